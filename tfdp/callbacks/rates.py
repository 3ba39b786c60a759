"""Learning rates that change with the batch, in whatever form they are."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from tfdp import _compat
from tfdp.base.param_groups import innermost
from tfdp.callbacks.conversion import distributed_optimizer
from tfdp.step.warmup import WarmupOptions


def factors_of(model: Any) -> dict[str, Any]:
    """What of the learning rate no variable holds, as JSON can hold it.

    Args:
        model: Compiled Keras model.

    Returns:
        Dict: the script's schedules, and what they are multiplied by.
    """
    warmup = getattr(model.optimizer, "warmup", None)
    return {
        "schedules": [_config(part) for part in _parts(model)],
        "warmup": None if warmup is None else dataclasses.asdict(warmup),
    }


def restore_factors(model: Any, saved: dict[str, Any] | None) -> None:
    """Multiplies schedules as `factors_of` has found them.

    A rate that is a variable needs none: it was restored with its factor, or a
    callback that raises it has restored its own.
    """
    if saved and saved["warmup"] and not _are_variables(model):
        _set(model, WarmupOptions(**saved["warmup"]))


def scale_rates(model: Any, ratio: float, saved: dict[str, Any] | None) -> bool:
    """Multiplies the learning rate from now on, in a warmup and after it too.

    Args:
        model: Compiled Keras model.
        ratio: Float.
        saved: Dict, what `factors_of` had returned in the run that was interrupted.

    Returns:
        Bool: `False` if nothing was changed, for the script makes another schedule
        than in that run and so has adapted it itself.
    """
    options = getattr(model.optimizer, "warmup", None)
    if not _are_variables(model):
        if saved and saved["schedules"] != factors_of(model)["schedules"]:
            return False
        options = options or WarmupOptions(1, 1.0, 1.0, momentum_correction=False)
    if options is None:
        for part in _parts(model):
            part.learning_rate = float(part.learning_rate.numpy()) * ratio
        return True
    first, last = options.first * ratio, options.last * ratio
    _set(model, dataclasses.replace(options, first=first, last=last))
    return True


def _set(model: Any, options: WarmupOptions) -> None:
    optimizer = distributed_optimizer(model)
    optimizer.warmup = options
    if optimizer.needs_trace:
        model.make_train_function(force=True)


def _parts(model: Any) -> list:
    optimizer = model.optimizer
    while hasattr(optimizer, "inner_optimizer"):  # Keras's loss scaling, too
        optimizer = optimizer.inner_optimizer
    return innermost(optimizer)


def _are_variables(model: Any) -> bool:
    return all(_compat.has_rate_variable(part) for part in _parts(model))


def _config(part: Any) -> str | None:
    """A schedule as text, or `None` where it cannot say what it is."""
    if _compat.has_rate_variable(part):
        return None
    try:
        return json.dumps(part.get_config()["learning_rate"], default=str)
    except (NotImplementedError, TypeError, ValueError):
        return None
