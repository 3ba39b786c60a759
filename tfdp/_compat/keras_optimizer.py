"""The one place that touches private names of TensorFlow and Keras.

Each name says why it is needed. Checked on TensorFlow 2.21.0 with Keras
3.15.1; `tools/test_matrix` runs the tests on the other supported versions.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import random
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src import tree as keras_tree
from keras.src.backend.common import global_state, symbolic_scope
from keras.src.backend.tensorflow import image as keras_image
from keras.src.backend.tensorflow import nn as _keras_nn
from keras.src.backend.tensorflow import optimizer as keras_tf_optimizer
from keras.src.backend.tensorflow import random as keras_random
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.legacy.saving import legacy_h5_format
from keras.src.losses import loss as _keras_loss
from keras.src.optimizers import base_optimizer as keras_base_optimizer
from keras.src.random import seed_generator
from keras.src.saving import saving_lib
from keras.src.trainers import compile_utils
from keras.src.trainers import trainer as keras_base_trainer
from keras.src.utils import rng_utils
from tensorflow.core.function.polymorphism import function_type
from tensorflow.python.data.experimental.ops import distribute as data_distribute
from tensorflow.python.distribute import (
    collective_all_reduce_strategy,
    collective_util,
    cross_device_ops,
    cross_device_utils,
    distribute_lib,
    distribute_utils,
    input_lib,
    mirrored_strategy,
    values,
)
from tensorflow.python.eager import context
from tensorflow.python.framework import (
    auto_control_deps,
    none_tensor,
    ops,
    random_seed,
    smart_cond,
)
from tensorflow.python.framework import device as device_lib
from tensorflow.python.ops import resource_variable_ops, stateful_random_ops
from tensorflow.python.trackable import data_structures
from tensorflow.python.types import distribute as distribute_types

# The strategies derive from the stock extended classes, so that every promise
# of tf.distribute that tfdp does not touch is kept by TensorFlow's own code.
MirroredExtended = mirrored_strategy.MirroredExtended
MultiWorkerExtended = collective_all_reduce_strategy.CollectiveAllReduceExtended
CollectiveAllReduce = cross_device_ops.CollectiveAllReduce
CollectiveKeys = cross_device_utils.CollectiveKeys
CommunicationImplementation = collective_util.CommunicationImplementation
StockOptions = collective_util.Options
MirroredVariable = values.MirroredVariable
SyncOnReadVariable = values.SyncOnReadVariable
PerReplica = values.PerReplica
PerReplicaSpec = values.PerReplicaSpec
# What stands for a None in the spec of a dataset's element.
NoneTensorSpec = none_tensor.NoneTensorSpec
# What Keras and AutoGraph take for distributed input, and what `tf.function`
# takes for an argument that is made of tensors.
DistributedDatasetsFromFunction = input_lib.DistributedDatasetsFromFunction
DistributedIteratorInterface = distribute_types.DistributedIteratorInterface
CompositeTensor = tf.__internal__.CompositeTensor

# Keras classes and modules whose functions tfdp replaces, see `trainer`.
TensorFlowTrainer = keras_trainer.TensorFlowTrainer
TFOptimizer = keras_tf_optimizer.TFOptimizer
BaseOptimizer = keras_base_optimizer.BaseOptimizer
BaseTrainer = keras_base_trainer.Trainer
EpochIterator = keras_trainer.TFEpochIterator
OWN_STEPS = ("train_step", "test_step")
# Modules with the moments of synchronized BatchNormalization, and with the
# division of a loss by the number of replicas.
keras_nn = _keras_nn
keras_loss = _keras_loss
CompileLoss = compile_utils.CompileLoss
# Modules that hold `draw_seed`, from which Dropout and its like take seeds.
KERAS_RANDOM_MODULES = (keras_random, keras_image)
# What writes and reads files, with the model as the first argument.
SAVING_FUNCTIONS = (
    (saving_lib, "save_model"),
    (saving_lib, "save_weights_only"),
    (legacy_h5_format, "save_model_to_hdf5"),
)
LOADING_FUNCTIONS = ((saving_lib, "load_weights_only"),)


def replace(owner: Any, name: str, wrapper: Callable) -> None:
    """Replaces a function of Keras by one that falls back on the original.

    Keras has no hook in these places. The replacement is called with the
    original first and hands over to it whenever no tfdp strategy is involved.
    It is installed once, however often this is called.

    Args:
        owner: Module or class that holds the function.
        name: String, the function's name.
        wrapper: Callable, `wrapper(original, *args, **kwargs)`.
    """
    original = getattr(owner, name)
    if getattr(original, "_tfdp_wrapper", None) is wrapper:
        return

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    replacement.__name__ = name
    replacement.__qualname__ = getattr(original, "__qualname__", name)
    replacement.__doc__ = original.__doc__
    replacement.__wrapped__ = original  # type: ignore[attr-defined]
    replacement._tfdp_wrapper = wrapper  # type: ignore[attr-defined]
    setattr(owner, name, replacement)


def hash_function_types_once() -> None:
    """Lets a call of a `tf.function` cost the same for many variables as for few.

    TensorFlow looks a traced function up by a type that names everything that
    the function captures, and hashes it all at every call, once or twice for
    each variable. The types are immutable: TensorFlow keeps other values that
    it derives from them in the same way.
    """
    replace(function_type.FunctionType, "__hash__", _hash_once)


def _hash_once(original: Callable, signature: Any) -> int:
    found = getattr(signature, "_tfdp_hash", None)
    if found is None:
        found = signature._tfdp_hash = original(signature)
    return found


@contextlib.contextmanager
def variable_classes(mapping: dict) -> Iterator[None]:
    """Lets the stock creator of mirrored variables make ours instead.

    It takes the classes from a constant of its module.
    """
    stock = distribute_utils.VARIABLE_CLASS_MAPPING
    distribute_utils.VARIABLE_CLASS_MAPPING = mapping
    try:
        yield
    finally:
        distribute_utils.VARIABLE_CLASS_MAPPING = stock


def local_replica_id(replica_context: Any) -> int:
    """Index of a replica among those of this process."""
    return replica_context._replica_id


def plain_variable(value: Any, dtype: tf.DType, device: str, shape: Any = None) -> Any:
    """A variable that no strategy mirrors, also inside a strategy's scope."""
    with ops.init_scope(), ops.device(device):
        return resource_variable_ops.ResourceVariable(
            value, dtype=dtype, shape=shape, trainable=False
        )


