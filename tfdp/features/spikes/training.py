"""Guards around `fit`: one that is not given to a later `fit` is removed."""

from __future__ import annotations

import functools
from typing import Any

from tfdp.features.spikes.step_guard import StepGuard
from tfdp.ground.base.feature import Feature, Fit, register
from tfdp.training.keras_hooks.worker_callbacks import callback_list


class SpikeGuards(Feature):
    """Removes the guard of an earlier `fit` from the step."""

    def choose_callbacks(self, fit: Fit) -> None:
        """Remove the guard if this `fit` has no callback for it."""
        if guards_of(fit.arguments.get("callbacks")):
            if fit.strategy is None:
                _wrap_step(fit.model)
            return
        features = getattr(getattr(fit.model, "optimizer", None), "features", None)
        if features is not None and StepGuard in features.installed:
            features.uninstall(StepGuard)
            fit.model.train_function = None


def _wrap_step(model: Any) -> None:
    """Have the guard act around the step of a model without a strategy."""
    train_step = model.train_step
    if hasattr(train_step, "is_guarded"):
        return

    @functools.wraps(train_step)
    def guarded(data: Any) -> Any:
        """Run the step, and undo what it has changed if it is left out."""
        guard = model.optimizer.features.installed.get(StepGuard)
        if guard is None:
            return train_step(data)
        finish = guard.around_step(model)
        logs = train_step(data)
        finish()
        return logs

    guarded.is_guarded = True  # type: ignore[attr-defined]
    model.train_step = guarded


def guards_of(callbacks: Any) -> list[Any]:
    """Return the callbacks that leave out spikes."""
    return [
        callback
        for callback in callback_list(callbacks)
        if getattr(callback, "leaves_out_spikes", False)
    ]


register(SpikeGuards())
