"""Gradients after the reduction, still in their buckets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from tfdp.reduction.fusion import unpack


@dataclasses.dataclass(frozen=True)
class ReducedGradients:
    """Sums over all replicas: what the reducer hands to the rest of a step.

    Args:
        flats: List of flat tensors, one for each bucket.
        buckets: List of tuples of ints, the positions of each bucket's
            gradients, in the order in which they lie end to end.
        like: List of the gradients as they were before, for their shapes.
        sparse: Dict from position to `tf.IndexedSlices`.
    """

    flats: list[tf.Tensor]
    buckets: list[tuple[int, ...]]
    like: list
    sparse: dict[int, tf.IndexedSlices]

    def divided_by(self, divisor: tf.Tensor) -> ReducedGradients:
        """The same, each element divided by a scalar, see `divided`."""
        return self._map(lambda values: divided(values, divisor))

    def all_finite(self) -> tf.Tensor:
        """Scalar bool tensor, whether no element is infinite or NaN."""
        values = [*self.flats, *(item.values for item in self.sparse.values())]
        return tf.reduce_all([_is_finite(value) for value in values])

    def gradients(self) -> list:
        """One gradient for each variable."""
        results: list = [None] * len(self.like)
        for flat, members in zip(self.flats, self.buckets, strict=True):
            parts = unpack(flat, [self.like[index] for index in members])
            for index, part in zip(members, parts, strict=True):
                results[index] = part
        for index, slices in self.sparse.items():
            results[index] = slices
        return results

    def _map(self, function: Callable[[tf.Tensor], tf.Tensor]) -> ReducedGradients:
        sparse = {
            index: tf.IndexedSlices(
                function(item.values), item.indices, item.dense_shape
            )
            for index, item in self.sparse.items()
        }
        flats = [function(flat) for flat in self.flats]
        return dataclasses.replace(self, flats=flats, sparse=sparse)


def divided(values: tf.Tensor, divisor: tf.Tensor) -> tf.Tensor:
    """A tensor divided by a scalar.

    Halves become float32: neither the divisor nor the result may fit them.
    """
    if values.dtype.size < tf.float32.size:
        values = tf.cast(values, tf.float32)
    return values / tf.cast(divisor, values.dtype)


def unbucketed(gradients: list) -> ReducedGradients:
    """Gradients that need no bucket, because there is nobody to share with."""
    dense: dict[int, tf.Tensor] = {}
    sparse: dict[int, tf.IndexedSlices] = {}
    for index, gradient in enumerate(gradients):
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        (sparse if is_sparse else dense)[index] = gradient
    return ReducedGradients(
        list(dense.values()), [(i,) for i in dense], gradients, sparse
    )


def _is_finite(values: tf.Tensor) -> tf.Tensor:
    return tf.reduce_all(tf.math.is_finite(values))