def ordering_token(device: str) -> Any:
    """The resource by which automatic control dependencies order collectives.

    With no token, collectives on two devices of one process are chained one
    after the other, each waits for the other, and the step never ends.
    """
    return plain_variable(0.0, tf.float32, device)


def root_graph() -> Any:
    """The outermost function being traced: what one call executes.

    Branches and loop bodies are graphs of their own; collectives in them must
    not get the key of one outside.
    """
    graph = ops.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None and getattr(
        graph.outer_graph, "building_function", False
    ):
        graph = graph.outer_graph
    return graph


def as_one_operation(function: Callable) -> Any:
    """Calls a function as one operation of the graph, which TensorFlow takes whole.

    Where a branch is not taken, each of its operations is passed over by itself, which
    takes time; a call that is not inlined is one.
    """
    if tf.executing_eagerly():
        return function()
    attributes = {"_noinline": True}
    return tf.function(function, autograph=False, experimental_attributes=attributes)()


def op_age(op: tf.Operation) -> int:
    """When an operation was added to its graph: after what it is made of."""
    return op._id


def called_graphs(op: tf.Operation) -> list:
    """The graphs of the function that an operation calls, or of its two branches."""
    attributes = op.node_def.attr
    names = [n for n in ("f", "then_branch", "else_branch") if n in attributes]
    functions = [op.graph._get_function(attributes[name].func.name) for name in names]
    return [getattr(function, "graph", None) for function in functions]


def is_pure(op: tf.Operation) -> bool:
    """Whether an operation has no state, no effect and no function inside."""
    has_function = any(value.HasField("func") for value in op.node_def.attr.values())
    return not has_function and not auto_control_deps.op_is_stateful(op)


def copy_of_operation(op: tf.Operation, inputs: list) -> list:
    """The outputs of an operation like another one, on other inputs."""
    attributes = {
        name: value
        for name, value in op.node_def.attr.items()
        if not name.startswith("_")
    }
    graph = ops.get_default_graph()
    dtypes = [output.dtype for output in op.outputs]
    copy = graph.create_op(op.type, inputs, dtypes, attrs=attributes, op_def=op.op_def)
    return list(copy.outputs)


def op_position(tensor: tf.Tensor) -> int:
    """When the operation that makes `tensor` was added to the graph."""
    return op_age(tensor.op)


def is_built_symbolically() -> bool:
    """Whether Keras only asks for shapes, as when it builds a model from a batch."""
    return symbolic_scope.in_symbolic_scope()


def constant_value(tensor: tf.Tensor) -> Any:
    """The value of a tensor that is known while a graph is traced, or `None`.

    `tf.get_static_value` looks through fewer operations: not through a slice of a
    shape, say.
    """
    return smart_cond.smart_constant_value(tensor)


def in_replica_thread() -> bool:
    """Whether this thread runs one replica's part of `strategy.run`."""
    context_ = tf.distribute.get_replica_context()
    return context_ is not None and tf.distribute.has_strategy()


def in_loop_of_replica() -> bool:
    """Whether a loop that began inside a replica's function is being traced."""
    entry = getattr(threading.current_thread(), "graph", None)
    graph = ops.get_default_graph()
    while graph is not None and graph is not entry:
        if type(graph).__name__ == "WhileBodyFuncGraph":
            return entry is not None
        graph = getattr(graph, "outer_graph", None)
    return False


def is_context_initialized() -> bool:
    """Whether TensorFlow has its devices, so that they can't be changed."""
    return context.context()._initialized


def configure_coordination_service(**config: Any) -> None:
    """Sets the coordination service up, with limits that stock leaves out."""
    context.context().configure_coordination_service(**config)


def coordinated_jobs(num_tasks: dict[str, int]) -> list:
    """The jobs whose tasks the coordination service expects."""
    return [
        collective_all_reduce_strategy.coordination_config_pb2.CoordinatedJob(
            name=name, num_tasks=count
        )
        for name, count in num_tasks.items()
    ]


def set_key_value(key: str, value: str) -> None:
    """Publishes a value in the cluster's coordination service."""
    context.context().set_config_key_value(key, value)


def get_key_value(key: str, timeout_seconds: float) -> str:
    """Waits for a value in the cluster's coordination service.

    Raises:
        tf.errors.DeadlineExceededError: If nobody published it in time.
    """
    milliseconds = max(1, int(timeout_seconds * 1000))
    return context.context().get_config_key_value(key, milliseconds)


def delete_key_value(key: str) -> None:
    """Removes a value, or all below a key, from the coordination service."""
    context.context().delete_config_key_value(key)


def abort_collectives(text: str) -> None:
    """Ends all collectives of this process with an error, now and from now on.

    A collective that waits for a worker that stands still would never end.
    """
    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, text)


def remove_generated_files() -> None:
    """Removes the files of AutoGraph, as TensorFlow does when a process ends by itself.

    Their names are those of `tensorflow.python.autograph.pyct.loader.load_source`.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("__autograph_generated_file"):
            with contextlib.suppress(OSError, TypeError):
                os.unlink(module.__file__ or "")


def random_state() -> str:
    """The state from which TensorFlow's unseeded operations take their seeds."""
    rng = getattr(context.context(), "_rng", None)  # set by set_random_seed
    return repr((context.global_seed(), rng.getstate() if rng else None))


@contextlib.contextmanager
def temporary_seed(seed: int) -> Iterator[None]:
    """Sets TensorFlow's global seed and puts the user's back afterwards."""
    eager = context.context()
    names = ("_seed", "_rng")
    before = {name: getattr(eager, name) for name in names if hasattr(eager, name)}
    tf.random.set_seed(seed)
    try:
        yield
    finally:
        vars(eager).update(before)


