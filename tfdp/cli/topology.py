"""Draws a cluster as a tree: nodes, their workers, the workers' replicas."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from rich.tree import Tree

from tfdp.cluster import Cluster, check_port_free, unreachable


def port_states(cluster: Cluster, timeout_seconds: float = 1.0) -> list[str]:
    """Says of each worker's port whether it answers, of this one's if it is free.

    Args:
        cluster: The `Cluster`.
        timeout_seconds: Float, how long to wait for answers. Defaults to
            `1.0`.

    Returns:
        List of strings, in the order of ranks.
    """
    silent = unreachable(cluster, timeout_seconds)
    states = [
        "does not answer" if rank in silent else "answers"
        for rank in range(cluster.num_workers)
    ]
    if not cluster.is_evaluator:
        states[cluster.rank] = f"this task, {_own_port_state(cluster)}"
    return states


def _own_port_state(cluster: Cluster) -> str:
    assert cluster.address is not None
    try:
        check_port_free(cluster.address)
    except ValueError:
        return "port taken: by its own training if that runs, else by another process"
    return "port free"


def draw_topology(
    cluster: Cluster, devices: Sequence[str], states: Sequence[str]
) -> Tree:
    """Draws the tree of nodes, workers and replicas.

    Args:
        cluster: The `Cluster`.
        devices: Sequence of strings, the devices that each worker trains on.
            All workers have the same number of them.
        states: Sequence of strings, what to say of each worker's port.

    Returns:
        A `rich.tree.Tree`.
    """
    num_replicas = cluster.num_workers * len(devices)
    nodes = dict.fromkeys(cluster.hosts)
    # `Text`, for in a plain string an IPv6 address would be taken for markup.
    tree = Tree(
        Text(
            f"{len(nodes)} nodes, {cluster.num_workers} workers, "
            f"{num_replicas} replicas"
        )
    )
    branches = {host: tree.add(Text(f"node {host}")) for host in nodes}
    for rank, address in enumerate(cluster.workers):
        chief = " (chief)" if rank == 0 else ""
        branch = branches[cluster.hosts[rank]].add(
            Text(f"worker {rank}{chief}  {address}  {states[rank]}")
        )
        for index, device in enumerate(devices):
            branch.add(Text(f"replica {rank * len(devices) + index}  {device}"))
    for address in cluster.evaluators:
        tree.add(Text(f"evaluator  {address}  takes no part in training"))
    return tree
