"""Gradients summed over all replicas, of which each has its own slices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from tfdp.ground.plans.shards import ShardPlan
from tfdp.training.parameters.packing import pack_row
from tfdp.training.reduction.fusion import divided, with_values


@dataclasses.dataclass(frozen=True)
class ShardedGradients:
    """Own slices of the reduced gradients of a parameter group.

    Args:
        slices: List with a tensor of shape `[slice_size]` for each bucket, or
            `None` for one without gradients.
        dense: Frozen set of ints, positions of the variables in them.
        sparse: Dict from position to `tf.IndexedSlices` of all replicas.
        order: Tuple of ints, the positions in the order of the gradients.
    """

    slices: list[tf.Tensor | None]
    dense: frozenset[int]
    sparse: dict[int, tf.IndexedSlices]
    order: tuple[int, ...]

    @property
    def present(self) -> frozenset[int]:
        """Positions of the variables that have gradients."""
        return self.dense | self.sparse.keys()

    def parts(self, plan: ShardPlan, owner: int) -> dict[int, list[tf.Tensor]]:
        """Elements of each variable in the slices of an owner, in order.

        Args:
            plan: `ShardPlan`.
            owner: Int, whose slices these are.

        Returns:
            Dict from position to list of tensors.
        """
        found: dict[int, list[tf.Tensor]] = {}
        for bucket, piece in zip(plan.buckets, self.slices, strict=True):
            if piece is not None:
                for segment, begin, end in bucket.places(owner):
                    found.setdefault(segment.index, []).append(piece[begin:end])
        return found

    def divided_by(self, divisor: tf.Tensor) -> ShardedGradients:
        """The same, each element divided by a scalar, see `divided`."""
        return self.map(lambda values: divided(values, divisor))

    def map(self, function: Callable[[tf.Tensor], tf.Tensor]) -> ShardedGradients:
        """The same with a function applied to every tensor."""
        sparse = {
            index: with_values(rows, function(rows.values))
            for index, rows in self.sparse.items()
        }
        slices = [None if piece is None else function(piece) for piece in self.slices]
        return dataclasses.replace(self, slices=slices, sparse=sparse)

    def scaled_by(
        self, factors: tf.Tensor, plan: ShardPlan, owner: int
    ) -> ShardedGradients:
        """The same, the elements of each variable times a factor of its own.

        Args:
            factors: Tensor of shape `[num_variables]`.
            plan: `ShardPlan`.
            owner: Int, whose slices these are.
        """
        slices: list[tf.Tensor | None] = []
        for bucket, piece in zip(plan.buckets, self.slices, strict=True):
            row = bucket.rows[owner]
            if piece is None or not row:
                slices.append(piece)
                continue
            own = tf.gather(factors, [segment.index for segment in row])
            own = tf.concat([own, tf.ones([1], own.dtype)], axis=0)
            sizes = [segment.size for segment in row] + [bucket.padding(owner)]
            slices.append(piece * tf.cast(tf.repeat(own, sizes), piece.dtype))
        sparse = {
            index: with_values(rows, rows.values * tf.cast(factors[index], rows.dtype))
            for index, rows in self.sparse.items()
        }
        return dataclasses.replace(self, slices=slices, sparse=sparse)

    def without_rows(self, plan: ShardPlan, owner: int) -> ShardedGradients:
        """The same with sparse gradients as elements of the own slices."""
        if not self.sparse:
            return self
        whole = {i: tf.convert_to_tensor(rows) for i, rows in self.sparse.items()}
        slices: list[tf.Tensor | None] = []
        for bucket, piece in zip(plan.buckets, self.slices, strict=True):
            given = sorted(bucket.indices & whole.keys())
            if given:
                own = pack_row(bucket, owner, whole, whole[given[0]].dtype)
                piece = own if piece is None else piece + own
            slices.append(piece)
        dense = self.dense | whole.keys()
        return dataclasses.replace(self, slices=slices, dense=dense, sparse={})
