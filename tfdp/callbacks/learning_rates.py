"""Learning rates of a resumed run, scaled with the batch."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from tfdp.callbacks.optimizer_callback import distributed_optimizer
from tfdp.ground import _compat
from tfdp.ground.base.param_groups import innermost
from tfdp.training.step.warmup import WarmupOptions


def rate_factors(model: Any) -> dict[str, Any]:
    """Collect the factors of the learning rate that no variable holds.

    Args:
        model: Compiled Keras model.

    Returns:
        Dict: the script's schedules, and what they are multiplied by.
    """
    warmup = getattr(model.optimizer, "warmup", None)
    return {
        "schedules": [
            _schedule_config(optimizer) for optimizer in _inner_optimizers(model)
        ],
        "warmup": None if warmup is None else dataclasses.asdict(warmup),
    }


def restore_rate_factors(model: Any, saved: dict[str, Any] | None) -> None:
    """Restore the factors of schedules that `rate_factors` collected.

    A rate that is a variable needs none: it was restored with its factor, or a
    callback that raises it has restored its own.
    """
    if saved and saved["warmup"] and not _are_rates_variables(model):
        _set_warmup(model, WarmupOptions(**saved["warmup"]))


def scale_rates(model: Any, ratio: float, saved: dict[str, Any] | None) -> bool:
    """Multiply the learning rate from now on, in a warmup and after it too.

    Args:
        model: Compiled Keras model.
        ratio: Float.
        saved: Dict, what `rate_factors` had returned in the run that was interrupted.

    Returns:
        Bool: `False` if nothing was changed, for the script makes another schedule
        than in that run and so has adapted it itself.
    """
    options = getattr(model.optimizer, "warmup", None)
    if not _are_rates_variables(model):
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
    optimizer = distributed_optimizer(model)
    optimizer.warmup = options
    if optimizer.needs_trace:
        model.make_train_function(force=True)


def _inner_optimizers(model: Any) -> list:
    optimizer = model.optimizer
    while hasattr(optimizer, "inner_optimizer"):  # Keras's loss scaling, too
        optimizer = optimizer.inner_optimizer
    return innermost(optimizer)


def _are_rates_variables(model: Any) -> bool:
    return all(
        _compat.has_rate_variable(optimizer) for optimizer in _inner_optimizers(model)
    )


def _schedule_config(optimizer: Any) -> str | None:
    """Config of a schedule as text, or `None` where it has none."""
    if _compat.has_rate_variable(optimizer):
        return None
    try:
        return json.dumps(optimizer.get_config()["learning_rate"], default=str)
    except (NotImplementedError, TypeError, ValueError):
        return None