def global_seed() -> int | None:
    """The seed of `tf.random.set_seed`, or `None`."""
    return context.global_seed()


# The global seed of this process that stands in for one of the user's, if any.
_stand_in: list[int] = []


def stand_in_seed() -> int | None:
    """The seed of `set_stand_in_seed` that was set last, or `None`."""
    return _stand_in[-1] if _stand_in else None


def set_stand_in_seed(seed: int) -> None:
    """Sets a global seed that changes only what has no seed of its own.

    With a global seed TensorFlow takes both, so that operations with a seed would
    draw other numbers than where the user has set no global one.
    """
    replace(random_seed, "get_seed", _seeds_of_operation)
    _stand_in[:] = [seed]
    tf.random.set_seed(seed)


def _seeds_of_operation(original: Callable, op_seed: Any) -> Any:
    seeds = original(op_seed)
    if op_seed is not None and seeds[0] == stand_in_seed():
        return random_seed.DEFAULT_GRAPH_SEED, seeds[1]
    return seeds


def tensorflow_random_state() -> dict[str, Any]:
    """TensorFlow's global seed and what it draws the seeds of operations from."""
    rng = getattr(context.context(), "_rng", None)  # set by set_random_seed
    generator = getattr(stateful_random_ops, "global_generator", None)
    seed = context.global_seed()
    return {
        "seed": seed,
        "stands_in": seed is not None and seed == stand_in_seed(),
        "rng": None if rng is None else rng.getstate(),
        "generator": None if generator is None else generator.state.numpy().tolist(),
    }


def set_tensorflow_random_state(state: dict[str, Any]) -> None:
    """Sets what `tensorflow_random_state` returned, also after JSON."""
    eager = context.context()
    if state.get("stands_in"):
        set_stand_in_seed(state["seed"])
    vars(eager)["_seed"] = state["seed"]
    if state["rng"] is not None:
        version, words, gauss = state["rng"]
        rng = getattr(eager, "_rng", None) or random.Random()
        rng.setstate((version, tuple(words), gauss))
        vars(eager)["_rng"] = rng
    if state["generator"] is not None:
        generator = tf.random.get_global_generator()
        generator.state.assign(tf.constant(state["generator"], generator.state.dtype))


def keras_global_seed() -> int | None:
    """The seed of `keras.utils.set_random_seed`, or `None`."""
    return rng_utils.get_random_seed()


def set_keras_global_seed(seed: int) -> None:
    """What `keras.utils.set_random_seed` does to Keras's own generator."""
    global_state.set_global_attribute(rng_utils.GLOBAL_RANDOM_SEED, seed)
    global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, None)


def keras_seed_state() -> list[int] | None:
    """The state of the generator that layers without a seed draw from, if it is."""
    found = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    return None if found is None else np.asarray(found.state.numpy()).tolist()


def set_keras_seed_state(state: list[int] | None) -> None:
    """Sets what `keras_seed_state` returned."""
    if state is not None:
        own = seed_generator.global_seed_generator().state
        own.assign(np.asarray(state, own.dtype))


def num_local_devices(kind: str) -> int:
    """How many logical devices this process has itself.

    Under a cluster `tf.config.list_logical_devices` lists those of all workers.
    """
    server = getattr(context.context(), "_collective_ops_server_def", None)
    specs = [
        device_lib.DeviceSpec.from_string(device.name)
        for device in tf.config.list_logical_devices(kind)
    ]
    if server is None:
        return len(specs)
    own = (server.job_name, server.task_index)
    return sum((spec.job, spec.task) == own for spec in specs)


def device_type(device: str) -> str:
    """`"CPU"` or `"GPU"`."""
    return device_lib.DeviceSpec.from_string(device).device_type or "CPU"


def dataset_batch_size(dataset: tf.data.Dataset) -> int:
    """The batch size of a dataset, or -1 where it has none that shows."""
    try:
        return int(data_distribute.compute_batch_size(dataset))
    except IndexError:  # TensorFlow asks scalars for their rows
        return -1


