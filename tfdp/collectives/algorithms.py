"""All-reduce algorithms: tensor and group in, sum out, each by one function.

They are compositions of the primitives over groups and parts of groups, and differ
in who talks to whom, in how many steps and with how many bytes. Every replica calls
the same one at the same place. Source of all but the hierarchical one: Thakur,
Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in
MPICH".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import tensorflow as tf

from tfdp.collectives.groups import ProcessGroup
from tfdp.collectives.primitives import (
    all_gather,
    all_reduce,
    broadcast,
    reduce_scatter,
)


@dataclasses.dataclass(frozen=True)
class Level:
    """How the replicas of one level, inside nodes or across them, reduce.

    Args:
        algorithm: String, a key of `FLAT`. Defaults to `"ring"`.
        reduce_dtype: `tf.DType` in which elements travel, or `None`, their own. They
            are added up in their own. Defaults to `None`.
    """

    algorithm: str = "ring"
    reduce_dtype: tf.DType | None = None


@dataclasses.dataclass(frozen=True)
class Call:
    """What the two phases of an algorithm have in common.

    Args:
        group: `ProcessGroup`.
        replica: Int, index of the calling replica among the local ones.
        channel: Int, the chain of the launch order.
        reduce_dtype: `tf.DType` or `None`, see `Level`.
    """

    group: ProcessGroup
    replica: int
    channel: int
    reduce_dtype: tf.DType | None

    @property
    def position(self) -> int:
        """Int, the calling replica's place in the group."""
        return self.group.position(self.replica)


def ring(
    tensor: tf.Tensor,
    group: ProcessGroup,
    replica: int,
    *,
    channel: int = 0,
    is_alone: bool = True,
    reduce_dtype: tf.DType | None = None,
) -> tf.Tensor:
    """Sums by TensorFlow's ring: fewest bytes, 2 (N - 1) steps.

    Args:
        tensor: Tensor of known shape, the same on every replica.
        group: A `ProcessGroup`.
        replica: Int, index of the calling replica among the local ones.
        channel: Int, the chain of the launch order. Defaults to `0`.
        is_alone: Bool, whether hardly anything else is under way at the same
            time. Defaults to `True`.
        reduce_dtype: `tf.DType` or `None`, see `Level`. Defaults to `None`.

    Returns:
        A tensor like `tensor`, identical on every replica.
    """
    if reduce_dtype is None:
        return all_reduce(tensor, group, replica, channel=channel, is_alone=is_alone)
    call = Call(group, replica, channel, reduce_dtype)
    return _in_two_phases(tensor, call, _scatter, _gather)


def tree(
    tensor: tf.Tensor,
    group: ProcessGroup,
    replica: int,
    *,
    channel: int = 0,
    is_alone: bool = True,
    reduce_dtype: tf.DType | None = None,
) -> tf.Tensor:
    """Sums up a binomial tree and sends the sum down: 2 log2 N steps.

    Every step moves the whole tensor, so that it is for small ones. Arguments and
    result are those of `ring`.
    """
    del is_alone
    call = Call(group, replica, channel, reduce_dtype)
    return _in_two_phases(tensor, call, _reduce_to_first, _broadcast_from_first)


