"""Name of a data source, for messages."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdp import _compat

# Operations of a dataset that call Python.
_PYTHON = ("GeneratorDataset", "PyFunc", "EagerPyFunc", "PyFuncStateless")


def source_name(source: Any) -> str:
    """Return what the data given to a loop of Keras is called in messages.

    Args:
        source: Arrays, a dataset, a `PyDataset`, a torch `DataLoader` or a generator.

    Example:

    >>> source_name(batch for batch in ())
    'the generator `<genexpr>`'
    >>> source_name(tf.data.Dataset.range(4).batch(2))
    'the `tf.data.Dataset` of `RangeDataset`'
    """
    name = type(source).__name__
    if isinstance(source, keras.utils.PyDataset):
        return f"the `PyDataset` `{name}`"
    if isinstance(source, tf.data.Dataset):
        return _dataset_name(source)
    if isinstance(source, (tf.Tensor, list, tuple, dict)) or hasattr(source, "shape"):
        return "the arrays"
    if hasattr(source, "dataset") and hasattr(source, "batch_size"):
        return f"the `{name}` of `{type(source.dataset).__name__}`"
    if hasattr(source, "__next__"):
        return f"the generator `{getattr(source, '__name__', name)}`"
    return f"the `{name}`"


def _dataset_name(dataset: tf.data.Dataset) -> str:
    """Name a dataset after the files, tensors or function that it begins with."""
    operations = {operation for operation, _ in _compat.operations_in(dataset)}
    if operations.intersection(_PYTHON):
        return "the `tf.data.Dataset` that calls Python"
    *_, first = _compat.dataset_inputs(dataset)
    kind = type(first).__name__.strip("_")
    return f"the `tf.data.Dataset` of `{kind}`"
