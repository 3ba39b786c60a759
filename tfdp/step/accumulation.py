"""Gradient accumulation: each replica adds up its own, nothing is communicated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp import _compat
from tfdp.base.param_groups import path_of


class Accumulation:
    """The gradients that a replica has added up since the last update.

    Args:
        make_variable: Callable that creates a Keras variable of the optimizer.
        variables: Sequence of Keras variables, those that are trained.
        steps: Int, micro-batches of an update.
    """

    def __init__(
        self, make_variable: Any, variables: Sequence[Any], steps: int
    ) -> None:
        self.steps = make_variable(
            shape=(),
            dtype="int",
            # No assignment: the first step may be under way, being traced.
            initializer=keras.initializers.Constant(steps),
            name="accumulation_steps",
        )
        self.count = make_variable(
            shape=(), dtype="int", initializer="zeros", name="accumulated_steps"
        )
        self.sums = [
            make_variable(
                shape=variable.shape,
                dtype=_wide(variable.dtype),
                initializer="zeros",
                name=f"{path_of(variable).replace('/', '_')}_gradient_sum",
            )
            for variable in variables
        ]

    @property
    def variables(self) -> list:
        """Its Keras variables."""
        return [self.steps, self.count, *self.sums]

    def completes(self) -> tf.Tensor:
        """Scalar bool tensor, whether the next micro-batch is the last of an update.

        The counters are alike on all replicas, so that all agree.
        """
        return _read(self.count) + 1 >= _read(self.steps)

    def add(self, gradients: Sequence[Any], positions: Sequence[int]) -> None:
        """Adds the gradients of a micro-batch.

        Args:
            gradients: Sequence of dense tensors.
            positions: Sequence of ints, the position of each one's variable.
        """
        for gradient, position in zip(gradients, positions, strict=True):
            total = _compat.local_part(self.sums[position])
            total.assign_add(tf.cast(gradient, total.dtype), read_value=False)
        _compat.local_part(self.count).assign_add(1, read_value=False)

    def close(
        self, gradients: Sequence[Any] | None, positions: Sequence[int]
    ) -> tuple[list, tf.Tensor]:
        """Adds the last micro-batch to the sums, and starts again from zero.

        Args:
            gradients: Sequence of dense tensors, or `None` to add nothing.
            positions: Sequence of ints, the position of each one's variable.

        Returns:
            Tuple of the sums and the number of micro-batches in them.
        """
        sums = [_read(self.sums[position]) for position in positions]
        count = _read(self.count)
        if gradients is not None:
            pairs = zip(sums, gradients, strict=True)
            sums = [total + tf.cast(item, total.dtype) for total, item in pairs]
            count += 1
        with tf.control_dependencies([*sums, count]):
            self.reset()
        return sums, count

    def redistribute(self, reducer: Any) -> None:
        """Gives every replica an equal part of the sum over all replicas.

        Args:
            reducer: `GradientReducer`.
        """
        totals = reducer.sum([_read(variable) for variable in self.sums])
        for variable, total in zip(self.sums, totals, strict=True):
            mean = total / tf.cast(reducer.num_replicas, total.dtype)
            _compat.local_part(variable).assign(mean, read_value=False)

    def rescale(self, factor: float) -> None:
        """Multiplies the sums, outside a step, when the loss scale is changed."""
        for variable in self.sums:
            _compat.copy_local_parts(variable, variable, factor)

    def reset(self) -> None:
        """Forgets what was added."""
        for variable in (*self.sums, self.count):
            part = _compat.local_part(variable)
            part.assign(tf.zeros(part.shape, part.dtype), read_value=False)


def dense(gradients: Sequence[Any]) -> list:
    """Gradients as tensors: rows of different micro-batches have no common form."""
    return [tf.convert_to_tensor(gradient) for gradient in gradients]


def _read(variable: Any) -> tf.Tensor:
    return _compat.local_part(variable).read_value()


def _wide(dtype: Any) -> str:
    """The dtype to add up in: float32, or the variable's where that is wider."""
    kind = tf.as_dtype(dtype)
    return "float32" if kind.size < tf.float32.size else kind.name
