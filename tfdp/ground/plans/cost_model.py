"""Cost model of all-reduces by latency and bandwidth, and the fastest algorithm."""

from __future__ import annotations

from collections.abc import Sequence

from tfdp.ground.links import Links
from tfdp.ground.plans.topology import Topology
from tfdp.ground.plans.traffic import (
    FLAT,
    HIERARCHICAL,
    Algorithm,
    Transfer,
    transfers_of,
)

# An algorithm must be faster than a preferred one by more than this fraction: smaller
# differences are within the error of the model. The ring is preferred because it is a
# single operation, and the others consist of several.
_TIE = 0.05


def predict_seconds(
    algorithm: Algorithm,
    num_bytes: int,
    topology: Topology,
    links: Links,
    *,
    inner_ratio: float = 1.0,
    outer_ratio: float = 1.0,
) -> float:
    """Predict the seconds of one all-reduce.

    Concurrent messages that leave a node share its link, and each operation has a
    launch cost. A transfer takes as long as its slowest message. If replicas share the
    cores of their node, it takes as long as all messages inside one node, one after
    another, plus those across nodes.

    Args:
        algorithm: `Algorithm`.
        num_bytes: Int, size of the tensor.
        topology: `Topology`.
        links: `Links`.
        inner_ratio: Float, bytes that travel inside nodes for each byte of the
            tensor, such as `0.5` for bfloat16. Defaults to `1.0`.
        outer_ratio: Float, bytes that travel across nodes for each byte of the
            tensor. A flat algorithm sends one dtype everywhere and uses the larger
            ratio. Defaults to `1.0`.

    Returns:
        Float, seconds; 0 if there is nothing to send.

    Raises:
        ValueError: If the algorithm is hierarchical and nodes have unequal sizes, or
            `num_bytes` is negative.

    Example: four replicas on one node send six messages of a quarter each.

    >>> from tfdp.ground.links import Link
    >>> links = Links(inside=Link(1e-3, 1e-6), across=Link(0.0, 0.0))
    >>> node = Topology(((0, 1, 2, 3),))
    >>> round(predict_seconds(Algorithm("ring"), 4000, node, links), 6)
    0.012

    Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective
    Communication Operations in MPICH"; Patarasuk and Yuan 2009, "Bandwidth
    optimal all-reduce algorithms for clusters of workstations", for the ring.
    """
    if num_bytes < 0:
        raise ValueError(
            "The size of a tensor must not be negative. "
            f"Received: num_bytes={num_bytes!r}"
        )
    if num_bytes == 0:
        return 0.0
    if not algorithm.is_hierarchical:
        inner_ratio = outer_ratio = max(inner_ratio, outer_ratio)
    inner_bytes, outer_bytes = num_bytes * inner_ratio, num_bytes * outer_ratio
    transfers = transfers_of(algorithm, topology)
    return len(transfers) * links.operation_seconds + sum(
        transfer.repeats * _seconds(transfer, inner_bytes, outer_bytes, links)
        for transfer in transfers
    )


def candidates_for(topology: Topology) -> tuple[Algorithm, ...]:
    """Return the algorithms that can run on a cluster, in the order of preference.

    Args:
        topology: `Topology`.

    Returns:
        Tuple of `Algorithm`: the flat ones, and hierarchical ones if several nodes have
        the same number of replicas, more than one. The ring is first.

    Example:

    >>> [str(algorithm) for algorithm in candidates_for(Topology(((0, 1),)))]
    ['ring', 'tree', 'halving_doubling']
    >>> len(candidates_for(Topology(((0, 1), (2, 3)))))
    12
    """
    ring, tree, halving_doubling = (Algorithm(name) for name in FLAT)
    if not topology.supports_hierarchy:
        return ring, tree, halving_doubling
    levels = ("ring", "halving_doubling", "tree")
    pairs = [(inner, outer) for inner in levels for outer in levels]
    hierarchical = (Algorithm(HIERARCHICAL.name, *pair) for pair in pairs)
    return ring, tree, *hierarchical, halving_doubling


def choose(
    num_bytes: int,
    topology: Topology,
    links: Links,
    candidates: Sequence[Algorithm] | None = None,
    *,
    inner_ratio: float = 1.0,
    outer_ratio: float = 1.0,
) -> tuple[Algorithm, float]:
    """Choose the algorithm that is predicted to be the fastest, within 5 %.

    Args:
        num_bytes: Int, size of the tensor.
        topology: `Topology`.
        links: `Links`; workers with different links would choose differently.
        candidates: Sequence of `Algorithm`, in the order of preference: a later
            one must be faster by more than 5 %; or `None` for
            `candidates_for(topology)`. Defaults to `None`.
        inner_ratio: Float, see `predict_seconds`. Defaults to `1.0`.
        outer_ratio: Float, see `predict_seconds`. Defaults to `1.0`.

    Returns:
        Tuple of an `Algorithm` and its predicted seconds.

    Raises:
        ValueError: If there are no candidates, or as `predict_seconds` raises.

    Example:

    >>> from tfdp.ground.links import DEFAULT_LINKS
    >>> node = Topology((tuple(range(8)),))
    >>> for num_bytes in (1_000, 100_000_000):
    ...     print(choose(num_bytes, node, DEFAULT_LINKS["ring"])[0])
    tree
    ring
    """
    ratios = {"inner_ratio": inner_ratio, "outer_ratio": outer_ratio}
    best: tuple[Algorithm, float] | None = None
    for algorithm in candidates_for(topology) if candidates is None else candidates:
        seconds = predict_seconds(algorithm, num_bytes, topology, links, **ratios)
        if best is None or seconds < best[1] * (1 - _TIE):
            best = algorithm, seconds
    if best is None:
        raise ValueError(
            "There must be an algorithm to choose from. "
            f"Received: candidates={candidates!r}"
        )
    return best


def num_serial_messages(transfer: Transfer, links: Links) -> int:
    """Return how many messages of a transfer follow one another inside a node.

    Args:
        transfer: `Transfer`.
        links: `Links`.

    Returns:
        Int: the number of all messages if they share the node's cores and memory; 1 if
        each has a separate link; 0 if no message stays inside a node.
    """
    return (
        transfer.num_inside if links.is_inside_shared else min(1, transfer.num_inside)
    )


def _seconds(
    transfer: Transfer, inner_bytes: float, outer_bytes: float, links: Links
) -> float:
    """Predict the seconds of one transfer, without repeats and launch cost.

    Messages across nodes are concurrent. Messages inside a node are serial if they
    share its cores.

    Args:
        transfer: `Transfer`.
        inner_bytes: Float, size of the tensor in the dtype that travels inside nodes.
        outer_bytes: Float, size of the tensor in the dtype that travels across nodes.
        links: `Links`.
    """
    inside = across = 0.0
    if transfer.num_inside:
        num_messages = num_serial_messages(transfer, links)
        inside = num_messages * links.inside.seconds(inner_bytes * transfer.fraction)
    if transfer.num_streams:
        shared_bytes = outer_bytes * transfer.fraction * transfer.num_streams
        across = links.across.seconds(shared_bytes)
    return inside + across if links.is_inside_shared else max(inside, across)
