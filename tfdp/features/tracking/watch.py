"""Disable experiment trackers that a script imports, except on the first worker."""

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

# Arguments and environment variables of MLflow that identify a run or an experiment of
# the first worker. Other workers ignore them, since their temporary store has neither.
_IDS = ("run_id", "parent_run_id", "experiment_id")
_VARIABLES = ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID")
# Name of the experiment in the temporary store if the script chooses an experiment by
# its id, which is valid only in the first worker's store.
_EXPERIMENT = "other workers"


@dataclasses.dataclass
class _State:
    """State of tracking in this process.

    Args:
        each_logs: Bool, whether `track_each_worker` was called.
        rank: Int, the rank that a strategy has set, or `None` before.
        undo: List of callables that enable disabled trackers again.
    """

    each_logs: bool = False
    rank: int | None = None
    undo: list[Callable[[], None]] = dataclasses.field(default_factory=list)


_state = _State()


def track_each_worker() -> None:
    """Have every worker log to Weights & Biases and MLflow, each to a separate run.

    By default only the first worker logs. Call it on all workers, before `wandb.init`
    and before MLflow is used. On a single worker it has no effect.

    Example:

    >>> import tfdp
    >>> tfdp.track_each_worker()

    Source: https://docs.wandb.ai/models/track/log/distributed-training ("Track each
    process separately")
    """
    _state.each_logs = True
    while _state.undo:
        _state.undo.pop()()


def are_trackers_disabled() -> bool:
    """Return whether Weights & Biases and MLflow are disabled in this process.

    They are on all workers but the first, unless `track_each_worker` was called. An
    invalid environment counts as a single process here: its error is raised when a
    strategy is created.
    """
    if _state.each_logs:
        return False
    try:
        rank = rank_of_process() if _state.rank is None else _state.rank
    except ValueError:
        return False
    return rank > 0


def disable_trackers() -> None:
    """On all workers but the first, disable Weights & Biases and MLflow.

    Modules that are imported later are disabled as well. Nothing is disabled if
    `track_each_worker` was called.
    """
    if are_trackers_disabled():
        _register_import_hooks()


def disable_trackers_by_rank(rank: int) -> None:
    """Set this worker's rank; unless it is 0, disable Weights & Biases and MLflow.

    Neither is disabled if `track_each_worker` was called.

    Args:
        rank: Int, rank of this worker.
    """
    _state.rank = rank
    disable_trackers()


class _Tracking(Feature):
    """Hook of strategies that disables trackers on other workers than the first."""

    def on_strategy(self, rank: int) -> None:
        """Disable trackers if the rank that the strategy passes is not 0."""
        disable_trackers_by_rank(rank)


register(_Tracking())


@functools.cache
def _register_import_hooks() -> None:
    """Wrap Weights & Biases and MLflow at their import, or now if imported before."""
    wrapt.register_post_import_hook(_watch_wandb, "wandb")
    wrapt.register_post_import_hook(_watch_mlflow, "mlflow")


def _watch_mlflow(mlflow: ModuleType) -> None:
    """Direct MLflow to a store that is deleted at exit, where trackers are disabled.

    Called when MLflow is imported.

    Calls of MLflow must still work there: all workers save a model, and MLflow's
    callback runs on each. Only their results are discarded.
    """
    if not are_trackers_disabled():
        return
    logger = logging.getLogger("mlflow")
    _state.undo.append(
        functools.partial(_restore, mlflow, mlflow.get_tracking_uri(), logger.level)
    )
    folder = TemporaryFolder("mlflow")
    at_exit(functools.partial(_delete_store, mlflow, folder))
    # This variable permits a store of files, which MLflow creates in milliseconds; a
    # database would take seconds.
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    # The subfolder must not exist yet: MLflow initializes only a new folder as a store.
    mlflow.set_tracking_uri(pathlib.Path(folder.name, "store").as_uri())
    # Warnings are silenced here, since the first worker prints the same ones.
    logger.setLevel(logging.ERROR)
    fluent = mlflow.tracking.fluent
    for name, wrapper in (
        ("start_run", _start_run),
        ("set_experiment", _set_experiment),
    ):
        wrapt.wrap_function_wrapper(fluent, name, wrapper)
        setattr(mlflow, name, getattr(fluent, name))
    for module in (mlflow, mlflow.tracking):
        for name in ("set_tracking_uri", "set_registry_uri"):
            wrapt.wrap_function_wrapper(module, name, _keep_uri)


