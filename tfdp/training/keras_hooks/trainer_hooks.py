"""Keras's loops over a tfdp strategy: compile, fit, evaluate, predict, save.

Each function without an underscore replaces a Keras function; the table is in
`tfdp.training.keras_hooks.install`. It receives that function as `original`, and only
calls it for a model without a tfdp strategy. In the functions below `name` is the
method of Keras that was called, `bound` are the arguments of the call, and `arguments`
is their dict by name, in which a function may replace some. A feature is an addition to
training, which registers hooks as a `Feature`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from tfdp.communication.collectives import timing
from tfdp.communication.coordination.model_group import worker_group_of
from tfdp.communication.coordination.progress import progress
from tfdp.communication.coordination.watch import WorkerLost
from tfdp.ground._compat import keras_model
from tfdp.ground.base import activities, loops
from tfdp.ground.base.context import strategy_of
from tfdp.ground.base.feature import Feature, Fit, equalize_replicas, overriders
from tfdp.ground.base.wrappers import wrapper_of
from tfdp.training.data import checks
from tfdp.training.data import position as data_position
from tfdp.training.data.distribute import check_batch_size
from tfdp.training.keras_hooks import (
    file_hooks,
    loop_agreement,
    scope_checks,
    step_functions,
)
from tfdp.training.keras_hooks.logs import mean_over_workers
from tfdp.training.keras_hooks.own_functions import requiring_strategy_run
from tfdp.training.keras_hooks.saving import save_atomically
from tfdp.training.keras_hooks.worker_callbacks import (
    add_optimizer_check,
    backup_callbacks,
    find_callback_problem,
    order_callbacks,
    other_callbacks,
    select_callbacks,
)
from tfdp.training.parameters.conversion import full_variables
from tfdp.training.reduction import link_measure
from tfdp.training.replicas.synchronized_scope import local_variables
from tfdp.training.step.step import active


def run_loop(
    name: str, original: Callable, model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run `fit`, `evaluate` or `predict`; repeat it after an error a feature handles.

    The hook `recover` of a `Feature` returns true for an error that it handles.

    Args:
        name: String, `"fit"`, `"evaluate"` or `"predict"`.
        original: Callable, this method of Keras.
        model: The Keras model.
        *args: Positional arguments of the call.
        **kwargs: Keyword arguments of the call.

    Returns:
        Result of the loop, as Keras's method returns it.
    """
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    arguments = bound.arguments
    with contextlib.ExitStack() as stack:
        while True:
            try:
                # An attempt changes its arguments in place, so each attempt gets a copy
                # of the user's arguments.
                attempt = inspect.BoundArguments(bound.signature, arguments.copy())
                return _begin_loop(name, original, model, attempt)
            except Exception as error:
                if not any(
                    feature.recover(name, model, arguments, error, stack)
                    for feature in overriders(Feature.recover)
                ):
                    raise


def _begin_loop(
    name: str, original: Callable, model: Any, bound: inspect.BoundArguments
) -> Any:
    """Run a loop of Keras once; name a lost worker or bad data in TensorFlow's errors.

    The loop's progress is recorded, and for backup callbacks in `fit` the position in
    the data, too.

    Args:
        name: String, `"fit"`, `"evaluate"` or `"predict"`.
        original: Callable, the method of Keras.
        model: The Keras model.
        bound: `inspect.BoundArguments` of the call. Its callbacks are replaced in place
            by those that this worker runs, and `verbose` is set to 0 except on the
            first worker.

    Returns:
        The result of `original`.
    """
    strategy = strategy_of(model)
    if strategy is not None:
        _check_process(model, name)
    resuming = (
        backup_callbacks(bound.arguments.get("callbacks")) if name == "fit" else []
    )
    position = None
    if resuming:
        names = "validation_data", "validation_steps"
        position = data_position.DataPosition(*map(bound.arguments.get, names))
    is_fit = name == "fit"
    activity = None if is_fit else activities.during(activities.EVALUATION)
    with activity or contextlib.nullcontext(), data_position.tracking(position):
        for callback in resuming:
            callback.listen(position)
        if strategy is None:
            return _run_loop(name, original, model, bound, strategy)
        with progress.looping(name), strategy.extended.naming_lost_workers():  # noqa: SIM117
            with checks.translate_errors():
                return _run_loop(name, original, model, bound, strategy)


