"""Which callbacks each worker runs: one writes the files, all stop together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfdp import _compat
from tfdp.base.param_groups import innermost
from tfdp.keras_hooks.added_callbacks import (
    LookAfterOptimizer,
    SaveWithTensorBoard,
    ShareRestoredState,
    StopEachBatchTogether,
    StopTogether,
)
from tfdp.keras_hooks.rebalancing import Rebalance
from tfdp.reduction.link_measure import num_steps_of

# They write what the user names by one path for all workers.
_WRITERS = (
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


def callbacks_of_worker(
    strategy: Any, model: Any, callbacks: Any, *, is_fit: bool
) -> Any:
    """The callbacks that this worker runs.

    Args:
        strategy: A tfdp strategy.
        model: The Keras model.
        callbacks: What the user gave to Keras.
        is_fit: Bool, whether they are for `fit`.

    Returns:
        List of callbacks, or what was given where there is one worker.
    """
    worker_group = strategy.extended.worker_group
    if worker_group.num_workers == 1 or isinstance(
        callbacks, keras.callbacks.CallbackList
    ):
        return callbacks
    chosen = []
    given = _given(callbacks)
    is_sharded = _is_sharded(model, given)
    for callback in given:
        if worker_group.rank == 0 or not isinstance(callback, _WRITERS):
            chosen.append(callback)
        elif is_sharded:
            chosen += _taking_part(callback)
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            chosen.append(ShareRestoredState(strategy))
    if is_fit:
        own = any(_decides_per_batch(callback) for callback in chosen)
        each_batch = worker_group.any("callbacks", own)
        chosen.append(
            StopEachBatchTogether(strategy) if each_batch else StopTogether(strategy)
        )
        if strategy.extended.balance is not None:
            chosen.append(Rebalance(strategy, strategy.extended.balance))
    return chosen


def ordered(callbacks: Any) -> Any:
    """Puts callbacks that look at the state of all the others behind them.

    Args:
        callbacks: What Keras is given.

    Returns:
        List of callbacks.
    """
    given, last = _given(callbacks), that_resume(callbacks)
    first = others_of(callbacks)
    if isinstance(callbacks, keras.callbacks.CallbackList):
        given[:] = [*first, *last]
        return callbacks
    if not any(isinstance(item, keras.callbacks.History) for item in first):
        # Keras would add it at the end.
        first.append(keras.callbacks.History())
    return [*first, *last]


def that_resume(callbacks: Any) -> list:
    """The callbacks that save the state of `fit`, or let it go on from there."""
    return [c for c in _given(callbacks) if _resumes(c)]


def others_of(callbacks: Any) -> list:
    """All callbacks but those."""
    return [c for c in _given(callbacks) if not _resumes(c)]


def _resumes(callback: Any) -> bool:
    return getattr(callback, "resumes_fit", False)


def problem_of(callbacks: Any, arguments: dict[str, Any]) -> str:
    """What is wrong with a callback that writes, before training begins.

    Args:
        callbacks: What the user gave to Keras.
        arguments: Dict, the arguments of `fit` by name.

    Returns:
        String, one sentence, or `""`.
    """
    if len(that_resume(callbacks)) > 1:
        return "Give `fit` one `tfdp.callbacks.BackupAndRestore`. Received: several"
    asked = [c for c in _given(callbacks) if hasattr(c, "find_problem")]
    num_steps = num_steps_of(arguments) if asked else None
    problems = [callback.find_problem(num_steps) for callback in asked]
    return next((problem for problem in problems if problem), "")


def names_of_ours(callbacks: Any) -> list[str]:
    """The callbacks of tfdp among those that the user gave to Keras, in order."""
    kinds = [type(callback) for callback in _given(callbacks)]
    return [k.__name__ for k in kinds if k.__module__.startswith("tfdp.")]


def _given(callbacks: Any) -> list:
    is_list = isinstance(callbacks, keras.callbacks.CallbackList)
    return callbacks.callbacks if is_list else keras.tree.flatten(callbacks or [])


def difference_of(names: list[list[str]]) -> str:
    """What is wrong if workers have different callbacks of tfdp, or `""`.

    Args:
        names: List of the names on each worker.
    """
    if all(own == names[0] for own in names):
        return ""
    return (
        "tfdp's callbacks take part on all workers: give every worker the same ones, "
        "in the same order. "
        f"Received: {names}, by worker"
    )


def with_care_of_optimizer(model: Any, callbacks: Any) -> Any:
    """Adds what a `DistributedOptimizer` needs in `fit`, before all others.

    Args:
        model: The Keras model.
        callbacks: What the user gave to Keras.

    Returns:
        List of callbacks, or what was given where nothing is needed.
    """
    given = _given(callbacks)
    optimizer = getattr(model, "optimizer", None)
    if getattr(optimizer, "needs_trace", False):
        model.train_function = None
    is_needed = hasattr(optimizer, "check_progress") or any(
        hasattr(callback, "switch_on") for callback in given
    )
    is_there = any(isinstance(callback, LookAfterOptimizer) for callback in given)
    if not is_needed or is_there:
        return callbacks
    care = LookAfterOptimizer()
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        return [care, *given]
    care.set_model(model)
    callbacks.append(care)
    return callbacks


def swap_averages(original: Callable, callback: Any) -> Any:
    """`SwapEMAWeights` swaps; sharded averages swap themselves."""
    optimizer = _averaging(callback)
    return original(callback) if optimizer is None else optimizer.swap_averages()


def restart_averages(original: Callable, callback: Any) -> Any:
    """`SwapEMAWeights` gives averages the values of the weights."""
    optimizer = _averaging(callback)
    return original(callback) if optimizer is None else optimizer.restart_averages()


def _averaging(callback: Any) -> Any:
    """The optimizer of a callback's model, if it has averages that are sharded."""
    optimizer = callback.model.optimizer
    if not getattr(optimizer, "is_sharded", False):
        return None
    return (
        optimizer
        if any(p.use_ema for p in innermost(optimizer.inner_optimizer))
        else None
    )


def _is_sharded(model: Any, callbacks: list) -> bool:
    """Whether the optimizer's state is sharded, or will be by a callback."""
    optimizer = getattr(model, "optimizer", None)
    wanted = getattr(optimizer, "sharding", "none") != "none"
    return wanted or any(getattr(item, "shards", False) for item in callbacks)


def _taking_part(callback: Any) -> list:
    """What saves when the first worker's callback does, and writes nothing."""
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        return [_compat.backup_that_writes_nothing(callback)]
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        return [callback]
    if getattr(callback, "embeddings_freq", 0):
        return [SaveWithTensorBoard(callback.embeddings_freq)]
    return []


def _decides_per_batch(callback: Any) -> bool:
    """Whether a callback that is not Keras's own acts after a batch."""
    kind = type(callback)
    if isinstance(callback, keras.callbacks.LambdaCallback):
        return any(name in vars(callback) for name in _BATCH_HOOKS)
    if kind.__module__.split(".")[0] in ("keras", "tfdp"):
        return False
    base = keras.callbacks.Callback
    return any(getattr(kind, name) is not getattr(base, name) for name in _BATCH_HOOKS)
