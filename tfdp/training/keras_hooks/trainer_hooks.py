"""Keras's loops over a tfdp strategy: compile, fit, evaluate, predict, save.

Each function without an underscore replaces a Keras function; the table is in
`tfdp.training.keras_hooks.install`. It receives that function as `original`, and only
calls it for a model without a tfdp strategy. In the functions below `name` is the
method of Keras that was called, `bound` are the arguments of the call, and `arguments`
is their dict by name, in which a function may replace some.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp.communication.collectives import timing
from tfdp.communication.coordination.progress import progress
from tfdp.communication.coordination.watch import WorkerLost
from tfdp.ground import _compat
from tfdp.ground.base import activities, loops
from tfdp.ground.base.context import is_tfdp, strategy_of
from tfdp.ground.base.feature import Fit, registered
from tfdp.ground.base.wrappers import wrapper_of
from tfdp.training.data import checks
from tfdp.training.data import position as data_position
from tfdp.training.data.distribute import check_batch_size
from tfdp.training.data.other_rows import unwrap_other_rows
from tfdp.training.keras_hooks import file_hooks, loop_agreement, scope_checks
from tfdp.training.keras_hooks.logs import mean_over_workers, merge_logs
from tfdp.training.keras_hooks.saving import save_atomically
from tfdp.training.keras_hooks.worker_callbacks import (
    add_optimizer_check,
    backup_callbacks,
    find_callback_problem,
    order_callbacks,
    other_callbacks,
    select_callbacks,
)
from tfdp.training.parameters.conversion import num_conversions, whole_variables
from tfdp.training.reduction import link_measure
from tfdp.training.replicas import drift_probe
from tfdp.training.replicas.synchronized_scope import local_variables
from tfdp.training.step.empty_step import Updates, recording

# The attribute of a model with the function that a loop of Keras calls for a step.
_FUNCTION_OF_LOOP = {
    "fit": "train_function",
    "train_on_batch": "train_function",
    "evaluate": "test_function",
    "test_on_batch": "test_function",
    "predict": "predict_function",
    "predict_on_batch": "predict_function",
}


def run_loop(
    name: str, original: Callable, model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run `fit`, `evaluate` or `predict`; again after an error if a feature can."""
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    arguments = bound.arguments
    with contextlib.ExitStack() as stack:
        while True:
            try:
                # Each attempt changes its arguments.
                attempt = inspect.BoundArguments(bound.signature, arguments.copy())
                return _begin_loop(name, original, model, attempt)
            except Exception as error:
                if not any(
                    feature.recover(name, model, arguments, error, stack)
                    for feature in registered()
                ):
                    raise


