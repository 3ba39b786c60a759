"""The two phases of all-reduce algorithms: reduce-scatter, and all-gather.

The pairs of positions that communicate are subgroups, created in the same order by
all replicas of a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import tensorflow as tf

from tfdp.communication.collectives.groups import ProcessGroup
from tfdp.communication.collectives.primitives import Member

# The two phases of an algorithm: a flat tensor into the calling replica's shard of
# the sum, or `None` where it gets none, and the shards into the sum.
Scatter = Callable[[tf.Tensor, Member], tf.Tensor | None]
Gather = Callable[[tf.Tensor | None, tf.Tensor, Member], tf.Tensor]
# The group of each local replica, of two or none.
Pairs = tuple[ProcessGroup | None, ...]


def in_two_phases(
    tensor: tf.Tensor, member: Member, scatter: Scatter, gather: Gather
) -> tf.Tensor:
    """All-reduce a tensor of any shape by two phases over flat, padded tensors."""
    if tensor.shape.num_elements() == 0:
        return tf.identity(tensor)
    with tf.device(member.group.devices[member.replica]):
        flat = tf.reshape(tensor, [-1])  # [length]
        length = flat.shape.num_elements()
        # A ring has as many shards as replicas, halving a power of two.
        size = member.group.size
        missing = -length % math.lcm(size, power_of_two_in(size))
        if missing:
            flat = tf.pad(flat, [[0, missing]])
        total = gather(scatter(flat, member), flat, member)
        return tf.reshape(total[:length] if missing else total, tensor.shape)


def _tree_reduce(flat: tf.Tensor, member: Member) -> tf.Tensor | None:
    """Reduce up the tree: position 0 gets the sum, all others `None`."""
    pairs = pairs_of("tree", member.group)
    for distance in powers_below(member.group.size):
        if member.position % (2 * distance) == distance:
            _send(flat, member, pairs[distance], upwards=False)
            return None
        if _has_partner(member, distance):
            flat = flat + _send(flat, member, pairs[distance], upwards=False)
    return flat


def _tree_broadcast(
    shard: tf.Tensor | None, flat: tf.Tensor, member: Member
) -> tf.Tensor:
    total = flat if shard is None else shard
    pairs = pairs_of("tree", member.group)
    for distance in reversed(powers_below(member.group.size)):
        is_below = member.position % (2 * distance) == distance
        if is_below or _has_partner(member, distance):
            total = _send(total, member, pairs[distance], upwards=True)
    return total


def _has_partner(member: Member, distance: int) -> bool:
    is_first = member.position % (2 * distance) == 0
    return is_first and member.position + distance < member.group.size


def _send(flat: tf.Tensor, member: Member, pairs: Pairs, *, upwards: bool) -> tf.Tensor:
    """Broadcast within each pair, `upwards` from the lower to the higher position."""
    return member.inside(pairs).broadcast(flat, 0 if upwards else 1)


def _halve(flat: tf.Tensor, member: Member) -> tf.Tensor | None:
    """Reduce-scatter by recursive halving, over the largest power of two."""
    core = power_of_two_in(member.group.size)
    pairs = pairs_of("halving_doubling", member.group)
    if member.position >= core:
        _send(flat, member, pairs[core], upwards=False)
        return None
    if member.position + core < member.group.size:
        flat = flat + _send(flat, member, pairs[core], upwards=False)
    for distance in powers_below(core):
        flat = member.inside(pairs[distance]).reduce_scatter(flat)
    return flat


def _double(shard: tf.Tensor | None, flat: tf.Tensor, member: Member) -> tf.Tensor:
    core = power_of_two_in(member.group.size)
    pairs = pairs_of("halving_doubling", member.group)
    if shard is None:
        return _send(flat, member, pairs[core], upwards=True)
    for distance in reversed(powers_below(core)):
        shard = member.inside(pairs[distance]).all_gather(shard)
    if member.position + core < member.group.size:
        _send(shard, member, pairs[core], upwards=True)
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
    "ring": (
        lambda flat, member: member.reduce_scatter(flat),
        lambda shard, flat, member: member.all_gather(shard),
    ),
    "tree": (_tree_reduce, _tree_broadcast),
    "halving_doubling": (_halve, _double),
}
