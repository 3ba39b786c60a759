"""Datasets of tf.data, and distributed datasets and iterators."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from keras.src import tree as keras_tree
from tensorflow.core.framework import dataset_metadata_pb2
from tensorflow.python.data.experimental.ops import distribute as data_distribute
from tensorflow.python.distribute import (
    input_lib,
    values,
)
from tensorflow.python.framework import (
    none_tensor,
    ops,
)
from tensorflow.python.ops import gen_dataset_ops
from tensorflow.python.types import distribute as distribute_types

# What stands for a None in the spec of a dataset's element.
NoneTensorSpec = none_tensor.NoneTensorSpec
PerReplicaSpec = values.PerReplicaSpec
CompositeTensor = tf.__internal__.CompositeTensor
# What Keras and AutoGraph take for distributed input, and what `tf.function`
# takes for an argument that is made of tensors.
DistributedDatasetsFromFunction = input_lib.DistributedDatasetsFromFunction
DistributedIteratorInterface = distribute_types.DistributedIteratorInterface
# The operations that call a Python function which may have state, and that of
# `Dataset.from_generator`.
PYTHON_FUNCTIONS = ("PyFunc", "EagerPyFunc")
_GENERATOR = "GeneratorDataset"
# By the class of a source of elements: its name, and what holds its tensors.
_SOURCES = {
    "TensorDataset": ("from_tensors", ("_tensors",)),
    "TensorSliceDataset": ("from_tensor_slices", ("_tensors",)),
    "RangeDataset": ("range", ("_start", "_step")),
}
# Sources that do not list the dataset of file names which they read.
_HIDE_NAMES = ("TextLineDatasetV2", "FixedLengthRecordDatasetV2")


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


def dataset_sources(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The datasets that the last stage of a dataset reads."""
    return dataset._inputs()


def size_of_batch_stage(dataset: tf.data.Dataset) -> int | None:
    """The batch size of a dataset whose last stage is a `batch`, as far as known."""
    size = getattr(dataset, "_batch_size", None)
    value = None if size is None else tf.get_static_value(size)
    return None if value is None else int(value)


def kind_of_part(dataset: tf.data.Dataset) -> str:
    """The class name of the last stage of a dataset."""
    return type(dataset).__name__.strip("_")


def kinds_of_parts(dataset: tf.data.Dataset) -> list[str]:
    """The class names of a dataset and all that it is made of, from the last on."""
    return [kind_of_part(part) for part in dataset_inputs(dataset)]


def names_of_parts(dataset: tf.data.Dataset) -> Iterator[str]:
    """The names that were given to a dataset and all that it is made of.

    Those of datasets that a function makes or captures, too, as that of a `flat_map`
    may. `TextLineDataset` and `FixedLengthRecordDataset` do not list their source.
    """
    for part in dataset_inputs(dataset):
        yield getattr(part, "_name", None) or ""
        if hasattr(part, "_impl"):
            yield from names_of_parts(part._impl)
        for function in part._functions():
            graph = function.function.graph.as_graph_def()
            yield from _names_in_graph(graph)
        for captured in _captured_variants(part):
            yield from _names_in_variant(captured)


def captures_dataset(dataset: tf.data.Dataset) -> bool:
    """Whether a function in a dataset captures another dataset."""
    return any(_captured_variants(part) for part in dataset_inputs(dataset))


def _captured_variants(part: tf.data.Dataset) -> list[tf.Tensor]:
    return [
        captured
        for function in part._functions()
        for captured in function.function.captured_inputs
        if captured.dtype == tf.variant
    ]


def _names_in_variant(variant: tf.Tensor) -> Iterator[str]:
    # A variant that is no dataset, or one too large for a graph, tells no names.
    with contextlib.suppress(tf.errors.OpError):
        text = gen_dataset_ops.dataset_to_graph_v2(variant).numpy()
        yield from _names_in_graph(tf.compat.v1.GraphDef.FromString(text))


def _names_in_graph(graph: Any) -> Iterator[str]:
    functions = (nested.node_def for nested in graph.library.function)
    for node in itertools.chain(graph.node, *functions):
        if "metadata" in node.attr:
            text = node.attr["metadata"].s
            yield dataset_metadata_pb2.Metadata.FromString(text).name.decode()


def operations_in(dataset: tf.data.Dataset) -> Iterator[tuple[str, Any]]:
    """The operations in the functions that a dataset calls, such as those of `map`.

    Yields:
        Pairs of the type of an operation and its attributes by name.
    """
    for part in dataset_inputs(dataset):
        yield from operations_of_stage(part)