def _check_process(model: Any, name: str) -> None:
    """Raise a `RuntimeError` in a forked process, or if another thread runs a loop.

    The second is an error only with several workers: two threads would exchange
    messages with other workers in an order that differs by worker.

    Args:
        model: A Keras model of a strategy.
        name: String, the method of Keras that was called.
    """
    worker_group = worker_group_of(model)
    worker_group.owner.check(f"`{name}`")
    if worker_group.num_workers > 1 and progress.loop and loops.current() is None:
        raise RuntimeError(
            f"`{name}` was called while another thread of this worker runs "
            f"`{progress.loop}`. On several workers, call both in one thread."
        )


def _run_loop(
    name: str,
    original: Callable,
    model: Any,
    bound: inspect.BoundArguments,
    strategy: Any,
) -> Any:
    """Check the call of a loop on all workers, select its callbacks, and run it.

    Args:
        name: String, `"fit"`, `"evaluate"` or `"predict"`.
        original: Callable, the method of Keras.
        model: The Keras model.
        bound: `inspect.BoundArguments` of the call, which are changed in place.
        strategy: The model's tfdp strategy, or `None`.

    Returns:
        Result of the loop, as Keras's method returns it.
    """
    arguments = bound.arguments
    step_functions.drop_stale_function(model, name)
    for feature in overriders(Feature.before_loop):
        feature.before_loop(model)
    each_batch = _agree_on_loop(name, model, bound, strategy)
    equalize_replicas(model)
    if strategy is not None:
        _check_data(strategy, name, model, arguments)
        if not name.startswith("predict"):
            scope_checks.bring_weights_into_scope(model)
    fit = _begin_fit(strategy, model, arguments) if name == "fit" else None
    if strategy is None:
        scope_checks.check_outside_scope(model, name)
        if fit is not None:
            scope_checks.warn_of_separate_training(model, name)
        _set_callbacks(arguments, arguments.get("callbacks"), is_fit=name == "fit")
        result = original(*bound.args, **bound.kwargs)
        if fit is not None:
            _complete_fit(model)
        return result
    worker_group = worker_group_of(model)
    if not worker_group.is_job_chief:
        arguments["verbose"] = 0
    chosen = select_callbacks(
        model,
        arguments.get("callbacks"),
        is_fit=name == "fit",
        each_batch=each_batch,
    )
    _set_callbacks(arguments, chosen, is_fit=name == "fit")
    if fit is not None:
        _measure_links(fit)
        _register_model(model)
    exchange = _gradient_exchange(fit)
    with (
        loops.looping(model, name, exchange=exchange),
        _undo_recording_after(fit),
        requiring_strategy_run(model, name),
    ):
        result = original(*bound.args, **bound.kwargs)
    if fit is not None:
        # All workers wait for worker 0, so that its files are complete when `fit`
        # returns. In a job that continues after the loss of workers, a loss at this
        # point must not make a finished `fit` fail.
        continues = strategy.extended.continues_after_loss
        with contextlib.suppress(*[WorkerLost] * continues):
            _complete_fit(model)
            worker_group.all_gather("the end of fit")
    return result


def _complete_fit(model: Any) -> None:
    """Let each feature finish what its callbacks have begun in a model's `fit`."""
    for feature in overriders(Feature.complete_fit):
        feature.complete_fit(model)


def _register_model(model: Any) -> None:
    """Give a `DistributedOptimizer` a weak reference to its model.

    When the optimizer shards state, it takes the order of parameters, and the
    parameters of frozen layers, from the model.
    """
    optimizer: Any = getattr(model, "optimizer", None)
    if hasattr(optimizer, "register_model"):
        optimizer.register_model(model)


def _begin_fit(strategy: Any, model: Any, arguments: dict[str, Any]) -> Fit:
    """Describe a call of `fit` by a `Fit`, and let features change its callbacks.

    Args:
        strategy: The model's tfdp strategy, or `None`.
        model: The Keras model.
        arguments: Dict, the arguments of `fit` by name; changed in place.
    """
    fit = Fit(strategy, model, arguments)
    arguments["callbacks"] = add_optimizer_check(model, arguments.get("callbacks"))
    for feature in overriders(Feature.choose_callbacks):
        feature.choose_callbacks(fit)
    return fit