def dataset_inputs(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """A dataset and all that it is made of."""
    yield dataset
    for source in dataset._inputs():
        yield from dataset_inputs(source)


def shuffle_seeds(dataset: tf.data.Dataset) -> list[tuple[int, int]]:
    """The seeds of every `Dataset.shuffle` in a dataset, (0, 0) for none."""
    return [
        (int(part._seed), int(part._seed2))
        for part in dataset_inputs(dataset)
        if type(part).__name__ == "_ShuffleDataset"
    ]


def without_partial_batches(dataset: Any) -> Any:
    """Marks a distributed dataset of which every replica has equally many batches.

    Stock asks all workers at every step whether anybody has data left. Where
    all know the number of batches beforehand the answer is known too.
    """
    dataset._enable_get_next_as_optional = False
    return dataset


def asks_for_more(dataset: Any) -> bool:
    """Whether workers ask each other for more data, in a dataset of TensorFlow's."""
    return dataset._enable_get_next_as_optional


def that_asks(dataset: Any) -> Any:
    """A copy of a distributed dataset of TensorFlow's whose workers ask for more data.

    A worker with an endless dataset does not ask, while one whose data ends does.
    """
    changed = copy.copy(dataset)
    changed._enable_get_next_as_optional = True
    changed._cardinality = tf.data.UNKNOWN_CARDINALITY
    return changed


def strategy_of_iterator(iterator: Any) -> Any:
    """The strategy of a distributed iterator of TensorFlow's."""
    return iterator._strategy


def optionals_of_replicas(iterator: Any) -> list[list]:
    """The next element of each local replica, or none, without asking other workers.

    Returns:
        List of lists of optionals, one list for each device that reads.
    """
    devices = iterator._input_workers.worker_devices
    found = []
    for device, local in zip(devices, iterator._iterators, strict=True):
        with ops.device(device):
            found.append(local.get_next_as_optional_list())
    return found


def any_has_value(optionals: list[list]) -> tf.Tensor:
    """Whether one of the optionals of `optionals_of_replicas` has a value."""
    with ops.device("/device:CPU:0"):
        flat = [part.has_value() for parts in optionals for part in parts]
        return tf.reduce_any(tf.stack(flat))


def values_or_empty(iterator: Any, optionals: list[list]) -> Any:
    """The values of `optionals_of_replicas` as one batch, empty where there is none."""
    workers = iterator._input_workers
    found = input_lib._get_value_or_dummy(workers, optionals, produce_dummy=True)
    if getattr(iterator, "_replica_order", None) is not None:
        found = iterator._reorder_replicas(found)
    return input_lib._create_per_replica(found, iterator._strategy)


def select_replica(replica: int, structure: Any) -> Any:
    """What one local replica gets of a nest of distributed values."""
    return distribute_utils.select_replica(replica, structure)


def per_replica(local_values: list, *, always_wrap: bool = False) -> Any:
    """One value per local replica as tf.distribute's own container."""
    return distribute_utils.regroup(tuple(local_values), always_wrap=always_wrap)


def type_spec_of(value: Any) -> Any:
    """The spec of a value that is made of tensors."""
    return value._type_spec


def empty_optional(spec: Any) -> Any:
    """An optional of a spec that holds nothing."""
    return tf.experimental.Optional.empty(spec._element_spec)


def local_dataset(distributed: Any) -> tf.data.Dataset:
    """The dataset that this worker reads for a distributed one."""
    return distributed._cloned_datasets[0]


def local_element_spec(dataset: Any) -> Any:
    """The spec of the first local replica's share of a distributed dataset.

    None where an element has it, or an empty optional, as Keras's generators do.
    """

    def first(spec: Any) -> Any:
        if isinstance(spec, values.PerReplicaSpec):
            spec = spec._value_specs[0]
        is_none = isinstance(spec, (tf.OptionalSpec, NoneTensorSpec))
        return None if is_none else spec

    return keras_tree.map_structure(first, dataset.element_spec)


def distributed_dataset(epoch_iterator: Any) -> Any:
    """The distributed dataset behind one of Keras's epoch iterators."""
    return epoch_iterator._distributed_dataset


def set_distributed_dataset(epoch_iterator: Any, dataset: Any) -> None:
    """Lets an epoch iterator of Keras read another distributed dataset."""
    epoch_iterator._distributed_dataset = dataset


def holds_arrays(adapter: Any) -> bool:
    """Whether Keras's adapter holds arrays, of which it knows the length."""
    return hasattr(adapter, "_inputs")


def shuffles_arrays(adapter: Any) -> bool:
    """Whether Keras's adapter shuffles arrays that it holds."""
    return bool(getattr(adapter, "_shuffle", False)) and holds_arrays(adapter)


def set_dataset_of_epoch(epoch_iterator: Any, make: Callable) -> None:
    """Lets an epoch iterator of Keras ask for its dataset at each epoch."""
    epoch_iterator._get_iterator = make


def dataset_maker(epoch_iterator: Any) -> Callable:
    """What an epoch iterator of Keras asks for its dataset at each epoch."""
    return epoch_iterator._get_iterator


def source_of(adapter: Any) -> Any:
    """What a data adapter of Keras reads: arrays, a dataset, or the user's object."""
    for name in ("_inputs", "_dataset", "py_dataset", "generator"):
        found = getattr(adapter, name, None)
        if found is not None:
            return found
    return adapter


def epoch_progress(epoch_iterator: Any) -> dict[str, Any]:
    """How far an epoch iterator of Keras has counted, between two epochs."""
    return {
        "steps_seen": epoch_iterator._steps_seen,
        "num_batches": epoch_iterator._num_batches,
    }


def set_epoch_progress(
    epoch_iterator: Any, progress: dict[str, Any], current: Any
) -> None:
    """Sets what `epoch_progress` returned, and the iterator that an epoch goes on with.

    Keras makes one for each epoch, but goes on with one where `steps_per_epoch` is
    given.
    """
    epoch_iterator._steps_seen = progress["steps_seen"]
    if epoch_iterator._num_batches is None:
        epoch_iterator._num_batches = progress["num_batches"]
    epoch_iterator._current_iterator = current


def operations_in(dataset: tf.data.Dataset) -> Iterator[tuple[str, Any]]:
    """The operations in the functions that a dataset calls, such as those of `map`.

    Yields:
        Pairs of the type of an operation and its attributes by name.
    """
    for part in dataset_inputs(dataset):
        for function in part._functions():
            graph = function.function.graph.as_graph_def()
            libraries = [nested.node_def for nested in graph.library.function]
            for node in itertools.chain(graph.node, *libraries):
                yield node.op, node.attr


def without_automatic_prefetch(
    dataset: tf.data.Dataset,
) -> tuple[tf.data.Dataset, bool]:
    """A dataset without a last `prefetch(AUTOTUNE)`, and whether it had one."""
    if type(dataset).__name__ != "_PrefetchDataset":
        return dataset, False
    if tf.get_static_value(dataset._buffer_size) != tf.data.AUTOTUNE:
        return dataset, False
    return dataset._input_dataset, True


def kinds_of_parts(dataset: tf.data.Dataset) -> list[str]:
    """The class names of a dataset and all that it is made of, from the last on."""
    return [type(part).__name__.strip("_") for part in dataset_inputs(dataset)]


def unseeded_parts(dataset: tf.data.Dataset) -> list[str]:
    """The class names of what draws at random in a dataset, without a seed."""
    return [
        type(part).__name__.strip("_")
        for part in dataset_inputs(dataset)
        if hasattr(part, "_seed2") and (int(part._seed), int(part._seed2)) == (0, 0)
    ]


def is_unordered(dataset: tf.data.Dataset) -> bool:
    """Whether elements may come in another order each time, for speed."""
    return dataset.options().deterministic is False or any(
        getattr(part, "_deterministic", None) == "false"
        for part in dataset_inputs(dataset)
    )


def reshuffles(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset has another order each time that it is iterated over."""
    return any(
        type(part).__name__ == "_ShuffleDataset" and part._reshuffle_each_iteration
        for part in dataset_inputs(dataset)
    )


def build_symbolically(model: Any, data_batch: Any) -> None:
    """Builds model, metrics and optimizer from the shapes of a batch."""
    with model.distribute_strategy.scope():
        model._symbolic_build(data_batch=data_batch)


@contextlib.contextmanager
def ordered_by_itself() -> Iterator[None]:
    """Side effects that a replica traces wait for its own, not for another's.

    TensorFlow runs operations with side effects and no resource, such as `Assert`, in
    the order in which they are traced. Replicas are traced one after the other: the
    first of the second would wait for the last of the first, and that one may wait for
    a collective in which the second has still to take part.
    """
    graph = ops.get_default_graph()
    manager = graph.experimental_acd_manager
    first = len(graph.get_operations())
    yield
    if manager is None:
        return
    previous = None
    for op in graph.get_operations()[first:]:
        if not _is_ordered_by_tracing(op):
            continue
        manager.run_independently(op)
        if previous is not None:
            op._add_control_input(previous)
        previous = op


def _is_ordered_by_tracing(op: Any) -> bool:
    uses_a_resource = any(tensor.dtype == tf.resource for tensor in op.inputs)
    is_in_a_branch = op._control_flow_context is not None
    is_plain = not uses_a_resource and not is_in_a_branch
    return is_plain and auto_control_deps.op_is_stateful(op)


def build_by_steps(model: Any, data_batch: Any) -> None:
    """Builds the layers that steps of the user's own call, where any is unbuilt.

    Else replicas would build them while the step is traced, each in its thread, and
    TensorFlow would initialize them in a branch of the step.
    """
    layers = model._flatten_layers(include_self=False)
    if all(layer.built for layer in layers):
        return
    batch = keras.tree.map_structure(
        lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name), data_batch
    )
    # An optimizer has no replica to update here, and its error is no news; the
    # variables that were asked for so far are made at the end all the same.
    for name in overridden(model):
        with model.distribute_strategy.scope(), contextlib.suppress(Exception):
            keras_backend.compute_output_spec(getattr(model, name), batch)


def overridden(model: Any, names: tuple[str, ...] = OWN_STEPS) -> list[str]:
    """Which of Keras's functions a model, or its class, has of its own."""
    return [
        name
        for name in names
        if getattr(getattr(model, name), "__func__", None)
        is not getattr(TensorFlowTrainer, name)
    ]


def strategy_of(model: Any) -> Any:
    """The strategy in whose scope a model was made, or `None`."""
    return getattr(model, "_distribute_strategy", None)


def rehome_optimizer(optimizer: Any, strategy: Any) -> None:
    """Moves an optimizer that was made outside the scope into it, in place.

    Its variables are its counter and its learning rate; slots are not built
    yet. The user's own handle stays valid.
    """
    optimizer._distribution_strategy = strategy
    for variable in optimizer.variables:
        rehome_variable(variable)
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        rehome_optimizer(inner, strategy)
    for part in getattr(optimizer, "optimizers", []):
        rehome_optimizer(part, strategy)


def rehome_variable(variable: Any) -> None:
    """Makes a Keras variable again in the strategy's scope that is in force."""
    if not isinstance(variable.value, values.DistributedVariable):
        value = variable.numpy()
        variable._initialize(value)


def is_optimizer_of(optimizer: Any, strategy: Any) -> bool:
    """Whether an optimizer was made in a strategy's scope."""
    return getattr(optimizer, "_distribution_strategy", None) is strategy


def stock_initial_value(
    extended: Any, replica_id: int, device: Any, primary: Any, **kwargs: Any
) -> Any:
    """The initial value of a mirrored variable, with no broadcast to workers."""
    return MirroredExtended._get_variable_creator_initial_value(
        extended, replica_id, device, primary, **kwargs
    )


def initial_epoch(model: Any) -> int:
    """The epoch at which a restored model goes on, see BackupAndRestore."""
    return int(getattr(model, "_initial_epoch", 0) or 0)


def set_initial_epoch(model: Any, epoch: int) -> None:
    """Sets what `initial_epoch` reads."""
    model._initial_epoch = epoch


def stand_in(optimizer: Any, **attributes: Any) -> Any:
    """An optimizer that shares all state with another, but for some attributes.

    Keras's update reads the learning rate and the slots from the optimizer
    itself. A stand-in is how one update sees others, while the user's stays as
    it is.
    """
    copy = object.__new__(type(optimizer))
    vars(copy).update(vars(optimizer))
    vars(copy).update(attributes)
    return copy


def with_rate(optimizer: Any, rate: Any) -> Any:
    """A stand-in whose learning rate is a tensor."""
    return stand_in(optimizer, _learning_rate=rate)


def with_counter_read(optimizer: Any) -> Any:
    """A stand-in whose number of updates is a tensor, read once.

    A variable is read again for each variable that is updated, and TensorFlow
    cannot know that what follows, the powers of Adam's betas, say, is the same.
    """
    count = local_part(optimizer._iterations).read_value()
    return stand_in(optimizer, _iterations=count)


def with_slots(optimizer: Any, variable: Any, slots: dict[str, list]) -> Any:
    """A stand-in that was built for one variable, with these slots."""
    indices = {optimizer._var_key(variable): 0}
    return stand_in(optimizer, _trainable_variables_indices=indices, **slots)


def as_accumulating(optimizer: Any, steps: int, variables: list | None) -> Any:
    """A stand-in that looks as if Keras accumulated, with these variables."""
    view = stand_in(optimizer, gradient_accumulation_steps=steps)
    if variables is not None:
        vars(view)["_variables"] = variables
    return view


def with_fixed_scale(optimizer: Any, scale: float) -> Any:
    """A stand-in with a `loss_scale_factor`."""
    view = stand_in(optimizer)
    name = "_loss_scale_factor" if "_inner_optimizers" in vars(view) else None
    vars(view)[name or "loss_scale_factor"] = scale
    return view


def set_trained(optimizer: Any, variables: list) -> None:
    """Tells an optimizer what it trains, without making variables for it."""
    indices = {optimizer._var_key(v): index for index, v in enumerate(variables)}
    # Not by attribute: Keras would track the model's variables as the optimizer's.
    vars(optimizer)["_trainable_variables_indices"] = indices
    vars(optimizer)["_trainable_variables"] = list(variables)
    optimizer.built = True


def is_one_device(strategy: Any) -> bool:
    """Whether a strategy is none, or of a single device without replicas."""
    default = distribute_lib._get_default_strategy()
    is_default = type(strategy) is type(default)
    return is_default or isinstance(strategy, tf.distribute.OneDeviceStrategy)


def finalize_averages(optimizer: Any, variables: Any) -> None:
    """Gives variables their averages; Keras fails if some have been frozen."""
    averages = optimizer._model_variables_moving_average
    keys = optimizer._trainable_variables_indices
    for variable in variables:
        index = keys.get(optimizer._var_key(variable))
        if index is not None and averages[index] is not None:
            optimizer._distribution_strategy.extended.update(
                variable.value, lambda a, b: a.assign(b), args=(averages[index].value,)
            )


def slots_of(optimizer: Any) -> dict[str, list]:
    """The lists of slot variables of a built optimizer, by attribute name."""
    count = len(optimizer._trainable_variables)
    skipped = ("_trainable_variables", "_variables", "_accumulated_gradients")
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, list)
        and name not in skipped
        and 0 < count == len(value)
        and any(isinstance(item, keras.Variable) for item in value)
    }


