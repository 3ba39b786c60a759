"""MLflow: the other workers log to a store of their own, which is thrown away.

They take part in all that a script does with MLflow: a model is saved on all workers,
and a callback of MLflow's runs on each. Only what comes of it is not kept.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import pathlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from tfdp.features.tracking import first_worker
from tfdp.ground.base.temporary import TemporaryFolder
from tfdp.ground.forks import at_exit

# What a run of the first worker's is found by, which the other store does not have.
_IDS = ("run_id", "parent_run_id", "experiment_id")
_VARIABLES = ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID")
_EXPERIMENT = "other workers"


def watch(mlflow: ModuleType) -> None:
    """Give MLflow a store that is thrown away, until each worker is to log.

    Args:
        mlflow: The module.
    """
    if not first_worker.is_silent():
        return
    logger = logging.getLogger("mlflow")
    first_worker.when_each_logs(
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
    return None if first_worker.is_silent() else function(*args, **kwargs)


def _start_run(start: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
    """Start a run that is new, where the first worker may go on with another."""
    if not first_worker.is_silent():
        return start(*args, **kwargs)
    for name in _VARIABLES:
        os.environ.pop(name, None)
    bound = inspect.signature(start).bind(*args, **kwargs)
    return start(**{k: v for k, v in bound.arguments.items() if k not in _IDS})


def _experiment(choose: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
    """Choose an experiment by its name, which the store need not have."""
    if not first_worker.is_silent():
        return choose(*args, **kwargs)
    bound = inspect.signature(choose).bind(*args, **kwargs)
    return choose(bound.arguments.get("experiment_name") or _EXPERIMENT)


def _restore(mlflow: ModuleType, uri: str, level: int) -> None:
    mlflow.set_tracking_uri(uri)
    logging.getLogger("mlflow").setLevel(level)


def _throw_away(mlflow: ModuleType, folder: TemporaryFolder) -> None:
    """Delete the store, after the last words to it."""
    if first_worker.is_silent():
        mlflow.end_run()
    folder.cleanup()