def _gradient_exchange(fit: Fit | None) -> Any:
    """Return the `GradientExchange` that a feature uses in `fit`; `None` without one.

    It sums the gradients of each step without a wait for all replicas.
    """
    if fit is None:
        return None
    features = overriders(Feature.gradient_exchange)
    found = (feature.gradient_exchange(fit) for feature in features)
    return next((exchange for exchange in found if exchange is not None), None)


def _measure_links(fit: Fit) -> None:
    """Load or measure the speed of links, by which all-reduce algorithms are chosen."""
    extended = fit.strategy.extended
    link_measure.load_or_measure_links(
        extended.algorithm_selector,
        extended.group,
        extended.worker_group,
        str(extended.hosts),
        link_measure.num_fit_steps(fit.arguments),
    )


def _check_data(
    strategy: Any, name: str, model: Any, arguments: dict[str, Any]
) -> None:
    """Raise a `ValueError` if data is invalid; wrap generators to check each batch.

    Args:
        strategy: The model's tfdp strategy.
        name: String, `"fit"`, `"evaluate"` or `"predict"`.
        model: The Keras model.
        arguments: Dict, the arguments of the call by name; changed in place.
    """
    checks.check_arrays(model, arguments)
    for key in ("x", "validation_data"):
        if key in arguments:
            arguments[key] = checks.check_structure(arguments[key])
    if name != "predict":
        check_batch_size(strategy, arguments.get("batch_size"), "`batch_size`")


def _set_callbacks(arguments: dict[str, Any], chosen: Any, *, is_fit: bool) -> None:
    """Set the callbacks of a call, and prepare the backup callbacks of a `fit`.

    Backup callbacks, which save the state of `fit`, are moved to the end. Each receives
    the position in the data and the list of all callbacks that are not backup
    callbacks.

    Args:
        arguments: Dict, the arguments of the call by name; changed in place.
        chosen: List of callbacks or `CallbackList`, those that this worker runs.
        is_fit: Bool, whether the call is one of `fit`.
    """
    arguments["callbacks"] = chosen
    resuming = backup_callbacks(chosen) if is_fit else []
    if resuming:
        arguments["callbacks"] = order_callbacks(chosen)
        others = other_callbacks(arguments["callbacks"])
        for callback in resuming:
            callback.set_position_and_callbacks(data_position.current(), others)


def epoch_logs(original: Callable, model: Any, logs: Any) -> Any:
    """Return the logs of an epoch; first notify the features of its end.

    Keras's method `original` computes them from `logs`, those of the last batch. If an
    interrupted run had completed all batches of the epoch, its last logs are used. Logs
    over each worker's own rows are averaged over the workers.

    Returns:
        Dict of the logs by name.
    """
    position = data_position.current()
    if not logs and position is not None and position.last_logs:
        logs = position.last_logs
    for feature in overriders(Feature.before_sync):
        feature.before_sync(model)
    results = original(model, logs)
    is_local = (loops.independent_groups() or loops.exchange()) is not None
    if results is logs and logs and is_local:
        # Keras returns the object `logs` itself only if the step is overridden. It then
        # holds values of this worker, whose mean over workers is returned. Metrics need
        # no mean, since reading a metric merges its states.
        return mean_over_workers(worker_group_of(model), logs)
    return results


def _agree_on_loop(
    name: str, model: Any, bound: inspect.BoundArguments, strategy: Any
) -> bool:
    """Raise a `ValueError` on every worker if workers would run different loops.

    It is raised for invalid callbacks of `fit`, too.

    Args:
        name: String, `"fit"`, `"evaluate"` or `"predict"`.
        model: The Keras model.
        bound: `inspect.BoundArguments` of the call.
        strategy: The model's tfdp strategy, or `None`.

    Returns:
        Bool, whether a callback of any worker may stop training after a batch.
    """
    if keras_model.is_within_fit(bound.arguments):
        return False
    if strategy is not None and worker_group_of(model).num_workers > 1:
        return loop_agreement.agree_on_loop(strategy, name, model, bound)
    if name == "fit":
        arguments = bound.arguments
        problem = find_callback_problem(arguments.get("callbacks"), arguments)
        if problem:
            raise ValueError(problem)
    return False