def halving_doubling(
    tensor: tf.Tensor,
    group: ProcessGroup,
    replica: int,
    *,
    channel: int = 0,
    is_alone: bool = True,
    reduce_dtype: tf.DType | None = None,
) -> tf.Tensor:
    """Sums by exchanging halves, quarters, ... between pairs: 2 log2 N steps.

    It moves as few bytes as a ring where N is a power of two; otherwise the
    replicas beyond one hand theirs to a partner first, and get the sum from it.
    Neighbours exchange the halves, so that most bytes stay inside a node.
    Arguments and result are those of `ring`.
    """
    del is_alone
    call = Call(group, replica, channel, reduce_dtype)
    return _in_two_phases(tensor, call, _halve, _double)


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
    """Sums in each node, then each share across nodes, and joins in each node.

    Only `2 (M - 1) / M` times the tensor passes a node's link, M nodes, however
    many replicas it has.

    Args:
        tensor: Tensor of known shape, the same on every replica.
        group: A `ProcessGroup` with equally large `nodes`.
        replica: Int, index of the calling replica among the local ones.
        channel: Int, the chain of the launch order. Defaults to `0`.
        is_alone: Bool, as for `ring`. Defaults to `True`.
        inner: `Level` inside a node.
        outer: `Level` across nodes.

    Returns:
        A tensor like `tensor`, identical on every replica.

    Source: Jia et al. 2018, https://arxiv.org/abs/1807.11205, section 3.3.
    """
    node = group.split(group.nodes)[replica]
    # A replica's share of the sum is that of its place among the node's positions.
    ordered = [sorted(positions) for positions in group.nodes]
    across = group.split(tuple(zip(*ordered, strict=True)))[replica]
    assert node is not None
    assert across is not None
    # Also by those that will have no share: groups are made in the same order by all.
    _pairs_of(inner.algorithm, node)
    _pairs_of(outer.algorithm, across)
    scatter, gather = _PHASES[inner.algorithm]
    reduce = FLAT[outer.algorithm]

    def scatter_and_reduce(flat: tf.Tensor, call: Call) -> tf.Tensor | None:
        piece = scatter(flat, call)
        if piece is None:
            return None
        return reduce(
            piece,
            across,
            replica,
            channel=channel,
            is_alone=is_alone,
            reduce_dtype=outer.reduce_dtype,
        )

    call = Call(node, replica, channel, inner.reduce_dtype)
    return _in_two_phases(tensor, call, scatter_and_reduce, gather)


# The two phases of an algorithm: a flat tensor into the calling replica's piece of
# the sum, or `None` where it gets none, and the pieces into the sum.
Scatter = Callable[[tf.Tensor, Call], tf.Tensor | None]
Gather = Callable[[tf.Tensor | None, tf.Tensor, Call], tf.Tensor]
# The group of each local replica, of two or none.
Pairs = tuple[ProcessGroup | None, ...]


def _in_two_phases(
    tensor: tf.Tensor, call: Call, scatter: Scatter, gather: Gather
) -> tf.Tensor:
    if tensor.shape.num_elements() == 0:
        return tf.identity(tensor)
    with tf.device(call.group.devices[call.replica]):
        flat = tf.reshape(tensor, [-1])  # [length]
        length = flat.shape.num_elements()
        # A ring splits into as many pieces as replicas, halving into a power of two.
        size = call.group.size
        missing = -length % math.lcm(size, _power_of_two_in(size))
        if missing:
            flat = tf.pad(flat, [[0, missing]])
        total = gather(scatter(flat, call), flat, call)
        return tf.reshape(total[:length] if missing else total, tensor.shape)


def _scatter(flat: tf.Tensor, call: Call) -> tf.Tensor:
    return reduce_scatter(
        flat,
        call.group,
        call.replica,
        channel=call.channel,
        reduce_dtype=call.reduce_dtype,
    )


def _gather(piece: tf.Tensor | None, flat: tf.Tensor, call: Call) -> tf.Tensor:
    del flat
    return all_gather(
        piece,
        call.group,
        call.replica,
        channel=call.channel,
        reduce_dtype=call.reduce_dtype,
    )


def _reduce_to_first(flat: tf.Tensor, call: Call) -> tf.Tensor | None:
    """Adds up pairs, pairs of pairs, ...: position 0 ends with the sum."""
    for distance in _powers_below(call.group.size):
        if call.position % (2 * distance) == distance:
            _move(flat, call, distance, upwards=False)
            return None
        if _has_partner(call, distance):
            flat = flat + _move(flat, call, distance, upwards=False)
    return flat


