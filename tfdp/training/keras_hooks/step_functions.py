"""Functions of a step, which Keras makes for a loop: their trace, build and outputs.

Functions without an underscore that take `original` replace a Keras function, as in
`tfdp.training.keras_hooks.trainer_hooks`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp.communication.collectives import timing
from tfdp.communication.coordination.progress import progress
from tfdp.ground._compat import (
    graphs,
    keras_data,
    keras_model,
    tf_data,
    tf_distribute,
    xla_lowering,
)
from tfdp.ground.base import loops
from tfdp.ground.base.context import is_tfdp, strategy_of
from tfdp.ground.base.feature import Feature, overriders
from tfdp.training.data import checks
from tfdp.training.data.other_rows import unwrap_other_rows
from tfdp.training.data.rows import join_rows
from tfdp.training.keras_hooks.logs import merge_logs
from tfdp.training.parameters.conversion import num_conversions
from tfdp.training.step.empty_step import Updates, recording

# Keras keeps the function of a step between calls, as this attribute of the model. A
# loop drops the function if it is outdated. The keys are the methods that users call.
FUNCTION_OF_LOOP = {
    "fit": "train_function",
    "train_on_batch": "train_function",
    "evaluate": "test_function",
    "test_on_batch": "test_function",
    "predict": "predict_function",
    "predict_on_batch": "predict_function",
}


def make_function(
    name: str, original: Callable, model: Any, force: bool = False
) -> Any:
    """Create a model's function for steps, which notifies the watchdog while it runs.

    Args:
        name: String, the attribute of the model that holds the function.
        original: Callable, the method of Keras that creates it.
        model: The Keras model.
        force: Bool, whether it is created again. Defaults to `False`.

    Returns:
        The result of `original`. The function is set as the attribute `name`.
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
        """Compute a step; before the first one, build the layers of `predict_step`.

        Returns:
            Result of the step, as Keras's function returns it.
        """
        nonlocal is_built
        if not is_built:
            is_built = True
            _build_for_predict(model, data[0])
        with progress.computing():
            return function(data)

    step: Any = compute
    if name != "predict_function":
        step = _with_empty_last_step(model, compute)
    if is_training:
        for feature in overriders(Feature.wrap_step):
            step = feature.wrap_step(model, step)
    step.made_after = _trace_conditions(model)
    setattr(model, name, step)
    return result


def _trace_conditions(model: Any) -> tuple[int, int]:
    """Return two counters; a traced step of a model is outdated if one has changed.

    They count how often parameters were sharded anew, and how often workers changed.
    """
    return num_conversions(), model.distribute_strategy.extended.generation


def _build_for_predict(model: Any, batch: Any) -> None:
    """Build the layers that `predict_step` calls, from the shapes of a batch.

    Keras builds them itself for the steps of training and evaluation.
    """

    def spec(part: Any) -> Any:
        """Return the spec of a replica's tensor, with any number of rows."""
        local = model.distribute_strategy.experimental_local_results(part)[0]
        return tf.TensorSpec([None, *local.shape[1:]], local.dtype)

    batch, _ = unwrap_other_rows(batch)
    specs = keras.tree.map_structure(lambda p: None if p is None else spec(p), batch)
    keras_model.build_by_steps(model, specs, ("predict_step",))


def _with_empty_last_step(model: Any, compute: Callable) -> Callable:
    """Wrap a step to make an update without gradients when its data has ended.

    Keras makes such an update in the additional step that it begins at the end of data
    of unknown length. The error about the end of the data is raised afterwards.

    Args:
        model: The Keras model.
        compute: Callable, the function of a step.

    Returns:
        Callable with the arguments of `compute`.
    """
    updates = Updates()

    @functools.wraps(compute)
    def step(*args: Any, **kwargs: Any) -> Any:
        """Compute a step; at the end of data, update without gradients, and raise.

        Returns:
            Result of the step.
        """
        try:
            with recording(updates):
                return compute(*args, **kwargs)
        except tf.errors.OutOfRangeError:
            # With XLA, or with several steps per execution, Keras reads the data before
            # its first update. So at the end of the data Keras makes no update, and
            # tfdp must make none.
            if not model.jit_compile and model.steps_per_execution == 1:
                updates.run_empty_step(strategy_of(model))
            raise

    return step


