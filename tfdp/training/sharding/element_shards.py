"""Optimizer state on flat shards, and the optimizer's update of them.

An ordinary Keras optimizer, a clone of the user's, is built on the slices that the
replica owns. So slots are born sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp.ground import _compat
from tfdp.ground.base import xla
from tfdp.ground.plans.shards import Segment, ShardPlan
from tfdp.training.parameters.sharded_parameter import own_elements
from tfdp.training.reduction.fusion import pack
from tfdp.training.sharding.sharded_gradients import ShardedGradients
from tfdp.training.step.flat_params import FlatParameterRange, TensorView
from tfdp.training.step.grouped_update import gains_from_xla


class ElementShards:
    """Slots on flat shards, for optimizers that treat every element by itself.

    Args:
        optimizer: Keras optimizer, one of those known to be elementwise.
        variables: List of Keras variables, those of the plan.
        plan: `ShardPlan` of slices.
        owner: Int, which slices.
        replica: Int, the local replica that has them.
        device: String, where they are kept and updated.
    """

    def __init__(
        self,
        optimizer: Any,
        variables: list[Any],
        plan: ShardPlan,
        owner: int,
        replica: int,
        device: str,
    ) -> None:
        self.owner = owner
        self.device = device
        self._plan = plan
        rows = [bucket.rows[owner] for bucket in plan.buckets]
        self.buckets = [number for number, row in enumerate(rows) if row]
        with tf.init_scope(), _compat.outside_strategies(), tf.device(device):
            flats = [
                _variable(
                    pack(
                        [own_elements(variables[s.index], s, replica) for s in rows[k]]
                    )
                )
                for k in self.buckets
            ]
            clone = _compat.plain_clone(optimizer)
            clone.build(flats)
        self.slots: dict[str, list[Any]] = _compat.slots_of(clone)
        self.singles: dict[str, Any] = _compat.single_variables(clone)

    def update(
        self,
        optimizer: Any,
        gradients: ShardedGradients,
        variables: list[Any],
        rate: Any,
    ) -> list[tf.Tensor | None]:
        """Decay and update what the replica owns.

        Args:
            optimizer: Keras optimizer, the user's or a stand-in.
            gradients: `ShardedGradients`.
            variables: List of Keras variables, those of the plan.
            rate: Scalar tensor, the learning rate.

        Returns:
            List with the new values of the own slice of each bucket, or `None`
            where no variable of the bucket has a gradient.
        """
        optimizer = _compat.stand_in(optimizer, **self.singles)
        _compat.update_variables(optimizer, [], [], rate)
        updated: list[tf.Tensor | None] = []
        for number, bucket in enumerate(self._plan.buckets):
            if not bucket.indices & gradients.present:
                updated.append(None)
                continue
            row = bucket.rows[self.owner]
            parts = []
            for first, last in _runs(row, gradients):
                parts.append(
                    self._update_run(
                        optimizer, number, first, last, gradients, variables, rate
                    )
                )
            dtype = tf.as_dtype(bucket.dtype)
            padding = [tf.zeros([bucket.padding(self.owner)], dtype)]
            updated.append(
                pack(parts + padding if bucket.padding(self.owner) else parts)
            )
        return updated

    def _update_run(
        self,
        optimizer: Any,
        number: int,
        first: int,
        last: int,
        gradients: ShardedGradients,
        variables: list[Any],
        rate: Any,
    ) -> tf.Tensor:
        """Update segments as one, and return their new values."""
        row = self._plan.buckets[number].rows[self.owner]
        segments = row[first:last]
        start = sum(segment.size for segment in row[:first])
        stop = start + sum(segment.size for segment in segments)
        index = segments[0].index
        if index not in gradients.present:
            return pack([_value(s, variables) for s in segments])
        if index in gradients.sparse:
            gradient: Any = _sparse_elements(gradients.sparse[index], segments[0])
        else:
            piece = gradients.slices[number]
            assert piece is not None
            is_all = (start, stop) == (0, piece.shape[0])
            gradient = piece if is_all else piece[start:stop]
        # Or all that the replica owns is packed as soon as the step begins.
        with tf.control_dependencies(_tensors_of(gradient)):
            values = pack([_decayed(optimizer, s, variables, rate) for s in segments])
        with tf.device(self.device):
            return self._apply(optimizer, number, start, stop, values, gradient, rate)

    def _apply(
        self,
        optimizer: Any,
        number: int,
        start: int,
        stop: int,
        values: tf.Tensor,
        gradient: Any,
        rate: Any,
    ) -> tf.Tensor:
        """Apply the optimizer's own update to elements `start` to `stop` of a shard."""

        def update(values: tf.Tensor, gradient: Any, rate: Any) -> tf.Tensor:
            view = TensorView(values)
            slots = {
                name: self._slot_range(items[self.buckets.index(number)], start, stop)
                for name, items in self.slots.items()
            }
            flat = _compat.with_slots(
                optimizer, view, {name: [slot] for name, slot in slots.items()}
            )
            flat.update_step(gradient, view, rate)
            for slot in slots.values():
                if isinstance(slot, FlatParameterRange):
                    slot.write_back()
            return view.read_value()

        if xla.is_wanted() and gains_from_xla([gradient]):
            return xla.run(update, (values, gradient, rate), self.device)
        return update(values, gradient, rate)

    def _slot_range(self, slot: Any, start: int, stop: int) -> Any:
        is_whole = slot is None or (start, stop) == (0, slot.shape[0])
        return slot if is_whole else FlatParameterRange(slot.value, start, stop)

    def own_values(self, variables: list[Any]) -> list[tf.Tensor]:
        """Values of what the replica owns, one tensor for each average."""
        rows = [self._plan.buckets[number].rows[self.owner] for number in self.buckets]
        return [pack([_value(s, variables) for s in row]) for row in rows]

    def average(self, optimizer: Any, variables: list[Any]) -> None:
        """Move the averages towards the variables."""
        views = [TensorView(value) for value in self.own_values(variables)]
        averages = self.slots.get("_model_variables_moving_average", [])
        stand_in = _compat.stand_in(optimizer, _model_variables_moving_average=averages)
        _compat.move_averages(stand_in, views)

    def set_averages(self, values: list[tf.Tensor]) -> None:
        """Set the averages to values, as `own_values` returns them."""
        averages = self.slots.get("_model_variables_moving_average", [])
        for average, value in zip(averages, values, strict=True):
            average.assign(value)

    def averages(self) -> list[tf.Tensor | None]:
        """Average, as slices of every bucket."""
        found: list[tf.Tensor | None] = []
        averages = self.slots.get("_model_variables_moving_average", [])
        for number, bucket in enumerate(self._plan.buckets):
            padding = tf.zeros([bucket.padding(self.owner)], tf.as_dtype(bucket.dtype))
            if number in self.buckets:
                own = averages[self.buckets.index(number)]
                found.append(tf.concat([tf.convert_to_tensor(own), padding], axis=0))
            else:
                found.append(padding)
        return found


