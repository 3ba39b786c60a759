"""All-reduce algorithms: one function each, from a tensor and a group to the sum.

In the functions of their phases, `flat` is the calling replica's flat, padded tensor,
`member` the replica in its group, and `shard` its part of the sum.

Each composes primitives over groups and subgroups in two phases, a reduce-scatter and
an all-gather. The algorithms differ in the pairs that communicate, the number of steps
and the bytes. Every replica calls the same one at the same point. The pairs that
communicate are subgroups, which all replicas of a group create in the same order.

Source of all except the hierarchical one: Thakur, Rabenseifner and Gropp 2005,
"Optimization of Collective Communication Operations in MPICH".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import tensorflow as tf

from tfdp.communication.collectives.groups import ProcessGroup
from tfdp.communication.collectives.primitives import Member

# The two phases of an all-reduce. `Scatter` maps a flat tensor to the calling replica's
# shard of the sum, or to `None` for a replica without a shard. `Gather` maps the shard,
# and a flat tensor of the sum's shape, to the whole sum.
Scatter = Callable[[tf.Tensor, Member], tf.Tensor | None]
Gather = Callable[[tf.Tensor | None, tf.Tensor, Member], tf.Tensor]
# The groups of two that exchange data at one distance between positions: the group of
# each local replica, or `None`, since not every replica has a partner at each distance.
Pairs = tuple[ProcessGroup | None, ...]


def in_two_phases(
    tensor: tf.Tensor, member: Member, scatter: Scatter, gather: Gather
) -> tf.Tensor:
    """All-reduce a tensor of any shape by two phases over its flat, padded form.

    Args:
        tensor: Tensor of known shape.
        member: `Member`, the calling replica in its group.
        scatter: Callable from the flat tensor and `member` to the replica's shard of
            the sum, or `None` if it has none.
        gather: Callable from the shard, the flat tensor and `member` to the whole sum.

    Returns:
        A tensor like `tensor`, the sum over the group.
    """
    if tensor.shape.num_elements() == 0:
        return tf.identity(tensor)
    with tf.device(member.group.devices[member.replica]):
        flat = tf.reshape(tensor, [-1])
        length = flat.shape.num_elements()
        # The padding suits all algorithms: the ring needs a shard per replica, and
        # halving-doubling a number of shards that is a power of two.
        size = member.group.size
        missing = -length % math.lcm(size, power_of_two_in(size))
        if missing:
            flat = tf.pad(flat, [[0, missing]])
        total = gather(scatter(flat, member), flat, member)
        return tf.reshape(total[:length] if missing else total, tensor.shape)


def _tree_reduce(flat: tf.Tensor, member: Member) -> tf.Tensor | None:
    """Reduce up a binomial tree: position 0 gets the sum, all other replicas `None`.

    Args:
        flat: Flat, padded tensor of the calling replica.
        member: `Member`, the calling replica.
    """
    pairs = pairs_of("tree", member.group)
    for distance in powers_below(member.group.size):
        if member.position % (2 * distance) == distance:
            _broadcast_in_pair(flat, member, pairs[distance], upwards=False)
            return None
        if _has_partner(member, distance):
            flat = flat + _broadcast_in_pair(
                flat, member, pairs[distance], upwards=False
            )
    return flat


def _tree_broadcast(
    shard: tf.Tensor | None, flat: tf.Tensor, member: Member
) -> tf.Tensor:
    """Broadcast the sum from the root, position 0; return it on every replica.

    Args:
        shard: Flat tensor, the sum at the root, or `None` elsewhere.
        flat: Flat tensor; its shape and dtype are those of the sum, its values unused.
        member: `Member`, the calling replica.
    """
    total = flat if shard is None else shard
    pairs = pairs_of("tree", member.group)
    for distance in reversed(powers_below(member.group.size)):
        is_below = member.position % (2 * distance) == distance
        if is_below or _has_partner(member, distance):
            total = _broadcast_in_pair(total, member, pairs[distance], upwards=True)
    return total


def _has_partner(member: Member, distance: int) -> bool:
    """Return whether a replica has a child in the binomial tree at a distance.

    The child is the replica whose position is larger by `distance`.
    """
    is_first = member.position % (2 * distance) == 0
    return is_first and member.position + distance < member.group.size


def _broadcast_in_pair(
    flat: tf.Tensor, member: Member, pairs: Pairs, *, upwards: bool
) -> tf.Tensor:
    """Broadcast within each pair, `upwards` from the lower to the higher position.

    Args:
        flat: Flat tensor; only that of the sending replica is used.
        member: `Member`, the calling replica.
        pairs: `Pairs`, for each local replica its group of two.
        upwards: Bool, whether the replica with the lower position sends.

    Returns:
        The tensor of the sending replica, on both.
    """
    return member.inside(pairs).broadcast(flat, 0 if upwards else 1)


def _halve(flat: tf.Tensor, member: Member) -> tf.Tensor | None:
    """Reduce-scatter by recursive halving, over the largest power of two.

    Args:
        flat: Flat, padded tensor of the calling replica.
        member: `Member`, the calling replica.

    Returns:
        Flat tensor, the replica's shard of the sum; or `None` for a replica beyond the
        power of two, which has sent its tensor to a partner.
    """
    core = power_of_two_in(member.group.size)
    pairs = pairs_of("halving_doubling", member.group)
    if member.position >= core:
        _broadcast_in_pair(flat, member, pairs[core], upwards=False)
        return None
    if member.position + core < member.group.size:
        flat = flat + _broadcast_in_pair(flat, member, pairs[core], upwards=False)
    for distance in powers_below(core):
        flat = member.inside(pairs[distance]).reduce_scatter(flat)
    return flat


def _double(shard: tf.Tensor | None, flat: tf.Tensor, member: Member) -> tf.Tensor:
    """All-gather the sum by recursive doubling, the inverse of `_halve`.

    Args:
        shard: Flat tensor, the result of `_halve`, or `None`.
        flat: Flat tensor; its shape and dtype are those of the sum, its values unused.
        member: `Member`, the calling replica.
    """
    core = power_of_two_in(member.group.size)
    pairs = pairs_of("halving_doubling", member.group)
    if shard is None:
        return _broadcast_in_pair(flat, member, pairs[core], upwards=True)
    for distance in reversed(powers_below(core)):
        shard = member.inside(pairs[distance]).all_gather(shard)
    if member.position + core < member.group.size:
        _broadcast_in_pair(shard, member, pairs[core], upwards=True)
    return shard


def pairs_of(algorithm: str, group: ProcessGroup) -> dict[int, Pairs]:
    """Create the groups of two in which an algorithm exchanges data.

    Args:
        algorithm: String, `"tree"` or `"halving_doubling"`; others have no pairs.
        group: `ProcessGroup`.

    Returns:
        Dict from a distance between positions to `Pairs`: for each local replica, its
        group of two at this distance, or `None`.
    """
    size, core = group.size, power_of_two_in(group.size)
    distances: dict[int, list[tuple[int, int]]] = {}
    if algorithm == "tree":
        for distance in powers_below(size):
            lower = list(range(0, size - distance, 2 * distance))
            distances[distance] = [(first, first + distance) for first in lower]
    if algorithm == "halving_doubling":
        for distance in powers_below(core):
            lower = [p for p in range(core) if not p & distance]
            distances[distance] = [(p, p + distance) for p in lower]
        # Halving needs a number of replicas that is a power of two. Replicas beyond the
        # largest power send their tensors to a partner, and receive the sum from it.
        distances[core] = [(extra - core, extra) for extra in range(core, size)]
    return {distance: group.split(pairs) for distance, pairs in distances.items()}


def powers_below(size: int) -> list[int]:
    """Return the powers of two below `size`: 1, 2, 4 and so on."""
    return [1 << exponent for exponent in range((size - 1).bit_length())]


def power_of_two_in(size: int) -> int:
    """Return the largest power of two that is at most `size`."""
    return 1 << (size.bit_length() - 1)


PHASES: dict[str, tuple[Scatter, Gather]] = {
    "ring": (
        lambda flat, member: member.reduce_scatter(flat),
        lambda shard, flat, member: member.all_gather(shard),
    ),
    "tree": (_tree_reduce, _tree_broadcast),
    "halving_doubling": (_halve, _double),
}


@dataclasses.dataclass(frozen=True)
class Level:
    """Algorithm and communication dtype of one level, inside nodes or across them.

    Args:
        algorithm: String, an all-reduce, a key of `FLAT`. Defaults to `"ring"`.
        wire_dtype: `tf.DType` in which elements travel, or `None` for their own. Sums
            are computed in the dtype of the tensor. Defaults to `None`.
    """

    algorithm: str = "ring"
    wire_dtype: tf.DType | None = None


def ring(
    tensor: tf.Tensor,
    group: ProcessGroup,
    replica: int,
    *,
    channel: int = 0,
    is_alone: bool = True,
    wire_dtype: tf.DType | None = None,
) -> tf.Tensor:
    """All-reduce by the group's transport, as a ring: fewest bytes, 2 (N - 1) steps.

    Args:
        tensor: Tensor, whose known shape is the same on every replica.
        group: A `ProcessGroup`.
        replica: Int, index of the calling replica among the local ones.
        channel: Int; collectives of one channel run one after another. Defaults to `0`.
        is_alone: Bool, whether hardly any other collective runs at the same time.
            TensorFlow then divides the ring's chunks in two, so the network is not idle
            between pieces. Defaults to `True`.
        wire_dtype: `tf.DType` in which elements travel, or `None` for their own.
            Defaults to `None`.

    Returns:
        A tensor like `tensor`, identical on every replica.
    """
    if wire_dtype is None:
        return Member(group, replica, channel=channel).all_reduce(
            tensor, is_alone=is_alone
        )
    if _rounds_sums_once(group):
        sent = tf.cast(tensor, wire_dtype)
        total = ring(sent, group, replica, channel=channel, is_alone=is_alone)
        return tf.cast(total, tensor.dtype)
    member = Member(group, replica, channel, wire_dtype)
    return in_two_phases(tensor, member, *PHASES["ring"])


def _in_phases(algorithm: str, docstring: str) -> Callable[..., tf.Tensor]:
    """Create an all-reduce function from the two functions of an algorithm in `PHASES`.

    The first one reduces to shards of the sum, such as a reduce-scatter; the second one
    collects the whole sum, such as an all-gather.

    Args:
        algorithm: String, a key of `PHASES`, the name of the function.
        docstring: String, the docstring of the function.

    Returns:
        Callable with the arguments and the result of `ring`.
    """

    def all_reduce_in_phases(
        tensor: tf.Tensor,
        group: ProcessGroup,
        replica: int,
        *,
        channel: int = 0,
        is_alone: bool = True,
        wire_dtype: tf.DType | None = None,
    ) -> tf.Tensor:
        """All-reduce by the two functions of an algorithm; has the arguments of `ring`.

        `is_alone`, whether hardly any other collective runs at the same time, is
        ignored.
        """
        del is_alone
        member = Member(group, replica, channel, wire_dtype)
        return in_two_phases(tensor, member, *PHASES[algorithm])

    all_reduce_in_phases.__name__ = all_reduce_in_phases.__qualname__ = algorithm
    all_reduce_in_phases.__doc__ = docstring
    return all_reduce_in_phases


tree = _in_phases(
    "tree",
    """All-reduce up and down a binomial tree, in 2 log2 N steps.

    Each step sends the whole tensor, so the tree suits small tensors. Arguments and
    result are those of `ring`.
    """,
)
halving_doubling = _in_phases(
    "halving_doubling",
    """All-reduce by recursive halving and doubling between pairs, in 2 log2 N steps.

    It sends as few bytes as a ring if N is a power of two; otherwise the replicas
    beyond that power first send their tensors to a partner, and receive the sum from
    it. The largest halves are exchanged between neighbors, so that most bytes stay
    inside a node. Arguments and result are those of `ring`.
    """,
)


def hierarchical(
    tensor: tf.Tensor,
    group: ProcessGroup,
    replica: int,
    *,
    channel: int = 0,
    is_alone: bool = True,
    inner: Level = Level(),
    outer: Level = Level(),
) -> tf.Tensor:
    """Reduce-scatter in each node, all-reduce across nodes, all-gather in each node.

    With M nodes, only `2 (M - 1) / M` times the tensor's bytes cross a node's link,
    whatever the number of its replicas.

    Args:
        tensor: Tensor, whose known shape is the same on every replica.
        group: A `ProcessGroup` with equally large `nodes`.
        replica: Int, index of the calling replica among the local ones.
        channel: Int. Collectives of one channel run one after another on a device, see
            `LaunchOrder`. Defaults to `0`.
        is_alone: Bool, whether hardly any other collective runs at the same time. It is
            passed to the all-reduce across nodes, see `ring`. Defaults to `True`.
        inner: `Level` inside a node.
        outer: `Level` across nodes.

    Returns:
        A tensor like `tensor`, identical on every replica.

    Source: Jia et al. 2018, https://arxiv.org/abs/1807.11205, section 3.3.
    """
    dtype = inner.wire_dtype
    rings = inner == outer == Level("ring", dtype)
    if dtype is not None and rings and _rounds_sums_once(group):
        # Elements are cast once for both levels, since a second rounding between the
        # levels would lose precision.
        with tf.device(group.devices[replica]):
            sent = tf.cast(tensor, dtype)
        total = hierarchical(sent, group, replica, channel=channel, is_alone=is_alone)
        return tf.cast(total, tensor.dtype)
    node, other_nodes = node_levels(group, replica)
    inside = Member(node, replica, channel, inner.wire_dtype)
    across = Member(other_nodes, replica, channel, outer.wire_dtype)
    # Groups are created here, since replicas without a shard do not reach the
    # all-reduce across nodes, and all replicas must create groups in one order.
    pairs_of(inner.algorithm, node)
    pairs_of(outer.algorithm, other_nodes)
    scatter, gather = PHASES[inner.algorithm]
    reduce = FLAT[outer.algorithm]

    def scatter_and_reduce(flat: tf.Tensor, member: Member) -> tf.Tensor | None:
        """Reduce-scatter in the node, then all-reduce the shard across nodes.

        Returns:
            Flat tensor, the replica's shard of the sum of all nodes; or `None` if the
            replica has no shard.
        """
        shard = scatter(flat, member)
        if shard is None:
            return None
        return reduce(shard, is_alone=is_alone, **across.arguments)

    return in_two_phases(tensor, inside, scatter_and_reduce, gather)


def node_levels(group: ProcessGroup, replica: int) -> tuple[ProcessGroup, ProcessGroup]:
    """Return a replica's group inside its node, and its group across the nodes.

    Args:
        group: A `ProcessGroup` with equally large `nodes`.
        replica: Int, index of the calling replica among the local ones.

    Returns:
        Tuple of the group of the replica's node, and of its group across nodes, which
        has the replicas with the same index in their nodes.
    """
    node = group.split(group.nodes)[replica]
    # Replicas with the same index in their nodes hold the same slice of a tensor, so
    # they form a group across nodes.
    ordered = [sorted(positions) for positions in group.nodes]
    across = group.split(tuple(zip(*ordered, strict=True)))[replica]
    assert node is not None
    assert across is not None
    return node, across


def _rounds_sums_once(group: ProcessGroup) -> bool:
    """Return whether sums of float16 and bfloat16 are rounded only once in a group.

    They are if the transport adds them in float32, and if each worker has one replica:
    the sum of several local replicas would be rounded before it is sent.
    """
    workers = group.workers or ()
    is_one_per_worker = len(set(workers)) == group.size
    return group.transport.rounds_sums_once and is_one_per_worker


FLAT = {"ring": ring, "tree": tree, "halving_doubling": halving_doubling}
