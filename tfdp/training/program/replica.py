"""Conversions of tensors: gathers of rows, sums of parts, slices of own rows."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import timing
from tfdp.ground._compat import runtime
from tfdp.ground.base import loops
from tfdp.training.parameters.gathers import regather_used_units
from tfdp.training.reduction.training_group import TrainingGroup

# The all-reduce of replicas can only sum. So for these reductions the replicas' results
# are gathered, and the function combines them.
_REDUCE = {
    "All": tf.reduce_all,
    "Any": tf.reduce_any,
    "Max": tf.reduce_max,
    "Min": tf.reduce_min,
    "Prod": tf.reduce_prod,
}


@dataclasses.dataclass(frozen=True)
class Rows:
    """Numbers of rows of a batch, and the block of them that one replica has.

    Args:
        own: Int or scalar int32 tensor, number of rows of the replica.
        first: Int or scalar int32 tensor, number of rows of the replicas before it.
        total: Int or scalar int32 tensor, number of rows of all replicas of its group.
        may_be_empty: Bool, whether the replica may have no rows.
        total_may_be_zero: Bool, whether its whole group may have no rows. Defaults to
            `False`.
        outside: `Rows`, the same numbers as tensors outside of the function that XLA
            compiles; or `None` if XLA does not compile the step. Defaults to `None`.
    """

    own: Any
    first: Any
    total: Any
    may_be_empty: bool
    total_may_be_zero: bool = False
    outside: Rows | None = None

    def fraction(self) -> tf.Tensor:
        """Return the rows of the replica as a fraction of all rows: scalar, float64."""
        total = tf.cast(tf.maximum(self.total, 1), tf.float64)
        return tf.cast(self.own, tf.float64) / total


class Replica:
    """The replica that builds a program, with its rows and its collectives.

    A program is a step as traced for one device, which each replica rebuilds for
    itself.

    Args:
        strategy: A tfdp strategy.
        group: `TrainingGroup` of the replicas that share the program.
        rows: `Rows` of the batch and of the replica.
    """

    def __init__(self, strategy: Any, group: TrainingGroup, rows: Rows) -> None:
        self.rows = rows
        self._strategy = strategy
        self.local_id = group.replica
        self.rank = group.rank
        # The replicas of a worker share states such as tables, so only one of them
        # writes these states: the worker's first replica that belongs to the group.
        first_of_worker = group.own_rank - group.replica
        self.is_writer = group.own_rank == max(group.ranks[0], first_of_worker)
        self.first_device = strategy.extended.worker_devices[0]
        self.is_on_cpu = runtime.device_type(self.first_device) == "CPU"
        self._group = group
        self._exchange = loops.exchange()
        # Whether the running micro-batch is the first one: a scalar bool tensor, or
        # `None` without micro-batches. Partial sums of all micro-batches are added up,
        # so a value that each of them has whole must count in the first one only.
        self.is_first_part: tf.Tensor | None = None

    def for_micro_batch(self, rows: Rows, index: tf.Tensor) -> Replica:
        """Return a copy of the replica that computes only one micro-batch.

        Args:
            rows: `Rows` of the micro-batch.
            index: Scalar int tensor, number of micro-batches before it.
        """
        part = copy.copy(self)
        part.rows, part.is_first_part = rows, tf.equal(index, 0)
        return part

    def sum(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sum each tensor over all replicas, by one all-reduce for each dtype."""
        sent = [
            tf.cast(part, tf.int32) if part.dtype == tf.bool else part for part in parts
        ]
        regather_used_units()
        with timing.labelled(timing.current_label() or "sums"):
            sums = self._group.reducer.sum(list(sent))
        return [
            tf.cast(total, part.dtype) for total, part in zip(sums, parts, strict=True)
        ]

    def gather(self, rows: tf.Tensor, axis: int) -> tf.Tensor:
        """All-gather the rows of all replicas along an axis.

        For strings the axis must be 0.
        """
        if self._group.size == 1:
            return rows
        if axis == 0:
            return self._gather(rows)
        # Strings with rows along another axis than the first never arrive here: the
        # plan's `_check_conversion` refuses to gather them.
        assert rows.dtype != tf.string
        rank = rows.shape.rank
        assert rank is not None
        order = [axis, *(i for i in range(rank) if i != axis)]
        inverse = [order.index(i) for i in range(rank)]
        return tf.transpose(self._gather(tf.transpose(rows, order)), inverse)

    def _gather(self, rows: tf.Tensor) -> tf.Tensor:
        """All-gather the rows of all replicas along the first axis."""
        regather_used_units()
        return self._group.gather(rows)

    def take_rows(
        self,
        tensor: tf.Tensor,
        axis: int,
        multiple: int | None,
        *,
        may_broadcast: bool = False,
    ) -> tf.Tensor:
        """Slice the rows of this replica from a whole tensor.

        Args:
            tensor: Tensor, the same on all replicas.
            axis: Int, the axis of rows.
            multiple: Int, number of entries along the axis for each row; or `None` to
                compute it in the step, which fails if the size of the axis is not a
                multiple of the number of rows.
            may_broadcast: Bool; if true, an axis of size one is not sliced, since it
                broadcasts. Defaults to `False`.
        """
        shape, static = tf.shape(tensor), tensor.shape.as_list()
        length = shape[axis]
        each: Any = multiple
        if each is None:
            each = length // tf.maximum(self.rows.total, 1)
            expected = each * self.rows.total
            if may_broadcast:
                expected = tf.where(tf.equal(length, 1), 1, expected)
            # The reshape fails if the size is not a multiple of the number of rows. A
            # `tf.Assert` would fail as well, but is stateful: TensorFlow would run it
            # after the stateful operations of other replicas.
            fitting = tf.concat([shape[:axis], [expected], shape[axis + 1 :]], 0)
            tensor = tf.reshape(tensor, fitting)
        begin, size = self.rows.first * each, self.rows.own * each
        if may_broadcast:
            is_one = tf.equal(length, 1)
            begin = tf.where(is_one, 0, begin)
            size = tf.where(is_one, 1, size)
        own = slice_along(tensor, axis, begin, size)
        static[axis] = None
        own.set_shape(static)
        return own

    def take_equal_share(self, tensor: tf.Tensor) -> tf.Tensor:
        """Slice this replica's share of a whole tensor's first axis, cut equally.

        The shares of two replicas differ by at most one element. They do not depend on
        the replicas' numbers of rows.
        """
        size = self._group.size
        length = tf.shape(tensor)[0]
        own = tensor[length * self.rank // size : length * (self.rank + 1) // size]
        own.set_shape([None, *tensor.shape[1:]])
        return own

    def broadcast_from_first(
        self, own: tf.Tensor | None, dtype: tf.DType, shape: tf.TensorShape
    ) -> tf.Tensor:
        """Broadcast a tensor of the first replica to all replicas.

        Args:
            own: Tensor on the first replica, `None` on others.
            dtype: `tf.DType` of the tensor.
            shape: `tf.TensorShape`, its static shape, known in part or not at all.
        """
        sizes = tf.zeros([0], tf.int32) if own is None else tf.shape(own)
        flat = tf.zeros([0], dtype) if own is None else tf.reshape(own, [-1])
        if dtype == tf.string and own is None:
            flat = tf.fill([0], "")
        result = tf.reshape(self.gather(flat, 0), self.gather(sizes, 0))
        result.set_shape(shape)
        return result

    def as_partial_sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return this replica's part of a whole tensor; all parts add up to the tensor.

        The part is the whole tensor in the first replica's first micro-batch, and zeros
        elsewhere. With a `GradientExchange`, whose sums may lack replicas, the part of
        each replica is in proportion to its rows.
        """
        if self._exchange is not None and tensor.dtype.is_floating:
            return self.weight_by_rows(tensor)
        if self._exchange is not None and tensor.dtype.is_integer:
            return self._divide_by_rows(tensor)
        if self.rank > 0:
            return tf.zeros_like(tensor)
        if self.is_first_part is not None:
            return tf.where(self.is_first_part, tensor, tf.zeros_like(tensor))
        return tf.identity(tensor)

    def average_after_step(self, handles: Sequence[Any]) -> bool:
        """Register variables to be averaged over all replicas after the step.

        Args:
            handles: Sequence of resource tensors, the handles of this replica's
                components of distributed variables.

        Returns:
            Bool, whether they will be averaged. If the strategy does not know one of
            them, or if the replica's group lacks replicas, none is, and the result is
            `False`.
        """
        extended = self._strategy.extended
        variables = [extended.variable_of(handle) for handle in handles]
        is_known = all(own is not None for own in variables)
        if not is_known or not self._group.is_all:
            return False
        # If XLA compiles the step, the average needs tensors from outside of the
        # compiled function, because those inside cannot be used after the step.
        rows = self.rows.outside or self.rows
        extended.record_statistics(variables, self.local_id, rows.fraction)
        return True

    def check_average_in_step(self) -> None:
        """Check that a step may average statistics over replicas, which waits for all.

        Raises:
            ValueError: If the loop has a `GradientExchange`, whose steps must not wait
                for all replicas.
        """
        if self._exchange is not None:
            raise ValueError(
                f"{self._exchange.label} does not support a layer with moving "
                "statistics that a step calls twice, such as `BatchNormalization`: the "
                "second call waits for the statistics of all replicas. Use two layers."
            )

    def weight_by_rows(self, value: tf.Tensor) -> tf.Tensor:
        """Multiply a value by this replica's rows as a fraction of all rows."""
        return tf.math.multiply_no_nan(
            value, tf.cast(self.rows.fraction(), value.dtype)
        )

    def _divide_by_rows(self, whole: tf.Tensor) -> tf.Tensor:
        """Return this replica's part of integers, in proportion to its rows.

        The parts of all replicas add up to `whole`, element by element.
        """
        first, own, total, number = (
            tf.cast(each, tf.int64)
            for each in (self.rows.first, self.rows.own, self.rows.total, whole)
        )
        total = tf.maximum(total, 1)
        part = number * (first + own) // total - number * first // total
        return tf.cast(part, whole.dtype)

    def reduce_results(self, kind: str, own: tf.Tensor) -> tf.Tensor:
        """Gather a tensor of each replica, and reduce them element by element.

        Args:
            kind: String, the reduction: `"All"`, `"Any"`, `"Max"`, `"Min"` or `"Prod"`.
            own: Tensor, the result for this replica's rows.
        """
        result = _REDUCE[kind](self._gather(own[tf.newaxis]), axis=0)
        result.set_shape(own.shape)
        return result


def slice_along(tensor: tf.Tensor, axis: int, begin: Any, size: Any) -> tf.Tensor:
    """Slice a tensor of known rank along one axis.

    Args:
        tensor: The tensor.
        axis: Int, the axis.
        begin: Int or scalar int32 tensor, index of the first entry.
        size: Int or scalar int32 tensor, number of entries.
    """
    rank = tensor.shape.rank
    assert rank is not None
    return tf.slice(
        tensor,
        tf.stack([begin if i == axis else 0 for i in range(rank)]),
        tf.stack([size if i == axis else -1 for i in range(rank)]),
    )