def _variable(value: tf.Tensor) -> Any:
    return keras.Variable(np.asarray(value), dtype=value.dtype.name, name="slice")


def _value(segment: Segment, variables: Sequence[Any]) -> tf.Tensor:
    replica = _compat.local_replica_id_in_force()
    return own_elements(variables[segment.index], segment, replica)


def _decayed(
    optimizer: Any, segment: Segment, variables: Sequence[Any], rate: Any
) -> tf.Tensor:
    value = _value(segment, variables)
    # By the first replica's name: those of others end in their number.
    first = _compat.local_value(variables[segment.index], 0)
    if not _compat.uses_weight_decay(optimizer, first):
        return value
    decay = tf.cast(optimizer.weight_decay, value.dtype) * tf.cast(rate, value.dtype)
    return value - value * decay


def _tensors_of(gradient: Any) -> list[tf.Tensor]:
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    return [gradient.values if is_sparse else gradient]


def _runs(row: Sequence[Segment], gradients: ShardedGradients) -> list[tuple[int, int]]:
    """Group neighbouring segments that are updated as one: first, one after the last.

    Those with sparse gradients are each by themselves.
    """
    runs: list[tuple[int, int]] = []
    before: Any = None
    for number, segment in enumerate(row):
        kind: Any = segment.index in gradients.dense
        if segment.index in gradients.sparse:
            kind = segment
        if runs and kind == before:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
        before = kind
    return runs


def _sparse_elements(rows: tf.IndexedSlices, segment: Segment) -> tf.IndexedSlices:
    """Convert rows of a variable to single elements of a segment of it.

    Keras applies rows of one index one by one, and so it must the elements.
    """
    row_size = tf.reduce_prod(tf.shape(rows.values)[1:])
    size = tf.cast(row_size, tf.int64)
    indices = tf.cast(rows.indices, tf.int64)
    touches = (indices * size < segment.stop) & ((indices + 1) * size > segment.start)
    indices = tf.boolean_mask(indices, touches)
    values = tf.reshape(tf.boolean_mask(rows.values, touches), [-1])
    places = indices[:, tf.newaxis] * size + tf.range(size)[tf.newaxis]
    places = tf.reshape(places, [-1]) - segment.start
    inside = (places >= 0) & (places < segment.size)
    return tf.IndexedSlices(
        tf.boolean_mask(values, inside),
        tf.boolean_mask(places, inside),
        tf.constant([segment.size], tf.int64),
    )
