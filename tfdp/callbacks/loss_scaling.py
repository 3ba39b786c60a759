"""Dynamic loss scaling for float16, the same on all replicas."""

from __future__ import annotations

from typing import Any

from tfdp.callbacks.bases import OptimizerCallback
from tfdp.ground.arguments import checked_integer
from tfdp.training.optimizer.distributed import DistributedOptimizer
from tfdp.training.step import loss_scale


class LossScaling(OptimizerCallback):
    """Scale the loss, and skip a step if gradients overflow on any replica.

    A skipped step changes only the scale and its counters. `loss_scale` and
    `skipped_steps` are logged at the end of each epoch.

    Args:
        initial_scale: Float, the scale at the start. Defaults to `2**15`.
        growth_steps: Int, steps without overflow after which the scale doubles.
            Defaults to 2000.
        min_scale: Float, the smallest scale. Defaults to 1.

    Raises:
        ValueError: If a value is not positive.
        RuntimeError: In `fit`, after ten consecutive skips at the smallest scale.

    Example:

    >>> LossScaling(initial_scale=2.0**10).scaling.initial_scale
    1024.0

    Source: Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740.
    """

    # All workers must skip the same steps, so `fit` raises an error if the setting
    # differs between workers.
    compared = ("scaling",)

    def __init__(
        self,
        initial_scale: float = 2.0**15,
        growth_steps: int = 2000,
        min_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.scaling = loss_scale.LossScaling(
            initial_scale=initial_scale,
            # The optimizer's `LossScaling` takes `None` for a constant scale. This
            # callback is for dynamic scales, so `None` is an error here.
            growth_steps=checked_integer("growth_steps", growth_steps, 1),
            min_scale=min_scale,
        )

    def enable_feature(self, optimizer: DistributedOptimizer) -> None:
        """Set the optimizer's loss scaling; with equal settings, its scale is kept."""
        optimizer.features.set_scaling(self.scaling)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add the scale and the number of skipped steps to the logs."""
        if logs is not None:
            logs["loss_scale"] = self.optimizer.loss_scale
            logs["skipped_steps"] = self.optimizer.skipped_steps
