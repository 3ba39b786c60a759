"""Optimizer state on flat shards, and the optimizer's update of them.

A clone of the user's Keras optimizer is built on the slices that the replica owns, so
that slots are created as shards and never as full tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp.ground._compat import (
    keras_optimizer,
    optimizer_state,
    optimizer_views,
    tf_distribute,
)
from tfdp.ground.base import xla
from tfdp.ground.plans.shards import Segment, ShardBucket
from tfdp.training.parameters.sharded_parameter import own_elements
from tfdp.training.reduction.fusion import pack
from tfdp.training.sharding.sharded_gradients import ShardedGradients
from tfdp.training.sharding.sharded_param_group import OptimizerShard
from tfdp.training.step.flat_params import FlatParameterRange, TensorView
from tfdp.training.step.grouped_update import gains_from_xla

# Segment of a variable, and the positions in a bucket's slice where the segment begins
# and ends: an item of `ShardBucket.places`.
Place = tuple[Segment, int, int]


class ElementShards(OptimizerShard):
    """Slots of an elementwise optimizer for one replica's flat slices of buckets.

    Arguments are those of `OptimizerShard`.
    """

    def _build(self, optimizer: Any, variables: list[Any], replica: int) -> None:
        """Create the slots of the replica's slices, by a clone of the optimizer.

        It also sets `buckets`, the indices of the buckets in which the replica owns
        elements: each list of `slots` has a slot for each of them.
        """
        rows = [bucket.rows[self.owner] for bucket in self._plan.buckets]
        self.buckets = [number for number, row in enumerate(rows) if row]
        flats = [
            _slice_variable(
                pack([own_elements(variables[s.index], s, replica) for s in rows[k]])
            )
            for k in self.buckets
        ]
        clone = optimizer_views.plain_clone(optimizer)
        clone.build(flats)
        self.slots = optimizer_state.slots_of(clone)
        self.singles = optimizer_state.single_variables(clone)

    def update(
        self,
        optimizer: Any,
        gradients: ShardedGradients,
        variables: list[Any],
        rate: Any,
    ) -> list[tf.Tensor | None]:
        """Update the replica's slots; return new values of the elements that it owns.

        Weights decay first. The variables themselves are not assigned.

        Args:
            optimizer: Keras optimizer with the settings: the user's, or a shallow copy
                of it.
            gradients: `ShardedGradients`.
            variables: List of the Keras variables that the `ShardPlan` was made for.
            rate: Scalar tensor, the learning rate.

        Returns:
            List with the new values of the replica's slice of each bucket, or `None`
            where no variable of the bucket has a gradient.
        """
        optimizer = optimizer_views.copy_with(optimizer, **self.singles)
        keras_optimizer.update_variables(optimizer, [], [], rate)

        def kind(place: Place) -> Any:
            """Return a key: adjacent segments with equal keys are updated as one.

            It is `True` for a segment with a dense gradient and `False` for one without
            a gradient. A segment with a sparse gradient is updated alone: it is its own
            key.

            Args:
                place: Tuple of a `Segment`, a range of a flattened variable, and ints,
                    its begin and end in the replica's slice of the bucket.
            """
            segment, _, _ = place
            is_sparse = segment.index in gradients.sparse
            return segment if is_sparse else segment.index in gradients.dense

        updated: list[tf.Tensor | None] = []
        for number, bucket in enumerate(self._plan.buckets):
            if not bucket.indices & gradients.present:
                updated.append(None)
                continue
            runs = itertools.groupby(bucket.places(self.owner), kind)
            parts = [
                self._update_run(
                    optimizer, number, list(run), gradients, variables, rate
                )
                for _, run in runs
            ]
            updated.append(_padded(parts, bucket, self.owner))
        return updated

    def _update_run(
        self,
        optimizer: Any,
        number: int,
        run: list[Place],
        gradients: ShardedGradients,
        variables: list[Any],
        rate: Any,
    ) -> tf.Tensor:
        """Update the slots of adjacent segments as one; return the new values.

        Args:
            optimizer: Keras optimizer with the scalar state of this shard.
            number: Int, index of the bucket.
            run: List of `Place`: tuples of a `Segment`, and its begin and end in the
                replica's slice of the bucket; one begins where the one before ends.
            gradients: `ShardedGradients`.
            variables: List of the Keras variables that the `ShardPlan` was made for.
            rate: Scalar tensor, the learning rate.

        Returns:
            Flat tensor, the new values of the elements of all segments.
        """
        (first, start, _), (_, _, stop) = run[0], run[-1]
        segments = [segment for segment, _, _ in run]
        if first.index not in gradients.present:
            return pack([_segment_value(s, variables) for s in segments])
        if first.index in gradients.sparse:
            gradient: Any = _sparse_elements(gradients.sparse[first.index], first)
        else:
            piece = gradients.slices[number]
            assert piece is not None
            is_all = (start, stop) == (0, piece.shape[0])
            gradient = piece if is_all else piece[start:stop]
        # Without the dependency on the gradient, TensorFlow would pack all owned
        # elements when the step begins, and hold the copies until gradients arrive.
        with tf.control_dependencies([getattr(gradient, "values", gradient)]):
            values = pack(
                [_decayed_segment(optimizer, s, variables, rate) for s in segments]
            )

        def update(values: tf.Tensor, gradient: Any, rate: Any) -> tf.Tensor:
            """Update the slots of adjacent segments; return their new `values`.

            Args:
                values: Flat tensor, the values of the segments before the update.
                gradient: Flat tensor, or `tf.IndexedSlices` for a single segment.
                rate: Scalar tensor, the learning rate.
            """
            view = TensorView(values)
            slots = {
                name: _slot_range(items[self.buckets.index(number)], start, stop)
                for name, items in self.slots.items()
            }
            flat = optimizer_views.with_slots(
                optimizer, view, {name: [slot] for name, slot in slots.items()}
            )
            flat.update_step(gradient, view, rate)
            for slot in slots.values():
                if isinstance(slot, FlatParameterRange):
                    slot.write_back()
            return view.read_value()

        with tf.device(self.device):
            if xla.should_compile() and gains_from_xla([gradient]):
                return xla.run(update, (values, gradient, rate), self.device)
            return update(values, gradient, rate)

    def own_values(self, variables: list[Any]) -> list[tf.Tensor]:
        """Return the elements of the variables that the replica owns.

        The result is a list of flat tensors, one for each bucket with such elements.

        Args:
            variables: List of the Keras variables that the `ShardPlan` was made for.
        """
        rows = [self._plan.buckets[number].rows[self.owner] for number in self.buckets]
        return [pack([_segment_value(s, variables) for s in row]) for row in rows]

    def average(self, optimizer: Any, variables: list[Any]) -> None:
        """Move the moving averages that the replica owns towards the variables.

        Args:
            optimizer: Keras optimizer with the settings of the averages.
            variables: List of the Keras variables that the `ShardPlan` was made for.
        """
        views = [TensorView(value) for value in self.own_values(variables)]
        stand_in = optimizer_views.with_averages(optimizer, self._own_averages)
        keras_optimizer.move_averages(stand_in, views)

    def averages(self) -> list[tf.Tensor]:
        """Return the moving averages of the replica's slice of each bucket.

        Returns:
            List with a tensor of shape `[slice_size]`, padded with zeros, for each
            bucket.
        """
        by_bucket = dict(zip(self.buckets, self._own_averages, strict=True))
        return [
            _padded(
                [tf.convert_to_tensor(by_bucket[number])]
                if number in by_bucket
                else [],
                bucket,
                self.owner,
            )
            for number, bucket in enumerate(self._plan.buckets)
        ]


def _padded(parts: list[tf.Tensor], bucket: ShardBucket, owner: int) -> tf.Tensor:
    """Concatenate the parts of a slice, and pad the result to `[slice_size]`."""
    size = bucket.padding(owner)
    zeros = [tf.zeros([size], tf.as_dtype(bucket.dtype))] if size else []
    return pack([*parts, *zeros])


def _slot_range(slot: Any, start: int, stop: int) -> Any:
    """Return a variable-like range of a flat slot, or the slot itself for all of it.

    Changes of a range reach the slot when its `write_back` is called.

    Args:
        slot: Flat Keras variable, or `None`, which is returned.
        start: Int, first element.
        stop: Int, one after the last element.
    """
    is_whole = slot is None or (start, stop) == (0, slot.shape[0])
    return slot if is_whole else FlatParameterRange(slot.value, start, stop)


def _slice_variable(value: tf.Tensor) -> Any:
    """Create a flat Keras variable with the elements of a slice.

    A clone of the optimizer is built for such variables, which creates the slots of the
    slices. `value` is the flat eager tensor of the elements.
    """
    return keras.Variable(np.asarray(value), dtype=value.dtype.name, name="slice")


def _segment_value(segment: Segment, variables: Sequence[Any]) -> tf.Tensor:
    """Return a segment's elements as a flat tensor, read on the running replica."""
    replica = tf_distribute.active_local_replica_id()
    return own_elements(variables[segment.index], segment, replica)


