"""`TopK`: the largest elements of a bucket; the others are fed back."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import tensorflow as tf

from tfdp.ground.arguments import checked_number
from tfdp.training.compression.compressor import Compressor, GradientBucket, State
from tfdp.training.compression.replica_group import ReplicaGroup

# Bytes of an element that is sent: its value, a float32, and its index, an int32.
_ELEMENT_BYTES = 8


@dataclasses.dataclass(frozen=True)
class TopK(Compressor):
    """The largest elements of each bucket; the others accumulate for later steps.

    Every replica sends its largest elements to all others by an all-gather of values
    and indices, so the number of bytes grows with the number of replicas. With a ratio
    above 1 / replicas it would exceed that of an all-reduce, and buckets are not
    compressed.

    Args:
        ratio: Float, fraction of a bucket that a replica sends in a step. Defaults
            to 0.01.
        momentum: Float, momentum for momentum correction, to be used in place of the
            momentum of SGD. Each replica applies it before it selects elements, so that
            elements that are sent later do not lose momentum. All buckets are
            compressed then, even those that travel in more bytes. Defaults to 0.0,
            without momentum correction.

    Raises:
        ValueError: If `ratio` is not above 0 and at most 1, or `momentum` is not from 0
            to below 1.

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
        """Return zeros for the unsent elements, and for the momentum if it is used."""
        names = ["residual", *(["momentum"] if self.momentum else [])]
        return {name: np.zeros([bucket.size], bucket.dtype) for name in names}

    def reduce(
        self, bucket: GradientBucket, state: State, group: ReplicaGroup
    ) -> tuple[tf.Tensor, State]:
        """Sum a bucket over the replicas, see `Compressor.reduce`.

        It takes an all-gather of the values and indices of the elements that are sent.
        """
        added = bucket.flat
        if self.momentum:
            added += self.momentum * state["momentum"]
        waiting = state["residual"] + added
        count = self._num_sent(bucket)
        places = tf.math.top_k(tf.abs(waiting), count, sorted=False).indices
        values = tf.gather(waiting, places)
        # An infinite or NaN element that is not sent must still show the overflow to
        # all replicas: it makes the sum of `waiting * 0.0` NaN instead of zero, and
        # this sum is added to the values that are sent.
        values += tf.reduce_sum(waiting * 0.0)
        sent = tf.cast(values, tf.float32)
        words = tf.concat([tf.bitcast(sent, tf.int32), places], axis=0)
        rows = group.all_gather(words[tf.newaxis])
        total = _sum_of(rows, group.size, count, bucket)
        left = values - tf.cast(sent, values.dtype)
        new = {"residual": _set_at(waiting, places, left)}
        if self.momentum:
            new["momentum"] = _set_at(added, places, tf.zeros_like(values))
        return total, new

    @property
    def replaces_momentum(self) -> bool:
        """Bool, whether momentum correction replaces the momentum of the optimizer."""
        return self.momentum > 0

    def wire_ratio(self, bucket: GradientBucket) -> float:
        """Return the bytes relative to an all-reduce, see `Compressor.wire_ratio`.

        Each replica receives the elements of all replicas, while an all-reduce sends
        each element about twice.
        """
        sent_bytes = _ELEMENT_BYTES * self._num_sent(bucket)
        return bucket.num_replicas * sent_bytes / (2 * bucket.num_bytes)

    def __str__(self) -> str:
        return f"top {100 * self.ratio:g} %"

    def _num_sent(self, bucket: GradientBucket) -> int:
        """Return the number of elements of a bucket that a replica sends in a step."""
        return math.ceil(self.ratio * bucket.size)


def _sum_of(
    rows: tf.Tensor, num_rows: int, count: int, bucket: GradientBucket
) -> tf.Tensor:
    """Add up the elements of all replicas, in the same order on each replica.

    Args:
        rows: Int32 tensor of shape `[num_rows, 2 * count]`. Each row has the bits of
            the values, then the indices.
        num_rows: Int, number of replicas.
        count: Int, number of elements of each replica.
        bucket: `GradientBucket`, which gives the size and dtype of the result.

    Returns:
        Tensor of shape `[bucket.size]`, zero where no replica has sent an element.
    """
    total = tf.zeros([bucket.size], bucket.dtype)
    for number in range(num_rows):
        values = tf.bitcast(rows[number, :count], tf.float32)
        places = rows[number, count:, tf.newaxis]
        total = tf.tensor_scatter_nd_add(total, places, tf.cast(values, total.dtype))
    return total


def _set_at(tensor: tf.Tensor, places: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Return a flat tensor with new values at the indices in `places`."""
    return tf.tensor_scatter_nd_update(tensor, places[:, tf.newaxis], values)
