"""Gradient accumulation: updates from several micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfdp.callbacks.bases import OptimizerCallback
from tfdp.features.islands.training import sync_islands_after_flush
from tfdp.features.micro_batches import MicroBatches
from tfdp.ground.arguments import check_choice
from tfdp.ground.base.context import strategy_of
from tfdp.ground.plans.schedules import check_steps, steps_at_epoch
from tfdp.training.optimizer.distributed import DistributedOptimizer


class GradientAccumulation(OptimizerCallback):
    """Make each update from the mean gradient of several batches.

    Replicas communicate only at the last of them. `optimizer.iterations` and
    learning-rate schedules count updates.

    Args:
        steps: Int, batches per update; or a dict from an epoch to the batches per
            update from that epoch on, such as `{0: 8, 5: 4}`; or `"auto"`: each batch
            is an update, and replicas compute its rows in as many micro-batches as
            memory needs. Defaults to 4.
        flush: `"epoch"` makes an update of the batches that are left over at
            the end of an epoch, divided by their true number. Defaults to `None`:
            they are carried over to the next epoch, as Keras does. With
            `steps="auto"` none are left over.

    Raises:
        ValueError: If `steps` or `flush` is invalid.

    Example:

    >>> GradientAccumulation(steps={0: 8, 5: 4}).steps
    {0: 8, 5: 4}
    """

    # All workers must update after the same batches, so `fit` raises an error if these
    # settings differ between workers.
    compared = ("steps", "flush")

    def __init__(
        self, steps: int | str | Mapping[int, int] = 4, *, flush: str | None = None
    ) -> None:
        super().__init__()
        if isinstance(steps, str) and steps != "auto":
            raise ValueError(
                '`steps` must be an integer, a dict or "auto". '
                f"Received: steps={steps!r}"
            )
        if not isinstance(steps, str):
            check_steps(steps)
        check_choice("flush", flush, (None, "epoch"))
        self.steps: int | str | dict[int, int] = (
            {int(first): int(number) for first, number in steps.items()}
            if isinstance(steps, Mapping)
            else steps
            if isinstance(steps, str)
            else int(steps)
        )
        self.flush = flush

    def enable_feature(self, optimizer: DistributedOptimizer) -> None:
        """Create accumulators if an epoch needs any; with `"auto"`, divide batches.

        Since the accumulators exist from the start, no later epoch needs a new trace.

        Raises:
            ValueError: If the optimizer accumulates another number of batches, or the
                model cannot compute its rows in micro-batches.
        """
        steps = self.steps
        if isinstance(steps, str):
            self._divide_rows(optimizer)
            return
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
        optimizer.features.plan = steps

    def _divide_rows(self, optimizer: DistributedOptimizer) -> None:
        """Have steps divide their rows into micro-batches that fit into memory.

        Raises:
            ValueError: If the step cannot be divided, such as an eager one.
        """
        strategy = self.model.distribute_strategy
        problems = [
            (strategy_of(self.model) is None, "no tfdp strategy"),
            (self.model.run_eagerly, "run_eagerly=True"),
            (
                self.model.steps_per_execution != 1,
                f"steps_per_execution={self.model.steps_per_execution}",
            ),
            (
                optimizer.accumulation_steps > 1,
                f"accumulation_steps={optimizer.accumulation_steps}",
            ),
        ]
        for is_found, received in problems:
            if is_found:
                raise ValueError(
                    '`GradientAccumulation(steps="auto")` needs a tfdp strategy, graph '
                    "execution with `steps_per_execution=1`, and an optimizer without "
                    "accumulation. Give a number of batches instead: `steps=4`. "
                    f"Received: {received}"
                )
        optimizer.features.install(MicroBatches, num_local=strategy.extended.num_local)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Set the number of batches per update of this epoch."""
        if not isinstance(self.steps, str):
            self.optimizer.accumulation_steps = steps_at_epoch(self.steps, epoch)

    def on_test_begin(self, logs: Any = None) -> None:
        """With `flush`, make an update of leftover batches before a validation."""
        self._flush()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """With `flush`, make an update of leftover batches at the end of the epoch.

        With `steps="auto"`, the number of micro-batches of a step is added to `logs` as
        `"micro_batches"`.
        """
        if self.steps == "auto" and logs is not None:
            division = self.optimizer.features.installed[MicroBatches]
            logs["micro_batches"] = division.number
        self._flush()

    def _flush(self) -> None:
        """Make an update of the leftover batches, if `flush` is set."""
        if self.flush and self.is_in_fit and self.optimizer.accumulated_steps:
            self.optimizer.flush()
            sync_islands_after_flush(self.model)
