"""Datasets of tf.data, and distributed datasets and iterators.

A dataset is the last stage of a pipeline, such as a `map` of a `batch` of a source. A
`part` is any of these stages, which is a dataset itself.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import tensorflow as tf
from keras.src import tree as keras_tree
from tensorflow.core.framework import dataset_metadata_pb2
from tensorflow.python.data.experimental.ops import distribute as data_distribute
from tensorflow.python.data.ops import shuffle_op
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

# tf.data has no public name for the spec of a component that is `None`, so its private
# class is used.
NoneTensorSpec = none_tensor.NoneTensorSpec
PerReplicaSpec = values.PerReplicaSpec
# `tf.function` takes an argument of this class apart into its tensors, so tfdp's
# iterators derive from it.
CompositeTensor = tf.__internal__.CompositeTensor
# Keras and AutoGraph recognize distributed input by these classes, so tfdp's datasets
# and iterators derive from them.
DistributedDatasetsFromFunction = input_lib.DistributedDatasetsFromFunction
DistributedIteratorInterface = distribute_types.DistributedIteratorInterface
# `PyFunc` and `EagerPyFunc` call Python functions, and `GeneratorDataset` is the
# operation of `Dataset.from_generator`. Each may have Python state that TensorFlow
# neither sees nor saves.
PYTHON_FUNCTIONS = ("PyFunc", "EagerPyFunc")
_GENERATOR = "GeneratorDataset"
# tf.data has no public way to read the tensors of a source. For each class of a source,
# this table has the method by which users create it, and the private attributes with
# its tensors.
_SOURCES = {
    "TensorDataset": ("from_tensors", ("_tensors",)),
    "TensorSliceDataset": ("from_tensor_slices", ("_tensors",)),
    "RangeDataset": ("range", ("_start", "_step")),
}
# The method `_inputs` of these sources leaves out the dataset of file names, which is
# therefore visited separately.
_HIDE_NAMES = ("TextLineDatasetV2", "FixedLengthRecordDatasetV2")


def dataset_batch_size(dataset: tf.data.Dataset) -> int:
    """Return the batch size of a dataset, or -1 if it is unknown."""
    try:
        return int(data_distribute.compute_batch_size(dataset))
    except IndexError:  # TensorFlow fails for elements that are scalars
        return -1


def dataset_inputs(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yield a dataset and all datasets that it reads, directly or indirectly."""
    yield dataset
    for source in dataset._inputs():
        yield from dataset_inputs(source)