def index_in(optimizer: Any, variable: Any) -> int:
    """The position of a variable among those that an optimizer was built for."""
    return optimizer._get_variable_index(variable)


def check_known(optimizer: Any, variables: list) -> None:
    """Raises Keras's error for variables that an optimizer was not built for."""
    optimizer._check_variables_are_known(variables)


def trained_by(optimizer: Any) -> list:
    """The variables that an optimizer was built for."""
    return list(optimizer._trainable_variables)


def inner_index(multi_optimizer: Any, variable: Any) -> int:
    """Which inner optimizer of a `MultiOptimizer` a variable belongs to."""
    return multi_optimizer._var_to_optimizer_idx[multi_optimizer._var_key(variable)]


def uses_weight_decay(optimizer: Any, variable: Any) -> bool:
    """Whether an optimizer decays a variable, given as its local part."""
    decays = optimizer.weight_decay is not None
    return decays and optimizer._use_weight_decay(variable)


def without_missing(optimizer: Any, gradients: list, variables: list) -> tuple:
    """Drops variables that have no gradient; warns, or raises if all have none."""
    return optimizer._filter_empty_gradients(gradients, variables)


def clip_gradients(optimizer: Any, gradients: list) -> list:
    """Clips as an optimizer was asked to."""
    return optimizer._clip_gradients(gradients)