def drop_stale_function(model: Any, name: str) -> None:
    """Discard the function of a step if shards or workers changed after its creation.

    Args:
        model: The Keras model.
        name: String, the called method, such as `"fit"` or `"train_on_batch"`.
    """
    attribute = FUNCTION_OF_LOOP[name]
    function = getattr(model, attribute, None)
    made_after = getattr(function, "made_after", None)
    if made_after is not None and made_after != _trace_conditions(model):
        setattr(model, attribute, None)


@contextlib.contextmanager
def _without_xla(model: Any) -> Iterator[None]:
    """Open a context in which Keras does not compile the step of a tfdp model by XLA.

    XLA cannot compile collectives; `strategy.compiled_step` compiles the other parts.
    """
    compiles = strategy_of(model) is not None and model.jit_compile
    if compiles:
        model.jit_compile = False
    try:
        yield
    finally:
        if compiles:
            model.jit_compile = True


def auto_compiles_with_xla(original: Callable, model: Any) -> bool:
    """Return whether `jit_compile="auto"` compiles a model by XLA.

    On GPUs it compiles what plain Keras would compile without a strategy. Without a
    tfdp strategy, or without GPUs, `original`, the method of Keras, decides.
    """
    if strategy_of(model) is None or not tf.config.get_visible_devices("GPU"):
        return original(model)
    return xla_lowering.supports_jit(model)


def build_symbolically(
    original: Callable, model: Any, iterator: Any = None, data_batch: Any = None
) -> Any:
    """Build a model from the data's spec; Keras would take a batch out of the data.

    Args:
        original: Callable, Keras's method. It builds a model without a tfdp strategy,
            or if the rank of a tensor in the data is unknown.
        model: The Keras model.
        iterator: Epoch iterator of Keras, whose distributed dataset has the spec, or
            `None`. Defaults to `None`.
        data_batch: Global batch of `train_on_batch` or `test_on_batch`, or `None`.
            Defaults to `None`.

    Returns:
        The result of `original`, or `None`.
    """
    if strategy_of(model) is None:
        return original(model, iterator=iterator, data_batch=data_batch)
    if iterator is None:
        spec = keras.tree.map_structure(_spec_of_array, data_batch)
        return _build_for(model, spec)
    dataset = keras_data.distributed_dataset(iterator)
    spec, _ = unwrap_other_rows(tf_data.local_element_spec(dataset))
    checks.check_element(model, spec)
    shapes = [s.shape for s in tf.nest.flatten(spec) if s is not None]
    if any(shape.rank is None for shape in shapes):
        return original(model, iterator=iterator)
    options = getattr(dataset, "read_options", None)
    if options is None or not options.by_weight:
        spec = _of_all_replicas(spec, model.distribute_strategy.num_replicas_in_sync)
    return _build_for(model, spec)


def _build_for(model: Any, spec: Any) -> Any:
    """Build a model for the running loop of Keras from a global batch's spec.

    The result is that of Keras's method, `None`.
    """
    loop = loops.current()
    step = "train_step" if loop is None or loop.trains else "test_step"
    try:
        return keras_model.build_symbolically(model, spec, step)
    except Exception:
        # A model that overrides its step may have no `call`. Its variables are created
        # by running the steps instead.
        if not keras_model.overridden(model):
            if not model.run_eagerly:
                raise
            return keras_model.build_eagerly(model, spec)
    return keras_model.build_by_steps(model, spec)


def _spec_of_array(array: Any) -> tf.TensorSpec | None:
    """Return the spec of an array or tensor of a batch, or `None` for `None`."""
    return None if array is None else tf.TensorSpec(array.shape, array.dtype)


