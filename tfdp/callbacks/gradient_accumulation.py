"""Gradient accumulation: updates from several micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfdp.callbacks.bases import OptimizerCallback
from tfdp.features.islands.training import sync_islands_after_flush
from tfdp.ground.plans.schedules import check_steps, steps_at_epoch
from tfdp.training.optimizer.distributed import DistributedOptimizer


class GradientAccumulation(OptimizerCallback):
    """Make each update from the mean gradient of several batches.

    Replicas communicate only at the last of them. `optimizer.iterations` and
    learning-rate schedules count updates.

    Args:
        steps: Int, batches per update; or a dict from an epoch to the batches per
            update from that epoch on, such as `{0: 8, 5: 4}`. Defaults to 4.
        flush: `"epoch"` makes an update of the batches that are left over at
            the end of an epoch, divided by their true number. Defaults to `None`:
            they are carried over to the next epoch, as Keras does.

    Raises:
        ValueError: If `steps` or `flush` is invalid.

    Example:

    >>> GradientAccumulation(steps={0: 8, 5: 4}).steps
    {0: 8, 5: 4}
    """

    # Settings that must be the same on all workers.
    compared = ("steps", "flush")

    def __init__(
        self, steps: int | Mapping[int, int] = 4, *, flush: str | None = None
    ) -> None:
        super().__init__()
        check_steps(steps)
        if flush not in (None, "epoch"):
            raise ValueError(
                f'`flush` must be `None` or "epoch". Received: flush={flush!r}'
            )
        self.steps: int | dict[int, int] = (
            {int(first): int(number) for first, number in steps.items()}
            if isinstance(steps, Mapping)
            else int(steps)
        )
        self.flush = flush

    def switch_on(self, optimizer: DistributedOptimizer) -> None:
        """Create accumulators, so that a later epoch needs no new trace.

        Raises:
            ValueError: If the optimizer accumulates another number of batches.
        """
        steps = self.steps
        numbers = set(steps.values()) if isinstance(steps, Mapping) else {steps}
        before = optimizer.accumulation_steps
        if before > 1 and before not in numbers and optimizer.features.plan is None:
            raise ValueError(
                "The optimizer already accumulates gradients. Give the number of "
                "batches in one place, the optimizer or the callback. Received: "
                f"accumulation_steps={before} and steps={steps}"
            )
        if max(numbers) > 1:
            optimizer.accumulation_steps = max(numbers)
        optimizer.accumulation_plan = steps

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Set the number of batches of this epoch."""
        self.optimizer.accumulation_steps = steps_at_epoch(self.steps, epoch)

    def on_test_begin(self, logs: Any = None) -> None:
        """Flush, so that validation within `fit` includes the leftover batches."""
        self._flush()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Flush the leftover batches."""
        self._flush()

    def _flush(self) -> None:
        """Make an update of the leftover batches, if the user asks for it."""
        if self.flush and self.is_in_fit and self.optimizer.accumulated_steps:
            self.optimizer.flush()
            sync_islands_after_flush(self.model)