def apply_weight_decay(optimizer: Any, variables: list) -> None:
    """Decays variables as an optimizer was asked to."""
    optimizer._apply_weight_decay(variables)


def update_variables(
    optimizer: Any, gradients: list, variables: list, learning_rate: Any
) -> None:
    """Runs an optimizer's own update on variables."""
    optimizer._backend_update_step(gradients, variables, learning_rate)


def update_moving_average(optimizer: Any) -> None:
    """Moves an optimizer's averages of the variables towards their values."""
    optimizer._update_model_variables_moving_average(optimizer._trainable_variables)


def move_averages(optimizer: Any, variables: list) -> None:
    """The same for variables that stand for those that it was built for."""
    optimizer._update_model_variables_moving_average(variables)


def overwrite_with_moving_average(optimizer: Any) -> None:
    """Gives the variables the values of an optimizer's averages."""
    optimizer._overwrite_model_variables_with_average_value(
        optimizer._trainable_variables
    )


def count_update(optimizer: Any, count: Any) -> None:
    """Adds to the number of updates that an optimizer has made."""
    optimizer._iterations.assign_add(count)


def local_part(variable: Any) -> Any:
    """The `tf.Variable` of the replica that is running."""
    variable = getattr(variable, "value", variable)
    if callable(variable):  # a tf.Variable's `value` is a method
        variable = variable.__self__
    if isinstance(variable, values.DistributedVariable):
        return variable._get_replica(local_replica_id_in_force())
    return variable


def local_replica_id_in_force() -> int:
    """Index of the replica that is running among those of this process."""
    return tf.distribute.get_replica_context()._replica_id


def strategy_of_optimizer(optimizer: Any) -> Any:
    """The strategy in whose scope an optimizer was made, or the default one."""
    return getattr(optimizer, "_distribution_strategy", None) or (
        tf.distribute.get_strategy()
    )


@contextlib.contextmanager
def scope_of_optimizer(optimizer: Any) -> Iterator[None]:
    """The scope of an optimizer's strategy, entered where it is not in force."""
    strategy = strategy_of_optimizer(optimizer)
    if tf.distribute.get_strategy() is strategy:
        yield
    else:
        with strategy.scope():
            yield


def own_variables(optimizer: Any) -> list:
    """An optimizer's variables without those of inner optimizers, in file order."""
    return list(optimizer._variables)


def num_variables_before_accumulators(optimizer: Any) -> int:
    """How many of an optimizer's variables Keras makes before the accumulators.

    The counter, the learning rate where it is a variable, the averages.
    """
    averages = getattr(optimizer, "_model_variables_moving_average", [])
    has_rate = isinstance(optimizer._learning_rate, keras.Variable)
    has_averages = optimizer.use_ema
    count = sum(v is not None for v in averages) if has_averages else 0
    return 1 + has_rate + count


def untrack(optimizer: Any, variables: list) -> None:
    """Takes variables out of an optimizer's list of them.

    TensorFlow saves and exports no list that has lost an element, so that a new
    list takes the place of Keras's.
    """
    for variable in variables:
        optimizer._untrack_variable(variable)
    kept = data_structures.sticky_attribute_assignment(
        trackable=optimizer, name="_variables", value=list(optimizer._variables)
    )
    vars(optimizer)["_variables"] = kept
    is_variable, _ = optimizer._tracker.config["variables"]
    optimizer._tracker.config["variables"] = (is_variable, kept)


