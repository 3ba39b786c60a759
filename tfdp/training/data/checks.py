"""Validation of the data of Keras's loops, with a one-sentence message per error."""

from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Generator, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp.ground._compat import keras_model, tf_data
from tfdp.training.data.rows import (
    BETWEEN_NAMES,
    UNEQUAL_ROWS,
    check_equal_rows,
    describe_unequal_rows,
    has_rows,
    named_leaves,
    parts_with_rows,
)

_PARTS = ("x", "y", "sample_weight")
# TensorFlow buries tfdp's own messages in long errors of its runtime, from which these
# patterns recover them: `_IN_GRAPH` the message of an assertion in a data graph, and
# `_IN_PYTHON` those of Python code that the graph calls.
_IN_GRAPH = re.compile(re.escape(UNEQUAL_ROWS) + r" Received: (.*) with\] \[([\d ]+)\]")
_IN_PYTHON = re.compile(
    r"(All batches of a generator must have the same structure\. |"
    r"`rows\([\d, ]+\)` of \w+ must return |`num_rows` of \w+ must return ).*"
)


def check_arrays(model: Any, arguments: dict[str, Any]) -> None:
    """Raise if the arrays for `fit`, `evaluate` or `predict` cannot be divided.

    Args:
        model: The Keras model.
        arguments: Dict, the arguments of the call by name, including `validation_data`.
            Data other than nests of arrays is not checked.

    Raises:
        ValueError: If there is no array, or if an array is a scalar, or if arrays have
            different lengths.
    """
    given = {name: arguments.get(name) for name in _PARTS}
    _check_features(model, given["x"], given["y"])
    _check_sample_arrays(given)
    validation = arguments.get("validation_data")
    if isinstance(validation, (tuple, list)):
        name = "validation_data"
        _check_sample_arrays(
            {f"{name}[{i}]": part for i, part in enumerate(validation)}
        )


def check_batch(strategy: Any, model: Any, arguments: dict[str, Any]) -> None:
    """Raise if arrays for `train_on_batch` or similar methods cannot be divided.

    Args:
        strategy: A tfdp strategy.
        model: The Keras model.
        arguments: Dict, the arguments of the call by name.

    Raises:
        ValueError: If there is no array, or arrays have different numbers of rows.
    """
    given = {name: arguments.get(name) for name in _PARTS}
    _check_features(model, given["x"], given["y"])
    if strategy.num_replicas_in_sync > 1:
        _check_equal_rows(given)


def describe_arrays(given: dict[str, Any]) -> dict[str, Any] | None:
    """Describe arrays, for comparison by workers.

    Args:
        given: Dict of nests of arrays by name.

    Returns:
        Dict with rows, shape and dtype of each array by name, or `None` if the nests
        contain anything but arrays.

    Example:

    >>> describe_arrays({"x": {"a": tf.zeros([8, 3])}, "y": None})
    {"x['a']": {'rows': 8, 'shape': [None, 3], 'dtype': 'float32'}}
    """
    arrays = named_arrays(given)
    if arrays is None:
        return None
    return {name: _describe_array(leaf) for name, leaf in arrays.items()}


