"""Keras's `fit`, `evaluate` and `predict` under a tfdp strategy.

Keras has no hooks for what is done here, so that its functions are replaced
once, when the first strategy is made. Each replacement hands over to Keras at
once for a model of no tfdp strategy.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp import _compat
from tfdp.base import loops
from tfdp.base.ownership import is_ours, strategy_of
from tfdp.collectives import timing
from tfdp.coordination.progress import progress
from tfdp.data import checks, epochs
from tfdp.data import position as data_position
from tfdp.data.distribute import check_batch_size
from tfdp.keras_hooks import file_hooks, layer_hooks, optimizer_hooks, scope_checks
from tfdp.keras_hooks.logs import merge_logs
from tfdp.keras_hooks.saving import save_atomically
from tfdp.keras_hooks.worker_callbacks import (
    callbacks_of_worker,
    difference_of,
    names_of_ours,
    ordered,
    others_of,
    problem_of,
    restart_averages,
    swap_averages,
    that_resume,
    with_care_of_optimizer,
)
from tfdp.reduction import link_measure
from tfdp.replicas import drift_probe


@functools.cache
def install() -> None:
    """Replaces Keras's functions, once for a process."""
    _compat.hash_function_types_once()
    layer_hooks.install()
    optimizer_hooks.install()
    file_hooks.install()
    owner = _compat.TensorFlowTrainer
    for name in ("fit", "evaluate", "predict"):
        _compat.replace(owner, name, functools.partial(_loop, name))
    for name in ("train_on_batch", "test_on_batch", "predict_on_batch"):
        _compat.replace(owner, name, _on_batch)
    for name in ("train_function", "test_function", "predict_function"):
        make = functools.partial(_make_function, name)
        _compat.replace(owner, f"make_{name}", make)
    for name in ("save", "save_weights", "export"):
        _compat.replace(keras.Model, name, _save)
    _compat.replace(owner, "_maybe_symbolic_build", _symbolic_build)
    swap = keras.callbacks.SwapEMAWeights
    _compat.replace(swap, "_swap_variables", swap_averages)
    _compat.replace(swap, "_finalize_ema_values", restart_averages)
    _compat.replace(_compat.BaseTrainer, "compile", _compile)
    _compat.replace(_compat.EpochIterator, "__init__", epochs.make_iterator)
    _compat.replace(
        _compat.EpochIterator, "_enumerate_iterator", data_position.enumerate_batches
    )
    _compat.replace(_compat.BaseTrainer, "_get_metrics_result_or_logs", _epoch_logs)
    _compat.replace(_compat.EpochIterator, "__iter__", epochs.begin_epoch)
    _compat.replace(_compat.EpochIterator, "__next__", epochs.next_step)
    _compat.replace(_compat.keras_trainer, "reduce_per_replica", _reduce_per_replica)


