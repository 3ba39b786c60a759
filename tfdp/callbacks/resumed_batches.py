"""Comparison of a resumed run's batches with its backup's; scaled learning rates."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from tfdp.callbacks.bases import distributed_optimizer
from tfdp.checkpoint.accumulated_gradients import clear_accumulated
from tfdp.checkpoint.backups import IncompatibleBackup
from tfdp.features import warmup
from tfdp.features.warmup import WarmupOptions
from tfdp.ground._compat import keras_optimizer
from tfdp.ground.base.param_groups import innermost
from tfdp.ground.plans.schedules import steps_at_epoch
from tfdp.ground.text import pluralize
from tfdp.training.data.batch_change import (
    BatchChange,
    BatchSettings,
    change_for_replicas,
    change_for_updates,
    convert_position,
)
from tfdp.training.data.position import DataPosition

# These settings of `fit` depend on the number of replicas, so a run that resumes on
# another number may have other values.
_MAY_CHANGE = ("batch_size", "steps_per_epoch")


class ResumedBatches:
    """Compares the batches of `fit` with a backup's, and adapts `fit` to a change.

    Args:
        model: Compiled Keras model, in `fit`.
        position: `DataPosition` of the data of that `fit`.
        batch: String, `"global"` or `"per_replica"`: the batch that stays the same on
            another number of replicas.
    """

    def __init__(self, model: Any, position: DataPosition, batch: str) -> None:
        self._model = model
        self._position = position
        self._batch = batch

    def metadata(self, epoch: int) -> dict[str, Any]:
        """Return the metadata of the batches for a backup.

        Args:
            epoch: Int, the epoch in which a resumed run continues, from 0.

        Returns:
            Dict: `"identity"`, classes of optimizers and arguments of `fit`; `"rates"`,
            the result of `rate_factors`; and `"accumulation"`, a dict of `"steps"`, the
            micro-batches of an update in `epoch`, and `"waiting"`, those accumulated
            since the last update.
        """
        return {
            "identity": self._identity(),
            "rates": rate_factors(self._model),
            "accumulation": {
                "steps": self._accumulation_steps(epoch),
                "waiting": getattr(self._model.optimizer, "accumulated_steps", 0),
            },
        }

    def change_since(self, run: dict[str, Any]) -> BatchChange | None:
        """Compare the batch size and settings of this run with those of a backup's run.

        Args:
            run: Dict, the run's metadata in the backup.

        Returns:
            `BatchChange`, or `None` if the batch size is the same.

        Raises:
            IncompatibleBackup: If other settings differ: the backup is of another run.
        """
        change = self._change(run)
        for name, now in self._identity().items():
            then = run["identity"].get(name)
            if then != now and not (change and name in _MAY_CHANGE):
                raise IncompatibleBackup(
                    f"it is of another run, in which `{name}` was {then!r} and not "
                    f"{now!r}"
                )
        return change

    def resume_position(
        self, run: dict[str, Any], change: BatchChange | None
    ) -> tuple[dict[str, Any], int]:
        """Return where the data of a resumed run begin.

        Args:
            run: Dict, the run's metadata in the backup.
            change: `BatchChange` since the backup, or `None`.

        Returns:
            Tuple of the data position at the start of the epoch, and the number of
            batches of this epoch that are not trained again.
        """
        batches = run["batches"]
        if change is None:
            return run["data"], batches
        if change.keeps_updates and batches:
            waiting = run["accumulation"]["waiting"]
            # If accumulated gradients cannot be carried over to the new batch size,
            # their batches are trained again.
            batches -= 0 if change.can_carry(waiting) else waiting
        return convert_position(
            run["data"],
            batches,
            change,
            keeps_iterator=self._position.iterator.steps_per_epoch is not None,
            group=self._position.iterator.steps_per_execution,
        )

    def adapt(self, run: dict[str, Any], change: BatchChange | None) -> str | None:
        """Adapt learning rates and accumulated gradients to the batches of this run.

        With another batch size, the learning rates are multiplied by the ratio of the
        sizes. But if an update has the same number of samples as before, the rates
        stay, and accumulated gradients are rescaled; they are cleared if their samples
        are not a whole number of new batches. In any case, the warmup of the
        interrupted run is set by `restore_rate_factors`.

        Args:
            run: Dict, the run's metadata in the backup.
            change: `BatchChange` since the backup, or `None`.

        Returns:
            String, a message to the user; or `None` if the batch is the same.
        """
        restore_rate_factors(self._model, run.get("rates"))
        if change is None:
            return None
        if not change.keeps_updates:
            return self._scale_rates(change, run.get("rates"))
        waiting = run["accumulation"]["waiting"]
        if change.can_carry(waiting):
            # The accumulator is a sum of means over a batch. With another batch size,
            # the same samples have another number of means, so the sum is rescaled by
            # the ratio.
            ratio = change.before / change.now
            self._model.optimizer.set_accumulated_count(change.floor(waiting), ratio)
        else:
            clear_accumulated(self._model)
        return (
            f"training continues with batches of {pluralize(change.now, 'sample')} "
            f"(before: {change.before}), and the same number of samples for an update."
        )

    def _scale_rates(self, change: BatchChange, saved: dict[str, Any] | None) -> str:
        """Multiply the learning rates by the ratio of the batch sizes.

        The rates stay if they follow a schedule that differs from that of the
        interrupted run: the script has adapted it itself.

        Args:
            change: `BatchChange` since the backup.
            saved: Dict, the result of `rate_factors` in the interrupted run, which has
                that schedule; or `None`, to multiply without a comparison.

        Returns:
            String, a message to the user.
        """
        is_scaled = scale_rates(self._model, change.ratio, saved)
        done = f"multiplied by {change.ratio:g}" if is_scaled else "the script's own"
        return (
            f"training continues with batches of {pluralize(change.now, 'sample')} "
            f"(before: {change.before}), since the number of replicas changed; the "
            f"learning rate is {done}."
        )

    def _change(self, run: dict[str, Any]) -> BatchChange | None:
        """Compare only the batch size of a backup's run with that of this run.

        Args:
            run: Dict, the run's metadata in the backup.

        Returns:
            `BatchChange`, or `None` if the batch size is the same.
        """
        accumulation = run.get("accumulation", {"steps": 1, "waiting": 0})
        then = BatchSettings(
            run["facts"]["replicas"],
            run["identity"]["batch_size"],
            run["identity"]["steps_per_epoch"],
            accumulation["steps"],
        )
        identity = self._identity()
        now = BatchSettings(
            self._model.distribute_strategy.num_replicas_in_sync,
            identity["batch_size"],
            identity["steps_per_epoch"],
            self._accumulation_steps(run["epoch"]),
        )
        try:
            if self._batch == "per_replica":
                return change_for_replicas(then, now)
            waiting = accumulation["waiting"]
            return change_for_updates(then, now, waiting, run["batches"])
        except ValueError as error:
            raise IncompatibleBackup(str(error)) from error

    def _identity(self) -> dict[str, Any]:
        """Return the settings that a resumed run must have in common with a backup.

        They are the classes of the optimizers, and the arguments of `fit`.
        """
        optimizer: Any = self._model.optimizer
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        names = [] if inner is None else [type(p).__name__ for p in innermost(inner)]
        return {"optimizer": names, **self._position.fit_arguments()}

    def _accumulation_steps(self, epoch: int) -> int:
        """Return the number of micro-batches of an update in an epoch."""
        plan = getattr(self._model.optimizer, "accumulation_plan", 1)
        return steps_at_epoch(plan, epoch)


def rate_factors(model: Any) -> dict[str, Any]:
    """Collect the parts of the learning rate that are not stored in a variable.

    Args:
        model: Compiled Keras model.

    Returns:
        Dict: `"schedules"`, a list with the config of each optimizer's schedule as
        JSON, or `None` for a rate in a variable; and `"warmup"`, a dict of the fields
        of `WarmupOptions`, whose factor multiplies the rate, or `None` without a
        warmup.
    """
    options = warmup.options_of(model.optimizer)
    return {
        "schedules": [
            _schedule_config(optimizer) for optimizer in _inner_optimizers(model)
        ],
        "warmup": None if options is None else dataclasses.asdict(options),
    }


def restore_rate_factors(model: Any, saved: dict[str, Any] | None) -> None:
    """Set the warmup of an interrupted run, if a learning rate is a schedule.

    A warmup multiplies the rate by a factor. A rate that is a variable needs none: its
    restored value contains the factor, or `LearningRateWarmup` has restored its own
    state.

    Args:
        model: Compiled Keras model, whose optimizer gets the warmup.
        saved: Dict, the result of `rate_factors` in the interrupted run; with `None`,
            nothing is changed.
    """
    if saved and saved["warmup"] and not _has_rate_variables(model):
        _set_warmup(model, WarmupOptions(**saved["warmup"]))


def scale_rates(model: Any, ratio: float, saved: dict[str, Any] | None) -> bool:
    """Multiply the learning rate from now on, also during and after a warmup.

    Args:
        model: Compiled Keras model.
        ratio: Float, the factor.
        saved: Dict, the result of `rate_factors` in the interrupted run, or `None`.

    Returns:
        Bool: `False` if nothing was changed, since the script's schedule differs from
        that of the interrupted run: the script has adapted it itself.
    """
    options = warmup.options_of(model.optimizer)
    if not _has_rate_variables(model):
        if saved and saved["schedules"] != rate_factors(model)["schedules"]:
            return False
        options = options or WarmupOptions(1, 1.0, 1.0, momentum_correction=False)
    if options is None:
        for optimizer in _inner_optimizers(model):
            optimizer.learning_rate = float(optimizer.learning_rate.numpy()) * ratio
        return True
    first, last = options.first * ratio, options.last * ratio
    _set_warmup(model, dataclasses.replace(options, first=first, last=last))
    return True


def _set_warmup(model: Any, options: WarmupOptions) -> None:
    """Start a warmup of the model's optimizer, or replace the settings of its warmup.

    The step is traced again if its trace has other settings than the optimizer now.
    """
    optimizer = distributed_optimizer(model)
    warmup.start(optimizer, options)
    if optimizer.needs_trace:
        model.make_train_function(force=True)


def _inner_optimizers(model: Any) -> list:
    """Return a list of the Keras optimizers inside the wrappers of `model.optimizer`.

    It has several for a `MultiOptimizer`, and otherwise one.
    """
    optimizer = model.optimizer
    while hasattr(optimizer, "inner_optimizer"):  # wrappers may be nested
        optimizer = optimizer.inner_optimizer
    return innermost(optimizer)


def _has_rate_variables(model: Any) -> bool:
    """Return whether all learning rates are variables, and no schedules."""
    return all(
        keras_optimizer.has_rate_variable(optimizer)
        for optimizer in _inner_optimizers(model)
    )


def _schedule_config(optimizer: Any) -> str | None:
    """Return the config of the schedule as JSON; `None` for a rate in a variable."""
    if keras_optimizer.has_rate_variable(optimizer):
        return None
    try:
        return json.dumps(optimizer.get_config()["learning_rate"], default=str)
    except (NotImplementedError, TypeError, ValueError):
        return None