def _broadcast_from_first(
    piece: tf.Tensor | None, flat: tf.Tensor, call: Call
) -> tf.Tensor:
    total = flat if piece is None else piece
    for distance in reversed(_powers_below(call.group.size)):
        is_below = call.position % (2 * distance) == distance
        if is_below or _has_partner(call, distance):
            total = _move(total, call, distance, upwards=True)
    return total


def _has_partner(call: Call, distance: int) -> bool:
    is_first = call.position % (2 * distance) == 0
    return is_first and call.position + distance < call.group.size


def _move(flat: tf.Tensor, call: Call, distance: int, *, upwards: bool) -> tf.Tensor:
    """Sends along the tree's pairs of a distance; `upwards` to the higher position."""
    return _send(flat, call, _pairs_of("tree", call.group)[distance], upwards=upwards)


def _send(flat: tf.Tensor, call: Call, pairs: Pairs, *, upwards: bool) -> tf.Tensor:
    """In each pair one sends; both return what was sent."""
    pair = pairs[call.replica]
    assert pair is not None
    source = 0 if upwards else 1
    return broadcast(
        flat,
        pair,
        call.replica,
        is_source=pair.position(call.replica) == source,
        source=source,
        channel=call.channel,
        reduce_dtype=call.reduce_dtype,
    )


def _halve(flat: tf.Tensor, call: Call) -> tf.Tensor | None:
    """Ends with one of as many pieces as there are replicas in a power of two."""
    core = _power_of_two_in(call.group.size)
    pairs = _pairs_of("halving_doubling", call.group)
    if call.position >= core:
        _send(flat, call, pairs[core], upwards=False)
        return None
    if call.position + core < call.group.size:
        flat = flat + _send(flat, call, pairs[core], upwards=False)
    for distance in _powers_below(core):
        pair = pairs[distance][call.replica]
        assert pair is not None
        flat = reduce_scatter(
            flat,
            pair,
            call.replica,
            channel=call.channel,
            reduce_dtype=call.reduce_dtype,
        )
    return flat


def _double(piece: tf.Tensor | None, flat: tf.Tensor, call: Call) -> tf.Tensor:
    core = _power_of_two_in(call.group.size)
    pairs = _pairs_of("halving_doubling", call.group)
    if piece is None:
        return _send(flat, call, pairs[core], upwards=True)
    for distance in reversed(_powers_below(core)):
        pair = pairs[distance][call.replica]
        assert pair is not None
        piece = all_gather(
            piece,
            pair,
            call.replica,
            channel=call.channel,
            reduce_dtype=call.reduce_dtype,
        )
    if call.position + core < call.group.size:
        _send(piece, call, pairs[core], upwards=True)
    return piece


def _pairs_of(algorithm: str, group: ProcessGroup) -> dict[int, Pairs]:
    """The pairs of an algorithm by distance, all made at once by every replica."""
    size, core = group.size, _power_of_two_in(group.size)
    distances: dict[int, list[tuple[int, int]]] = {}
    if algorithm == "tree":
        for distance in _powers_below(size):
            lower = list(range(0, size - distance, 2 * distance))
            distances[distance] = [(first, first + distance) for first in lower]
    if algorithm == "halving_doubling":
        for distance in _powers_below(core):
            lower = [p for p in range(core) if not p & distance]
            distances[distance] = [(p, p + distance) for p in lower]
        # Those beyond the power of two hand over to a partner.
        distances[core] = [(extra - core, extra) for extra in range(core, size)]
    return {distance: group.split(pairs) for distance, pairs in distances.items()}


def _powers_below(size: int) -> list[int]:
    """1, 2, 4, ... less than a number."""
    return [1 << exponent for exponent in range((size - 1).bit_length())]


def _power_of_two_in(size: int) -> int:
    return 1 << (size.bit_length() - 1)


_PHASES: dict[str, tuple[Scatter, Gather]] = {
    "ring": (_scatter, _gather),
    "tree": (_reduce_to_first, _broadcast_from_first),
    "halving_doubling": (_halve, _double),
}
FLAT = {"ring": ring, "tree": tree, "halving_doubling": halving_doubling}