def _begin_loop(
    name: str, original: Callable, model: Any, bound: inspect.BoundArguments
) -> Any:
    """Run a loop in the contexts that record its progress and explain its errors.

    The arguments are those of `_run_loop`.
    """
    strategy = strategy_of(model)
    if strategy is not None:
        strategy.extended.worker_group.owner.check(f"`{name}`")
    resuming = (
        backup_callbacks(bound.arguments.get("callbacks")) if name == "fit" else []
    )
    position = data_position.DataPosition() if resuming else None
    is_fit = name == "fit"
    activity = None if is_fit else activities.during(activities.EVALUATION)
    with activity or contextlib.nullcontext(), data_position.tracking(position):
        for callback in resuming:
            callback.listen(position)
        if strategy is None:
            return _run_loop(name, original, model, bound, strategy)
        with progress.looping(name), strategy.extended.explaining():  # noqa: SIM117
            with checks.translate_errors():
                return _run_loop(name, original, model, bound, strategy)


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
    """
    arguments = bound.arguments
    _drop_stale_function(model, name)
    features = registered()
    for feature in features:
        feature.before_loop(model)
    each_batch = _agree_on_loop(name, model, bound, strategy)
    for feature in features:
        feature.equalize_replicas(model)
    if strategy is not None:
        _check_data(strategy, name, model, arguments)
    fit = _begin_fit(strategy, model, arguments) if name == "fit" else None
    if strategy is None:
        scope_checks.check_outside_scope(model, name)
        if fit is not None:
            scope_checks.warn_of_separate_training(model, name)
        _set_callbacks(arguments, arguments.get("callbacks"), is_fit=name == "fit")
        return original(*bound.args, **bound.kwargs)
    worker_group = strategy.extended.worker_group
    if not worker_group.is_job_chief:
        arguments["verbose"] = 0
    chosen = select_callbacks(
        strategy,
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
    with loops.looping(model, name, exchange=exchange), _undo_recording_after(fit):
        result = original(*bound.args, **bound.kwargs)
    if fit is not None:
        # No worker returns before worker 0 has completed its files.
        continues = strategy.extended.continues_after_loss
        with contextlib.suppress(*[WorkerLost] * continues):
            worker_group.all_gather("the end of fit")
    return result


def _register_model(model: Any) -> None:
    """Register a model with its optimizer, if the optimizer shards parameters."""
    optimizer: Any = getattr(model, "optimizer", None)
    if hasattr(optimizer, "note_model"):
        optimizer.note_model(model)


def _begin_fit(strategy: Any, model: Any, arguments: dict[str, Any]) -> Fit:
    """Create the `Fit` of a call, and let the features change its callbacks.

    Args:
        strategy: The model's tfdp strategy, or `None`.
        model: The Keras model.
        arguments: Dict, the arguments of `fit` by name; changed in place.
    """
    fit = Fit(strategy, model, arguments)
    arguments["callbacks"] = add_optimizer_check(model, arguments.get("callbacks"))
    for feature in registered():
        feature.choose_callbacks(fit)
    return fit


def _gradient_exchange(fit: Fit | None) -> Any:
    """Return what replaces the all-reduce of gradients in `fit`, or `None`."""
    if fit is None:
        return None
    found = (feature.gradient_exchange(fit) for feature in registered())
    return next((exchange for exchange in found if exchange is not None), None)


def _measure_links(fit: Fit) -> None:
    """Load or measure the speed of links, which the choice of algorithms uses."""
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
    """Raise if data is invalid; wrap generators to check their batches on reading.

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
    """Set the callbacks argument, and pass the other callbacks to backup callbacks.

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
            callback.follow(data_position.current(), others)


def epoch_logs(original: Callable, model: Any, logs: Any) -> Any:
    """Return the logs of an epoch.

    If an interrupted run had completed all batches of the epoch, its last logs count.
    """
    position = data_position.current()
    if not logs and position is not None and position.last_logs:
        logs = position.last_logs
    for feature in registered():
        feature.before_meeting(model)
    results = original(model, logs)
    is_local = loops.loop_uses_local_steps() or loops.exchange() is not None
    if results is logs and logs and is_local:
        # An overridden step returns logs itself. Metrics need no mean: reading them
        # merges their states.
        return mean_over_workers(model.distribute_strategy.extended.worker_group, logs)
    return results


def _agree_on_loop(
    name: str, model: Any, bound: inspect.BoundArguments, strategy: Any
) -> bool:
    """Raise on every worker if workers differ in a loop, or its callbacks are invalid.

    Args:
        name: String, `"fit"`, `"evaluate"` or `"predict"`.
        model: The Keras model.
        bound: `inspect.BoundArguments` of the call.
        strategy: The model's tfdp strategy, or `None`.

    Returns:
        Bool, whether a callback of any worker acts after each batch.
    """
    if _compat.is_within_fit(bound.arguments):
        return False
    worker_group = None if strategy is None else strategy.extended.worker_group
    if worker_group is not None and worker_group.num_workers > 1:
        return loop_agreement.agree_on_loop(strategy, name, model, bound)
    if name == "fit":
        arguments = bound.arguments
        problem = find_callback_problem(arguments.get("callbacks"), arguments)
        if problem:
            raise ValueError(problem)
    return False


@contextlib.contextmanager
def _undo_recording_after(fit: Fit | None) -> Iterator[None]:
    """Deactivate after `fit` the recorders and drift probes of its callbacks."""
    if fit is None:
        with _suspend_recording():
            yield
        return
    recorders, watches = timing.recorders.active(), drift_probe.probes.active()
    try:
        yield
    finally:
        # An exit stack calls every function, even if another one fails.
        with contextlib.ExitStack() as stack:
            stack.callback(_stop_recording, fit.model, recorders, watches)
            for feature in registered():
                stack.callback(feature.after_fit, fit)


def _stop_recording(model: Any, recorders: Any, watches: Any) -> None:
    """Deactivate later recorders and probes; retrace the step if there were any.

    Args:
        model: The Keras model.
        recorders: The recorders that were active before `fit`, which stay active.
        watches: The drift probes that were active before `fit`, which stay active.
    """
    was_recorded = timing.recorders.deactivate_since(recorders)
    if drift_probe.probes.deactivate_since(watches) or was_recorded:
        model.train_function = None


@contextlib.contextmanager
def _suspend_recording() -> Iterator[None]:
    """Suspend recorders and drift probes in a loop that a callback of `fit` runs."""
    if loops.is_nested():
        with timing.recorders.suspended(), drift_probe.probes.suspended():
            yield
    else:
        yield


def run_on_batch(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `train_on_batch` or a similar method on a global batch, divided by rows."""
    strategy, name = strategy_of(model), original.__name__
    if strategy is None:
        if name == "train_on_batch":
            scope_checks.warn_of_separate_training(model, name)
        return original(model, *args, **kwargs)
    strategy.extended.worker_group.owner.check(f"`{name}`")
    arguments = inspect.signature(original).bind(model, *args, **kwargs).arguments
    with progress.looping(name), strategy.extended.explaining():
        _register_model(model)
        _drop_stale_function(model, name)
        loop_agreement.agree_on_batch(strategy, name, model, arguments)
        checks.check_batch(strategy, model, arguments)
        with loops.looping(model, name, whole_batches=True), _suspend_recording():
            return original(model, *args, **kwargs)