def value_in_symbolic_build(original: Callable, scope: Any, variable: Any) -> Any:
    """Return the value that a `StatelessScope` of Keras keeps for a variable.

    Keras's method `original` finds it. It is `None` if the scope keeps none, and Keras
    then reads the variable. While a model is built symbolically, it is also `None` for
    a tensor from inside of a `tf.function` or a loop that has ended, which the current
    graph cannot read.
    """
    value = original(scope, variable)
    if not keras_model.is_built_symbolically() or not tf.is_symbolic_tensor(value):
        return value
    around = graphs.graphs_around(tf.compat.v1.get_default_graph())
    return value if value.graph in around else None


def _of_all_replicas(spec: Any, num_replicas: int) -> Any:
    """Return the spec of a global batch, given the spec of each replica's batch."""

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
    """Merge the outputs of the replicas at the end of a step: rows, or logs.

    Keras interleaves the rows of several workers in the order of stock sharding. Here
    rows are concatenated in the order of ranks.

    Args:
        original: Callable, the function of Keras. It is called for one replica, and
            outside of Keras's loops.
        values: Nest of per-replica values, the outputs.
        strategy: The strategy of the model.
        reduction: String, `"concat"` if the outputs are rows, as in `predict`. For any
            other value they are logs, and become those of the global batch.

    Returns:
        Nest like `values`, of merged tensors.
    """
    if not is_tfdp(strategy):
        return original(values, strategy, reduction)
    loop, has_one_replica = loops.current(), strategy.num_replicas_in_sync == 1
    if has_one_replica or loop is None:
        reduced = original(values, strategy, reduction)
    elif reduction == "concat":
        reduced = keras.tree.map_structure(
            functools.partial(_join_outputs, strategy), values
        )
    else:
        reduced = merge_logs(strategy, loop.model, values)
    timing.gather()
    return reduced


def _join_outputs(strategy: Any, value: Any) -> Any:
    """Concatenate the rows that all replicas return from a step of `predict`.

    Args:
        strategy: A tfdp strategy.
        value: Per-replica value of dense, ragged or sparse tensors, or of scalars,
            which are the same on all replicas.

    Returns:
        Tensor of the same kind with the rows of all replicas, or the scalar.
    """
    local = strategy.experimental_local_results(value)
    first = local[0]
    if not tf.is_tensor(first) or first.shape.rank == 0:
        return first
    if strategy.extended.worker_group.num_workers == 1:
        return join_rows(list(local))
    if not isinstance(first, (tf.RaggedTensor, tf.SparseTensor)):
        return strategy.gather(value, axis=0)
    parts = [
        strategy.gather(tf_distribute.per_replica(list(part)), axis=0)
        for part in zip(*map(_dense_parts, local), strict=True)
    ]
    if isinstance(first, tf.RaggedTensor):
        return tf.RaggedTensor.from_nested_row_lengths(parts[0], parts[1:])
    indices, values, shapes, counts = parts
    rows_before = tf.cumsum(shapes[:, 0], exclusive=True)
    rows = indices[:, :1] + tf.repeat(rows_before, counts)[:, tf.newaxis]
    num_rows = tf.reduce_sum(shapes[:, 0], keepdims=True)
    shape = tf.concat([num_rows, tf.reduce_max(shapes[:, 1:], axis=0)], axis=0)
    return tf.SparseTensor(tf.concat([rows, indices[:, 1:]], axis=1), values, shape)


def _dense_parts(output: Any) -> list[tf.Tensor]:
    """Return dense tensors of a ragged or sparse one, to join each over the replicas.

    Returns:
        List: the flat values and the row lengths of each ragged axis; or the indices,
        the values, the shape as a row, and the number of values, a vector of one.
    """
    if isinstance(output, tf.RaggedTensor):
        return [output.flat_values, *output.nested_row_lengths()]
    count = tf.shape(output.values)
    return [output.indices, output.values, output.dense_shape[tf.newaxis], count]