def take_accumulators(optimizer: Any) -> list:
    """Removes the gradient accumulators from a built optimizer and returns them."""
    sums = list(optimizer._accumulated_gradients)
    untrack(optimizer, [variable for variable in sums if variable is not None])
    optimizer._accumulated_gradients = []
    return sums


def accumulators(optimizer: Any) -> list:
    """The gradient accumulators of a built optimizer."""
    return [v for v in optimizer._accumulated_gradients if v is not None]


def has_accumulators(optimizer: Any) -> bool:
    """Whether an optimizer was built with gradient accumulators."""
    return bool(getattr(optimizer, "_accumulated_gradients", None))


def sum_of_local_parts(variable: Any, num_replicas: int) -> Any:
    """The sum over all replicas of a variable of which each has its own value.

    Those of other workers are taken to be alike on the average.
    """
    value = variable.value
    if not isinstance(value, values.DistributedVariable):
        return variable.numpy()
    parts = value.values
    local = sum(part.numpy().astype("float64") for part in parts)
    return (local * (num_replicas / len(parts))).astype(parts[0].dtype.as_numpy_dtype)


def copy_local_parts(source: Any, target: Any, factor: float) -> None:
    """Gives each replica's part of a variable a multiple of another's part."""
    pairs = [(source.value, target.value)]
    if isinstance(target.value, values.DistributedVariable):
        pairs = list(zip(source.value.values, target.value.values, strict=True))
    for old, new in pairs:
        new.assign(tf.cast(old, new.dtype) * tf.cast(factor, new.dtype))


@contextlib.contextmanager
def outside_strategies() -> Iterator[None]:
    """Leaves the scope of every strategy, so that variables are plain ones."""
    default = distribute_lib._get_default_replica_mode()
    distribute_lib._push_per_thread_mode(default)
    try:
        # The creators of the strategy's scope stay in force; this one goes first.
        with tf.variable_creator_scope(_create_plain_variable):
            yield
    finally:
        distribute_lib._pop_per_thread_mode()


def _create_plain_variable(next_creator: Callable, **kwargs: Any) -> Any:
    del next_creator
    accepted = ("initial_value", "trainable", "dtype", "name", "shape", "aggregation")
    return resource_variable_ops.ResourceVariable(
        **{name: kwargs.get(name) for name in accepted if name in kwargs}
    )


def loss_scale_optimizer(
    optimizer: Any, *, initial_scale: float, growth_steps: int, counters: Any
) -> Any:
    """A `LossScaleOptimizer` around an optimizer, with counters that exist already.

    Building one would build the inner optimizer again.
    """
    with outside_strategies():
        outer = keras.optimizers.LossScaleOptimizer(
            stand_in(optimizer),
            initial_scale=initial_scale,
            dynamic_growth_steps=growth_steps,
        )
    if counters is not None:
        outer.step_counter, outer.dynamic_scale = counters
        outer.built = True
    return outer


def multi_with_parts(optimizer: Any, views: dict[int, Any], counter: Any) -> Any:
    """A `MultiOptimizer` with other optimizers in the place of its own.

    `counter` stands for its own counter, or is `None`.
    """
    old = optimizer._optimizer_map
    new = old
    if hasattr(old, "default_optimizer"):
        new = keras.optimizers.OptimizerMap(
            views[id(old.default_optimizer)],
            {name: views[id(part)] for name, part in old.items()},
        )
    parts = [views[id(part)] for part in optimizer.optimizers]
    own = list(optimizer._variables)
    if counter is not None:
        own[0] = counter
    return stand_in(
        optimizer, _optimizer_map=new, _inner_optimizers=parts, _variables=own
    )


@contextlib.contextmanager
def replaced_optimizer(model: Any, optimizer: Any) -> Iterator[None]:
    """Lets a model and its compile arguments show another optimizer."""
    own = model.optimizer
    config = getattr(getattr(model, "_compile_config", None), "config", {})
    compiled_with = config.get("optimizer")
    model.__dict__["optimizer"] = optimizer
    config["optimizer"] = optimizer
    try:
        yield
    finally:
        model.__dict__["optimizer"] = own
        config["optimizer"] = compiled_with


def rate_variable(optimizer: Any) -> Any:
    """An optimizer's learning rate, where that is a variable."""
    return optimizer._learning_rate


def has_rate_variable(optimizer: Any) -> bool:
    """Whether an optimizer's learning rate is a variable, and no schedule."""
    return isinstance(optimizer._learning_rate, keras.Variable)


# Optimizers whose state is spread over replicas, see `tfdp.sharding`.


def plain_clone(optimizer: Any) -> Any:
    """An optimizer like another, not built and of no strategy."""
    config = optimizer.get_config()
    with outside_strategies():
        return type(optimizer).from_config(config)


def with_local_value(variable: Any, replica: int) -> Any:
    """A Keras variable that shows only the part of one local replica."""
    value = variable.value if hasattr(variable, "path") else variable
    if isinstance(value, values.DistributedVariable):
        value = value.values[replica]
    if not isinstance(variable, keras.Variable):
        return value
    copy = object.__new__(type(variable))
    vars(copy).update(vars(variable))
    vars(copy)["_value"] = value
    return copy


def is_on(variable: Any, device: str) -> bool:
    """Whether a Keras variable of one replica lies on a device."""
    own = device_lib.DeviceSpec.from_string(variable.value.device)
    asked = device_lib.DeviceSpec.from_string(device)
    return (own.device_type, own.device_index) == (
        asked.device_type,
        asked.device_index,
    )


def copy_of(variable: Any) -> Any:
    """A Keras variable of the same path and value, where the scope in force says."""
    # Weight decay looks at the name of the `tf.Variable`.
    copy = keras.Variable(
        variable.value.read_value(), dtype=variable.dtype, name=variable.name
    )
    for name in ("_name", "_path", "trainable", "constraint"):
        if hasattr(variable, name):
            vars(copy)[name] = getattr(variable, name)
    return copy


