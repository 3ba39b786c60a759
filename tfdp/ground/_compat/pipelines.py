"""Stages of a tf.data pipeline, for rebuilding them on another pipeline.

tf.data has no public way to see a pipeline's stages. Checked on TensorFlow 2.19 to
2.21.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.data.util import structure
from tensorflow.python.framework import op_def_registry

from tfdp.ground._compat.tf_data import operations_of_stage

# TensorFlow calls these operations stateful. They do not make a `map` stateful, since
# they only read, print or check, or run functions whose own operations are examined.
_READING = {
    *("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarHandleOp"),
    *("LookupTableFindV2", "LookupTableSizeV2", "HashTableV2", "Assert", "PrintV2"),
    *("If", "While", "Case", "StatefulPartitionedCall", "Placeholder"),
}
# Keras has no public way to tell its own `map` functions from the user's, so they are
# recognized by their module's name. Checked on Keras 3.12 to 3.15.
_KERAS = "keras.src."
_ADAPTERS = f"{_KERAS}trainers.data_adapters."


def function_of_map(dataset: tf.data.Dataset) -> Callable[[Any], Any]:
    """Return the traced function of a `map` stage, from an element to an element."""
    wrapper = dataset._map_func

    def call(element: Any) -> Any:
        """Return the traced function's result for an element, both nests of tensors."""
        inputs = structure.to_tensor_list(wrapper._input_structure, element)
        returned = wrapper.function(*inputs)
        return structure.from_compatible_tensor_list(wrapper.output_structure, returned)

    return call


def python_function_of_map(dataset: tf.data.Dataset) -> Callable[[Any], Any]:
    """Return the Python function of a `map`, to be traced again for other shapes."""
    function = dataset._map_func._func

    def call(element: Any) -> Any:
        """Return the Python function's result for an element.

        A tuple is passed as several arguments.
        """
        return function(*element) if type(element) is tuple else function(element)

    return call


def parallelism_of(dataset: tf.data.Dataset) -> Any:
    """Return the `num_parallel_calls` of a dataset that ends in a `map` or `batch`.

    It is an int, or a tensor if TensorFlow does not know it statically; `None` if it
    was not given.
    """
    return _value(getattr(dataset, "_num_parallel_calls", None))


def stateful_operation(dataset: tf.data.Dataset) -> str | None:
    """Return the type of a stateful operation in a `map`, such as `"RandomUniform"`.

    Operations that only read, check or print, or call other functions, do not count.

    Args:
        dataset: Dataset whose last stage is the `map`.

    Returns:
        String, or `None` without such an operation.
    """
    names = (name for name, _ in operations_of_stage(dataset) if name not in _READING)
    return next((name for name in names if _is_stateful(name)), None)


def name_of_map(dataset: tf.data.Dataset) -> str:
    """Return module and qualified name of the Python function of a `map`."""
    function = dataset._map_func._func
    return f"{function.__module__}.{getattr(function, '__qualname__', '')}"


def is_map_of_keras(dataset: tf.data.Dataset) -> bool:
    """Return whether the Python function of a `map` is Keras's own."""
    return name_of_map(dataset).startswith(_KERAS)


def applies_class_weight(dataset: tf.data.Dataset) -> bool:
    """Return whether a `map` is Keras's own that weights rows by `class_weight`."""
    name = "tf_dataset_adapter.make_class_weight_map_fn."
    return name_of_map(dataset).startswith(f"{_ADAPTERS}{name}")


def gathers_rows(dataset: tf.data.Dataset) -> bool:
    """Return whether a `map` is Keras's own that gathers a batch's rows from arrays."""
    name = "array_data_adapter.ArrayDataAdapter."
    return name_of_map(dataset).startswith(f"{_ADAPTERS}{name}")


def count_of_stage(dataset: tf.data.Dataset) -> Any:
    """Return the count of a `take`, `skip` or `repeat`: an int, or a dynamic tensor."""
    return _value(dataset._count)


def buffer_size_of(dataset: tf.data.Dataset) -> Any:
    """Return the buffer size of a `prefetch`: an int, or a dynamic tensor."""
    return _value(dataset._buffer_size)


def drops_remainder(dataset: tf.data.Dataset) -> bool:
    """Return whether a `batch` drops a last partial batch."""
    return bool(tf.get_static_value(dataset._drop_remainder))


def zipped(dataset: tf.data.Dataset) -> Any:
    """Return the nest of datasets that a `zip` reads."""
    return dataset._datasets


def _value(tensor: Any) -> Any:
    """Return the static value of a tensor, or the tensor if it has none."""
    static = None if tensor is None else tf.get_static_value(tensor)
    return tensor if static is None else static.item()


def _is_stateful(name: str) -> bool:
    """Return whether an operation of this type name is stateful."""
    definition = op_def_registry.get(name)
    return definition is not None and definition.is_stateful