def named_arrays(given: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arrays of nests by their paths, such as "x['a']".

    Args:
        given: Dict of nests of arrays by name.

    Returns:
        Dict, or `None` if the nests contain anything but arrays.
    """
    leaves = [leaf for leaf in keras.tree.flatten(given) if leaf is not None]
    if not all(hasattr(leaf, "shape") for leaf in leaves):
        return None
    return {
        where: leaf
        for name, part in given.items()
        for where, leaf in named_leaves(part, name).items()
        if leaf is not None
    }


def _describe_array(array: Any) -> dict[str, Any]:
    """Return rows, shape and dtype of an array, as `describe_arrays` returns them.

    The shape has `None` for the number of rows. The dtype of a table is a list with
    that of each column.
    """
    shape = tf.TensorShape(array.shape)
    dtype = getattr(array, "dtype", None)
    name: Any = str(getattr(dtype, "name", dtype))
    # A table, such as a `DataFrame`, has a dtype for each column, and none of its own.
    if dtype is None:
        name = [str(column) for column in getattr(array, "dtypes", [])]
    if not shape.rank:
        return {"shape": [], "dtype": name}
    return {"rows": shape[0], "shape": [None, *shape[1:]], "dtype": name}


def check_element(model: Any, spec: Any) -> None:
    """Raise if an element of a dataset holds no features.

    Args:
        model: The Keras model.
        spec: Nest of specs, `None` for parts that are left out.

    Raises:
        ValueError: If `x` has no array, unless `y` has and the model overrides a step.
    """
    parts = spec if isinstance(spec, tuple) else (spec,)
    _check_features(model, *(*parts, None)[:2])


def check_structure(data: Any) -> Any:
    """Return a generator's batches; raise at the first with another structure.

    Args:
        data: Data of a loop; anything but a generator is returned unchanged.

    Raises:
        ValueError: The generator raises it at a batch with another structure than the
            first, or without features.

    Example:

    >>> list(check_structure(batch for batch in [(0, {"a": 1}), (0, None)]))
    Traceback (most recent call last):
    ...
    ValueError: All batches of a generator must have the same structure. Received: \
batch 2 of (array, None), after (array, {'a': array})
    """
    if not isinstance(data, types.GeneratorType):
        return data
    checked = _checked_batches(data)
    # Error messages refer to a generator by its name, see `source_name`.
    checked.__name__ = data.__name__  # type: ignore[attr-defined]
    return checked


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Open a context that replaces a TensorFlow error by the tfdp message inside it.

    Raises:
        ValueError: With tfdp's message about the data, in place of a
            `tf.errors.InvalidArgumentError` that contains it.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        sentence = _original_message(str(error))
        if sentence is None:
            raise
        raise ValueError(sentence) from None


def _original_message(text: str) -> str | None:
    """Return tfdp's message within the text of a TensorFlow error, or `None`.

    Returns:
        String, such as "`num_rows` of MyData must return ...".
    """
    if found := _IN_PYTHON.search(text):
        return found.group()
    if found := _IN_GRAPH.search(text):
        names, rows = found.groups()
        # TensorFlow escapes the quotes in names of parts, such as `x['a']`.
        names = names.replace("\\", "")
        return describe_unequal_rows(
            names.split(BETWEEN_NAMES), [int(n) for n in rows.split()]
        )
    return None


def _checked_batches(batches: types.GeneratorType) -> Generator[Any, None, None]:
    """Yield batches; raise at one without features or with another structure."""
    first = None
    for number, batch in enumerate(batches, start=1):
        structure = _structure_of(batch)
        first = first or structure
        if structure != first:
            raise ValueError(
                "All batches of a generator must have the same structure. Received: "
                f"batch {number} of {structure}, after {first}"
            )
        if _is_empty(batch):
            raise _no_features_error("batch", batch)
        yield batch


def _structure_of(batch: Any) -> str:
    """Describe the structure of a batch, the same for dicts of any order.

    The description is text such as `(array, {'a': array})`.
    """
    if batch is None:
        return "None"
    if isinstance(batch, dict):
        items = sorted(batch.items(), key=lambda item: repr(item[0]))
        return (
            "{" + ", ".join(f"{k!r}: {_structure_of(part)}" for k, part in items) + "}"
        )
    if not isinstance(batch, (tuple, list)):
        return "array"
    parts = [_structure_of(part) for part in batch]
    if isinstance(batch, list):
        return f"[{', '.join(parts)}]"
    if hasattr(batch, "_fields"):
        return f"{type(batch).__name__}({', '.join(parts)})"
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


def _check_features(model: Any, x: Any, y: Any) -> None:
    """Raise if `x` holds no array, unless an overridden step may use `y` alone."""
    if not _is_empty(x) or (not _is_empty(y) and keras_model.overridden(model)):
        return
    raise _no_features_error("x", x)


def _no_features_error(name: str, data: Any) -> ValueError:
    """Return the error that data without any array causes.

    Args:
        name: String, argument or part that the data was passed as, for the message.
        data: The data.
    """
    return ValueError(
        "The data holds no features: `x` must be an array, a dataset, or a structure "
        f"with at least one array. Received: {name}={data!r}"
    )


def _is_empty(data: Any) -> bool:
    """Return whether all leaves of a nest are `None`, also if it has no leaves."""
    return all(leaf is None for leaf in keras.tree.flatten(data))


def _check_sample_arrays(data_by_name: dict[str, Any]) -> None:
    """Raise if arrays are scalars or differ in length; ignore data of other kinds.

    Args:
        data_by_name: Dict of nests of arrays by the name of the argument.
    """
    arrays = named_arrays(data_by_name) or {}
    for where, leaf in arrays.items():
        if not has_rows(leaf):
            raise ValueError(
                f"`{where}` must have the samples along its first axis. Received: "
                f"the scalar {leaf}"
            )
    check_equal_rows(arrays)


def _check_equal_rows(data_by_name: dict[str, Any]) -> None:
    """Raise if arrays of a batch have different numbers of rows; ignore scalars."""
    parts = [parts_with_rows(part, name) for name, part in data_by_name.items()]
    check_equal_rows({where: leaf for each in parts for where, leaf in each.items()})


def source_name(source: Any) -> str:
    """Return the name that messages use for the data of a loop of Keras.

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
    """Return the name that messages use for a dataset: by the class of its source.

    An example is "the `tf.data.Dataset` of `RangeDataset`". A dataset that calls Python
    code is named as such instead.
    """
    if tf_data.calls_python(dataset, counts_pure=True):
        return "the `tf.data.Dataset` that calls Python"
    *_, first = tf_data.dataset_inputs(dataset)
    kind = type(first).__name__.strip("_")
    return f"the `tf.data.Dataset` of `{kind}`"
