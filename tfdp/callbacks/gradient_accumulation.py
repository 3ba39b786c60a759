"""Gradient accumulation: updates from several micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfdp.callbacks.bases import OptimizerCallback
from tfdp.features.islands.training import meet_islands_after_flush
from tfdp.ground.plans.schedules import check_steps, steps_at_epoch
from tfdp.training.optimizer.distributed import DistributedOptimizer


class GradientAccumulation(OptimizerCallback):
    """Make an update from the mean gradient of several batches.

    Nothing is communicated but at the last of them. `optimizer.iterations` and
    learning-rate schedules count updates.

    Args:
        steps: Int, batches of an update, or a dict from the first epoch to
            their number from there on, such as `{0: 8, 5: 4}`.
        flush: `"epoch"` makes an update of the batches that are left over at
            the end of an epoch, with their true number. Defaults to `None`: they
            are carried over to the next epoch, as Keras does.

    Raises:
        ValueError: If `steps` or `flush` is something else.

    Example:

    >>> GradientAccumulation(steps={0: 8, 5: 4}).steps
    {0: 8, 5: 4}
    """

    # Settings that all workers have to share.
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
        """Make accumulators, so that a later epoch needs no new trace.

        Raises:
            ValueError: If the optimizer was given another number of batches.
        """
        steps = self.steps
        numbers = set(steps.values()) if isinstance(steps, Mapping) else {steps}
        own = optimizer.accumulation_steps
        if own > 1 and own not in numbers and optimizer.features.plan is None:
            raise ValueError(
                "The optimizer was made to accumulate, too. Give the number of batches "
                "in one place, the optimizer or the callback. Received: "
                f"accumulation_steps={own} and steps={steps}"
            )
        if max(numbers) > 1:
            optimizer.accumulation_steps = max(numbers)
        optimizer.accumulation_plan = steps

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Set the number of batches of this epoch."""
        self.optimizer.accumulation_steps = steps_at_epoch(self.steps, epoch)

    def on_test_begin(self, logs: Any = None) -> None:
        """Flush, so that validation within `fit` sees what the epoch has learned."""
        self._flush()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Flush the batches that are left over."""
        self._flush()

    def _flush(self) -> None:
        if self.flush and self.is_in_fit and self.optimizer.accumulated_steps:
            self.optimizer.flush()
            meet_islands_after_flush(self.model)
