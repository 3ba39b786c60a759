"""Watch for trackers that a script imports, where another worker logs."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import os
import pathlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from tfdp.communication.cluster import rank_of_process
from tfdp.ground import user_code
from tfdp.ground.base.feature import Feature, register
from tfdp.ground.base.temporary import TemporaryFolder
from tfdp.ground.forks import at_exit

# What a run of the first worker's is found by, which the other store does not have.
_IDS = ("run_id", "parent_run_id", "experiment_id")
_VARIABLES = ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID")
_EXPERIMENT = "other workers"


@dataclasses.dataclass
class _State:
    """What is known of this worker, and what ends when each worker is to log."""

    each_logs: bool = False
    rank: int | None = None
    undo: list[Callable[[], None]] = dataclasses.field(default_factory=list)


_state = _State()


def track_each_worker() -> None:
    """Let every worker log to Weights & Biases and MLflow, each to a run of its own.

    Without it the first worker alone logs. Call it before `wandb.init` and before
    MLflow is used, on all workers. On a single worker it has no effect.

    Example:

    >>> import tfdp
    >>> tfdp.track_each_worker()

    Source: https://docs.wandb.ai/models/track/log/distributed-training ("Track each
    process separately")
    """
    _state.each_logs = True
    while _state.undo:
        _state.undo.pop()()


def is_silent() -> bool:
    """Return whether another worker than this one logs for all.

    What is wrong in the environment is told where a strategy is made.
    """
    if _state.each_logs:
        return False
    try:
        rank = rank_of_process() if _state.rank is None else _state.rank
    except ValueError:
        return False
    return rank > 0


def watch_trackers() -> None:
    """Have trackers that are imported, now or later, make no run on this worker.

    On the first worker, and in a single process, nothing is done.
    """
    if is_silent():
        _register()


def follow(rank: int) -> None:
    """Watch where a strategy knows for sure which worker this is.

    Args:
        rank: Int.
    """
    _state.rank = rank
    watch_trackers()


class _Tracking(Feature):
    def on_strategy(self, rank: int) -> None:
        """Watch from when a strategy knows for sure which worker this is."""
        follow(rank)


register(_Tracking())


@functools.cache
def _register() -> None:
    wrapt.register_post_import_hook(_watch_wandb, "wandb")
    wrapt.register_post_import_hook(_watch_mlflow, "mlflow")


def _watch_mlflow(mlflow: ModuleType) -> None:
    """Give MLflow a store that is thrown away, until each worker is to log.

    The other workers take part in all that a script does with MLflow: a model is saved
    on all workers, and a callback of MLflow's runs on each. Only what comes of it is
    not kept.
    """
    if not is_silent():
        return
    logger = logging.getLogger("mlflow")
    _state.undo.append(
        functools.partial(_restore, mlflow, mlflow.get_tracking_uri(), logger.level)
    )
    folder = TemporaryFolder("mlflow")
    at_exit(functools.partial(_throw_away, mlflow, folder))
    # A folder is made in milliseconds, a database in seconds.
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    # MLflow makes a store of a folder that is not there.
    mlflow.set_tracking_uri(pathlib.Path(folder.name, "store").as_uri())
    logger.setLevel(logging.ERROR)  # the first worker says the same
    fluent = mlflow.tracking.fluent
    for name, wrapper in (("start_run", _start_run), ("set_experiment", _experiment)):
        wrapt.wrap_function_wrapper(fluent, name, wrapper)
        setattr(mlflow, name, getattr(fluent, name))
    for module in (mlflow, mlflow.tracking):
        for name in ("set_tracking_uri", "set_registry_uri"):
            wrapt.wrap_function_wrapper(module, name, _keep_uri)


def _keep_uri(function: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
    """Leave the store as it is."""
    return None if is_silent() else function(*args, **kwargs)


def _start_run(start: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
    """Start a run that is new, where the first worker may go on with another."""
    if not is_silent():
        return start(*args, **kwargs)
    for name in _VARIABLES:
        os.environ.pop(name, None)
    bound = inspect.signature(start).bind(*args, **kwargs)
    return start(**{k: v for k, v in bound.arguments.items() if k not in _IDS})


def _experiment(choose: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
    """Choose an experiment by its name, which the store need not have."""
    if not is_silent():
        return choose(*args, **kwargs)
    bound = inspect.signature(choose).bind(*args, **kwargs)
    return choose(bound.arguments.get("experiment_name") or _EXPERIMENT)


def _restore(mlflow: ModuleType, uri: str, level: int) -> None:
    mlflow.set_tracking_uri(uri)
    logging.getLogger("mlflow").setLevel(level)


def _throw_away(mlflow: ModuleType, folder: TemporaryFolder) -> None:
    """Delete the store, after the last words to it."""
    if is_silent():
        mlflow.end_run()
    folder.cleanup()


def _watch_wandb(wandb: ModuleType) -> None:
    """Have `wandb.init` make no run, unless each worker is to have its own."""
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