def _keep_uri(function: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
    """Call a setter of MLflow's store, or ignore the call where trackers are disabled.

    Wrapper of `set_tracking_uri` and `set_registry_uri` for `wrapt`, which passes the
    function, the object that it is bound to, and the arguments of the call. Returns the
    result of the function, or `None`.
    """
    return None if are_trackers_disabled() else function(*args, **kwargs)


def _start_run(start: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
    """Start a run by `mlflow.start_run`, without its ids where trackers are disabled.

    Wrapper for `wrapt`, which passes the function, the object that it is bound to, and
    the arguments of the call. The ids are those of the first worker's runs.
    """
    if not are_trackers_disabled():
        return start(*args, **kwargs)
    for name in _VARIABLES:
        os.environ.pop(name, None)
    bound = inspect.signature(start).bind(*args, **kwargs)
    return start(**{k: v for k, v in bound.arguments.items() if k not in _IDS})


def _set_experiment(choose: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
    """Choose an experiment of MLflow; where trackers are disabled, by name, not by id.

    The temporary store of such a worker has no experiment with the id of the call, and
    MLflow creates a missing experiment only by name: that of the call, or a default.

    Args:
        choose: Callable, `mlflow.set_experiment`.
        instance: Not used.
        args: Tuple, positional arguments of the call.
        kwargs: Dict, keyword arguments of the call.

    Returns:
        The experiment that `choose` returns.
    """
    if not are_trackers_disabled():
        return choose(*args, **kwargs)
    bound = inspect.signature(choose).bind(*args, **kwargs)
    return choose(bound.arguments.get("experiment_name") or _EXPERIMENT)


def _restore(mlflow: ModuleType, uri: str, level: int) -> None:
    """Restore MLflow's store and the level of its logger.

    Args:
        mlflow: The module.
        uri: String, the address of the store.
        level: Int, the level of the logger.
    """
    mlflow.set_tracking_uri(uri)
    logging.getLogger("mlflow").setLevel(level)


def _delete_store(mlflow: ModuleType, folder: TemporaryFolder) -> None:
    """Delete a temporary store, at exit; first end the run that writes to it.

    After `track_each_worker` the active run writes to another store, and stays.

    Args:
        mlflow: The module.
        folder: `TemporaryFolder` of the store.
    """
    if are_trackers_disabled():
        mlflow.end_run()
    folder.cleanup()


def _watch_wandb(wandb: ModuleType) -> None:
    """Wrap `wandb.init` so that, where trackers are disabled, its mode is "disabled".

    Called when Weights & Biases is imported; warns where trackers are disabled if
    `wandb.init` was called before.
    """
    if are_trackers_disabled() and getattr(wandb, "run", None) is not None:
        user_code.warn(
            "`wandb.init` was called before tfdp was imported: this worker has created "
            "a separate run. Import tfdp first."
        )
    wrapt.wrap_function_wrapper(wandb, "init", _init)


def _init(init: Callable, instance: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call `wandb.init`, with the mode "disabled" where trackers are disabled.

    Wrapper for `wrapt`, which passes the function, the object that it is bound to, and
    the arguments of the call.
    """
    del instance
    if not are_trackers_disabled():
        return init(*args, **kwargs)
    bound = inspect.signature(init).bind(*args, **kwargs)
    bound.arguments["mode"] = "disabled"
    return init(*bound.args, **bound.kwargs)