def _decayed_segment(
    optimizer: Any, segment: Segment, variables: Sequence[Any], rate: Any
) -> tf.Tensor:
    """Return a segment's elements, after weight decay if its variable has it.

    Args:
        optimizer: Keras optimizer with the settings of the decay.
        segment: `Segment` of the variable at `segment.index` in `variables`.
        variables: Sequence of the Keras variables that the `ShardPlan` was made for.
        rate: Scalar tensor, the learning rate.
    """
    value = _segment_value(segment, variables)
    # Variables are excluded from weight decay by name. Only the copy of replica 0 has
    # the name of the variable: the names of other copies end in the replica's number.
    first = tf_distribute.local_value(variables[segment.index], 0)
    if not keras_optimizer.uses_weight_decay(optimizer, first):
        return value
    decay = tf.cast(optimizer.weight_decay, value.dtype) * tf.cast(rate, value.dtype)
    return value - value * decay


def _sparse_elements(rows: tf.IndexedSlices, segment: Segment) -> tf.IndexedSlices:
    """Convert a sparse gradient of a variable to the gradient of one of its segments.

    Keras applies rows with the same index one after another, so elements of such rows
    are not added up here.

    Args:
        rows: `tf.IndexedSlices`, the gradient; a row may lie in several segments.
        segment: `Segment` of the flattened variable.

    Returns:
        `tf.IndexedSlices` of single elements, by position in the segment.
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
