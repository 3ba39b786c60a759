"""The learning rate of a warmup, inside the graph: right however steps are run."""

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
        steps: Int, updates until the last factor is reached.
        first: Float, factor of the base rate at the first update.
        last: Float, factor from update `steps` on.
        start: Int, updates that were made before. Defaults to 0.
        momentum_correction: Bool, whether momentum that contains the rate is
            rescaled with it.
    """

    steps: int
    first: float
    last: float
    start: int = 0
    momentum_correction: bool = True


class Warmup:
    """A warmup as variables, so that it can be changed without a new trace.

    Args:
        make_variable: Callable that creates a Keras variable of the optimizer.
        options: `WarmupOptions`.
    """

    def __init__(self, make_variable: Callable, options: WarmupOptions) -> None:
        self.momentum_correction = options.momentum_correction

        def scalar(name: str, value: float) -> Any:
            return make_variable(
                shape=(),
                dtype="float64",
                # Keras's own `Constant` rounds to float32 first.
                initializer=lambda shape, dtype: tf.constant(value, dtype, shape),
                name=f"warmup_{name}",
            )

        self._steps = scalar("steps", options.steps)
        self._start = scalar("start", options.start)
        self._first = scalar("first_factor", options.first)
        self._last = scalar("last_factor", options.last)

    @property
    def variables(self) -> list:
        """Its Keras variables."""
        return [self._steps, self._start, self._first, self._last]

    def set(self, options: WarmupOptions) -> None:
        """Change length and factors."""
        self._steps.assign(options.steps)
        self._start.assign(options.start)
        self._first.assign(options.first)
        self._last.assign(options.last)

    def switch_off(self) -> None:
        """Leave the base rate as it is from now on."""
        self._first.assign(1.0)
        self._last.assign(1.0)

    def factor(self, update: tf.Tensor) -> tf.Tensor:
        """Scalar float64 tensor, the factor of the base rate.

        Args:
            update: Scalar int tensor, number of updates made so far.
        """
        steps, start, first, last = (
            _compat.local_part(variable).read_value() for variable in self.variables
        )
        update = tf.maximum(tf.cast(update, tf.float64) - start, 0.0)
        # Written so that it rounds at neither end.
        done = tf.minimum(update / steps, 1.0)
        return (1.0 - done) * first + done * last

    def growth(self, update: tf.Tensor) -> tf.Tensor:
        """Scalar float64 tensor, the factor divided by that of the update before."""
        before = self.factor(tf.maximum(update - 1, 0))
        now = self.factor(update)
        one = tf.ones_like(now)
        return tf.where(before > 0, tf.math.divide_no_nan(now, before), one)
