"""Selection of the callbacks that each worker runs: one worker writes the files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfdp.communication.coordination.model_group import worker_group_of
from tfdp.ground._compat import keras_model
from tfdp.ground.base.param_groups import innermost
from tfdp.ground.base.temporary import TemporaryFolder
from tfdp.ground.base.wrappers import is_sharded, sharding_of
from tfdp.training.keras_hooks.added_callbacks import (
    BroadcastRestoredState,
    OptimizerProgressCheck,
    SyncStopTraining,
    SyncStopTrainingEachBatch,
    TensorBoardParticipant,
)
from tfdp.training.reduction.link_measure import num_fit_steps

# Callbacks that write to a path that the user gives. The path is the same on all
# workers, so only worker 0 runs these callbacks.
WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.BackupAndRestore,
)
_BATCH_HOOKS = (
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_batch_begin",
    "on_batch_end",
)


def select_callbacks(
    model: Any, callbacks: Any, *, is_fit: bool, each_batch: bool
) -> Any:
    """Select the callbacks that this worker runs, and add those that synchronize it.

    Args:
        model: The Keras model, under a tfdp strategy.
        callbacks: Callback, list of callbacks or `CallbackList` from the user.
        is_fit: Bool, whether the callbacks are for `fit`.
        each_batch: Bool, whether a callback of any worker may stop training after a
            batch.

    Returns:
        List of callbacks, or `callbacks` unchanged with one worker or a `CallbackList`.
    """
    worker_group = worker_group_of(model)
    if worker_group.num_workers == 1 or isinstance(
        callbacks, keras.callbacks.CallbackList
    ):
        return callbacks
    chosen = []
    given = callback_list(callbacks)
    shards_state = _shards_state(model, given)
    for callback in given:
        if worker_group.is_job_chief or not isinstance(callback, WRITERS):
            chosen.append(callback)
        elif shards_state:
            chosen += _saving_participants(callback)
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            chosen.append(BroadcastRestoredState())
    if is_fit:
        chosen.append(SyncStopTrainingEachBatch() if each_batch else SyncStopTraining())
    return chosen


def order_callbacks(callbacks: Any) -> Any:
    """Move backup callbacks, which save the state of other callbacks, to the end.

    Args:
        callbacks: Callback, list of callbacks or `CallbackList` for Keras.

    Returns:
        List of callbacks, with a `History`; or the same `CallbackList`.
    """
    given, last = callback_list(callbacks), backup_callbacks(callbacks)
    first = other_callbacks(callbacks)
    if isinstance(callbacks, keras.callbacks.CallbackList):
        given[:] = [*first, *last]
        return callbacks
    if not any(isinstance(item, keras.callbacks.History) for item in first):
        # Without a `History` in the list, Keras would append one after the backup
        # callbacks, which have to be last.
        first.append(keras.callbacks.History())
    return [*first, *last]


def backup_callbacks(callbacks: Any) -> list:
    """Return the callbacks that save the state of `fit`, or resume it."""
    return [c for c in callback_list(callbacks) if _resumes_fit(c)]


def other_callbacks(callbacks: Any) -> list:
    """Return the callbacks that neither save the state of `fit` nor resume it."""
    return [c for c in callback_list(callbacks) if not _resumes_fit(c)]


def _resumes_fit(callback: Any) -> bool:
    """Return whether a callback saves the state of `fit`, or resumes it."""
    # A class in place of a callback has `resumes_fit` too, but is an error, which
    # `find_callback_problem` reports.
    return not isinstance(callback, type) and getattr(callback, "resumes_fit", False)


def find_callback_problem(callbacks: Any, arguments: dict[str, Any]) -> str:
    """Find what is wrong with the callbacks before training begins.

    Args:
        callbacks: Callback, list of callbacks or `CallbackList` from the user.
        arguments: Dict, the arguments of `fit` by name.

    Returns:
        String, the first problem in one sentence, or `""` if there is none.
    """
    given = callback_list(callbacks)
    classes = [callback.__name__ for callback in given if isinstance(callback, type)]
    if classes:
        return (
            f"Give `fit` instances of callbacks, such as `{classes[0]}(...)`. "
            f"Received: the class `{classes[0]}`"
        )
    # Two callbacks that change training in the same way would replace each other, or
    # both act. A user's subclass counts as the callback of tfdp that it extends.
    names = [
        next(c.__name__ for c in type(callback).__mro__ if c.__module__[:5] == "tfdp.")
        for callback in given
        if hasattr(callback, "enable_feature") or _resumes_fit(callback)
    ]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        count = names.count(repeated)
        return f"Give `fit` one `tfdp.callbacks.{repeated}`. Received: {count}"
    validated = [c for c in given if hasattr(c, "find_problem")]
    num_steps = num_fit_steps(arguments) if validated else None
    problems = [callback.find_problem(num_steps) for callback in validated]
    return next((problem for problem in problems if problem), "")


def tfdp_callback_names(callbacks: Any) -> list[str]:
    """Return the class names of tfdp's callbacks among the user's, in order."""
    kinds = [type(callback) for callback in callback_list(callbacks)]
    return [k.__name__ for k in kinds if k.__module__.startswith("tfdp.")]


def callback_list(callbacks: Any) -> list:
    """Return callbacks as a new list; for a `CallbackList`, the list that it holds."""
    is_list = isinstance(callbacks, keras.callbacks.CallbackList)
    return callbacks.callbacks if is_list else keras.tree.flatten(callbacks or [])


def describe_mismatch(names: dict[int, list[str]]) -> str:
    """Describe how the workers' tfdp callbacks differ, in sentences for an error.

    Args:
        names: Dict from the rank of each worker to a list of class names.
    """
    return (
        "tfdp's callbacks must run on all workers. Give every worker the same ones, in "
        f"the same order. Received: {list(names.values())}, by worker"
    )


def add_optimizer_check(model: Any, callbacks: Any) -> Any:
    """Prepare the optimizer for `fit`; prepend an `OptimizerProgressCheck` if needed.

    Optimizer features that a failed `fit` left active are reset, and a step that was
    traced with outdated settings is dropped. The check is needed if the optimizer has
    `check_progress`, as `DistributedOptimizer` has, or if a callback will wrap it in
    one.

    Args:
        model: The Keras model.
        callbacks: Callback, list of callbacks or `CallbackList` from the user.

    Returns:
        List of callbacks, or `callbacks` unchanged if no check is needed.
    """
    given = callback_list(callbacks)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and hasattr(optimizer, "features"):
        # Callbacks deactivate features of the optimizer when `fit` ends. If an earlier
        # `fit` raised, its features may still be active.
        optimizer.features.reset()
    if getattr(optimizer, "needs_trace", False):
        model.train_function = None
    is_needed = hasattr(optimizer, "check_progress") or any(
        hasattr(callback, "enable_feature") for callback in given
    )
    is_present = any(isinstance(callback, OptimizerProgressCheck) for callback in given)
    if not is_needed or is_present:
        return callbacks
    return prepend_callback(model, callbacks, OptimizerProgressCheck())


def prepend_callback(
    model: Any, callbacks: Any, added: keras.callbacks.Callback
) -> Any:
    """Return callbacks with an added one: first in a list, last in a `CallbackList`.

    Args:
        model: The Keras model.
        callbacks: Callback, list of callbacks or `CallbackList` from the user.
        added: Keras callback.

    Returns:
        List of callbacks; or `callbacks` itself if it is a `CallbackList`.
    """
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        return [added, *callback_list(callbacks)]
    added.set_model(model)
    callbacks.callbacks.append(added)
    return callbacks


def swap_or_restart_averages(name: str, original: Callable, callback: Any) -> Any:
    """Run a method of `SwapEMAWeights`, or the optimizer's if averages are sharded.

    Args:
        name: String, name of the optimizer's method, which swaps weights with averages
            or restarts the averages.
        original: Callable, the method of `SwapEMAWeights`.
        callback: `SwapEMAWeights` callback.

    Returns:
        `None`, the result of either method.
    """
    optimizer = callback.model.optimizer
    if not is_sharded(optimizer) or not any(
        part.use_ema for part in innermost(optimizer.inner_optimizer)
    ):
        return original(callback)
    return getattr(optimizer, name)()


def _shards_state(model: Any, callbacks: list) -> bool:
    """Return whether the optimizer's state is sharded, or a callback will shard it."""
    wanted = sharding_of(getattr(model, "optimizer", None)).shards_state
    return wanted or any(getattr(item, "shards", False) for item in callbacks)