def operations_of_stage(dataset: tf.data.Dataset) -> Iterator[tuple[str, Any]]:
    """The operations of `operations_in`, of the last stage of a dataset only."""
    for function in dataset._functions():
        graph = function.function.graph.as_graph_def()
        libraries = [nested.node_def for nested in graph.library.function]
        for node in itertools.chain(graph.node, *libraries):
            yield node.op, node.attr


def calls_python(dataset: tf.data.Dataset, *, counts_pure: bool = False) -> bool:
    """Whether a dataset calls Python that may have state, or pure functions, too."""
    names = (_GENERATOR, *PYTHON_FUNCTIONS, *(("PyFuncStateless",) * counts_pure))
    return any(name in names for name, _ in operations_in(dataset))


def has_generator(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset draws from a Python generator: `Dataset.from_generator`."""
    return any(name == _GENERATOR for name, _ in operations_in(dataset))


def writes_while_read(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset writes files, or takes work of a service, as it is read."""
    for part in dataset_inputs(dataset):
        name = getattr(part, "_filename", None)
        if name is not None and tf.get_static_value(name):  # a cache in a file
            return True
        if kind_of_part(part).startswith(("Snapshot", "Save", "DataService")):
            return True
    return False


def shuffle_seeds(dataset: tf.data.Dataset) -> list[tuple[int, int]]:
    """The seeds of every `Dataset.shuffle` in a dataset, (0, 0) for none."""
    return [
        (int(part._seed), int(part._seed2))
        for part in dataset_inputs(dataset)
        if type(part).__name__ == "_ShuffleDataset"
    ]


def sources_of(dataset: tf.data.Dataset) -> dict[str, tf.Tensor]:
    """The tensors that the elements of a dataset come from, and the names of files.

    Not those of datasets that a function makes or captures, nor where a range ends.

    Returns:
        Dict by the function that the user has called, and a number.
    """
    found: dict[str, tf.Tensor] = {}
    for part in dataset_inputs(dataset):
        kind = kind_of_part(part)
        if kind in _HIDE_NAMES:
            found |= sources_of(part._filenames)
        name, attributes = _SOURCES.get(kind, ("", ()))
        for tensor in tf.nest.flatten([getattr(part, each) for each in attributes]):
            if tensor.dtype not in (tf.variant, tf.resource):
                found[f"{name}[{len(found)}]"] = tensor
    return found


def shards_of(dataset: tf.data.Dataset) -> list[tuple[int, int]]:
    """The number of shards and the index of every `Dataset.shard` in a dataset."""
    return [
        (int(part._num_shards), int(part._index))
        for part in dataset_inputs(dataset)
        if type(part).__name__ == "_ShardDataset"
    ]


def reshuffles(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset has another order each time that it is iterated over."""
    return any(reshuffles_itself(part) for part in dataset_inputs(dataset))


def begin_shuffles(dataset: tf.data.Dataset) -> None:
    """Draw the seeds of an epoch for each `Dataset.shuffle` that has others in each.

    One draws them as its iterator is created, which creates that of its source only
    when it is read: each has one of its own here.
    """
    for part in dataset_inputs(dataset):
        if reshuffles_itself(part):
            iter(part)


def reshuffles_itself(part: tf.data.Dataset) -> bool:
    """Whether the last stage of a dataset is a shuffle with another order each time."""
    is_shuffle = type(part).__name__ == "_ShuffleDataset"
    return is_shuffle and bool(part._reshuffle_each_iteration)


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


def without_automatic_prefetch(
    dataset: tf.data.Dataset,
) -> tuple[tf.data.Dataset, bool]:
    """A dataset without a last `prefetch(AUTOTUNE)`, and whether it had one."""
    if type(dataset).__name__ != "_PrefetchDataset":
        return dataset, False
    if tf.get_static_value(dataset._buffer_size) != tf.data.AUTOTUNE:
        return dataset, False
    return dataset._input_dataset, True


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


def without_partial_batches(dataset: Any) -> Any:
    """Mark a distributed dataset of which every replica has equally many batches.

    Stock asks all workers at every step whether anybody has data left. Where
    all know the number of batches beforehand the answer is known too.
    """
    dataset._enable_get_next_as_optional = False
    return dataset


def syncs_end_of_data(dataset: Any) -> bool:
    """Whether workers ask each other for more data, in a dataset of TensorFlow's."""
    return dataset._enable_get_next_as_optional


def with_end_of_data_sync(dataset: Any) -> Any:
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
