"""Gradient noise scale, measured from small and large batches of one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.ground import _compat
from tfdp.ground.base import batch_weight
from tfdp.ground.base.context import is_tfdp
from tfdp.training.step.accumulation import Totals
from tfdp.training.step.state_layout import GradientStatistics, squared_norm
from tfdp.training.step.step import Step, StepFeature


class GradientNoise(StepFeature):
    """Moving averages of the size of the true gradient and of its noise.

    Args:
        make_variable: Callable that creates a Keras variable of the optimizer.
        smoothing: Float, weight of the past.

    Source: McCandlish et al. 2018, https://arxiv.org/abs/1812.06162, appendix A.1.
    """

    label = "the gradient noise scale"
    measures_norm = needs_all_replicas = True

    def __init__(self, make_variable: Callable, smoothing: float) -> None:
        self.smoothing = smoothing
        self.signal, self.noise = (
            make_variable(shape=(), dtype="float32", initializer="zeros", name=name)
            for name in ("gradient_signal", "gradient_noise")
        )

    @property
    def variables(self) -> list:
        """List of its Keras variables."""
        return [self.signal, self.noise]

    @property
    def scale(self) -> float:
        """Float, noise scale in samples; NaN before it is known."""
        signal, noise = float(self.signal.numpy()), float(self.noise.numpy())
        return noise / signal if signal > 0 else float("nan")

    @property
    def counters(self) -> dict[str, Any]:
        """The variables by name."""
        return {"signal": self.signal, "noise": self.noise}

    def check(self, optimizer: Any) -> None:
        """See `StepFeature`."""
        if optimizer.features.accumulation and optimizer.accumulates_sums:
            raise ValueError(
                "The gradient noise scale needs what each replica accumulates itself, "
                f"which `sharding={optimizer.sharding!r}` does not keep. Use "
                '`sharding="optimizer"`, stage 1.'
            )
        strategy = tf.distribute.get_strategy()
        if is_tfdp(strategy) and strategy.extended.reducer.combines_means:
            raise ValueError(
                "The gradient noise scale compares a replica's gradient with the mean "
                "of all, which Adasum does not compute. Leave out "
                '`GradientNoiseScale`, or `algorithm="adasum"`.'
            )

    def examine(
        self,
        step: Step,
        totals: Totals,
        divisor: tf.Tensor | None,
        statistics: GradientStatistics,
    ) -> None:
        """Compare each replica's gradient with that of all, by one scalar more."""
        if totals.gradients is None:
            return
        if tf.executing_eagerly() and batch_weight.is_part_of_sum():
            raise ValueError(
                "The gradient noise scale compares the gradients of replicas, and with "
                "`run_eagerly=True` there is one, that of the whole batch. Leave out "
                "`GradientNoiseScale`, or `run_eagerly=True`."
            )
        samples, weight = batch_weight.num_samples(), batch_weight.current()
        if samples is None or weight is None:
            return
        replicas = step.reducer.num_replicas
        factor = tf.constant(1.0, tf.float64) if divisor is None else divisor
        if totals.count is not None:
            # What was accumulated has the weights of its micro-batches.
            samples = samples * tf.cast(totals.count, tf.float32)
            factor = factor / replicas
        else:
            factor *= weight  # it is a part of a sum
        scaled = squared_norm(totals.gradients)
        own = scaled / tf.square(tf.cast(factor, tf.float32))
        own = tf.math.multiply_no_nan(own, tf.cast(weight > 0, tf.float32))
        small = step.reducer.sum([own])[0] / replicas
        self.update(small, statistics.squared_norm(), replicas, samples)

    def update(
        self, small: tf.Tensor, large: tf.Tensor, num_replicas: int, samples: tf.Tensor
    ) -> None:
        """Update the moving averages with the norms of one update.

        Args:
            small: Scalar tensor, mean over replicas of the squared norm of a
                replica's mean gradient.
            large: Scalar tensor, squared norm of the mean gradient of all.
            num_replicas: Int.
            samples: Scalar float32 tensor, samples of all replicas.
        """
        others = float(num_replicas - 1)
        signal = (num_replicas * large - small) / others
        noise = (small - large) * samples / others
        for variable, estimate in ((self.signal, signal), (self.noise, noise)):
            part = _compat.local_part(variable)
            old = part.read_value()
            moved = self.smoothing * old + (1.0 - self.smoothing) * estimate
            # Neither an overflow nor a replica without samples tells anything.
            part.assign(tf.where(tf.math.is_finite(estimate), moved, old))
