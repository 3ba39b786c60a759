"""Sharded gradients: each replica's slices of the sums over all replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from tfdp.ground.plans.shards import ShardPlan
from tfdp.training.parameters.packing import pack_row
from tfdp.training.reduction.carried_scalar import CarriedScalar
from tfdp.training.reduction.fusion import divided, with_values
from tfdp.training.sharding.shard_collectives import ShardCollectives
from tfdp.training.sharding.sharded_param_group import ShardedParamGroup
from tfdp.training.step.state_layout import GradientStatistics, squared_norm


@dataclasses.dataclass(frozen=True)
class ShardedGradients:
    """This replica's slices of the reduced gradients of a parameter group.

    Args:
        slices: List with a tensor of shape `[slice_size]` for each bucket, or
            `None` for a bucket without gradients.
        dense: Frozen set of ints, positions of the variables with dense gradients.
        sparse: Dict from position to the gathered `tf.IndexedSlices` of all replicas.
        order: Tuple of ints, the positions of the variables in the order of the
            gradients.
    """

    slices: list[tf.Tensor | None]
    dense: frozenset[int]
    sparse: dict[int, tf.IndexedSlices]
    order: tuple[int, ...]

    @property
    def present(self) -> frozenset[int]:
        """Frozen set of ints, positions of the variables that have gradients."""
        return self.dense | self.sparse.keys()

    def parts(self, plan: ShardPlan, owner: int) -> dict[int, list[tf.Tensor]]:
        """Return the elements of dense gradients in these slices, by variable.

        Args:
            plan: `ShardPlan`.
            owner: Int, index of the owner of the slices.

        Returns:
            Dict from the position of a variable to the flat tensors of its elements,
            one for each slice.
        """
        elements: dict[int, list[tf.Tensor]] = {}
        for bucket, piece in zip(plan.buckets, self.slices, strict=True):
            if piece is not None:
                for segment, begin, end in bucket.places(owner):
                    elements.setdefault(segment.index, []).append(piece[begin:end])
        return elements

    def divided_by(self, divisor: tf.Tensor) -> ShardedGradients:
        """Return the gradients divided by a scalar; half precision becomes float32."""
        return self.map(lambda values: divided(values, divisor))

    def map(self, function: Callable[[tf.Tensor], tf.Tensor]) -> ShardedGradients:
        """Apply a function to each slice, and to the values of each sparse gradient.

        The result is a new `ShardedGradients`; this one is not changed.

        Args:
            function: Callable from a tensor to a tensor of the same shape.
        """
        sparse = {
            index: with_values(rows, function(rows.values))
            for index, rows in self.sparse.items()
        }
        slices = [None if piece is None else function(piece) for piece in self.slices]
        return dataclasses.replace(self, slices=slices, sparse=sparse)

    def scaled_by(
        self, factors: tf.Tensor, plan: ShardPlan, owner: int
    ) -> ShardedGradients:
        """Return the gradients, each multiplied by the factor of its variable.

        Args:
            factors: Tensor of shape `[num_variables]`.
            plan: `ShardPlan`.
            owner: Int, index of the owner of the slices.
        """
        slices: list[tf.Tensor | None] = []
        for bucket, piece in zip(plan.buckets, self.slices, strict=True):
            row = bucket.rows[owner]
            if piece is None or not row:
                slices.append(piece)
                continue
            segment_factors = tf.gather(factors, [segment.index for segment in row])
            segment_factors = tf.concat(
                [segment_factors, tf.ones([1], segment_factors.dtype)], axis=0
            )
            sizes = [segment.size for segment in row] + [bucket.padding(owner)]
            slices.append(
                piece * tf.cast(tf.repeat(segment_factors, sizes), piece.dtype)
            )
        sparse = {
            index: with_values(rows, rows.values * tf.cast(factors[index], rows.dtype))
            for index, rows in self.sparse.items()
        }
        return dataclasses.replace(self, slices=slices, sparse=sparse)

    def without_rows(self, plan: ShardPlan, owner: int) -> ShardedGradients:
        """Return the gradients, with sparse ones made dense and added to the slices.

        Args:
            plan: `ShardPlan`.
            owner: Int, index of the owner of the slices.
        """
        if not self.sparse:
            return self
        whole = {i: tf.convert_to_tensor(rows) for i, rows in self.sparse.items()}
        slices: list[tf.Tensor | None] = []
        for bucket, piece in zip(plan.buckets, self.slices, strict=True):
            sparse_indices = sorted(bucket.indices & whole.keys())
            if sparse_indices:
                sparse_part = pack_row(
                    bucket, owner, whole, whole[sparse_indices[0]].dtype
                )
                piece = sparse_part if piece is None else piece + sparse_part
            slices.append(piece)
        dense = self.dense | whole.keys()
        return dataclasses.replace(self, slices=slices, dense=dense, sparse={})


class ShardedGradientStatistics(GradientStatistics):
    """Norms and finite checks of sharded gradients, by one collective for all groups.

    The constructor runs the collective.

    Args:
        groups: List of `ShardedParamGroup`.
        sums: List of `ShardedGradients`, one for each group.
        collectives: `ShardCollectives`.
        is_needed: Bool, whether norms or checks will be read. If not, the collective
            runs only for a `loss` without a `total`.
        loss: `CarriedScalar`, the loss, which the collective also sums unless it has a
            `total`, from a bucket of gradients; or `None`. Defaults to `None`.
    """

    def __init__(
        self,
        groups: list[ShardedParamGroup],
        sums: list[ShardedGradients],
        collectives: ShardCollectives,
        *,
        is_needed: bool,
        loss: CarriedScalar | None = None,
    ) -> None:
        super().__init__(sums, None if loss is None else loss.total)
        self._groups = groups
        # One collective sums the measures of all groups, so they are in one list: for
        # each group two tensors `[num_variables]`, the squared norms of the gradients
        # and the numbers of their non-finite elements.
        self._measured: list[tf.Tensor] = []
        is_waiting = loss is not None and loss.total is None
        if is_needed or is_waiting:
            local = [
                item
                for g, s in zip(groups, sums, strict=True)
                for item in _squares_and_flags(g, s, collectives.owner)
            ]
            own_loss = [loss.value[tf.newaxis]] if loss is not None else []
            total = collectives.all_reduce(
                tf.concat(_in_widest_dtype([*local, *own_loss[:is_waiting]]), axis=0)
            )
            sizes = [len(group.variables) for group in groups for _ in range(2)]
            self._measured = tf.split(total, [*sizes, *[1] * is_waiting])
            if is_waiting:
                self.loss = tf.cast(self._measured.pop()[0], tf.float32)

    def is_finite(self) -> tf.Tensor:
        """Return a scalar bool tensor, whether no element is infinite or NaN."""
        return tf.reduce_all(
            [tf.reduce_sum(flags) < 1 for flags in self._measured[1::2]]
        )

    def squared_norm(self) -> tf.Tensor:
        """Return the squared norm of all gradients together, a scalar float32 tensor.

        Rows of a sparse gradient with the same index are summed before they are
        squared.
        """
        norms = [tf.reduce_sum(squares) for squares in self._measured[::2]]
        total = tf.cast(tf.add_n(norms), tf.float32)
        for rows in [rows for sums in self.sums for rows in sums.sparse.values()]:
            # Several rows of a sparse gradient may have the same index. `_measured`,
            # which is for clipping, squares such rows separately, but the norm of all
            # gradients squares the sum of such rows: the difference is added.
            one_by_one = tf.cast(_sum_of_squares(rows.values), tf.float32)
            total += squared_norm([rows]) - one_by_one
        return total

    def squared_norms(self, group: ShardedParamGroup) -> tf.Tensor:
        """Return a tensor `[num_variables]`: the squared norm of each whole gradient.

        Rows of a sparse gradient with the same index are squared separately.
        """
        return self._measured[2 * self._groups.index(group)]

    def squared_norm_of_each(self) -> list[tf.Tensor]:
        """Return the squared norm of each gradient, in the order of the gradients.

        Returns:
            List of scalar float32 tensors.
        """
        return [
            tf.cast(squares[index], tf.float32)
            for squares, sums in zip(self._measured[::2], self.sums, strict=True)
            for index in sums.order
        ]

    def non_finite(self) -> list[tf.Tensor]:
        """Return whether each gradient has infinity or NaN, in the gradients' order.

        Returns:
            List of scalar bool tensors.
        """
        return [
            flags[index] > 0
            for flags, sums in zip(self._measured[1::2], self.sums, strict=True)
            for index in sums.order
        ]


def local_squared_norm(
    group: ShardedParamGroup, sums: ShardedGradients, owner: int
) -> tf.Tensor:
    """Compute the squared norm of an owner's slices of the gradients.

    Args:
        group: `ShardedParamGroup`.
        sums: `ShardedGradients` of the group.
        owner: Int, index of the owner of the slices.

    Returns:
        Scalar float32 tensor.
    """
    whole = sums.without_rows(group.plan, owner)
    squares = [_sum_of_squares(piece) for piece in whole.slices if piece is not None]
    none = [tf.zeros([], tf.float32)]
    return tf.add_n([tf.cast(item, tf.float32) for item in squares] or none)


def _squares_and_flags(
    group: ShardedParamGroup, sums: ShardedGradients, owner: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute squared norms and count non-finite elements in an owner's slices.

    Args:
        group: `ShardedParamGroup`.
        sums: `ShardedGradients` of the group.
        owner: Int, index of the owner of the slices. Sparse gradients, whose rows all
            replicas have, count for owner 0 only.

    Returns:
        Tuple of two tensors `[num_variables]`, for each variable over its elements in
        these slices: the sum of squares, and the number of infinite or NaN elements.
    """
    elements = sums.parts(group.plan, owner)
    # Every replica has the rows of all sparse gradients, so only owner 0 counts them.
    for index, rows in sums.sparse.items() if owner == 0 else ():
        elements.setdefault(index, []).append(rows.values)
    none = [tf.zeros([], tf.float32)]
    squares, flags = [], []
    for index in range(len(group.variables)):
        tensors = elements.get(index, [])
        squares.append(
            tf.add_n(
                _in_widest_dtype([_sum_of_squares(item) for item in tensors] or none)
            )
        )
        bad = [tf.cast(tf.math.is_finite(item), tf.float32) for item in tensors]
        flags.append(tf.add_n([tf.reduce_sum(1.0 - item) for item in bad] or none))
    dtype = _dtype_of_norms(group)
    return tf.stack([tf.cast(item, dtype) for item in squares]), tf.stack(flags)


def _dtype_of_norms(group: ShardedParamGroup) -> tf.DType:
    """Return the dtype of a group's squared norms: its widest, but at least float32.

    It is the same on all replicas, also on those whose shards lack the widest dtype.
    """
    dtypes = [tf.as_dtype(bucket.dtype) for bucket in group.plan.buckets]
    return max([tf.float32, *dtypes], key=lambda dtype: dtype.size)


def _sum_of_squares(values: tf.Tensor) -> tf.Tensor:
    """Sum the squares of all elements, at least in float32."""
    if values.dtype.size < tf.float32.size:
        values = tf.cast(values, tf.float32)
    return tf.reduce_sum(tf.square(values))


def _in_widest_dtype(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Cast tensors to the widest of their dtypes."""
    widest = max((tensor.dtype for tensor in tensors), key=lambda dtype: dtype.size)
    return [tf.cast(tensor, widest) for tensor in tensors]
