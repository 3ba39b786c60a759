"""The two phases of all-reduce algorithms: reduce-scatter, and all-gather.

The pairs of positions that communicate are subgroups, created in the same order by
all replicas of a group.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import tensorflow as tf

from tfdp.collectives.groups import ProcessGroup
from tfdp.collectives.primitives import all_gather, broadcast, reduce_scatter


@dataclasses.dataclass(frozen=True)
class PhaseArguments:
    """Arguments of the two phases of an algorithm.

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
        """Int, the calling replica's position in the group."""
        return self.group.position(self.replica)


# The two phases of an algorithm: a flat tensor into the calling replica's shard of
# the sum, or `None` where it gets none, and the shards into the sum.
Scatter = Callable[[tf.Tensor, PhaseArguments], tf.Tensor | None]
Gather = Callable[[tf.Tensor | None, tf.Tensor, PhaseArguments], tf.Tensor]
# The group of each local replica, of two or none.
Pairs = tuple[ProcessGroup | None, ...]


def in_two_phases(
    tensor: tf.Tensor, args: PhaseArguments, scatter: Scatter, gather: Gather
) -> tf.Tensor:
    """All-reduce a tensor of any shape by two phases over flat, padded tensors."""
    if tensor.shape.num_elements() == 0:
        return tf.identity(tensor)
    with tf.device(args.group.devices[args.replica]):
        flat = tf.reshape(tensor, [-1])  # [length]
        length = flat.shape.num_elements()
        # A ring has as many shards as replicas, halving a power of two.
        size = args.group.size
        missing = -length % math.lcm(size, power_of_two_in(size))
        if missing:
            flat = tf.pad(flat, [[0, missing]])
        total = gather(scatter(flat, args), flat, args)
        return tf.reshape(total[:length] if missing else total, tensor.shape)


def _ring_scatter(flat: tf.Tensor, args: PhaseArguments) -> tf.Tensor:
    return reduce_scatter(
        flat,
        args.group,
        args.replica,
        channel=args.channel,
        reduce_dtype=args.reduce_dtype,
    )


def _ring_gather(
    shard: tf.Tensor | None, flat: tf.Tensor, args: PhaseArguments
) -> tf.Tensor:
    del flat
    return all_gather(
        shard,
        args.group,
        args.replica,
        channel=args.channel,
        reduce_dtype=args.reduce_dtype,
    )


def _tree_reduce(flat: tf.Tensor, args: PhaseArguments) -> tf.Tensor | None:
    """Reduce up the tree: position 0 gets the sum, all others `None`."""
    for distance in powers_below(args.group.size):
        if args.position % (2 * distance) == distance:
            _move(flat, args, distance, upwards=False)
            return None
        if _has_partner(args, distance):
            flat = flat + _move(flat, args, distance, upwards=False)
    return flat


def _tree_broadcast(
    shard: tf.Tensor | None, flat: tf.Tensor, args: PhaseArguments
) -> tf.Tensor:
    total = flat if shard is None else shard
    for distance in reversed(powers_below(args.group.size)):
        is_below = args.position % (2 * distance) == distance
        if is_below or _has_partner(args, distance):
            total = _move(total, args, distance, upwards=True)
    return total


def _has_partner(args: PhaseArguments, distance: int) -> bool:
    is_first = args.position % (2 * distance) == 0
    return is_first and args.position + distance < args.group.size


def _move(
    flat: tf.Tensor, args: PhaseArguments, distance: int, *, upwards: bool
) -> tf.Tensor:
    """Send along the tree's pairs of a distance; `upwards` to the higher position."""
    return _send(flat, args, pairs_of("tree", args.group)[distance], upwards=upwards)


def _send(
    flat: tf.Tensor, args: PhaseArguments, pairs: Pairs, *, upwards: bool
) -> tf.Tensor:
    """Broadcast within each pair, `upwards` from the lower to the higher position."""
    pair = pairs[args.replica]
    assert pair is not None
    return broadcast(
        flat,
        pair,
        args.replica,
        source=0 if upwards else 1,
        channel=args.channel,
        reduce_dtype=args.reduce_dtype,
    )


def _halve(flat: tf.Tensor, args: PhaseArguments) -> tf.Tensor | None:
    """Reduce-scatter by recursive halving, over the largest power of two."""
    core = power_of_two_in(args.group.size)
    pairs = pairs_of("halving_doubling", args.group)
    if args.position >= core:
        _send(flat, args, pairs[core], upwards=False)
        return None
    if args.position + core < args.group.size:
        flat = flat + _send(flat, args, pairs[core], upwards=False)
    for distance in powers_below(core):
        pair = pairs[distance][args.replica]
        assert pair is not None
        flat = reduce_scatter(
            flat,
            pair,
            args.replica,
            channel=args.channel,
            reduce_dtype=args.reduce_dtype,
        )
    return flat


def _double(
    shard: tf.Tensor | None, flat: tf.Tensor, args: PhaseArguments
) -> tf.Tensor:
    core = power_of_two_in(args.group.size)
    pairs = pairs_of("halving_doubling", args.group)
    if shard is None:
        return _send(flat, args, pairs[core], upwards=True)
    for distance in reversed(powers_below(core)):
        pair = pairs[distance][args.replica]
        assert pair is not None
        shard = all_gather(
            shard,
            pair,
            args.replica,
            channel=args.channel,
            reduce_dtype=args.reduce_dtype,
        )
    if args.position + core < args.group.size:
        _send(shard, args, pairs[core], upwards=True)
    return shard


def pairs_of(algorithm: str, group: ProcessGroup) -> dict[int, Pairs]:
    """Create the pairs of an algorithm by distance, all at once on every replica."""
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
        # Those beyond the power of two hand over to a partner.
        distances[core] = [(extra - core, extra) for extra in range(core, size)]
    return {distance: group.split(pairs) for distance, pairs in distances.items()}


def powers_below(size: int) -> list[int]:
    """Return 1, 2, 4, ... below a number."""
    return [1 << exponent for exponent in range((size - 1).bit_length())]


def power_of_two_in(size: int) -> int:
    """Return the largest power of two that is not above a number."""
    return 1 << (size.bit_length() - 1)


PHASES: dict[str, tuple[Scatter, Gather]] = {
    "ring": (_ring_scatter, _ring_gather),
    "tree": (_tree_reduce, _tree_broadcast),
    "halving_doubling": (_halve, _double),
}
