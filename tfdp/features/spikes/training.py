"""Guards around `fit`, which may go back to a backup.

A step whose update is a spike waits for the host, which runs `fit` again, within the
same call and from the newest backup. The batches of the spike are excluded then.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from tfdp.features.attempts import (
    continue_callbacks,
    restart_data,
    why_not_read_again,
)
from tfdp.features.spikes.step_guard import StepGuard
from tfdp.ground.base import loops
from tfdp.ground.base.feature import Feature, Fit, register
from tfdp.training.keras_hooks.worker_callbacks import backup_callbacks, callback_list
from tfdp.training.optimizer.features import installed

ROLLBACK = '`SpikeGuard(action="rollback")`'


class SpikeRollback(Exception):
    """Raised to end `fit`, which then continues from its backup without the spike."""


class SpikeGuards(Feature):
    """Feature of `SpikeGuard`: runs `fit` again, from a backup, after a rollback.

    Before a `fit` without `SpikeGuard` it removes the `StepGuard` of an earlier one.
    """

    def choose_callbacks(self, fit: Fit) -> None:
        """Prepare a `fit` with `SpikeGuard`; without it, remove an earlier `StepGuard`.

        For a model without a strategy, `train_step` is wrapped. For a rollback, backups
        and data are checked. Callbacks stay as they are.

        Raises:
            ValueError: If a guard rolls back, but `fit` has no backups, or its data
                cannot be read again.
        """
        callbacks = fit.arguments.get("callbacks")
        guards = guards_of(callbacks)
        if guards:
            if fit.strategy is None:
                _wrap_step(fit.model)
            if any(guard.action == "rollback" for guard in guards):
                _prepare_rollback(fit)
            return
        optimizer: Any = getattr(fit.model, "optimizer", None)
        if installed(optimizer, StepGuard) is not None:
            optimizer.features.uninstall(StepGuard)
            fit.model.train_function = None

    def recover(
        self,
        name: str,
        model: Any,
        arguments: dict[str, Any],
        error: Exception,
        stack: contextlib.ExitStack,
    ) -> bool:
        """Prepare `fit` to continue from the newest backup, if a spike has ended it.

        Implements `Feature.recover`.

        Args:
            name: String, not used here.
            model: The Keras model, not used here.
            arguments: Dict, the arguments of `fit` by name; datasets in it are
                replaced by ones that are read in their first order again.
            error: The error that the loop has raised.
            stack: `contextlib.ExitStack`, closed at the end of the call; it then
                restores what was changed in the callbacks.

        Returns:
            Bool, whether `fit` is repeated: after a `SpikeRollback`, unless this loop
            runs inside another.
        """
        # If a callback of another `fit` runs this loop, that enclosing `fit` recovers,
        # since it is repeated as a whole.
        if not isinstance(error, SpikeRollback) or loops.current() is not None:
            return False
        restart_data(arguments)
        continue_callbacks(arguments.get("callbacks"), stack)
        return True


def _prepare_rollback(fit: Fit) -> None:
    """Check that a rollback has a backup to return to, and can read the data again.

    Raises:
        ValueError: If there are no backups, or the data cannot be read again.
    """
    backups = backup_callbacks(fit.arguments.get("callbacks"))
    if any(backup.is_retry for backup in backups):
        return
    if not backups:
        raise ValueError(
            f"{ROLLBACK} goes back to a backup: pass "
            "`tfdp.callbacks.BackupAndRestore(directory)` to `fit`, too."
        )
    if problem := why_not_read_again(fit):
        raise ValueError(f"{ROLLBACK} {problem}")


def _wrap_step(model: Any) -> None:
    """Wrap a model's `train_step` so that the guard can undo a step that it leaves out.

    Only for models without a strategy. A `train_step` that is already wrapped stays.
    """
    train_step = model.train_step
    if hasattr(train_step, "is_guarded"):
        return

    @functools.wraps(train_step)
    def guarded(data: Any) -> Any:
        """Run the step, undo its changes if it is left out, and return its logs."""
        guard = installed(model.optimizer, StepGuard)
        if guard is None:
            return train_step(data)
        finish = guard.around_step(model)
        logs = train_step(data)
        finish()
        return logs

    guarded.is_guarded = True  # type: ignore[attr-defined]
    model.train_step = guarded


def guards_of(callbacks: Any) -> list[Any]:
    """Return the `SpikeGuard`s among `callbacks`: those with a true `skips_spikes`."""
    return [
        callback
        for callback in callback_list(callbacks)
        if getattr(callback, "skips_spikes", False)
    ]


register(SpikeGuards())