def decay_alike(optimizer: Any, copy: Any, variable: Any) -> None:
    """Lets an optimizer exclude a copy from weight decay where it does the variable."""
    excluded = set(getattr(optimizer, "_exclude_from_weight_decay", ()))
    if optimizer._var_key(variable) in excluded:
        excluded.add(optimizer._var_key(copy))
        vars(optimizer)["_exclude_from_weight_decay"] = excluded


def local_value(variable: Any, replica: int) -> Any:
    """The `tf.Variable` of one local replica, outside a step."""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    if isinstance(value, values.DistributedVariable):
        return value.values[replica]
    return value


def elements_of(variable: Any, start: int, stop: int) -> Any:
    """Some elements of a flattened variable, or of what can be read like one."""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    if isinstance(value, values.DistributedVariable):
        value = value._primary
    if not hasattr(value, "read_value"):
        return np.asarray(value.numpy()).ravel()[start:stop]
    with tf.device(value.device):
        return tf.reshape(value.read_value(), [-1])[start:stop].numpy()


def adopt(clone: Any, optimizer: Any) -> None:
    """Lets a clone count, decay and look up variables as the original does."""
    names = [
        name for name in vars(optimizer) if name.startswith("_exclude_from_weight")
    ]
    for name in ("_iterations", "_learning_rate", "_distribution_strategy", *names):
        vars(clone)[name] = vars(optimizer)[name]


def settings_of(optimizer: Any) -> dict[str, Any]:
    """The plain numbers, texts and switches among an optimizer's attributes."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, (bool, int, float, str, type(None))) and name != "built"
    }


def state_variables(optimizer: Any) -> list:
    """A built optimizer's variables but for its counter and learning rate."""
    own = (optimizer._iterations, optimizer._learning_rate)
    return [v for v in optimizer._variables if not any(v is item for item in own)]


def single_variables(optimizer: Any) -> dict[str, Any]:
    """An optimizer's variables that belong to none of the trained ones, by name."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, keras.Variable)
        and name not in ("_iterations", "_learning_rate")
    }


def built_without_memory(optimizer: Any, variables: list) -> Any:
    """A clone that shows which variables an optimizer makes, and holds no values.

    Variables in a graph of their own have shapes and names, but no memory.
    """
    with tf.init_scope():  # a step may be under way, being traced
        config = optimizer.get_config()
    with tf.Graph().as_default(), outside_strategies():
        clone = type(optimizer).from_config(config)
        shells = []
        for variable in variables:
            shell = keras.Variable(
                "zeros",
                shape=tuple(variable.shape),
                dtype=variable.dtype,
                name=getattr(variable, "name", "variable").replace("/", "_"),
            )
            vars(shell)["_path"] = getattr(variable, "path", variable.name)
            shells.append(shell)
        clone.build(shells)
    return clone


def drop_state(optimizer: Any) -> None:
    """Frees a built optimizer's variables but for its counter and learning rate."""
    dropped = {id(variable) for variable in state_variables(optimizer)}
    untrack(optimizer, state_variables(optimizer))
    for name, value in list(vars(optimizer).items()):
        if id(value) in dropped:
            optimizer._delete_tracking(name)
            vars(optimizer)[name] = None
        elif name != "_variables" and _holds(value, dropped):
            # TensorFlow's tracking, too, would keep the list with all that it holds.
            optimizer._delete_tracking(name)
            vars(optimizer)[name] = {} if isinstance(value, dict) else []


def _holds(value: Any, dropped: set[int]) -> bool:
    items = value.values() if isinstance(value, dict) else value
    is_container = isinstance(value, (list, tuple, dict))
    return is_container and any(id(item) in dropped for item in items)


def build_without_state(optimizer: Any, variables: list) -> None:
    """Tells an optimizer, and those inside a `MultiOptimizer`, what they train."""
    if not hasattr(optimizer, "_inner_optimizers"):
        set_trained(optimizer, variables)
        return
    shells: dict[int, list] = {}
    chosen = {}
    for variable in variables:
        part = optimizer._optimizer_map(variable)
        if not any(part is item for item in optimizer._inner_optimizers):
            part.loss_scale_factor = optimizer.loss_scale_factor
            optimizer._inner_optimizers.append(part)
        index = optimizer._inner_optimizers.index(part)
        chosen[optimizer._var_key(variable)] = index
        shells.setdefault(index, []).append(variable)
    vars(optimizer)["_var_to_optimizer_idx"] = chosen
    for index, part in enumerate(optimizer._inner_optimizers):
        if index in shells:
            set_trained(part, shells[index])
    set_trained(optimizer, variables)


def with_state(optimizer: Any, state: list, num_averages: int) -> Any:
    """A stand-in whose variables are the optimizer's own and then these."""
    averages = state[:num_averages]
    return stand_in(
        optimizer,
        _variables=[*optimizer._variables, *state],
        _model_variables_moving_average=averages,
    )


def backup_that_writes_nothing(callback: Any) -> Any:
    """A `BackupAndRestore` that saves and loads the same weights, but no other file.

    What it notes beside the weights goes to a directory of its own.
    """
    folder = tempfile.TemporaryDirectory()
    twin = object.__new__(type(callback))
    vars(twin).update(vars(callback))
    path = os.path.join(folder.name, "training_metadata.json")
    vars(twin).update(
        # It looks whether the directory is there, and makes it if the first worker
        # has not yet: one of the two would fail.
        backup_dir=folder.name,
        _training_metadata_path=path,
        _prev_training_metadata_path=f"{path}.bkp",
        double_checkpoint=False,
        delete_checkpoint=False,
        _tfdp_folder=folder,  # lives as long as the callback
    )
    return twin


def profile_of(serialized: bytes) -> Any:
    """A profile as `tf.profiler` writes it: planes, their lines, and their events.

    Only TensorBoard's plug-in reads it otherwise. Seen with TensorFlow 2.19 to 2.21.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    return xplane_pb2.XSpace.FromString(serialized)
