"""Conversions between the forms in which replicas hold a tensor of the program."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import timing
from tfdp.ground import _compat
from tfdp.ground.base import xla
from tfdp.training.parameters.gathers import gather_again_so_far
from tfdp.training.reduction.training_group import TrainingGroup

_REDUCE = {
    "All": tf.reduce_all,
    "Any": tf.reduce_any,
    "Max": tf.reduce_max,
    "Min": tf.reduce_min,
    "Prod": tf.reduce_prod,
}


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a batch, and those of one replica: a block of them.

    Args:
        own: Int or scalar int32 tensor, rows of the replica.
        first: The same, rows of the replicas before it.
        total: The same, rows of all replicas of its group.
        may_be_empty: Bool, whether the replica may have none.
        total_may_be_zero: Bool, whether its whole group may have none. Defaults to
            `False`.
    """

    own: Any
    first: Any
    total: Any
    may_be_empty: bool
    total_may_be_zero: bool = False


class Replica:
    """The replica that builds a program.

    Args:
        strategy: A tfdp strategy.
        group: `TrainingGroup`, the replicas whose program it is.
        rows: `Rows`.
    """

    def __init__(self, strategy: Any, group: TrainingGroup, rows: Rows) -> None:
        self.rows = rows
        self._strategy = strategy
        self.local_id = group.replica
        self.rank = group.rank
        # Whether it is the one of its worker that writes what they share.
        first_of_worker = group.own_rank - group.replica
        self.is_writer = group.own_rank == max(group.ranks[0], first_of_worker)
        self.first_device = strategy.extended.worker_devices[0]
        self.is_on_cpu = _compat.device_type(self.first_device) == "CPU"
        self._group = group

    def sum(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sum parts over all replicas, by one message for each dtype."""
        sent = [
            tf.cast(part, tf.int32) if part.dtype == tf.bool else part for part in parts
        ]
        gather_again_so_far()
        with timing.labelled(timing.current_label() or "sums"):
            sums = self._group.reducer.sum(list(sent))
        return [
            tf.cast(total, part.dtype) for total, part in zip(sums, parts, strict=True)
        ]

    def gather(self, rows: tf.Tensor, axis: int) -> tf.Tensor:
        """Gather the rows of all replicas."""
        if self._group.size == 1:
            return rows
        if rows.dtype == tf.string:
            return self._gather_strings(rows, axis)
        if axis == 0:
            return self._gather(rows)
        rank = rows.shape.rank
        assert rank is not None
        order = [axis, *(i for i in range(rank) if i != axis)]
        inverse = [order.index(i) for i in range(rank)]
        return tf.transpose(self._gather(tf.transpose(rows, order)), inverse)

    def _gather(self, rows: tf.Tensor) -> tf.Tensor:
        gather_again_so_far()
        return self._group.gather(rows)

    def _gather_strings(self, rows: tf.Tensor, axis: int) -> tf.Tensor:
        """Gather strings, which no collective carries, by their bytes."""
        flat = tf.reshape(rows, [-1])
        own_bytes = tf.io.decode_raw(tf.strings.reduce_join(flat), tf.uint8)
        lengths = self.gather(tf.reshape(tf.strings.length(flat), tf.shape(rows)), axis)
        assert axis == 0  # A plan has been checked, see `tfdp.training.program.plan`.
        letters = tf.constant([bytes([value]) for value in range(256)])
        codes = tf.cast(self._gather(own_bytes), tf.int32)
        text = tf.strings.reduce_join(tf.gather(letters, codes))
        sizes = tf.reshape(lengths, [-1])
        begins = tf.cumsum(sizes, exclusive=True)
        found = tf.strings.substr(tf.fill(tf.shape(sizes), text), begins, sizes)
        return tf.ensure_shape(tf.reshape(found, tf.shape(lengths)), lengths.shape)

    def take_rows(
        self,
        tensor: tf.Tensor,
        axis: int,
        multiple: int | None,
        *,
        may_broadcast: bool = False,
    ) -> tf.Tensor:
        """Take the rows of this replica from a whole tensor.

        Args:
            tensor: Tensor, the same on all replicas.
            axis: Int, the axis of rows.
            multiple: Int, entries for each row, or `None` to find it out.
            may_broadcast: Bool, whether one entry stands for all rows. Defaults to
                `False`.
        """
        shape, static = tf.shape(tensor), tensor.shape.as_list()
        length = shape[axis]
        rank = tensor.shape.rank
        assert rank is not None
        each: Any = multiple
        if each is None:
            each = length // tf.maximum(self.rows.total, 1)
            expected = each * self.rows.total
            if may_broadcast:
                expected = tf.where(tf.equal(length, 1), 1, expected)
            # An error where rows do not fit. An assertion has a state, and so would
            # wait for those of other replicas.
            fitting = tf.concat([shape[:axis], [expected], shape[axis + 1 :]], 0)
            tensor = tf.reshape(tensor, fitting)
        begin, size = self.rows.first * each, self.rows.own * each
        if may_broadcast:
            is_one = tf.equal(length, 1)
            begin = tf.where(is_one, 0, begin)
            size = tf.where(is_one, 1, size)
        own = tf.slice(
            tensor,
            tf.stack([begin if i == axis else 0 for i in range(rank)]),
            tf.stack([size if i == axis else -1 for i in range(rank)]),
        )
        static[axis] = None
        own.set_shape(static)
        return own

    def share(self, tensor: tf.Tensor) -> tf.Tensor:
        """Take an equal share of a whole tensor with any number of rows."""
        size = self._group.size
        length = tf.shape(tensor)[0]
        own = tensor[length * self.rank // size : length * (self.rank + 1) // size]
        own.set_shape([None, *tensor.shape[1:]])
        return own

    def share_of_first(
        self, own: tf.Tensor | None, dtype: tf.DType, shape: tf.TensorShape
    ) -> tf.Tensor:
        """Give a tensor of the first replica to all.

        Args:
            own: Tensor of the first replica, `None` on others.
            dtype: Its dtype.
            shape: What is known of its shape.
        """
        sizes = tf.zeros([0], tf.int32) if own is None else tf.shape(own)
        flat = tf.zeros([0], dtype) if own is None else tf.reshape(own, [-1])
        if dtype == tf.string and own is None:
            flat = tf.fill([0], "")
        found = tf.reshape(self.gather(flat, 0), self.gather(sizes, 0))
        found.set_shape(shape)
        return found

    def once(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return a tensor on the first replica, and zeros on others."""
        return tf.identity(tensor) if self.rank == 0 else tf.zeros_like(tensor)

    def averages_after_step(self, handles: Sequence[Any]) -> bool:
        """Have variables averaged over all replicas after the step, where that can be.

        Args:
            handles: Sequence of resource tensors, of components of this replica.

        Returns:
            Bool, whether they will be.
        """
        extended = self._strategy.extended
        variables = [extended.variable_of(handle) for handle in handles]
        is_known = all(own is not None for own in variables)
        if not is_known or not self._group.is_all or xla.is_tracing():
            return False
        extended.note_statistics(variables, self.local_id, self._fraction())
        return True

    def _fraction(self) -> tf.Tensor:
        """Return the fraction of all rows that this replica has."""
        total = tf.cast(tf.maximum(self.rows.total, 1), tf.float64)
        return tf.cast(self.rows.own, tf.float64) / total

    def weighted(self, value: tf.Tensor) -> tf.Tensor:
        """Multiply a value of this replica by the fraction of all rows that it has."""
        return tf.math.multiply_no_nan(value, tf.cast(self._fraction(), value.dtype))

    def reduce_results(self, kind: str, own: tf.Tensor) -> tf.Tensor:
        """Reduce one result of each replica by an operation such as `Max`."""
        found = _REDUCE[kind](self._gather(own[tf.newaxis]), axis=0)
        found.set_shape(own.shape)
        return found
