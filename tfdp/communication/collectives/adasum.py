"""Adasum: gradients combined pair by pair, as far as they point the same way.

Two gradients a and b become

    (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b

their sum where they are orthogonal, their mean where they are parallel, and what pairs
give is combined in pairs again: neighbours first, then those at distance 2, 4, ...
Members beyond the largest power of two are combined with the first ones before. Each
tensor of a bucket has dot products of its own, in float64. It moves the bytes of
recursive halving and doubling, and after each halving three numbers for each tensor.

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
    reduce_dtype: tf.DType | None = None,
) -> tf.Tensor:
    """Combine the replicas' tensors by Adasum.

    Args:
        tensor: Flat tensor of known shape, the same on every replica.
        group: A `ProcessGroup`.
        replica: Int, index of the calling replica among the local ones.
        sizes: Sequence of ints, the elements of each gradient in `tensor`, end to end.
        channel: Int, the chain of the launch order. Defaults to `0`.
        is_alone: Bool, as for `collectives.ring`; it makes no difference.
        reduce_dtype: `tf.DType` in which elements travel, or `None`, their own.
            Defaults to `None`.

    Returns:
        A tensor like `tensor`, identical on every replica.
    """
    del is_alone
    members = tuple((position,) for position in range(group.size))
    place = _place_of(Member(group, replica, channel, reduce_dtype), members)
    with tf.device(group.devices[replica]):
        return _combined(tensor, sizes, place)


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

    Replicas of a node reduce-scatter; those of one index in their nodes combine a
    slice of the sums, with dot products of the whole; each node all-gathers.

    Args:
        tensor: As for `adasum`.
        group: A `ProcessGroup` with equally large `nodes`.
        replica: Int, index of the calling replica among the local ones.
        sizes: As for `adasum`.
        channel: Int, the chain of the launch order. Defaults to `0`.
        is_alone: Bool, as for `collectives.ring`; it makes no difference.
        inner_dtype: `tf.DType` in which elements travel inside nodes, or `None`.
            Defaults to `None`.
        outer_dtype: The same across nodes. Defaults to `None`.

    Returns:
        A tensor like `tensor`, identical on every replica.
    """
    del is_alone
    nodes = tuple(tuple(sorted(positions)) for positions in group.nodes)
    node = Member(group, replica, channel, inner_dtype).inside(group.split(nodes))
    place = _place_of(Member(group, replica, channel, outer_dtype), nodes)
    scatter, gather = PHASES["ring"]

    def scatter_and_combine(flat: tf.Tensor, member: Member) -> tf.Tensor:
        piece = scatter(flat, member)
        assert piece is not None
        size = piece.shape[0]
        return _combined(piece, _part(sizes, member.position * size, size), place)

    return in_two_phases(tensor, node, scatter_and_combine, gather)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Place of a replica among members: replicas, or nodes that hold slices.

    Args:
        caller: `Member` of the group of all replicas.
        member: Int, the index of its member.
        num_members: Int.
        pairs: Dict from a distance of members to the groups of two that have one slice,
            by local replica.
        is_swapped: Dict from a distance to whether the lower member is second there.
        blocks: Dict from a distance to the group of all replicas whose gradients
            a pair at it combines, with all slices.
    """

    caller: Member
    member: int
    num_members: int
    pairs: dict[int, Pairs]
    is_swapped: dict[int, bool]
    blocks: dict[int, Pairs]


def _place_of(caller: Member, members: Partition) -> _Place:
    """Create the groups by distance, all at once and alike on every replica."""
    group, position = caller.group, caller.position
    core = power_of_two_in(len(members))
    pairs, is_swapped, blocks = {}, {}, {}
    for distance in powers_below(core):
        lower = [index for index in range(core) if not index & distance]
        given = _pairs_at(members, lower, distance)
        pairs[distance] = group.split(given)
        is_swapped[distance] = any(position in p and p[0] > p[1] for p in given)
        firsts = range(0, core, 2 * distance)
        joined = [sum(members[f : f + 2 * distance], ()) for f in firsts]
        blocks[distance] = group.split(joined)
    # Those beyond the power of two are combined with a partner by itself.
    given = _pairs_at(members, range(len(members) - core), core)
    pairs[core] = group.split(given)
    is_swapped[core] = any(position in p and p[0] > p[1] for p in given)
    blocks[core] = group.split(members)
    member = next(i for i, positions in enumerate(members) if position in positions)
    return _Place(caller, member, len(members), pairs, is_swapped, blocks)


def _pairs_at(
    members: Partition, lower: Sequence[int], distance: int
) -> list[tuple[int, int]]:
    """Positions with one slice in members at a distance, the lower member first."""
    return [
        pair
        for index in lower
        for pair in zip(members[index], members[index + distance], strict=True)
    ]


def _combined(flat: tf.Tensor, sizes: Sequence[int], place: _Place) -> tf.Tensor:
    """Combine a slice of the members' tensors; all get the whole of it."""
    length, core = flat.shape[0], power_of_two_in(place.num_members)
    if place.num_members == 1 or length == 0:
        return tf.identity(flat)
    missing = -length % core
    if missing:
        flat = tf.pad(flat, [[0, missing]])
    sizes = [*sizes, flat.shape[0] - sum(sizes)]  # zeros are one gradient more
    if place.member >= core:
        _send(flat, place, core, from_lower=False)
        return _send(flat, place, core, from_lower=True)[:length]
    has_extra = place.member + core < place.num_members
    if has_extra:
        other = _send(flat, place, core, from_lower=False)
        flat = _pair(flat, other, sizes, place, core)
    for distance in powers_below(core):
        lower, upper, half = _exchange_halves(flat, place, distance)
        size = lower.shape[0]
        sizes = _part(sizes, half * size, size)
        flat = _pair(lower, upper, sizes, place, distance)
    for distance in reversed(powers_below(core)):
        flat = _pair_of(place, distance).all_gather(flat)
    if has_extra:
        _send(flat, place, core, from_lower=True)
    return flat[:length]


