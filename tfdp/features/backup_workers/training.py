"""The feature of `fit`: steps that drop late gradients, and the count of these."""

from __future__ import annotations

import weakref
from typing import Any

import keras

from tfdp.communication.coordination.model_group import worker_group_of
from tfdp.features.backup_workers.checks import check_workers
from tfdp.features.backup_workers.exchange import FirstGradients
from tfdp.ground.base.context import strategy_of
from tfdp.ground.base.feature import Feature, Fit, register
from tfdp.ground.text import say
from tfdp.training.keras_hooks.worker_callbacks import callback_list

# Key of the number of dropped gradients in the logs of an epoch. Users read it from
# `History`, so it must not change.
_LOG = "dropped_gradients"


class _DroppedGradients(keras.callbacks.Callback):
    """Callback that adds the number of dropped gradients to the logs of an epoch.

    Args:
        exchange: `FirstGradients`, whose counts are read.
    """

    def __init__(self, exchange: FirstGradients) -> None:
        super().__init__()
        self._exchange = exchange
        # `_total` at the beginning of the epoch, which is subtracted to count the epoch
        # alone. In a resumed epoch it is lower by the number dropped before the backup.
        self._before = 0

    @property
    def _total(self) -> int:
        """Int, gradients dropped in this `fit`: one for each late worker of a step."""
        return self._exchange.counts.without.total()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add the number of gradients that this epoch has dropped to `logs`."""
        if logs is not None:
            logs[_LOG] = self._total - self._before
        self._before = self._total

    def get_state(self) -> dict[str, Any]:
        """Return a dict with the number of gradients dropped so far in this epoch."""
        return {"dropped": self._total - self._before}

    def set_state(self, state: dict[str, Any]) -> None:
        """Add the gradients that the epoch had dropped before the backup to its count.

        Args:
            state: Dict, the result of `get_state` when the backup was saved.
        """
        self._before = self._total - state["dropped"]


class BackupWorkers(Feature):
    """Feature of `backup_workers`: `fit` drops late gradients, and reports them."""

    def __init__(self) -> None:
        self._exchanges: weakref.WeakKeyDictionary[Any, FirstGradients]
        self._exchanges = weakref.WeakKeyDictionary()

    def gradient_exchange(self, fit: Fit) -> FirstGradients | None:
        """Return the `FirstGradients` of a model, or `None` without `backup_workers`.

        It is created at the first call for a model.

        Raises:
            ValueError: If the workers or the backend do not support `backup_workers`.
        """
        if not _is_on(fit.strategy):
            return None
        if fit.model not in self._exchanges:
            check_workers(fit.strategy)
            self._exchanges[fit.model] = FirstGradients(fit.strategy, fit.model)
        return self._exchanges[fit.model]

    def choose_callbacks(self, fit: Fit) -> None:
        """Reset the counts of dropped gradients; add a callback that logs their number.

        Called before `fit` begins; it changes nothing without `backup_workers`.
        """
        if (exchange := self.gradient_exchange(fit)) is not None:
            _check_steps(fit.model, exchange.counts.steps)
            exchange.counts.steps = 0
            exchange.counts.without.clear()
            callbacks = fit.arguments.get("callbacks")
            if not isinstance(callbacks, keras.callbacks.CallbackList):
                others = callback_list(callbacks)
                fit.arguments["callbacks"] = [_DroppedGradients(exchange), *others]

    def batches_between_syncs(self, model: Any) -> int | None:
        """Return the number of batches from one synchronization of workers to the next.

        Returns:
            Int, 1 without `backup_workers`; with them `None`, since no step waits for
            all workers.
        """
        return None if _is_on(strategy_of(model)) else 1

    def after_fit(self, fit: Fit) -> None:
        """Print on worker 0 how many steps lack the gradients of each late worker."""
        if not _is_on(fit.strategy) or not worker_group_of(fit.model).is_chief:
            return
        if text := self._exchanges[fit.model].counts.describe():
            say(text)


def _check_steps(model: Any, steps: int) -> None:
    """Raise on all workers if their last `fit` has made different numbers of steps.

    All workers call it together, before the next `fit` begins.

    Args:
        model: The Keras model.
        steps: Int, steps of the last `fit` on this worker.

    Raises:
        RuntimeError: If the numbers differ: then the workers' weights differ.
    """
    made = worker_group_of(model).all_gather("the steps of the last fit", steps)
    if len(set(made)) > 1:
        raise RuntimeError(
            "An error has ended `fit` after different numbers of steps, since with "
            "`backup_workers` workers do not wait for each other: their weights "
            "differ. Create the model again, and load a checkpoint. Received: "
            f"numbers of steps {made}"
        )


def _is_on(strategy: Any) -> bool:
    """Return whether a strategy has `backup_workers`; `False` for `None`."""
    return strategy is not None and strategy.extended.options.backup_workers > 0


register(BackupWorkers())