@contextlib.contextmanager
def _undo_recording_after(fit: Fit | None) -> Iterator[None]:
    """Open a context that deactivates what callbacks of `fit` have activated for steps.

    These are recorders, which measure a step's collectives, and `LoopFeature`s, which
    take part in the step. Without a `Fit`, as for `evaluate`, they are suspended if the
    loop runs within `fit`.
    """
    if fit is None:
        with _suspend_recording():
            yield
        return
    recorders, features = timing.recorders.active(), active.active()
    try:
        yield
    finally:
        # An exit stack calls every function, even if another one fails.
        with contextlib.ExitStack() as stack:
            stack.callback(_stop_recording, fit.model, recorders, features)
            for feature in overriders(Feature.after_fit):
                stack.callback(feature.after_fit, fit)


def _stop_recording(model: Any, recorders: Any, features: Any) -> None:
    """Deactivate recorders and features of `fit`; retrace the step if there were any.

    Args:
        model: The Keras model.
        recorders: The recorders that were active before `fit`, which stay active.
        features: The `LoopFeature`s that were active before `fit`, which stay active.
    """
    was_recorded = timing.recorders.deactivate_since(recorders)
    if active.deactivate_since(features) or was_recorded:
        model.train_function = None


@contextlib.contextmanager
def _suspend_recording() -> Iterator[None]:
    """Open a context that suspends recorders and `LoopFeature`s in a loop within `fit`.

    Such a loop is an `evaluate`, for example, that a callback of `fit` calls.
    """
    if loops.is_nested():
        with timing.recorders.suspended(), active.suspended():
            yield
    else:
        yield


def run_on_batch(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `train_on_batch` or a similar method on a global batch, divided by rows.

    `original` is Keras's method, called with the arguments of the user.

    Returns:
        Result of Keras's method: the logs or the predictions of the batch.
    """
    strategy, name = strategy_of(model), original.__name__
    if strategy is None:
        if name == "train_on_batch":
            scope_checks.warn_of_separate_training(model, name)
        return original(model, *args, **kwargs)
    _check_process(model, name)
    arguments = inspect.signature(original).bind(model, *args, **kwargs).arguments
    with progress.looping(name), strategy.extended.naming_lost_workers():
        _register_model(model)
        step_functions.drop_stale_function(model, name)
        loop_agreement.agree_on_batch(strategy, name, model, arguments)
        checks.check_batch(strategy, model, arguments)
        if not name.startswith("predict"):
            scope_checks.bring_weights_into_scope(model)
        with (
            loops.looping(model, name, receives_global_batches=True),
            _suspend_recording(),
            requiring_strategy_run(model, name),
        ):
            return original(model, *args, **kwargs)


@activities.during(activities.SAVE)
def save(
    original: Callable, model: Any, filepath: Any, *args: Any, **kwargs: Any
) -> Any:
    """Save or export a model by Keras's method `original`; all workers call it.

    Each worker writes a temporary file in the folder of `filepath`. The complete file
    then replaces `filepath`, which is whole at any time. Into an object store, or as
    several files, only worker 0 writes.
    """
    strategy = strategy_of(model)
    if strategy is None:
        return original(model, filepath, *args, **kwargs)
    is_export = original.__name__ == "export"
    full = full_variables(model) if is_export else contextlib.nullcontext()
    with full, local_variables(strategy):
        return save_atomically(original, model, filepath, *args, **kwargs)


def compile_model(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Compile a model in the strategy's scope, into which its optimizer is moved.

    `original` is Keras's `compile`, called with the arguments of the user. A
    `LossScaleOptimizer` that Keras adds around a `DistributedOptimizer` is removed.

    Returns:
        Result of Keras's `compile`.
    """
    strategy = strategy_of(model)
    if strategy is None:
        scope_checks.check_outside_scope(model, "compile")
        result = original(model, *args, **kwargs)
        file_hooks.unwrap_loss_scaling(model)
        return result
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    optimizer = getattr(model, "optimizer", None)
    with strategy.scope():
        scope_checks.move_metrics_into_scope(bound.arguments)
        result = original(*bound.args, **bound.kwargs)
        file_hooks.unwrap_loss_scaling(model)
        if (wrapper := wrapper_of(model.optimizer)) is not None:
            # A callback of an earlier `fit` wrapped the optimizer. The wrapper has the
            # optimizer's state, so the model gets the wrapper again.
            model.optimizer = wrapper
        scope_checks.bring_optimizer_into_scope(model.optimizer)
    if model.optimizer is not optimizer:
        # A new optimizer begins without momentum. So it also begins without the
        # gradients that compressors kept back from the previous optimizer.
        strategy.extended.reducer.residuals.reset(model.variables)
    return result