def make_function(
    name: str, original: Callable, model: Any, force: bool = False
) -> Any:
    """Create the function of a step, which notifies the watchdog while it computes.

    Args:
        name: String, the attribute of the model that holds the function.
        original: Callable, the method of Keras that creates it.
        model: The Keras model.
        force: Bool, whether it is created again. Defaults to `False`.
    """
    before = getattr(model, name)
    with _without_xla(model):
        result = original(model, force)
    function = getattr(model, name)
    is_training = name == "train_function"
    if function is before:
        return result
    if strategy_of(model) is None:
        if is_training:
            setattr(model, name, _with_empty_last_step(model, function))
        return result

    is_built = name != "predict_function"

    @functools.wraps(function)
    def compute(data: Any) -> Any:
        """Compute a step; before the first one, build the layers of `predict_step`."""
        nonlocal is_built
        if not is_built:
            is_built = True
            _build_for_predict(model, data[0])
        with progress.computing():
            return function(data)

    step: Any = compute
    if is_training:
        step = _with_empty_last_step(model, compute)
        for feature in registered():
            step = feature.wrap_step(model, step)
    step.made_after = _trace_conditions(model)
    setattr(model, name, step)
    return result


def _trace_conditions(model: Any) -> tuple[int, int]:
    """Return what makes traced steps of a model outdated when it changes."""
    return num_conversions(), model.distribute_strategy.extended.generation


def _build_for_predict(model: Any, batch: Any) -> None:
    """Build the layers of `predict_step`; Keras does so only for `fit`, `evaluate`."""

    def spec(part: Any) -> Any:
        """Return the spec of a replica's tensor, with any number of rows."""
        local = model.distribute_strategy.experimental_local_results(part)[0]
        return tf.TensorSpec([None, *local.shape[1:]], local.dtype)

    batch, _ = unwrap_other_rows(batch)
    specs = keras.tree.map_structure(lambda p: None if p is None else spec(p), batch)
    _compat.build_by_steps(model, specs, ("predict_step",))


def _with_empty_last_step(model: Any, compute: Callable) -> Callable:
    """Wrap a step so that it updates without data at the end of data, as Keras does.

    Keras runs one more step at the end of data of unknown length.

    Args:
        model: The Keras model.
        compute: Callable, the function of a step.

    Returns:
        Callable with the arguments of `compute`.
    """
    updates = Updates()

    @functools.wraps(compute)
    def step(*args: Any, **kwargs: Any) -> Any:
        """Compute a step; if the data has ended, update without data and raise."""
        try:
            with recording(updates):
                return compute(*args, **kwargs)
        except tf.errors.OutOfRangeError:
            # With XLA, or with several steps per execution, Keras reads the data before
            # the first update, so that no update has run.
            if not model.jit_compile and model.steps_per_execution == 1:
                updates.take_without_data(strategy_of(model))
            raise

    return step


def _drop_stale_function(model: Any, name: str) -> None:
    """Discard the function of a step if shards or workers changed after its trace.

    Args:
        model: The Keras model.
        name: String, the called method, such as `"fit"` or `"train_on_batch"`.
    """
    attribute = _FUNCTION_OF_LOOP[name]
    function = getattr(model, attribute, None)
    made_after = getattr(function, "made_after", None)
    if made_after is not None and made_after != _trace_conditions(model):
        setattr(model, attribute, None)


