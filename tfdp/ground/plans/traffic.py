"""Traffic of all-reduce algorithms: the messages of each transfer on each link.

An algorithm is a sequence of transfers between positions, one for each replica. The
array `node_of` has the node of each position.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from tfdp.ground.options import ADASUM
from tfdp.ground.options import FLAT_ALGORITHMS as FLAT
from tfdp.ground.plans.topology import Topology

# Algorithms that sum gradients. Adasum is left out, since it combines gradients in
# another way.
NAMES = (*FLAT, "hierarchical")


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """All-reduce algorithm, with its algorithms for the levels of a hierarchy.

    Args:
        name: String, `"ring"`, `"tree"`, `"halving_doubling"`, `"hierarchical"` or
            `"adasum"`.
        inner: String, the algorithm of `"hierarchical"` inside nodes: `"ring"`,
            `"tree"` or `"halving_doubling"`. Defaults to `"ring"`.
        outer: String, the algorithm of `"hierarchical"` across nodes: the same, or
            `"adasum"`. Defaults to `"ring"`.

    Raises:
        ValueError: If a name is unknown.

    Example:

    >>> print(Algorithm("hierarchical", outer="tree"))
    hierarchical (ring, tree)
    """

    name: str
    inner: str = "ring"
    outer: str = "ring"

    def __post_init__(self) -> None:
        allowed = {
            "name": (*NAMES, ADASUM),
            "inner": FLAT,
            "outer": (*FLAT, ADASUM),
        }
        for field, known in allowed.items():
            value = getattr(self, field)
            if value not in known:
                listed = ", ".join(f'"{item}"' for item in known)
                raise ValueError(
                    f"The `{field}` of an algorithm must be one of {listed}. "
                    f"Received: {field}={value!r}"
                )
        if self.outer == ADASUM and self.inner != "ring":
            raise ValueError(
                "Adasum across nodes needs the ring inside them. "
                f"Received: inner={self.inner!r}"
            )

    @property
    def is_hierarchical(self) -> bool:
        """Bool, whether the algorithm reduces inside nodes first, then across them."""
        return self.name == HIERARCHICAL.name

    @property
    def is_adasum(self) -> bool:
        """Bool, whether Adasum combines the gradients of all replicas or of nodes."""
        return ADASUM in (self.name, self.outer)

    def __str__(self) -> str:
        """Return the name, such as "ring" or "hierarchical (ring, tree)"."""
        if not self.is_hierarchical:
            return self.name
        return f"{self.name} ({self.inner}, {self.outer})"


RING = Algorithm("ring")
HIERARCHICAL = Algorithm("hierarchical")


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Messages that one operation of an all-reduce sends at the same time.

    Args:
        fraction: Float, the fraction of the tensor in each message.
        num_inside: Int, the largest number of messages inside one node.
        num_streams: Int, the largest number of messages that leave, or enter, one
            node, and share its link.
        repeats: Int, the number of times that the operation repeats the messages.
            Defaults to `1`.
    """

    fraction: float
    num_inside: int
    num_streams: int
    repeats: int = 1


# The result is cached because plans need the same transfers for each bucket.
@functools.lru_cache(maxsize=256)
def transfers_of(algorithm: Algorithm, topology: Topology) -> tuple[Transfer, ...]:
    """Return the transfers of one all-reduce, in order.

    Args:
        algorithm: `Algorithm`.
        topology: `Topology`; a replica's rank is its position, such as in the ring.

    Returns:
        Tuple of `Transfer`; empty for a single replica.

    Raises:
        ValueError: If the algorithm is hierarchical and nodes have unequal sizes.

    Example: in a ring over two nodes of two replicas one message at a time
    leaves a node.

    >>> transfers_of(Algorithm("ring"), Topology(((0, 1), (2, 3))))
    (Transfer(fraction=0.25, num_inside=1, num_streams=1, repeats=6),)
    """
    if algorithm.is_hierarchical:
        return _hierarchical(algorithm, topology)
    node_of = np.zeros(topology.num_replicas, np.int64)
    for node, ranks in enumerate(topology.nodes):
        node_of[list(ranks)] = node
    return _flat(algorithm.name, node_of)


def _flat(name: str, node_of: np.ndarray) -> tuple[Transfer, ...]:
    """Return the transfers of an algorithm that is not hierarchical.

    Args:
        name: String, one of `FLAT`, or `"adasum"`.
        node_of: Array of ints, the node of the replica at each position.
    """
    if name == "ring":
        return _ring(node_of)
    if name == ADASUM:
        return _combine_by_pairs(node_of)
    if name == "tree":
        up = _reduce_to_first(node_of)
    else:
        up, _ = _halve(node_of)
    return (*up, *reversed(up))


def _ring(node_of: np.ndarray) -> tuple[Transfer, ...]:
    """Return the transfers of a ring; none for a single replica.

    Args:
        node_of: Array of ints, the node of the replica at each position.
    """
    size = len(node_of)
    if size == 1:
        return ()
    senders = np.arange(size)
    receivers = np.roll(senders, -1)
    return (_transfer(1 / size, senders, receivers, node_of, 2 * (size - 1)),)