def _exchange_halves(
    flat: tf.Tensor, place: _Place, distance: int
) -> tuple[tf.Tensor, tf.Tensor, int]:
    """Return the lower and the upper member's half that is this replica's, and which.

    What travels is rounded, and what stays here alike.
    """
    pair = _pair_of(place, distance)
    halves = tf.reshape(flat, [2, flat.shape[0] // 2])
    if pair.reduce_dtype is not None:
        halves = tf.cast(halves, pair.reduce_dtype)
    found = pair.all_to_all(halves)
    first, second = tf.unstack(tf.cast(found, flat.dtype))
    half = pair.position
    if place.is_swapped[distance]:
        return second, first, half
    return first, second, half


def _send(
    flat: tf.Tensor, place: _Place, distance: int, *, from_lower: bool
) -> tf.Tensor:
    """Broadcast from one member of a pair to the other."""
    source = int(from_lower == place.is_swapped[distance])
    return _pair_of(place, distance).broadcast(flat, source)


def _pair_of(place: _Place, distance: int) -> Member:
    return place.caller.inside(place.pairs[distance])


def _pair(
    lower: tf.Tensor,
    upper: tf.Tensor,
    sizes: Sequence[int],
    place: _Place,
    distance: int,
) -> tf.Tensor:
    """Apply the rule to a part of two tensors, whose other parts the block holds."""
    block = place.caller.inside(place.blocks[distance])
    dtype = lower.dtype
    wide = tf.float32 if dtype.size < tf.float32.size else dtype
    present = [index for index, size in enumerate(sizes) if size]
    own = [sizes[index] for index in present]
    first, second = (tf.split(tf.cast(x, wide), own) for x in (lower, upper))
    rows = [tf.zeros([3], tf.float64)] * len(sizes)
    for index, a, b in zip(present, first, second, strict=True):
        rows[index] = _dot_products(a, b)
    totals = block.all_reduce(tf.stack(rows), is_alone=False)  # [num_gradients, 3]
    of_first, of_second = (tf.cast(x, wide) for x in _coefficients(totals))
    parts = [
        of_first[index] * a + of_second[index] * b
        for index, a, b in zip(present, first, second, strict=True)
    ]
    return tf.cast(tf.concat(parts, axis=0), dtype)


def _dot_products(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """`a.a`, `a.b` and `b.b` in float64, in which no float32 over- or underflows."""
    a, b = tf.cast(a, tf.float64), tf.cast(b, tf.float64)
    return tf.stack([tf.tensordot(x, y, 1) for x, y in ((a, a), (a, b), (b, b))])


def _coefficients(products: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Coefficients of both, `[num_gradients]`; what is zero leaves the other alone."""
    aa, ab, bb = tf.unstack(products, axis=1)
    half = ab / 2.0
    return (
        1.0 - tf.math.divide_no_nan(half, aa),
        1.0 - tf.math.divide_no_nan(half, bb),
    )


def _part(sizes: Sequence[int], begin: int, length: int) -> list[int]:
    """How much of each of some tensors, end to end, lies in a part of them.

    Example:

    >>> _part([4, 2, 6], 5, 3)
    [0, 1, 2]
    """
    found, start = [], 0
    for size in sizes:
        overlap = min(start + size, begin + length) - max(start, begin)
        found.append(max(overlap, 0))
        start += size
    return found
