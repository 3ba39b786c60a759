"""Replicas of a benchmark's local workers by node, and what these can run."""

from __future__ import annotations

from collections.abc import Collection

from tfdp.ground.plans.topology import Topology


def local_topology(
    num_workers: int | None, devices_per_worker: int | None, node_size: int | None
) -> Topology:
    """The replicas of local processes, by node.

    Args:
        num_workers: Int or `None`, one.
        devices_per_worker: Int or `None`, one.
        node_size: Int, replicas that count as one node, or `None`: all do.

    Returns:
        `Topology`.

    Example:

    >>> local_topology(3, None, 2).nodes
    ((0, 1), (2,))
    """
    count = (num_workers or 1) * (devices_per_worker or 1)
    size = node_size or count
    starts = range(0, count, size)
    return Topology(tuple(tuple(range(s, min(s + size, count))) for s in starts))


def check_topology(topology: Topology, algorithms: Collection[str]) -> None:
    """Check that there is somebody to talk to, by each algorithm.

    Args:
        topology: `Topology` of the replicas.
        algorithms: Collection of strings, of the all-reduce.

    Raises:
        ValueError: If not.
    """
    count = topology.num_replicas
    if count < 2:
        raise ValueError(
            "A collective needs at least 2 replicas; give -n, or "
            f"--devices-per-worker, or run it in a cluster. Received: {count}"
        )
    if "hierarchical" in algorithms and not topology.has_levels:
        raise ValueError(
            "The hierarchical algorithm needs several nodes with equally many, "
            "at least 2, replicas; --node-size says how many count as one. "
            f"Received: nodes of {[len(node) for node in topology.nodes]}"
        )
