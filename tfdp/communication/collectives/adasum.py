"""Adasum: gradients combined pair by pair, with weights by their angle.

Two gradients a and b become

    (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b

which is their sum if they are orthogonal and their mean if they are parallel. The
results of pairs are combined in pairs again: first neighbors, then at distances 2, 4,
... Before that, members beyond the largest power of two are combined with the first
members. Each tensor of a bucket has its own dot products, in float64. Adasum sends as
many bytes as recursive halving and doubling, and three numbers per tensor and halving.

Source: Maleki et al. 2021, "Scaling Distributed Training with Adaptive Summation",
https://arxiv.org/abs/2006.02924.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdp.communication.collectives.algorithms import (
    PHASES,
    Pairs,
    in_two_phases,
    power_of_two_in,
    powers_below,
)
from tfdp.communication.collectives.groups import Partition, ProcessGroup
from tfdp.communication.collectives.primitives import Member


def adasum(
    tensor: tf.Tensor,
    group: ProcessGroup,
    replica: int,
    *,
    sizes: Sequence[int],
    channel: int = 0,
    is_alone: bool = True,
    wire_dtype: tf.DType | None = None,
) -> tf.Tensor:
    """Combine the replicas' tensors by Adasum.

    Args:
        tensor: Flat tensor, whose known shape is the same on every replica.
        group: A `ProcessGroup`.
        replica: Int, index of the calling replica among the local ones.
        sizes: Sequence of ints, numbers of elements of the gradients in `tensor`.
        channel: Int; collectives of one channel run one after another. Defaults to `0`.
        is_alone: Bool, ignored; an argument that all algorithms have.
        wire_dtype: `tf.DType` in which elements travel, or `None` for their own.
            Defaults to `None`.

    Returns:
        A tensor like `tensor`, identical on every replica.
    """
    del is_alone
    members = tuple((position,) for position in range(group.size))
    groups = _create_groups(Member(group, replica, channel, wire_dtype), members)
    with tf.device(group.devices[replica]):
        return _combine(tensor, sizes, groups)


def adasum_across_nodes(
    tensor: tf.Tensor,
    group: ProcessGroup,
    replica: int,
    *,
    sizes: Sequence[int],
    channel: int = 0,
    is_alone: bool = True,
    inner_dtype: tf.DType | None = None,
    outer_dtype: tf.DType | None = None,
) -> tf.Tensor:
    """Sum inside each node, and combine the sums of the nodes by Adasum.

    The replicas of each node reduce-scatter; replicas with the same index in their
    nodes combine a slice of the sums, with dot products over all slices; then each node
    all-gathers.

    Args:
        tensor: Flat tensor, whose known shape is the same on every replica.
        group: A `ProcessGroup` with equally large `nodes`.
        replica: Int, index of the calling replica among the local ones.
        sizes: Sequence of ints, numbers of elements of the gradients in `tensor`.
        channel: Int; collectives of one channel run one after another. Defaults to `0`.
        is_alone: Bool, ignored; an argument that all algorithms have.
        inner_dtype: `tf.DType` in which elements travel inside nodes, or `None`.
            Defaults to `None`.
        outer_dtype: `tf.DType` in which elements travel across nodes, or `None`.
            Defaults to `None`.

    Returns:
        A tensor like `tensor`, identical on every replica.
    """
    del is_alone
    nodes = tuple(tuple(sorted(positions)) for positions in group.nodes)
    node = Member(group, replica, channel, inner_dtype).inside(group.split(nodes))
    groups = _create_groups(Member(group, replica, channel, outer_dtype), nodes)
    scatter, gather = PHASES["ring"]

    def scatter_and_combine(flat: tf.Tensor, member: Member) -> tf.Tensor:
        """Reduce-scatter in the node; combine the replica's slice across nodes.

        Returns:
            Flat tensor, the replica's slice of the combined sums of all nodes.
        """
        piece = scatter(flat, member)
        assert piece is not None
        size = piece.shape[0]
        return _combine(
            piece, _sizes_in_range(sizes, member.position * size, size), groups
        )

    return in_two_phases(tensor, node, scatter_and_combine, gather)


@dataclasses.dataclass(frozen=True)
class _Groups:
    """Process groups of a replica for the recursive halving of Adasum.

    A member of Adasum is a replica, or a node whose replicas have one slice each.
    Members of a pair differ in index by a distance: 1, then 2, 4 and so on.

    Args:
        caller: `Member` of the group of all replicas.
        member: Int, the index of the caller's member.
        num_members: Int, number of members.
        pairs: Dict from a distance between members to `Pairs`: for each local replica,
            its group of the two replicas with the same slice in a pair of members.
        is_swapped: Dict from a distance to whether the lower member is second in the
            caller's pair.
        blocks: Dict from a distance to `Pairs`: for each local replica, the group of
            the replicas that hold all parts of the two gradients combined at this
            distance. Dot products are summed over this group.
    """

    caller: Member
    member: int
    num_members: int
    pairs: dict[int, Pairs]
    is_swapped: dict[int, bool]
    blocks: dict[int, Pairs]


def _create_groups(caller: Member, members: Partition) -> _Groups:
    """Create the process groups of Adasum, in the same order on every replica.

    Args:
        caller: `Member` of the group of all replicas.
        members: `Partition`, the positions of the replicas of each member.
    """
    group, position = caller.group, caller.position
    core = power_of_two_in(len(members))
    pairs, is_swapped, blocks = {}, {}, {}
    for distance in powers_below(core):
        lower = [index for index in range(core) if not index & distance]
        positions = _position_pairs(members, lower, distance)
        pairs[distance] = group.split(positions)
        is_swapped[distance] = any(position in p and p[0] > p[1] for p in positions)
        firsts = range(0, core, 2 * distance)
        block_positions = [sum(members[f : f + 2 * distance], ()) for f in firsts]
        blocks[distance] = group.split(block_positions)
    # Recursive halving needs a number of members that is a power of two. Members beyond
    # the largest power first send their tensors to a partner, and finally receive the
    # result from it.
    positions = _position_pairs(members, range(len(members) - core), core)
    pairs[core] = group.split(positions)
    is_swapped[core] = any(position in p and p[0] > p[1] for p in positions)
    blocks[core] = group.split(members)
    member = next(i for i, of_member in enumerate(members) if position in of_member)
    return _Groups(caller, member, len(members), pairs, is_swapped, blocks)


def _position_pairs(
    members: Partition, lower: Sequence[int], distance: int
) -> list[tuple[int, int]]:
    """Pair the group positions that hold the same slice in two members.

    Args:
        members: `Partition`, the positions of the replicas of each member.
        lower: Sequence of ints, the lower member of each pair of members.
        distance: Int, distance from the lower to the upper member of each pair.

    Returns:
        List of pairs of ints: a position of the lower member, then one of the upper.
    """
    return [
        pair
        for index in lower
        for pair in zip(members[index], members[index + distance], strict=True)
    ]


def _combine(flat: tf.Tensor, sizes: Sequence[int], groups: _Groups) -> tf.Tensor:
    """Combine one slice of all members' tensors by Adasum, on each member.

    Args:
        flat: Flat tensor, the caller's slice.
        sizes: Sequence of ints, elements of each gradient in the slice.
        groups: `_Groups` of the caller.

    Returns:
        Flat tensor, the combined slice.
    """
    length, core = flat.shape[0], power_of_two_in(groups.num_members)
    if groups.num_members == 1 or length == 0:
        return tf.identity(flat)
    missing = -length % core
    if missing:
        flat = tf.pad(flat, [[0, missing]])
    # The sizes must add up to the number of elements, so the padding counts as a
    # gradient.
    sizes = [*sizes, flat.shape[0] - sum(sizes)]
    if groups.member >= core:
        _broadcast_in_pair(flat, groups, core, from_lower=False)
        return _broadcast_in_pair(flat, groups, core, from_lower=True)[:length]
    has_extra = groups.member + core < groups.num_members
    if has_extra:
        other = _broadcast_in_pair(flat, groups, core, from_lower=False)
        flat = _combine_pair(flat, other, sizes, groups, core)
    for distance in powers_below(core):
        lower, upper, half = _exchange_halves(flat, groups, distance)
        size = lower.shape[0]
        sizes = _sizes_in_range(sizes, half * size, size)
        flat = _combine_pair(lower, upper, sizes, groups, distance)
    for distance in reversed(powers_below(core)):
        flat = _pair_of(groups, distance).all_gather(flat)
    if has_extra:
        _broadcast_in_pair(flat, groups, core, from_lower=True)
    return flat[:length]


def _exchange_halves(
    flat: tf.Tensor, groups: _Groups, distance: int
) -> tuple[tf.Tensor, tf.Tensor, int]:
    """Exchange halves in a pair; return both members' data of this replica's half.

    Both halves are rounded to the dtype that travels, also the one that is kept.

    Args:
        flat: Flat tensor of even length, the caller's data.
        groups: `_Groups` of the caller.
        distance: Int, distance between the members of the pair.

    Returns:
        Tuple of the half of the lower member, that of the upper member, and the index
        of the half.
    """
    pair = _pair_of(groups, distance)
    halves = tf.reshape(flat, [2, flat.shape[0] // 2])
    if pair.wire_dtype is not None:
        halves = tf.cast(halves, pair.wire_dtype)
    received = pair.all_to_all(halves)
    first, second = tf.unstack(tf.cast(received, flat.dtype))
    half = pair.position
    if groups.is_swapped[distance]:
        return second, first, half
    return first, second, half


def _broadcast_in_pair(
    flat: tf.Tensor, groups: _Groups, distance: int, *, from_lower: bool
) -> tf.Tensor:
    """Broadcast one member's tensor in the caller's pair; return it on both members.

    Args:
        flat: Flat tensor; only that of the sending member is used.
        groups: `_Groups` of the caller.
        distance: Int, distance between the members of the pair.
        from_lower: Bool, whether the lower member sends.
    """
    source = int(from_lower == groups.is_swapped[distance])
    return _pair_of(groups, distance).broadcast(flat, source)


def _pair_of(groups: _Groups, distance: int) -> Member:
    """Return the caller as a `Member` of its pair of replicas at a distance.

    Args:
        groups: `_Groups` of the caller.
        distance: Int, distance between the members of Adasum in the pair.
    """
    return groups.caller.inside(groups.pairs[distance])


def _combine_pair(
    lower: tf.Tensor,
    upper: tf.Tensor,
    sizes: Sequence[int],
    groups: _Groups,
    distance: int,
) -> tf.Tensor:
    """Combine parts of two tensors by Adasum, with dot products of the whole tensors.

    Args:
        lower: Flat tensor of the lower member of the pair.
        upper: Flat tensor of the upper member.
        sizes: Sequence of ints, elements of each gradient in these tensors.
        groups: `_Groups` of the caller.
        distance: Int, distance between the members of the pair.

    Returns:
        Flat tensor, the combined part.
    """
    block = groups.caller.inside(groups.blocks[distance])
    dtype = lower.dtype
    wide = tf.float32 if dtype.size < tf.float32.size else dtype
    present = [index for index, size in enumerate(sizes) if size]
    present_sizes = [sizes[index] for index in present]
    first, second = (tf.split(tf.cast(x, wide), present_sizes) for x in (lower, upper))
    rows = [tf.zeros([3], tf.float64)] * len(sizes)
    for index, a, b in zip(present, first, second, strict=True):
        rows[index] = _dot_products(a, b)
    totals = block.all_reduce(tf.stack(rows), is_alone=False)
    first_factors, second_factors = (tf.cast(x, wide) for x in _coefficients(totals))
    parts = [
        first_factors[index] * a + second_factors[index] * b
        for index, a, b in zip(present, first, second, strict=True)
    ]
    return tf.cast(tf.concat(parts, axis=0), dtype)


def _dot_products(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Return `[a.a, a.b, b.b]`, a tensor of float64, whose squares do not overflow."""
    a, b = tf.cast(a, tf.float64), tf.cast(b, tf.float64)
    return tf.stack([tf.tensordot(x, y, 1) for x, y in ((a, a), (a, b), (b, b))])


def _coefficients(products: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the factors of both gradients of each pair; 1 for a zero gradient.

    Args:
        products: Tensor of shape `[num_gradients, 3]`, from `_dot_products`.

    Returns:
        Tuple of two tensors of shape `[num_gradients]`.
    """
    aa, ab, bb = tf.unstack(products, axis=1)
    half = ab / 2.0
    return (
        1.0 - tf.math.divide_no_nan(half, aa),
        1.0 - tf.math.divide_no_nan(half, bb),
    )


def _sizes_in_range(sizes: Sequence[int], begin: int, length: int) -> list[int]:
    """Return the number of elements of each concatenated tensor in a range.

    Args:
        sizes: Sequence of ints, elements of each tensor.
        begin: Int, first element of the range.
        length: Int, number of elements of the range.

    Example:

    >>> _sizes_in_range([4, 2, 6], 5, 3)
    [0, 1, 2]
    """
    found, start = [], 0
    for size in sizes:
        overlap = min(start + size, begin + length) - max(start, begin)
        found.append(max(overlap, 0))
        start += size
    return found
