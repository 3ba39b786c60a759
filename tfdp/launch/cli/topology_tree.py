"""Tree of nodes, workers and replicas that `tfdp doctor` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from rich.tree import Tree

from tfdp.communication.cluster import Cluster, listen, unreachable_workers
from tfdp.ground.plans.topology import Topology
from tfdp.ground.text import pluralize


def port_states(cluster: Cluster, timeout_seconds: float = 1.0) -> list[str]:
    """Describe the port of each worker.

    The description of another worker's port is whether it answers; that of this
    worker's port is whether it is free.

    Args:
        cluster: `Cluster` of this process.
        timeout_seconds: Float, longest wait for answers. Defaults to `1.0`.

    Returns:
        List of strings, in the order of ranks.
    """
    silent = unreachable_workers(cluster, timeout_seconds)
    states = [
        "does not answer" if rank in silent else "answers"
        for rank in range(cluster.num_workers)
    ]
    if not cluster.is_evaluator:
        states[cluster.rank] = f"this task, {_own_port_state(cluster)}"
    return states


def _own_port_state(cluster: Cluster) -> str:
    """Describe whether this worker's port is free, by listening on it briefly."""
    assert cluster.address is not None
    try:
        for sock in listen(cluster.address):
            sock.close()
    except ValueError:
        return "port taken: by its own training if that runs, else by another process"
    return "port free"


def draw_topology(
    cluster: Cluster,
    devices: Sequence[str],
    states: Sequence[str],
    topology: Topology,
) -> Tree:
    """Draw the tree of nodes, workers and replicas.

    Args:
        cluster: The `Cluster`.
        devices: Sequence of strings, the devices that each worker trains on.
            All workers have the same number of them.
        states: Sequence of strings, the description of each worker's port.
        topology: The `Topology` of the cluster's replicas.

    Returns:
        A `rich.tree.Tree`.
    """
    # Labels are `Text`, since rich would parse an IPv6 address in a plain string as
    # markup.
    tree = Tree(
        Text(
            f"{pluralize(topology.num_nodes, 'node')}, "
            f"{pluralize(cluster.num_workers, 'worker')}, "
            f"{pluralize(topology.num_replicas, 'replica')}, numbered by global rank"
        )
    )
    for node_rank, ranks in enumerate(topology.nodes):
        on_node: dict[int, list[int]] = {}
        for rank in ranks:
            on_node.setdefault(rank // len(devices), []).append(rank)
        hosts = dict.fromkeys(cluster.hosts[worker] for worker in on_node)
        node = tree.add(Text(f"node {node_rank}  {', '.join(hosts)}"))
        for worker, replicas in on_node.items():
            chief = " (chief)" if worker == 0 else ""
            address = cluster.workers[worker]
            branch = node.add(
                Text(f"worker {worker}{chief}  {address}  {states[worker]}")
            )
            for rank in replicas:
                device = devices[rank % len(devices)]
                local_rank = ranks.index(rank)
                branch.add(Text(f"replica {rank}  {device}  local rank {local_rank}"))
    for address in cluster.evaluators:
        tree.add(Text(f"evaluator  {address}  takes no part in training"))
    return tree


def describe_unevenness(topology: Topology) -> str | None:
    """Describe how nodes of different sizes affect the choice of the all-reduce.

    Args:
        topology: The `Topology` of the cluster's replicas.

    Returns:
        String, a sentence, or `None` if all nodes have the same number of replicas.
    """
    if topology.is_even:
        return None
    sizes = ", ".join(str(len(node)) for node in topology.nodes)
    return (
        f"The nodes are uneven, with {sizes} replicas: hierarchical algorithms fall "
        "back to flat ones."
    )
