"""Gradient noise scale, measured from small and large batches of one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp import _compat


class GradientNoise:
    """Moving averages of the size of the true gradient and of its noise.

    Args:
        make_variable: Callable that creates a Keras variable of the optimizer.
        smoothing: Float, weight of the past.

    Source: McCandlish et al. 2018, https://arxiv.org/abs/1812.06162, appendix A.1.
    """

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


def squared_norm(gradients: Sequence[Any]) -> tf.Tensor:
    """Sum the squares of all elements: a scalar float32 tensor.

    Args:
        gradients: Sequence of tensors and `tf.IndexedSlices`, whose rows of one
            index are added up first.
    """
    squares = [
        tf.square(tf.cast(tf.convert_to_tensor(g), tf.float32)) for g in gradients
    ]
    return tf.add_n([tf.reduce_sum(square) for square in squares])
