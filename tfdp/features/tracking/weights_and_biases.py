"""Weights & Biases: `wandb.init` of the other workers makes no run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from tfdp.features.tracking.first_worker import is_silent
from tfdp.ground import user_code


def watch(wandb: ModuleType) -> None:
    """Have `wandb.init` make no run, unless each worker is to have its own.

    Args:
        wandb: The module.
    """
    if is_silent() and getattr(wandb, "run", None) is not None:
        user_code.warn(
            "`wandb.init` was called before tfdp was imported: this worker has made a "
            "run of its own. Import tfdp first."
        )
    wrapt.wrap_function_wrapper(wandb, "init", _init)


def _init(init: Callable, instance: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Start a run, or one whose methods do nothing: a mode of wandb's own."""
    del instance
    if not is_silent():
        return init(*args, **kwargs)
    bound = inspect.signature(init).bind(*args, **kwargs)
    bound.arguments["mode"] = "disabled"
    return init(*bound.args, **bound.kwargs)