def _saving_participants(callback: Any) -> list:
    """Return callbacks by which another worker takes part in the saves of worker 0.

    Saving sharded state requires all workers. These callbacks write no files.

    Args:
        callback: Keras callback that worker 0 runs.

    Returns:
        List of callbacks to run in its place; empty if it does not save sharded state.
    """
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        return [keras_model.backup_without_files(callback, TemporaryFolder("backup"))]
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        return [callback]
    if getattr(callback, "embeddings_freq", 0):
        return [TensorBoardParticipant(callback.embeddings_freq)]
    return []


def may_stop_after_batch(callbacks: list) -> bool:
    """Return whether a callback may stop training after a batch on some workers only.

    Only callbacks of the user may: those of Keras, tfdp, MLflow and W&B do not stop
    after a batch, or do so on all workers.
    """
    return any(_may_stop_after_batch(callback) for callback in callbacks)


def _may_stop_after_batch(callback: Any) -> bool:
    """Return whether a callback may stop training after a batch on some workers."""
    kind = type(callback)
    if isinstance(callback, keras.callbacks.LambdaCallback):
        return any(name in vars(callback) for name in _BATCH_HOOKS)
    if kind.__module__.split(".")[0] in ("keras", "tfdp", "mlflow", "wandb"):
        return False
    base = keras.callbacks.Callback
    return any(getattr(kind, name) is not getattr(base, name) for name in _BATCH_HOOKS)
