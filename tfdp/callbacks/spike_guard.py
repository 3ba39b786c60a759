"""Spikes of the loss or of the gradient: leave their updates out, or stop."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from tfdp.callbacks.bases import OptimizerCallback
from tfdp.communication.coordination.model_group import worker_group_of
from tfdp.features.spikes.report import (
    NAMES,
    SkippedUpdate,
    failure,
    read_skipped_updates,
    table,
)
from tfdp.features.spikes.step_guard import MAX_EXCLUDED, StepGuard
from tfdp.features.spikes.training import ROLLBACK, SpikeRollback
from tfdp.ground.arguments import check_choice, checked_integer, checked_number
from tfdp.ground.text import pluralize, say
from tfdp.training.optimizer.distributed import DistributedOptimizer

_WINDOW = 200
# The number of consecutive skips is read only once every this many batches, since a
# read waits for the running step to end.
_BATCHES_BETWEEN_CHECKS = 10


class SpikeGuard(OptimizerCallback):
    """Leave out an update whose loss or gradient is a spike, on all replicas alike.

    A spike is a value that is NaN or infinite, or above the median of the last
    `window` accepted values by more than `threshold` deviations (1.4826 times the
    median absolute deviation, and at least 1 % of the median). Before there are
    `min(window, 20)` values, only NaN and infinity count. The value is that of the
    global batch; no further collective is needed. The statistics are saved in backups.

    A step that is left out changes nothing: no weight, slot, moving average or counter,
    no metric, no statistic of `BatchNormalization`. With gradient accumulation the
    decision is about the update, and all its micro-batches are left out of it; metrics
    and statistics count those before the last. With `LocalSGD` and `DiLoCo` each
    replica decides by itself. An overflow that `LossScaling` skips is not a spike.

    `skipped_spikes` is logged at the end of each epoch, and a table at the end of `fit`
    says which updates were left out.

    Args:
        threshold: Float of at least 1, deviations above the median. Small batches have
            losses far above the median now and then, which need more. Defaults to 6.
        window: Int of at least 2, number of values of the statistics; at most the
            number of steps of `fit`, except for the default. Defaults to 200.
        on: String, `"loss"`, or `"gradient_norm"`, the norm of the gradient before it
            is clipped. Gradients must be finite in any case. Defaults to `"loss"`.
        action: String, `"skip"`: training continues without the update; `"rollback"`:
            it goes back to the newest state that `BackupAndRestore` has saved, in
            memory or on the disk, and leaves out the batches of the spike when it gets
            there again; or `"stop"`: training ends with the weights before the update.
            Defaults to `"skip"`.
        patience: Int, number of updates left out in a row that ends training with an
            error. Defaults to 10.

    Raises:
        ValueError: If an argument is invalid; in `fit`, for a rollback without backups,
            or with data that cannot be read again.
        RuntimeError: In `fit`, on all workers, after `patience` skips in a row, or if
            all updates were left out.

    Example:

    >>> SpikeGuard(threshold=8.0, on="gradient_norm").action
    'skip'

    Source: Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, section 5.1.
    """

    # `fit` finds guards by this attribute instead of their class, since this module
    # imports the code that looks for them.
    skips_spikes = True

    # All workers must leave out the same updates, so `fit` raises an error if these
    # settings differ between workers.
    compared = ("threshold", "window", "on", "action", "patience")

    def __init__(
        self,
        threshold: float = 6.0,
        window: int = _WINDOW,
        on: str = "loss",
        action: str = "skip",
        patience: int = 10,
    ) -> None:
        super().__init__()
        bounds = "a number of at least 1"
        self.threshold = float(checked_number("threshold", threshold, bounds, least=1))
        self.window = checked_integer("window", window, 2)
        check_choice("on", on, ("loss", "gradient_norm"))
        check_choice("action", action, ("skip", "rollback", "stop"))
        self.on, self.action = on, action
        self.patience = checked_integer("patience", patience, 1)
        self._rows: list[SkippedUpdate] = []
        # `_is_local` stores whether replicas have local steps, since another callback
        # may end the local steps before `on_train_end` of this callback.
        self._is_local = False
        self._num_read = 0
        self._epoch, self._batches_before = 0, 0
        # Numbers of the batches whose spikes have caused a rollback. They are kept
        # while `fit` repeats the steps, which must leave out these batches.
        self._excluded: list[int] = []
        self._goes_back = False

    def find_problem(self, num_steps: int | None) -> str:
        """Return why `window` is too long for the training, or `""`.

        Args:
            num_steps: Int, steps of the training, or `None` if unknown.
        """
        if num_steps is None or self.window == _WINDOW or self.window <= num_steps:
            return ""
        return (
            "`SpikeGuard` never fills a window that is longer than the run. Received: "
            f"window={self.window}, and {pluralize(num_steps, 'step')} of `fit`"
        )

    def enable_feature(self, optimizer: DistributedOptimizer) -> None:
        """Install the `StepGuard` that decides on each update of the optimizer."""
        optimizer.features.install(
            StepGuard,
            threshold=self.threshold,
            window=self.window,
            on=self.on,
            action=self.action,
        )

    @property
    def rollback_name(self) -> str:
        """String, the name of this callback if it may roll `fit` back, otherwise `""`.

        Messages of `BackupAndRestore` contain it as the reason for going back.
        """
        return ROLLBACK if self.action == "rollback" else ""

    @property
    def _guard(self) -> StepGuard:
        """`StepGuard` of the model's optimizer."""
        return self.optimizer.features.installed[StepGuard]

    def on_train_begin(self, logs: Any = None) -> None:
        """Clear the list of left-out updates, unless `fit` repeats after a rollback.

        With `action="rollback"`, workers exchange the numbers of batches to leave out,
        so that all of them leave out the same ones.

        Raises:
            ValueError: If replicas update independently, and `action` is not `"skip"`.
        """
        super().on_train_begin(logs)
        self._is_local = self.optimizer.features.independent_groups is not None
        if self.action != "skip" and self._is_local:
            raise ValueError(
                "With `LocalSGD` and `DiLoCo` each replica decides by itself, so that "
                f'`SpikeGuard` can only skip. Received: action="{self.action}"'
            )
        if not self._goes_back:
            self._rows, self._excluded = [], []
        self._goes_back = False
        self._num_read = int(self._guard.num_skipped.numpy())
        self._guard.waiting.assign(0)
        self._guard.num_in_a_row.assign(0)
        found = [self._excluded]
        if self.action == "rollback":
            # If a worker was lost during a rollback, only some of the others have
            # excluded the batch of the spike, so each worker excludes what any worker
            # has excluded.
            found = worker_group_of(self.model).all_gather("spikes", self._excluded)
        self._exclude([number for each in found for number in each])

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Record how many batches came before the epoch."""
        self._epoch = epoch
        self._batches_before = int(self._guard.num_batches.numpy())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stop or roll back after a spike; raise after too many skips in a row."""
        if self._is_local:
            # With local steps, workers are at different batches, and find different
            # spikes, so they cannot stop or go back together.
            return
        self._act()
        since = (batch + 1) % _BATCHES_BETWEEN_CHECKS
        if since < self.model.steps_per_execution and not self._has_pending_spike:
            self._check()

    def _act(self) -> None:
        """Stop training or roll back, as `action` says, if there was a spike."""
        if self.action != "skip" and (number := int(self._guard.waiting.numpy())):
            if self.action == "rollback":
                self._check()
                self._go_back(number)
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop or roll back, as `action` says, if the last update was a spike.

        It may be an update of accumulated batches that are left at the end of the
        epoch. The number of updates left out so far is added to `logs` as
        `"skipped_spikes"`.
        """
        self._act()
        if not self._has_pending_spike:
            self._check()
        if logs is not None:
            logs["skipped_spikes"] = int(self._guard.num_skipped.numpy())

    def on_train_end(self, logs: Any = None) -> None:
        """Print the updates that were left out.

        Raises:
            RuntimeError: If all updates were left out.
        """
        super().on_train_end(logs)
        self._read()
        is_none_accepted = bool(self._rows) and not self._guard.num_values.numpy()
        self._fail_if(is_none_accepted and not self._has_pending_spike)
        if self._rows and worker_group_of(self.model).is_chief:
            number = pluralize(len(self._rows), "update")
            has_stopped = self._has_pending_spike and self.action == "stop"
            done = ", and stopped training" if has_stopped else ""
            say(f"`SpikeGuard` left out {number}{done}:\n{table(self._rows, self.on)}")
        self._guard.waiting.assign(0)

    @property
    def _has_pending_spike(self) -> bool:
        """Bool, whether a spike must end training or cause a rollback."""
        return bool(self._guard.waiting.numpy())

    def get_state(self) -> dict[str, Any]:
        """Return the left-out updates and batches, and the epoch, for a backup."""
        self._read()
        return {
            "rows": [list(row) for row in self._rows],
            "epoch": self._epoch,
            "batches_before": self._batches_before,
            "excluded": self._excluded,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the left-out updates of a backup; keep those left out after it.

        Args:
            state: Dict, the result of `get_state` when the backup was saved.
        """
        rows = [*map(SkippedUpdate._make, state["rows"]), *self._rows]
        self._rows = sorted({row.step: row for row in rows}.values())
        self._exclude(state["excluded"])
        self._epoch, self._batches_before = state["epoch"], state["batches_before"]
        self._num_read = int(self._guard.num_skipped.numpy())

    def _read(self) -> None:
        """Append to `_rows` the updates that were left out since the last call.

        These rows are the table that is printed at the end of `fit`. The updates are
        read from the variables in which the step has stored them.
        """
        number = int(self._guard.num_skipped.numpy())
        if number == self._num_read:
            return
        new, self._num_read = range(self._num_read, number), number
        found = read_skipped_updates(
            self._guard, new, self._epoch, self._batches_before
        )
        # After a rollback, the repeated steps leave out the update of the spike again.
        # `_rows` already contains that update, which must not be listed twice.
        known = {row.step for row in self._rows}
        self._rows += [row for row in found if row.step not in known]

    def _exclude(self, numbers: list[int]) -> None:
        """Have the step leave out further batches.

        Args:
            numbers: List of ints, the numbers of the batches, counted over all epochs.

        Raises:
            RuntimeError: If too many batches are left out.
        """
        self._excluded = sorted({*self._excluded, *numbers})
        if len(self._excluded) > MAX_EXCLUDED:
            raise RuntimeError(
                f"`SpikeGuard` has left out more than {MAX_EXCLUDED} batches. Look for "
                "bad values in the data, or for a learning rate that is too high."
            )
        padded = np.zeros(MAX_EXCLUDED, "int64")
        padded[: len(self._excluded)] = self._excluded
        self._guard.excluded.assign(padded)

    def _go_back(self, number: int) -> NoReturn:
        """Raise `SpikeRollback`, which makes `fit` go back to its newest backup.

        Before that, record the batches of the spike, which the repeated steps leave
        out; worker 0 prints a line.

        Args:
            number: Int, number of the spike's last batch, counted over all epochs.
        """
        first = number - int(self._guard.num_of_update.numpy())
        self._excluded += range(first + 1, number + 1)
        self._goes_back = True
        last = self._rows[-1]
        text = (
            f"the {NAMES[self.on]} was {last.value:.5g} (median before: "
            f"{last.median_text}) in batch {last.batch} of epoch {last.epoch}; going "
            "back to the newest backup, to leave that update out"
        )
        if worker_group_of(self.model).is_chief:
            say(f"{text}.")
        raise SpikeRollback(f"`SpikeGuard`: {text}.")

    def _check(self) -> None:
        """Raise `RuntimeError` if `patience` updates in a row were left out."""
        self._read()
        self._fail_if(int(self._guard.num_in_a_row.numpy()) >= self.patience)

    def _fail_if(self, has_failed: bool) -> None:
        """Raise on all workers if one has left out all updates, or too many in a row.

        Args:
            has_failed: Bool, whether this worker has left out all updates, or too many
                in a row.
        """
        if self._is_local:
            group = worker_group_of(self.model)
            if group.any("`SpikeGuard`", has_failed) and not has_failed:
                raise RuntimeError(
                    "`SpikeGuard` of another worker left out all updates, or "
                    f"patience={self.patience} in a row; its error names the variables."
                )
        if has_failed:
            raise RuntimeError(failure(self.optimizer, self._guard, self._rows[-1]))
