"""`TopK`: the largest elements of a bucket, and what is left for later."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import tensorflow as tf

from tfdp.ground.arguments import checked_number
from tfdp.training.compression.compressor import Compressor, GradientBucket, State
from tfdp.training.compression.replica_group import ReplicaGroup

_ELEMENT_BYTES = 8  # a float32 and an int32


@dataclasses.dataclass(frozen=True)
class TopK(Compressor):
    """The largest elements of each bucket; the others wait until they are large.

    Every replica sends its largest elements to all others, by an all-gather of values
    and places. So the bytes grow with the number of replicas: with a ratio above 1 /
    replicas they are more than those of an all-reduce of everything, and buckets
    travel as they are.

    Args:
        ratio: Float, the fraction of a bucket that a replica sends in a step.
            Defaults to 0.01.
        momentum: Float, momentum correction: the momentum of an SGD that has none of
            its own any more. It acts on each replica before elements are chosen, so
            that those which wait lose none; all buckets are compressed then, also
            those that gain nothing. Defaults to 0.0: without.

    Raises:
        ValueError: If `ratio` is not above 0 and at most 1, or `momentum` not from 0
            and below 1.

    Example:

    >>> bucket = GradientBucket(size=1000, dtype="float32", num_replicas=4)
    >>> TopK(ratio=0.01).wire_ratio(bucket)
    0.04

    Source: Lin et al. 2018, Deep Gradient Compression,
    https://arxiv.org/abs/1712.01887.
    """

    ratio: float = 0.01
    momentum: float = 0.0

    cuts_buckets = True

    def __post_init__(self) -> None:
        ratio = checked_number(
            "ratio", self.ratio, "a number above 0 and at most 1", above=0, most=1
        )
        momentum = checked_number(
            "momentum", self.momentum, "a number from 0 and below 1", least=0, below=1
        )
        object.__setattr__(self, "ratio", ratio)
        object.__setattr__(self, "momentum", momentum)

    def state(self, bucket: GradientBucket) -> State:
        """Return what waits to be sent, and the momentum."""
        names = ["residual", *(["momentum"] if self.momentum else [])]
        return {name: np.zeros([bucket.size], bucket.dtype) for name in names}

    def reduce(
        self, bucket: GradientBucket, state: State, group: ReplicaGroup
    ) -> tuple[tf.Tensor, State]:
        """See `Compressor`: an all-gather of values and places."""
        added = bucket.flat
        if self.momentum:
            added += self.momentum * state["momentum"]
        waiting = state["residual"] + added
        count = self._count(bucket)
        places = tf.math.top_k(tf.abs(waiting), count, sorted=False).indices  # [count]
        values = tf.gather(waiting, places)
        # Zero, or NaN where an element is infinite or NaN: all replicas must see it.
        values += tf.reduce_sum(waiting * 0.0)
        sent = tf.cast(values, tf.float32)
        words = tf.concat([tf.bitcast(sent, tf.int32), places], axis=0)
        rows = group.all_gather(words[tf.newaxis])  # [size, 2 * count]
        total = _sum_of(rows, group.size, count, bucket)
        left = values - tf.cast(sent, values.dtype)
        new = {"residual": _set_at(waiting, places, left)}
        if self.momentum:
            new["momentum"] = _set_at(added, places, tf.zeros_like(values))
        return total, new

    @property
    def replaces_momentum(self) -> bool:
        """See `Compressor`: with momentum correction."""
        return self.momentum > 0

    def wire_ratio(self, bucket: GradientBucket) -> float:
        """See `Compressor`: an all-reduce sends everything about twice."""
        sent_bytes = _ELEMENT_BYTES * self._count(bucket)
        return bucket.num_replicas * sent_bytes / (2 * bucket.num_bytes)

    def __str__(self) -> str:
        return f"top {100 * self.ratio:g} %"

    def _count(self, bucket: GradientBucket) -> int:
        return math.ceil(self.ratio * bucket.size)


def _sum_of(
    rows: tf.Tensor, num_rows: int, count: int, bucket: GradientBucket
) -> tf.Tensor:
    """Add up the elements of all replicas, in one order on each of them."""
    total = tf.zeros([bucket.size], bucket.dtype)
    for number in range(num_rows):
        values = tf.bitcast(rows[number, :count], tf.float32)
        places = rows[number, count:, tf.newaxis]
        total = tf.tensor_scatter_nd_add(total, places, tf.cast(values, total.dtype))
    return total


def _set_at(tensor: tf.Tensor, places: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    return tf.tensor_scatter_nd_update(tensor, places[:, tf.newaxis], values)
