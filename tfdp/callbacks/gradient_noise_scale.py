"""Gradient noise scale, from gradient norms that data parallelism already has."""

from __future__ import annotations

from typing import Any

from tfdp.callbacks.bases import OptimizerCallback
from tfdp.features.monitor.gradient_noise import GradientNoise
from tfdp.ground.arguments import checked_number
from tfdp.training.optimizer.distributed import DistributedOptimizer


class GradientNoiseScale(OptimizerCallback):
    """Log the batch size beyond which more replicas bring little speedup.

    Each replica's gradient is that of a small batch, and their mean is that of a
    large one; the two norms give the noise of the gradient and the size of the true
    gradient. The simple noise scale, in samples, is logged as
    `gradient_noise_scale` at the end of each epoch. It needs at least two replicas.

    Args:
        smoothing: Float in [0, 1), weight of the past in the moving averages of
            noise and size. Defaults to 0.99.

    Raises:
        ValueError: If `smoothing` is outside the range, or there is one replica.

    Example:

    >>> noise = GradientNoiseScale(smoothing=0.95)  # model.fit(..., callbacks=[noise])
    >>> noise.smoothing
    0.95

    Source: McCandlish et al. 2018, https://arxiv.org/abs/1812.06162, appendix A.1.
    """

    # With another smoothing, a worker would log another noise scale, so `fit` raises an
    # error if the setting differs between workers.
    compared = ("smoothing",)

    def __init__(self, smoothing: float = 0.99) -> None:
        super().__init__()
        bounds = "a number from 0 to below 1"
        smoothing = checked_number("smoothing", smoothing, bounds, least=0, below=1)
        self.smoothing = float(smoothing)

    def enable_feature(self, optimizer: DistributedOptimizer) -> None:
        """Have updates measure gradient norms; raise `ValueError` for one replica."""
        if self.model.distribute_strategy.num_replicas_in_sync == 1:
            raise ValueError(
                "`GradientNoiseScale` compares the gradients of several replicas. "
                "Received: a strategy of one replica"
            )
        optimizer.features.install(GradientNoise, smoothing=self.smoothing)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add the noise scale to the logs."""
        if logs is not None:
            noise = self.optimizer.features.installed[GradientNoise]
            logs["gradient_noise_scale"] = noise.scale