@contextlib.contextmanager
def _without_xla(model: Any) -> Iterator[None]:
    """Keep Keras from compiling a step: `strategy.compiled_step` compiles its parts.

    XLA cannot compile collectives.
    """
    compiles = strategy_of(model) is not None and model.jit_compile
    if compiles:
        model.jit_compile = False
    try:
        yield
    finally:
        if compiles:
            model.jit_compile = True


def chosen_xla(original: Callable, model: Any) -> bool:
    """Return whether `jit_compile="auto"` compiles: on GPUs as plain Keras would."""
    if strategy_of(model) is None or not tf.config.list_physical_devices("GPU"):
        return original(model)
    return _compat.supports_jit(model)


@activities.during(activities.SAVE)
def save(
    original: Callable, model: Any, filepath: Any, *args: Any, **kwargs: Any
) -> Any:
    """Save a model on all workers, each into a temporary file that is then moved."""
    strategy = strategy_of(model)
    if strategy is None:
        return original(model, filepath, *args, **kwargs)
    is_export = original.__name__ == "export"
    whole = whole_variables(model) if is_export else contextlib.nullcontext()
    with whole, local_variables(strategy):
        return save_atomically(strategy, original, model, filepath, *args, **kwargs)


def build_symbolically(
    original: Callable, model: Any, iterator: Any = None, data_batch: Any = None
) -> Any:
    """Build a model from the spec of the data; Keras would take a generator's batch."""
    if strategy_of(model) is None or iterator is None:
        return original(model, iterator=iterator, data_batch=data_batch)
    dataset = _compat.distributed_dataset(iterator)
    spec, _ = unwrap_other_rows(_compat.local_element_spec(dataset))
    checks.check_element(model, spec)
    shapes = [s.shape for s in tf.nest.flatten(spec) if s is not None]
    if any(shape.rank is None for shape in shapes):
        return original(model, iterator=iterator)
    options = getattr(dataset, "read_options", None)
    if options is None or not options.by_weight:
        spec = _of_all_replicas(spec, model.distribute_strategy.num_replicas_in_sync)
    try:
        return _compat.build_symbolically(model, spec)
    except Exception:
        # An overridden step need not use `call`, which may not exist.
        if not _compat.overridden(model):
            if not model.run_eagerly:
                raise
            return _compat.build_eagerly(model, spec)
    return _compat.build_by_steps(model, spec)


def _of_all_replicas(spec: Any, num_replicas: int) -> Any:
    """Return the spec of a global batch for the spec of a replica's batch."""

    def of_all(part: Any) -> Any:
        """Return the spec of one tensor in the global batch."""
        shape = part.shape
        if shape.rank and shape[0] is not None:
            shape = tf.TensorShape([shape[0] * num_replicas, *shape[1:]])
        return tf.TensorSpec(shape, part.dtype)

    return keras.tree.map_structure(lambda p: None if p is None else of_all(p), spec)


def reduce_per_replica(
    original: Callable, values: Any, strategy: Any, reduction: Any
) -> Any:
    """Merge the outputs of the replicas at the end of a step.

    Keras interleaves the rows of several workers in the order of stock sharding. Here
    rows are concatenated in the order of ranks.
    """
    if not is_tfdp(strategy):
        return original(values, strategy, reduction)
    loop, is_alone = loops.current(), strategy.num_replicas_in_sync == 1
    is_local = strategy.extended.worker_group.num_workers == 1
    if is_alone or loop is None or (is_local and reduction == "concat"):
        reduced = original(values, strategy, reduction)
    elif reduction == "concat":
        reduced = keras.tree.map_structure(lambda v: strategy.gather(v, axis=0), values)
    else:
        reduced = merge_logs(strategy, loop.model, values)
    timing.gather()
    return reduced


def compile_model(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Compile a model in the strategy's scope, into which its optimizer is moved.

    A `LossScaleOptimizer` that Keras adds around a `DistributedOptimizer` is removed.
    """
    strategy = strategy_of(model)
    if strategy is None:
        scope_checks.check_outside_scope(model, "compile")
        result = original(model, *args, **kwargs)
        file_hooks.unwrap_loss_scaling(model)
        return result
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    with strategy.scope():
        scope_checks.move_metrics_into_scope(bound.arguments)
        result = original(*bound.args, **bound.kwargs)
        file_hooks.unwrap_loss_scaling(model)
        if (wrapper := wrapper_of(model.optimizer)) is not None:
            # A callback of an earlier `fit` wrapped the optimizer, and its state is in
            # the wrapper.
            model.optimizer = wrapper
        scope_checks.bring_into_scope(model.optimizer)
    return result
