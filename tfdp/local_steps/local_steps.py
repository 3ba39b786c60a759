"""The state of local steps, and the average over the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp import _compat
from tfdp.base import batch_weight
from tfdp.base.param_groups import innermost
from tfdp.reduction.gradient_reducer import GradientReducer


class LocalSteps:
    """Counts what a replica has done alone since all were averaged.

    Args:
        make_variable: Callable that creates a Keras variable of the optimizer.
        sync_every: Int, updates from one average to the next.

    Source: Stich 2019, "Local SGD Converges Fast and Communicates Little",
    https://arxiv.org/abs/1805.09767.
    """

    def __init__(self, make_variable: Callable[..., Any], sync_every: int) -> None:
        self.sync_every = sync_every
        self.updates = make_variable(
            shape=(), dtype="int", initializer="zeros", name="local_updates"
        )
        # Another number on each replica, zero where the state may be saved.
        self.samples = make_variable(
            shape=(), dtype="float32", initializer="zeros", name="local_samples"
        )

    @property
    def variables(self) -> list:
        """Its Keras variables."""
        return [self.updates, self.samples]

    def count(self, is_updated: tf.Tensor | bool) -> None:
        """Add a micro-batch of this replica, which may have made an update."""
        samples = _compat.local_part(self.samples)
        samples.assign_add(_own_samples(), read_value=False)
        updates = _compat.local_part(self.updates)
        updates.assign_add(tf.cast(is_updated, updates.dtype), read_value=False)

    def is_due(self) -> tf.Tensor:
        """Scalar bool tensor, alike on all replicas: whether to average now."""
        return _compat.local_part(self.updates) >= self.sync_every

    def average(
        self, optimizer: Any, variables: Sequence[Any], reducer: GradientReducer
    ) -> None:
        """Set variables and slots to their means over all replicas, in replica context.

        A replica counts by the samples that it has seen since the last average.

        Args:
            optimizer: Keras optimizer, no wrapper.
            variables: Sequence of the trained Keras variables.
            reducer: `GradientReducer` of all replicas.
        """
        samples = _compat.local_part(self.samples)
        (total,) = reducer.sum([samples.read_value()])
        coefficient = samples / total
        parts = [
            _compat.local_part(variable)
            for variable in (*variables, *slots_of(optimizer))
        ]
        values = [_wide(part.read_value()) for part in parts]
        means = reducer.sum(
            [
                tf.math.multiply_no_nan(value, tf.cast(coefficient, value.dtype))
                for value in values
            ]
        )
        with tf.control_dependencies(means):
            for part, mean in zip(parts, means, strict=True):
                part.assign(tf.cast(mean, part.dtype), read_value=False)
            samples.assign(0.0, read_value=False)
            updates = _compat.local_part(self.updates)
            updates.assign(tf.zeros((), updates.dtype), read_value=False)


def _own_samples() -> tf.Tensor:
    """Scalar float32 tensor, the samples of this replica's micro-batch.

    Where Keras's loops do not count them all replicas have as many.
    """
    weight, samples = batch_weight.current(), batch_weight.num_samples()
    own = tf.constant(1.0) if weight is None else tf.cast(weight, tf.float32)
    return own if samples is None else own * samples


def slots_of(optimizer: Any) -> list:
    """Keras variables of an optimizer that follow from its replica's gradients.

    Its scalars, such as the learning rate and the number of updates, follow from the
    number of steps alone, and are alike on all replicas as they are.

    Args:
        optimizer: Keras optimizer, no wrapper.
    """
    found = {
        id(variable): variable
        for part in innermost(optimizer)
        for variable in part.variables
        if len(variable.shape) and tf.as_dtype(variable.dtype).is_floating
    }
    return list(found.values())


def average_replicas_of(model: Any) -> None:
    """Average what the replicas of a model have learned alone; on all workers.

    After local steps every replica would evaluate and save its own weights.

    Args:
        model: Keras model. Without local steps nothing is done.
    """
    average = getattr(getattr(model, "optimizer", None), "average_replicas", None)
    if average is not None:
        average()


def check_sync_every(sync_every: object) -> None:
    """Check the number of updates from one average to the next.

    Raises:
        ValueError: If it is no integer of at least 1.
    """
    if not _is_int(sync_every) or sync_every < 1:  # type: ignore[operator]
        raise ValueError(
            "`sync_every` must be an integer of at least 1, the updates from one "
            f"average to the next. Received: sync_every={sync_every!r}"
        )


def check_start_step(start_step: object) -> None:
    """Check the number of updates before local steps begin.

    Raises:
        ValueError: If it is no integer of at least 0.
    """
    if not _is_int(start_step) or start_step < 0:  # type: ignore[operator]
        raise ValueError(
            "`start_step` must be an integer of at least 0, the updates that are made "
            f"synchronously first. Received: start_step={start_step!r}"
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wide(value: tf.Tensor) -> tf.Tensor:
    """Add up halves in float32."""
    return tf.cast(value, tf.float32) if value.dtype.size < 4 else value