def dataset_sources(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Return the datasets that the last stage of a dataset reads."""
    return dataset._inputs()


def size_of_batch_stage(dataset: tf.data.Dataset) -> int | None:
    """Return the batch size of a `batch` stage, or `None` if it is unknown."""
    size = getattr(dataset, "_batch_size", None)
    value = None if size is None else tf.get_static_value(size)
    return None if value is None else int(value)


def kind_of_stage(dataset: tf.data.Dataset) -> str:
    """Return the class name of the last stage of a dataset."""
    return type(dataset).__name__.strip("_")


def kinds_of_stages(dataset: tf.data.Dataset) -> list[str]:
    """Return the class names of all stages of a dataset, the last one first."""
    return [kind_of_stage(part) for part in dataset_inputs(dataset)]


def names_of_stages(dataset: tf.data.Dataset) -> Iterator[str]:
    """Yield the argument `name` of each stage of a dataset, `""` without one.

    Included are datasets that functions create or capture, such as that of a
    `flat_map`, and the source that `TextLineDataset` and `FixedLengthRecordDataset` do
    not list.
    """
    for part in dataset_inputs(dataset):
        yield getattr(part, "_name", None) or ""
        if hasattr(part, "_impl"):
            yield from names_of_stages(part._impl)
        for function in part._functions():
            graph = function.function.graph.as_graph_def()
            yield from _names_in_graph(graph)
        for captured in _captured_variants(part):
            yield from _names_in_variant(captured)


def captures_dataset(dataset: tf.data.Dataset) -> bool:
    """Return whether a function in a dataset captures another dataset."""
    return any(_captured_variants(part) for part in dataset_inputs(dataset))


def _captured_variants(part: tf.data.Dataset) -> list[tf.Tensor]:
    """Return the variants, such as datasets, that a stage's functions capture."""
    return [
        captured
        for function in part._functions()
        for captured in function.function.captured_inputs
        if captured.dtype == tf.variant
    ]


def _names_in_variant(variant: tf.Tensor) -> Iterator[str]:
    """Yield the argument `name` of each stage of the dataset in a variant tensor."""
    # A variant that is not a dataset, or a dataset too large for a graph, cannot be
    # converted, and is left out.
    with contextlib.suppress(tf.errors.OpError):
        text = gen_dataset_ops.dataset_to_graph_v2(variant).numpy()
        yield from _names_in_graph(tf.compat.v1.GraphDef.FromString(text))


def _names_in_graph(graph: Any) -> Iterator[str]:
    """Yield the argument `name` of each stage in the `GraphDef` of a dataset."""
    functions = (nested.node_def for nested in graph.library.function)
    for node in itertools.chain(graph.node, *functions):
        if "metadata" in node.attr:
            text = node.attr["metadata"].s
            yield dataset_metadata_pb2.Metadata.FromString(text).name.decode()


def operations_in(dataset: tf.data.Dataset) -> Iterator[tuple[str, Any]]:
    """Yield the operations in the functions of all stages of a dataset.

    Yields:
        Pairs of the type of an operation and its attributes by name.
    """
    for part in dataset_inputs(dataset):
        yield from operations_of_stage(part)


def operations_of_stage(dataset: tf.data.Dataset) -> Iterator[tuple[str, Any]]:
    """Yield the operations in the functions that a dataset's last stage calls.

    Yields:
        Pairs of the type of an operation and its attributes by name.
    """
    for function in dataset._functions():
        graph = function.function.graph.as_graph_def()
        libraries = [nested.node_def for nested in graph.library.function]
        for node in itertools.chain(graph.node, *libraries):
            yield node.op, node.attr


def calls_python(dataset: tf.data.Dataset, *, counts_pure: bool = False) -> bool:
    """Return whether a dataset calls Python functions.

    Args:
        dataset: The dataset.
        counts_pure: Bool, whether functions that are declared stateless count. Defaults
            to `False`.
    """
    names = (_GENERATOR, *PYTHON_FUNCTIONS, *(("PyFuncStateless",) * counts_pure))
    return any(name in names for name, _ in operations_in(dataset))


def has_generator(dataset: tf.data.Dataset) -> bool:
    """Return whether a dataset reads a Python generator: `Dataset.from_generator`."""
    return any(name == _GENERATOR for name, _ in operations_in(dataset))


def writes_while_read(dataset: tf.data.Dataset) -> bool:
    """Return whether a read of a dataset writes files or uses a tf.data service."""
    for part in dataset_inputs(dataset):
        name = getattr(part, "_filename", None)
        if name is not None and tf.get_static_value(name):
            # Only a `cache` stage has a file name, and reading the stage writes that
            # file.
            return True
        if kind_of_stage(part).startswith(("Snapshot", "Save", "DataService")):
            return True
    return False


def shuffle_seeds(dataset: tf.data.Dataset) -> list[tuple[int, int]]:
    """Return the seeds of each `Dataset.shuffle` in a dataset, (0, 0) without seed."""
    return [
        (int(part._seed), int(part._seed2))
        for part in dataset_inputs(dataset)
        if type(part).__name__ == "_ShuffleDataset"
    ]


def sources_of(dataset: tf.data.Dataset) -> dict[str, tf.Tensor]:
    """Return the tensors and file names from which a dataset was created.

    Datasets that functions create or capture are left out, and so is the `stop` of
    `Dataset.range`.

    Returns:
        Dict from a string such as `"from_tensor_slices[0]"`, the method of the source
        and a number, to a tensor. Names of files are a string tensor.
    """
    sources = enumerate(_named_sources(dataset))
    return {f"{name}[{number}]": tensor for number, (name, tensor) in sources}


def _named_sources(dataset: tf.data.Dataset) -> Iterator[tuple[str, tf.Tensor]]:
    """Yield the method that created each source of a dataset, and its tensor."""
    for part in dataset_inputs(dataset):
        kind = kind_of_stage(part)
        if kind in _HIDE_NAMES:
            yield from _named_sources(part._filenames)
        name, attributes = _SOURCES.get(kind, ("", ()))
        for tensor in tf.nest.flatten(
            [getattr(part, attribute) for attribute in attributes]
        ):
            if tensor.dtype not in (tf.variant, tf.resource):
                yield name, tensor


def shards_of(dataset: tf.data.Dataset) -> list[tuple[int, int]]:
    """Return, for each `Dataset.shard` in a dataset, its number of shards and index."""
    return [
        (int(part._num_shards), int(part._index))
        for part in dataset_inputs(dataset)
        if type(part).__name__ == "_ShardDataset"
    ]


def reshuffles(dataset: tf.data.Dataset) -> bool:
    """Return whether each iteration over a dataset has a different order."""
    return any(reshuffles_itself(part) for part in dataset_inputs(dataset))


def begin_shuffles(dataset: tf.data.Dataset) -> None:
    """Draw an epoch's seeds for each `Dataset.shuffle` with new seeds in each epoch.

    A shuffle draws seeds when its iterator is created. An iterator creates that of its
    source only when it is read, so an iterator of each shuffle is created here.
    """
    for part in dataset_inputs(dataset):
        if reshuffles_itself(part):
            iter(part)


def shuffle_alike(part: Any, source: tf.data.Dataset) -> tf.data.Dataset:
    """Return `source`, shuffled with the settings and seeds of the shuffle `part`.

    Args:
        part: Dataset whose last stage is a `shuffle`, with any input.
        source: Dataset to shuffle.
    """
    seeds = part._seed, part._seed2
    with mock.patch.object(shuffle_op.random_seed, "get_seed", return_value=seeds):
        return source.shuffle(
            part._buffer_size,
            reshuffle_each_iteration=part._reshuffle_each_iteration,
        )


def reshuffles_itself(part: tf.data.Dataset) -> bool:
    """Return whether a dataset's last stage is a shuffle with a new order each time."""
    is_shuffle = type(part).__name__ == "_ShuffleDataset"
    return is_shuffle and bool(part._reshuffle_each_iteration)


def unseeded_stages(dataset: tf.data.Dataset) -> list[str]:
    """Return the class names of random stages of a dataset without a seed."""
    return [
        type(part).__name__.strip("_")
        for part in dataset_inputs(dataset)
        if hasattr(part, "_seed2") and (int(part._seed), int(part._seed2)) == (0, 0)
    ]


def is_unordered(dataset: tf.data.Dataset) -> bool:
    """Return whether a dataset's elements may vary in order, in favor of speed."""
    return dataset.options().deterministic is False or any(
        getattr(part, "_deterministic", None) == "false"
        for part in dataset_inputs(dataset)
    )


def without_automatic_prefetch(
    dataset: tf.data.Dataset,
) -> tuple[tf.data.Dataset, bool]:
    """Return a dataset without a final `prefetch(AUTOTUNE)`, and whether it had one."""
    if type(dataset).__name__ != "_PrefetchDataset":
        return dataset, False
    if tf.get_static_value(dataset._buffer_size) != tf.data.AUTOTUNE:
        return dataset, False
    return dataset._input_dataset, True


def empty_optional(spec: Any) -> Any:
    """Return an optional without a value, for a distributed iterator's spec.

    Args:
        spec: `tf.OptionalSpec` of the optional.
    """
    return tf.experimental.Optional.empty(spec._element_spec)


def local_dataset(distributed: Any) -> tf.data.Dataset:
    """Return the `tf.data.Dataset` that this worker reads for a distributed dataset."""
    return distributed._cloned_datasets[0]


def local_element_spec(dataset: Any) -> Any:
    """Return the spec of a distributed dataset's elements on the first local replica.

    `None` replaces the spec of a component that is `None`, and of an optional, which
    Keras's generators have in place of `None`.
    """

    def first(spec: Any) -> Any:
        """Return a component's spec on the first local replica; `None` for no value."""
        if isinstance(spec, values.PerReplicaSpec):
            spec = spec._value_specs[0]
        is_none = isinstance(spec, (tf.OptionalSpec, NoneTensorSpec))
        return None if is_none else spec

    return keras_tree.map_structure(first, dataset.element_spec)


def disable_end_of_data_sync(dataset: Any) -> Any:
    """Stop the workers of a distributed dataset from synchronizing its end, in place.

    By default workers ask each other in every step whether one has data left. If each
    replica has the same number of batches, they need not ask.

    Returns:
        `dataset`.
    """
    dataset._enable_get_next_as_optional = False
    return dataset


def syncs_end_of_data(dataset: Any) -> bool:
    """Return whether the workers of a distributed dataset synchronize its end."""
    return dataset._enable_get_next_as_optional


def with_end_of_data_sync(dataset: Any) -> Any:
    """Return a copy of a distributed dataset whose workers synchronize its end.

    By default a worker with an endless dataset does not take part, while workers with
    finite data wait for it.
    """
    changed = copy.copy(dataset)
    changed._enable_get_next_as_optional = True
    changed._cardinality = tf.data.UNKNOWN_CARDINALITY
    return changed


def strategy_of_iterator(iterator: Any) -> Any:
    """Return the strategy of a distributed iterator of TensorFlow."""
    return iterator._strategy


def optionals_of_replicas(iterator: Any) -> list[list]:
    """Read a distributed iterator's next elements on this worker, as optionals.

    This worker does not ask the others whether they have data left.

    Returns:
        List, for each input device, of a list of the optionals of its local replicas.
    """
    devices = iterator._input_workers.worker_devices
    optionals = []
    for device, local in zip(devices, iterator._iterators, strict=True):
        with ops.device(device):
            optionals.append(local.get_next_as_optional_list())
    return optionals


def any_has_value(optionals: list[list]) -> tf.Tensor:
    """Return a bool tensor, whether any of the optionals has a value.

    Args:
        optionals: List of lists, the result of `optionals_of_replicas`.
    """
    with ops.device("/device:CPU:0"):
        flat = [part.has_value() for parts in optionals for part in parts]
        return tf.reduce_any(tf.stack(flat))


def values_or_empty(iterator: Any, optionals: list[list]) -> Any:
    """Return the values of optionals as one batch, a nest of per-replica values.

    For an empty optional the batch has no rows.

    Args:
        iterator: Distributed iterator of TensorFlow.
        optionals: List of lists, from `optionals_of_replicas`.
    """
    workers = iterator._input_workers
    parts = input_lib._get_value_or_dummy(workers, optionals, produce_dummy=True)
    if getattr(iterator, "_replica_order", None) is not None:
        parts = iterator._reorder_replicas(parts)
    return input_lib._create_per_replica(parts, iterator._strategy)