def _reduce_to_first(node_of: np.ndarray) -> tuple[Transfer, ...]:
    """Return the transfers of a binomial tree towards the first position.

    Args:
        node_of: Array of ints, the node of the replica at each position.
    """
    size, distance, transfers = len(node_of), 1, []
    while distance < size:
        senders = np.arange(distance, size, 2 * distance)
        transfers.append(_transfer(1.0, senders, senders - distance, node_of))
        distance *= 2
    return tuple(transfers)


def _halve(node_of: np.ndarray) -> tuple[tuple[Transfer, ...], int]:
    """Return the transfers of recursive halving, and the number of resulting shards.

    Args:
        node_of: Array of ints, the node of the replica at each position.
    """
    size = len(node_of)
    power = 1 << (size.bit_length() - 1)
    transfers = []
    if size > power:
        # Recursive halving needs a number of positions that is a power of two, so each
        # position beyond that number first sends its whole tensor to one below it.
        extras = np.arange(power, size)
        transfers.append(_transfer(1.0, extras, extras - power, node_of))
    fraction, positions = 1.0, np.arange(power)
    for distance in _distances(power):
        fraction /= 2
        transfers.append(_transfer(fraction, positions, positions ^ distance, node_of))
    return tuple(transfers), power


def _combine_by_pairs(node_of: np.ndarray) -> tuple[Transfer, ...]:
    """Return the transfers of Adasum: recursive halving, then doubling.

    After each halving, the positions that combine a pair of vectors sum a few scalars
    in a ring. Its messages count as empty.

    Args:
        node_of: Array of ints, the node of the replica at each position.
    """
    halves, power = _halve(node_of)
    up = list(halves[: len(halves) - (power.bit_length() - 1)])
    positions = np.arange(power)
    for half, distance in zip(halves[len(up) :], _distances(power), strict=True):
        block = 2 * distance
        following = positions // block * block + (positions + 1) % block
        sums = _transfer(0.0, positions, following, node_of, 2 * (block - 1))
        up += [half, sums]
    return (*up, *reversed(halves))


def _distances(power: int) -> list[int]:
    """Return the distances between partners in recursive halving: 1, 2, 4, ...

    Args:
        power: Int, the number of replicas, a power of two.
    """
    return [1 << bit for bit in range(power.bit_length() - 1)]


def _hierarchical(algorithm: Algorithm, topology: Topology) -> tuple[Transfer, ...]:
    """Return the transfers of a hierarchical all-reduce, in order.

    Args:
        algorithm: `Algorithm` with an inner and an outer algorithm.
        topology: `Topology` of the replicas.

    Raises:
        ValueError: If nodes have different numbers of replicas.
    """
    if not topology.is_even:
        sizes = [len(ranks) for ranks in topology.nodes]
        raise ValueError(
            "A hierarchical all-reduce needs the same number of replicas on every "
            f"node; use a flat algorithm. Received: nodes of {sizes} replicas"
        )
    node_size = topology.replicas_per_node
    scatter, num_shards = _reduce_inside(algorithm.inner, node_size)
    across = tuple(
        dataclasses.replace(
            transfer,
            fraction=transfer.fraction / num_shards,
            num_streams=transfer.num_streams * num_shards,
        )
        for transfer in _flat(algorithm.outer, np.arange(topology.num_nodes))
    )
    return (*scatter, *across, *reversed(scatter))


def _reduce_inside(name: str, node_size: int) -> tuple[tuple[Transfer, ...], int]:
    """Return the transfers of a reduction inside a node, and the number of shards.

    Args:
        name: String, `"ring"`, `"tree"` or `"halving_doubling"`.
        node_size: Int, number of replicas of the node.

    Returns:
        Tuple of the transfers, and of the number of replicas of the node that hold an
        equal shard of the sum afterwards; 1 if one replica holds it whole.
    """
    if node_size == 1:
        return (), 1
    node_of = np.zeros(node_size, np.int64)
    if name == "tree":
        return _reduce_to_first(node_of), 1
    if name == "halving_doubling":
        return _halve(node_of)
    (ring,) = _ring(node_of)
    return (dataclasses.replace(ring, repeats=node_size - 1),), node_size


def _transfer(
    fraction: float,
    senders: np.ndarray,
    receivers: np.ndarray,
    node_of: np.ndarray,
    repeats: int = 1,
) -> Transfer:
    """Return the `Transfer` of concurrent sends, counted inside and between nodes.

    Args:
        fraction: Float, the fraction of the tensor in each message.
        senders: Array of ints, position of the sender of each message.
        receivers: Array of ints, position of the receiver of each message.
        node_of: Array of ints, the node of the replica at each position.
        repeats: Int, how often the messages are sent. Defaults to `1`.
    """
    from_nodes, to_nodes = node_of[senders], node_of[receivers]
    leaves = from_nodes != to_nodes
    leaving, entering = np.bincount(from_nodes[leaves]), np.bincount(to_nodes[leaves])
    num_streams = max(leaving.max(initial=0), entering.max(initial=0))
    num_inside = np.bincount(from_nodes[~leaves]).max(initial=0)
    return Transfer(fraction, int(num_inside), int(num_streams), repeats)