def _loop(name: str, original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    strategy = strategy_of(model)
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    resuming = that_resume(bound.arguments.get("callbacks")) if name == "fit" else []
    position = data_position.Position() if resuming else None
    with data_position.following(position):
        if strategy is None:
            return _run_loop(name, original, model, bound, strategy)
        with progress.looping(name), strategy.extended.explaining():  # noqa: SIM117
            with checks.in_plain_words():
                return _run_loop(name, original, model, bound, strategy)


def _run_loop(
    name: str,
    original: Callable,
    model: Any,
    bound: inspect.BoundArguments,
    strategy: Any,
) -> Any:
    arguments = bound.arguments
    if name == "fit":
        given = arguments.get("callbacks")
        _check_callbacks(strategy, given, arguments)
        arguments["callbacks"] = with_care_of_optimizer(model, given)
    if strategy is None:
        scope_checks.check_no_strategy_in_force(model, name)
        _choose_callbacks(arguments, arguments.get("callbacks"), is_fit=name == "fit")
        return original(*bound.args, **bound.kwargs)
    worker_group = strategy.extended.worker_group
    _check_data(model, arguments)
    if name != "predict":
        check_batch_size(strategy, arguments.get("batch_size"), "`batch_size`")
    if worker_group.rank > 0 and worker_group.num_workers > 1:
        arguments["verbose"] = 0
    chosen = callbacks_of_worker(
        strategy, model, arguments.get("callbacks"), is_fit=name == "fit"
    )
    _choose_callbacks(arguments, chosen, is_fit=name == "fit")
    if name == "fit":
        extended = strategy.extended
        steps = link_measure.num_steps_of(arguments)
        link_measure.learn_links(
            extended.algorithm_selector,
            extended.group,
            worker_group,
            str(extended.hosts),
            steps,
        )
    is_fit = name == "fit"
    with loops.looping(model, is_fit=is_fit), _recording(model, is_fit=is_fit):
        result = original(*bound.args, **bound.kwargs)
    if name == "fit":
        # The first worker's files are complete when the others go on.
        worker_group.all_gather("the end of fit")
    return result


def _check_data(model: Any, arguments: dict[str, Any]) -> None:
    """Raises what is wrong with the data, or lets a generator say so later."""
    checks.check_arrays(model, arguments)
    for key in ("x", "validation_data"):
        if key in arguments:
            arguments[key] = checks.of_one_structure(arguments[key])


def _choose_callbacks(arguments: dict[str, Any], chosen: Any, *, is_fit: bool) -> None:
    """Gives Keras callbacks; those that save the others' state are told of them."""
    arguments["callbacks"] = chosen
    resuming = that_resume(chosen) if is_fit else []
    if resuming:
        arguments["callbacks"] = ordered(chosen)
        others = others_of(arguments["callbacks"])
        for callback in resuming:
            callback.follow(data_position.current(), others)


def _epoch_logs(original: Callable, model: Any, logs: Any) -> Any:
    """The logs of an epoch, also of one whose batches a run before had all done."""
    position = data_position.current()
    if not logs and position is not None and position.last_logs:
        logs = position.last_logs
    return original(model, logs)


def _check_callbacks(strategy: Any, callbacks: Any, arguments: dict[str, Any]) -> None:
    """Raises on every worker what is wrong with the callbacks of any of them."""
    worker_group = None if strategy is None else strategy.extended.worker_group
    is_chief = worker_group is None or worker_group.rank == 0
    problem = problem_of(callbacks, arguments) if is_chief else ""
    if worker_group is not None and worker_group.num_workers > 1:
        own = json.dumps([problem, names_of_ours(callbacks)])
        told = [json.loads(text) for text in worker_group.all_gather("callbacks", own)]
        problem = told[0][0] or difference_of([names for _, names in told])
        if problem:
            worker_group.leave()
    if problem:
        raise ValueError(problem)


@contextlib.contextmanager
def _recording(model: Any, *, is_fit: bool) -> Iterator[None]:
    """In `fit` callbacks may add to what is traced; nothing is left of it after."""
    if not is_fit:
        with _unrecorded():
            yield
        return
    recorders, watches = timing.recorders.active(), drift_probe.watches.active()
    try:
        yield
    finally:
        was_recorded = timing.recorders.switch_back(recorders)
        if drift_probe.watches.switch_back(watches) or was_recorded:
            model.train_function = None


@contextlib.contextmanager
def _unrecorded() -> Iterator[None]:
    """What a callback evaluates in the middle of a `fit` is no part of its steps."""
    if loops.is_nested():
        with timing.recorders.suspended(), drift_probe.watches.suspended():
            yield
    else:
        yield


def _on_batch(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    strategy = strategy_of(model)
    if strategy is None:
        return original(model, *args, **kwargs)
    name = original.__name__
    given = inspect.signature(original).bind(model, *args, **kwargs).arguments
    with progress.looping(name), strategy.extended.explaining():
        checks.check_batch(strategy, model, given)
        with loops.looping(model, whole_batches=True), _unrecorded():
            return original(model, *args, **kwargs)


def _make_function(
    name: str, original: Callable, model: Any, force: bool = False
) -> Any:
    """Notes when a step computes, and when callbacks do."""
    if strategy_of(model) is not None:
        _leave_out_xla(model)
    before = getattr(model, name)
    result = original(model, force)
    function = getattr(model, name)
    if strategy_of(model) is None or function is before:
        return result

    @functools.wraps(function)
    def compute(*args: Any, **kwargs: Any) -> Any:
        with progress.computing():
            return function(*args, **kwargs)

    setattr(model, name, compute)
    return result


def _leave_out_xla(model: Any) -> None:
    """Warns where XLA was asked for, in `compile` or by the model's attribute."""
    if model.jit_compile and not model.run_eagerly:
        warnings.warn(
            "`jit_compile=True` is left out: XLA cannot compile the collectives of "
            "a step on all devices. Training goes on without it.",
            stacklevel=3,
        )
        model.jit_compile = False


def _save(
    original: Callable, model: Any, filepath: Any, *args: Any, **kwargs: Any
) -> Any:
    strategy = strategy_of(model)
    if strategy is None:
        return original(model, filepath, *args, **kwargs)
    return save_atomically(strategy, original, model, filepath, *args, **kwargs)


def _symbolic_build(
    original: Callable, model: Any, iterator: Any = None, data_batch: Any = None
) -> Any:
    """Builds from the data's spec; stock takes a batch, which generators lose."""
    if strategy_of(model) is None or iterator is None:
        return original(model, iterator=iterator, data_batch=data_batch)
    spec = _compat.local_element_spec(_compat.distributed_dataset(iterator))
    checks.check_element(model, spec)
    shapes = [s.shape for s in tf.nest.flatten(spec) if s is not None]
    if any(shape.rank is None for shape in shapes):
        return original(model, iterator=iterator)
    try:
        return _compat.build_symbolically(model, spec)
    except Exception:
        # A step of the user's own need not use `call`, which may not even exist.
        if not _compat.overridden(model):
            raise
    return _compat.build_by_steps(model, spec)


def _reduce_per_replica(
    original: Callable, values: Any, strategy: Any, reduction: Any
) -> Any:
    """What a step returns for all replicas: the last thing that it does."""
    reduced = _reduced(original, values, strategy, reduction)
    if is_ours(strategy):
        timing.gather()
    return reduced


def _reduced(original: Callable, values: Any, strategy: Any, reduction: Any) -> Any:
    is_alone = strategy.num_replicas_in_sync == 1
    loop = loops.current()
    if not is_ours(strategy) or is_alone or loop is None:
        return original(values, strategy, reduction)
    if reduction == "concat":
        return _concatenated(original, values, strategy)
    return merge_logs(strategy, loop.model, values)


def _concatenated(original: Callable, values: Any, strategy: Any) -> Any:
    """The rows of all replicas in the order of the global batch.

    Keras interleaves the rows of several workers as stock sharding deals them
    out; here rank r has the r-th rows.
    """
    if strategy.extended.worker_group.num_workers == 1:
        return original(values, strategy, "concat")
    return keras.tree.map_structure(lambda v: strategy.gather(v, axis=0), values)


def _compile(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    strategy = strategy_of(model)
    if strategy is None:
        scope_checks.check_no_strategy_in_force(model, "compile")
        return original(model, *args, **kwargs)
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    with strategy.scope():
        scope_checks.move_into_scope(strategy, bound.arguments)
        result = original(*bound.args, **bound.kwargs)
        scope_checks.move_optimizer_into_scope(strategy, model.optimizer)
    return result
