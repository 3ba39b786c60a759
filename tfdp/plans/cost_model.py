"""How long an all-reduce takes, from latency and bandwidth, and which is fastest."""

from __future__ import annotations

from collections.abc import Sequence

from tfdp.cluster import Topology
from tfdp.links import DEFAULT_LINKS, Link, Links
from tfdp.plans.traffic import FLAT, Algorithm, Transfer, transfers_of

__all__ = [
    "DEFAULT_LINKS",
    "Algorithm",
    "Link",
    "Links",
    "candidates_for",
    "choose",
    "num_messages_inside",
    "predict_seconds",
]

# An algorithm has to be faster than those before it by more than the model can
# tell: the ring is a single operation, where the others are made of several.
_TIE = 0.05


def predict_seconds(
    algorithm: Algorithm,
    num_bytes: int,
    topology: Topology,
    links: Links,
    *,
    inner_wire: float = 1.0,
    outer_wire: float = 1.0,
) -> float:
    """Predicts how long one all-reduce takes.

    Messages that leave a node together share its link, and each operation has
    to be started. An exchange lasts as long as its slowest message; or, where
    replicas share the cores of their node, as all messages inside one node, one
    after the other, and those across.

    Args:
        algorithm: `Algorithm`.
        num_bytes: Int, size of the tensor.
        topology: `Topology`.
        links: `Links`.
        inner_wire: Float, bytes that travel inside nodes for each byte of the
            tensor, such as `0.5` for bfloat16. Defaults to `1.0`.
        outer_wire: Float, the same across nodes. A flat algorithm sends one
            type everywhere: there the larger of the two counts. Defaults to
            `1.0`.

    Returns:
        Float, seconds; 0 where there is nothing to send.

    Raises:
        ValueError: If a hierarchical algorithm meets nodes of unequal size, or
            `num_bytes` is negative.

    Example: four replicas on one node send six messages of a quarter each.

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
    if algorithm.name != "hierarchical":
        inner_wire = outer_wire = max(inner_wire, outer_wire)
    inner_bytes, outer_bytes = num_bytes * inner_wire, num_bytes * outer_wire
    exchanges = transfers_of(algorithm, topology)
    return len(exchanges) * links.operation_seconds + sum(
        transfer.repeats * _seconds(transfer, inner_bytes, outer_bytes, links)
        for transfer in exchanges
    )


def candidates_for(topology: Topology) -> tuple[Algorithm, ...]:
    """The algorithms that can run on a cluster, in the order of preference.

    Args:
        topology: `Topology`.

    Returns:
        Tuple of `Algorithm`: the flat ones; and hierarchical ones where several
        nodes have several replicas each, and equally many. The ring is first.

    Example:

    >>> [str(algorithm) for algorithm in candidates_for(Topology(((0, 1),)))]
    ['ring', 'tree', 'halving_doubling']
    >>> len(candidates_for(Topology(((0, 1), (2, 3)))))
    12
    """
    ring, tree, halving_doubling = (Algorithm(name) for name in FLAT)
    has_levels = topology.num_nodes > 1 and topology.replicas_per_node > 1
    if not (has_levels and topology.is_even):
        return ring, tree, halving_doubling
    levels = ("ring", "halving_doubling", "tree")
    pairs = [(inner, outer) for inner in levels for outer in levels]
    hierarchical = (Algorithm("hierarchical", *pair) for pair in pairs)
    return ring, tree, *hierarchical, halving_doubling


def choose(
    num_bytes: int,
    topology: Topology,
    links: Links,
    candidates: Sequence[Algorithm] | None = None,
    *,
    inner_wire: float = 1.0,
    outer_wire: float = 1.0,
) -> tuple[Algorithm, float]:
    """Chooses the algorithm that is predicted to be the fastest, within 5 %.

    Args:
        num_bytes: Int, size of the tensor.
        topology: `Topology`.
        links: `Links`, the same on all workers, or they choose differently.
        candidates: Sequence of `Algorithm`, in the order of preference: a later
            one must be faster by more than 5 %; or `None` for
            `candidates_for(topology)`. Defaults to `None`.
        inner_wire: Float, see `predict_seconds`. Defaults to `1.0`.
        outer_wire: Float, see `predict_seconds`. Defaults to `1.0`.

    Returns:
        Tuple of an `Algorithm` and its seconds.

    Raises:
        ValueError: If there are no candidates; or see `predict_seconds`.

    Example:

    >>> node = Topology((tuple(range(8)),))
    >>> for num_bytes in (1_000, 100_000_000):
    ...     print(choose(num_bytes, node, DEFAULT_LINKS["ring"])[0])
    tree
    ring
    """
    reduce_dtypes = {"inner_wire": inner_wire, "outer_wire": outer_wire}
    best: tuple[Algorithm, float] | None = None
    for algorithm in candidates_for(topology) if candidates is None else candidates:
        seconds = predict_seconds(
            algorithm, num_bytes, topology, links, **reduce_dtypes
        )
        if best is None or seconds < best[1] * (1 - _TIE):
            best = algorithm, seconds
    if best is None:
        raise ValueError(
            "There must be an algorithm to choose from. "
            f"Received: candidates={candidates!r}"
        )
    return best


def num_messages_inside(transfer: Transfer, links: Links) -> int:
    """Messages of an exchange that take their turns inside a node.

    Args:
        transfer: `Transfer`.
        links: `Links`.

    Returns:
        Int: all of them where they share the node's cores and memory; 1 where each
        has a link of its own; 0 where none stays inside.
    """
    return (
        transfer.num_inside if links.is_inside_shared else min(1, transfer.num_inside)
    )


def _seconds(
    transfer: Transfer, inner_bytes: float, outer_bytes: float, links: Links
) -> float:
    """Seconds of one exchange.

    Messages across nodes wait for the network together, once. Those inside, where
    they share cores, are work for these, and wait for each other.
    """
    inside = across = 0.0
    if transfer.num_inside:
        num_messages = num_messages_inside(transfer, links)
        inside = num_messages * links.inside.seconds(inner_bytes * transfer.fraction)
    if transfer.num_streams:
        shared_bytes = outer_bytes * transfer.fraction * transfer.num_streams
        across = links.across.seconds(shared_bytes)
    return inside + across if links.is_inside_shared else max(inside, across)
