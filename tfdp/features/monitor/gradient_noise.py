"""Gradient noise scale, measured from the local and the global batch of each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.ground._compat import tf_distribute
from tfdp.ground.base import batch_weight
from tfdp.ground.base.context import is_tfdp
from tfdp.training.step.accumulation import Totals
from tfdp.training.step.state_layout import GradientStatistics, squared_norm
from tfdp.training.step.step import Step, StepFeature


class GradientNoise(StepFeature):
    """Hooks of a step that measure the gradient noise scale, in moving averages.

    The averages are of the squared norm of the true gradient, and of the variance of a
    single sample's gradient; `scale` is the variance divided by that squared norm.

    Args:
        make_variable: Callable that creates a Keras variable of the optimizer.
        smoothing: Float from 0 to 1, weight of the previous average in each update.

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
        """List of the Keras variables of the averages."""
        return [self.signal, self.noise]

    @property
    def scale(self) -> float:
        """Float, noise scale in samples; NaN before the first measurement."""
        signal, noise = float(self.signal.numpy()), float(self.noise.numpy())
        return noise / signal if signal > 0 else float("nan")

    @property
    def counters(self) -> dict[str, Any]:
        """Dict from a name to the variable of each average, for logs and backups."""
        return {"signal": self.signal, "noise": self.noise}

    def check(self, optimizer: Any) -> None:
        """Raise if an update does not have each replica's gradient and their mean.

        Raises:
            ValueError: With sharded accumulators, or with Adasum.
        """
        if optimizer.features.accumulation and optimizer.accumulates_sums:
            raise ValueError(
                "The gradient noise scale needs the gradients that each replica "
                f"accumulates, which `sharding={optimizer.sharding!r}` does not keep. "
                'Use `sharding="optimizer"`, stage 1.'
            )
        strategy = tf.distribute.get_strategy()
        if is_tfdp(strategy) and strategy.extended.reducer.combines_means:
            raise ValueError(
                "The gradient noise scale compares a replica's gradient with the mean "
                "of all, which Adasum does not compute. Remove `GradientNoiseScale`, "
                'or `algorithm="adasum"`.'
            )

    def examine(
        self,
        step: Step,
        totals: Totals,
        divisor: tf.Tensor | None,
        statistics: GradientStatistics,
    ) -> None:
        """Update the averages by the norms of replicas' gradients and of their mean.

        It does nothing without gradients, or if the number of samples is unknown.

        Args:
            step: `Step` of the running replica.
            totals: `Totals` of the gradients before they are reduced.
            divisor: Scalar tensor by which the gradients must be divided, such as the
                loss scale, or `None`.
            statistics: `GradientStatistics` of the mean gradient.

        Raises:
            ValueError: With `run_eagerly=True` in a loop of Keras.
        """
        if totals.gradients is None:
            return
        if tf.executing_eagerly() and batch_weight.is_part_of_sum():
            raise ValueError(
                "The gradient noise scale compares the gradients of replicas, but with "
                "`run_eagerly=True` there is only that of the whole batch. Remove "
                "`GradientNoiseScale`, or `run_eagerly=True`."
            )
        samples, weight = batch_weight.num_samples(), batch_weight.current()
        if samples is None or weight is None:
            return
        replicas = step.reducer.num_replicas
        if totals.count is not None:
            # Accumulated gradients are weighted by the weights of several
            # micro-batches, not by a single one, so each replica counts as an equal
            # part of the update.
            samples = samples * tf.cast(totals.count, tf.float32)
            weight = tf.constant(1.0 / replicas, tf.float64)
        # A replica's gradient is its part of a weighted sum: divided by its weight, it
        # is the mean gradient of the replica's own rows.
        factor = weight if divisor is None else weight * tf.cast(divisor, tf.float64)
        scaled = squared_norm(totals.gradients)
        local = scaled / tf.square(tf.cast(factor, tf.float32))
        parts = step.reducer.sum([local, 1.0 / tf.cast(weight, tf.float32)])
        small, ratio = (part / replicas for part in parts)
        self.update(small, statistics.squared_norm(), ratio, samples)

    def update(
        self, small: tf.Tensor, large: tf.Tensor, ratio: tf.Tensor, samples: tf.Tensor
    ) -> None:
        """Update the moving averages with the norms of one update.

        Args:
            small: Scalar tensor, mean over replicas of the squared norm of a
                replica's mean gradient.
            large: Scalar tensor, squared norm of the mean gradient of all replicas.
            ratio: Scalar tensor, mean over replicas of all samples divided by the
                replica's samples: the number of replicas if they have equal batches.
            samples: Scalar float32 tensor, number of samples on all replicas.
        """
        signal = (ratio * large - small) / (ratio - 1.0)
        noise = (small - large) * samples / (ratio - 1.0)
        for variable, estimate in ((self.signal, signal), (self.noise, noise)):
            part = tf_distribute.local_part(variable)
            old = part.read_value()
            moved = self.smoothing * old + (1.0 - self.smoothing) * estimate
            # The estimate is not finite if a gradient overflows, or if a replica has no
            # samples. One such value would make the moving average NaN or infinite.
            part.assign(tf.where(tf.math.is_finite(estimate), moved, old))
