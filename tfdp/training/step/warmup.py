"""Warmup of the learning rate, computed in the graph from the update counter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.ground import _compat


@dataclasses.dataclass(frozen=True)
class WarmupOptions:
    """Length and factors of a learning-rate warmup.

    Args:
        steps: Int, the number of updates until the last factor is reached.
        first: Float, factor of the base rate at the first update.
        last: Float, factor of the base rate after `steps` updates.
        start: Int, the number of updates before the warmup. Defaults to 0.
        momentum_correction: Bool, whether momentum that contains the rate is
            rescaled when the rate changes. Defaults to `True`.
    """

    steps: int
    first: float
    last: float
    start: int = 0
    momentum_correction: bool = True


class Warmup:
    """Warmup with settings in variables, which can change without a new trace.

    Args:
        make_variable: Callable that creates a Keras variable of the optimizer.
        options: `WarmupOptions`.
    """

    def __init__(self, make_variable: Callable, options: WarmupOptions) -> None:
        self.momentum_correction = options.momentum_correction

        def scalar(name: str, value: float) -> Any:
            """Create a scalar float64 variable for a setting."""
            return make_variable(
                shape=(),
                dtype="float64",
                # Keras's own `Constant` would round the value to float32 first.
                initializer=lambda shape, dtype: tf.constant(value, dtype, shape),
                name=f"warmup_{name}",
            )

        self._steps = scalar("steps", options.steps)
        self._start = scalar("start", options.start)
        self._first = scalar("first_factor", options.first)
        self._last = scalar("last_factor", options.last)

    @property
    def variables(self) -> list:
        """List of the Keras variables of the settings."""
        return [self._steps, self._start, self._first, self._last]

    def set(self, options: WarmupOptions) -> None:
        """Change the length, the start and the factors of the warmup."""
        self._steps.assign(options.steps)
        self._start.assign(options.start)
        self._first.assign(options.first)
        self._last.assign(options.last)

    def switch_off(self) -> None:
        """Set both factors to 1, which keeps the base rate."""
        self._first.assign(1.0)
        self._last.assign(1.0)

    def factor(self, update: tf.Tensor) -> tf.Tensor:
        """Return the factor of the base rate, a scalar float64 tensor.

        Args:
            update: Scalar int tensor, the number of updates so far.
        """
        steps, start, first, last = (
            _compat.local_part(variable).read_value() for variable in self.variables
        )
        update = tf.maximum(tf.cast(update, tf.float64) - start, 0.0)
        # This form of the interpolation is exact at both ends.
        done = tf.minimum(update / steps, 1.0)
        return (1.0 - done) * first + done * last

    def growth(self, update: tf.Tensor) -> tf.Tensor:
        """Return the factor divided by that of the previous update, or 1 if that is 0.

        The result is a scalar float64 tensor.

        Args:
            update: Scalar int tensor, the number of updates so far.
        """
        before = self.factor(tf.maximum(update - 1, 0))
        now = self.factor(update)
        one = tf.ones_like(now)
        return tf.where(before > 0, tf.math.divide_no_nan(now, before), one)
