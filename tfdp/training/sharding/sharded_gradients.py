"""Gradients summed over all replicas, of which each has its own slices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from tfdp.ground.plans.shards import ShardPlan
from tfdp.training.parameters.packing import pack_row
from tfdp.training.reduction.fusion import divided, with_values
from tfdp.training.sharding.shard_collectives import ShardCollectives
from tfdp.training.sharding.sharded_param_group import ShardedParamGroup
from tfdp.training.step.state_layout import GradientStatistics, squared_norm


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


class ShardedGradientStatistics(GradientStatistics):
    """Norms and finite checks from slices: one small collective for all parts.

    Args:
        parts: List of `ShardedParamGroup`.
        sums: List of `ShardedGradients`.
        collectives: `ShardCollectives`.
        is_needed: Bool, whether anybody will ask.
    """

    def __init__(
        self,
        parts: list[ShardedParamGroup],
        sums: list[ShardedGradients],
        collectives: ShardCollectives,
        *,
        is_needed: bool,
    ) -> None:
        super().__init__(sums)
        self._parts = parts
        self._facts: list[tf.Tensor] = []
        if is_needed:
            own = [
                _squares_and_flags(p, s, collectives.owner)
                for p, s in zip(parts, sums, strict=True)
            ]
            total = collectives.all_reduce(
                tf.concat(_alike([fact for pair in own for fact in pair]), axis=0)
            )
            sizes = [len(p.variables) for p in parts for _ in range(2)]
            self._facts = tf.split(total, sizes)

    def is_finite(self) -> tf.Tensor:
        """Scalar bool tensor, whether no element is infinite or NaN."""
        return tf.reduce_all([tf.reduce_sum(flags) < 1 for flags in self._facts[1::2]])

    def squared_norm(self) -> tf.Tensor:
        """Scalar float32 tensor, the sum of the squares of all elements."""
        norms = [tf.reduce_sum(squares) for squares in self._facts[::2]]
        total = tf.cast(tf.add_n(norms), tf.float32)
        for rows in [rows for sums in self._sums for rows in sums.sparse.values()]:
            # Rows of one index were squared one by one, as clipping wants it.
            one_by_one = tf.cast(_sum_of_squares(rows.values), tf.float32)
            total += squared_norm([rows]) - one_by_one
        return total

    def squared_norms(self, part: ShardedParamGroup) -> tf.Tensor:
        """Tensor `[num_variables]`, that of each variable of a part."""
        return self._facts[2 * self._parts.index(part)]

    def non_finite(self) -> list[tf.Tensor]:
        """Scalar bool tensors, one for each variable that has a gradient."""
        return [
            flags[index] > 0
            for flags, sums in zip(self._facts[1::2], self._sums, strict=True)
            for index in sums.order
        ]


def own_squares(
    part: ShardedParamGroup, sums: ShardedGradients, owner: int
) -> tf.Tensor:
    """Contribution of an owner's slices to the squared norm of all gradients.

    Args:
        part: `ShardedParamGroup`.
        sums: `ShardedGradients` of the part.
        owner: Int, whose slices these are.

    Returns:
        Scalar float32 tensor.
    """
    whole = sums.without_rows(part.plan, owner)
    squares = [_sum_of_squares(piece) for piece in whole.slices if piece is not None]
    none = [tf.zeros([], tf.float32)]
    return tf.add_n([tf.cast(item, tf.float32) for item in squares] or none)


def _squares_and_flags(
    part: ShardedParamGroup, sums: ShardedGradients, owner: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Contribution of the own slices to each variable's squared norm and flag."""
    found = sums.parts(part.plan, owner)
    # Every replica has the rows of sparse gradients; one counts them.
    for index, rows in sums.sparse.items() if owner == 0 else ():
        found.setdefault(index, []).append(rows.values)
    none = [tf.zeros([], tf.float32)]
    squares, flags = [], []
    for index in range(len(part.variables)):
        own = found.get(index, [])
        squares.append(
            tf.add_n(_alike([_sum_of_squares(item) for item in own] or none))
        )
        bad = [tf.cast(tf.math.is_finite(item), tf.float32) for item in own]
        flags.append(tf.add_n([tf.reduce_sum(1.0 - item) for item in bad] or none))
    dtype = _dtype_of_norms(part)
    return tf.stack([tf.cast(item, dtype) for item in squares]), tf.stack(flags)


def _dtype_of_norms(part: ShardedParamGroup) -> tf.DType:
    """The same on all replicas, also on one that owns nothing of the widest dtype."""
    dtypes = [tf.as_dtype(bucket.dtype) for bucket in part.plan.buckets]
    return max([tf.float32, *dtypes], key=lambda dtype: dtype.size)


def _sum_of_squares(values: tf.Tensor) -> tf.Tensor:
    if values.dtype.size < tf.float32.size:
        values = tf.cast(values, tf.float32)
    return tf.reduce_sum(tf.square(values))


def _alike(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Tensors in the widest of their dtypes."""
    widest = max((tensor.dtype for tensor in tensors), key=lambda dtype: dtype.size)
    return [tf.cast(tensor, widest) for tensor in tensors]
