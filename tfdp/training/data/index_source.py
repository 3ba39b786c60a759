"""Elements loaded by their index, from Grain, ArrayRecord, tfds and similar sources."""

from __future__ import annotations

import operator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp.ground._compat import patches
from tfdp.ground.arguments import is_integer, plain
from tfdp.training.data.stages import no_autograph


@patches.filter_traceback
def from_source(source: Any, *, seed: int | None = None) -> tf.data.Dataset:
    """Create a dataset of a random-access source; each worker loads only its elements.

    A source is any object with `len(source)` and `source[index]`: a `grain.MapDataset`
    before `batch`, an `ArrayRecordDataSource`, `tfds.data_source(...)`, a PyTorch
    dataset, a list. Continue as with any `tf.data.Dataset`: `map`, then `batch` by the
    global size. Each of N workers then loads and maps an N-th of every batch.

    `source[index]` runs in threads of this process. It must return the same element for
    an index at every call, as Grain's `random_map` with a seed does.

    Args:
        source: The source. Its elements are arrays, numbers or strings, or nests of
            them, with the shapes and types of the first one.
        seed: Int, seed of the shuffle, which has another order in each epoch; or
            `None` for the order of the indices. Defaults to `None`.

    Returns:
        `tf.data.Dataset` of `len(source)` elements.

    Raises:
        ValueError: If `source` has no length or no element, or if an element is not an
            array. Loading an element raises it if the structure, a shape or a type
            differs from that of the first element.

    Example:

    >>> squares = [{"x": np.float32(x), "y": x * x} for x in range(5)]
    >>> for batch in from_source(squares).batch(3).as_numpy_iterator():
    ...     print(batch["x"], batch["y"])
    [0. 1. 2.] [0 1 4]
    [3. 4.] [ 9 16]
    """
    if seed is not None and not is_integer(seed):
        raise ValueError(f"`seed` must be an integer or None. Received: seed={seed!r}")
    seed = plain(seed)
    num_elements = _length_of(source)
    if num_elements == 0:
        raise ValueError(f"`source` has no element. Received: source={source!r}")
    first = keras.tree.lists_to_tuples(source[0])
    parts = [_spec_of(part) for part in tf.nest.flatten(first)]
    specs = [spec for spec in parts if spec is not None]
    if len(specs) < len(parts):
        raise ValueError(
            "Elements of `source` must be arrays, numbers or strings, or nests of them."
            f" Received: source[0]={first!r}"
        )

    def load(index: np.ndarray) -> list[np.ndarray]:
        """Load an element as a flat list of arrays, checked by `_checked_parts`."""
        return _checked_parts(source[int(index)], int(index), first, specs)

    @no_autograph
    def element(index: tf.Tensor) -> Any:
        """Return the element at an index: a nest of tensors that a graph loads."""
        dtypes = [spec.dtype for spec in specs]
        # A `map` with a stateful function is not divided among workers: each worker
        # would load all elements. So the function is marked as stateless.
        parts = tf.numpy_function(load, [index], dtypes, stateful=False)
        for part, spec in zip(parts, specs, strict=True):
            part.set_shape(spec.shape)
        return tf.nest.pack_sequence_as(first, parts)

    indices = tf.data.Dataset.range(num_elements)
    if seed is not None:
        indices = indices.shuffle(num_elements, seed=seed)
    return indices.map(element, num_parallel_calls=tf.data.AUTOTUNE)


def _length_of(source: Any) -> int:
    """Return `len(source)`; raise a `ValueError` if it has no length or indices."""
    try:
        if not hasattr(source, "__getitem__"):
            raise TypeError
        return operator.index(len(source))
    except TypeError:
        raise ValueError(
            "`source` must have a length and an element for each index, as a "
            "`grain.MapDataset` or a list has, and not only an iterator. "
            f"Received: source={source!r}"
        ) from None


def _spec_of(part: Any) -> tf.TensorSpec | None:
    """Return the spec of an array, a number or a string; `None` for anything else."""
    if part is None:
        return None
    array = np.asarray(part)
    if array.dtype == object and not all(
        isinstance(s, (str, bytes)) for s in array.flat
    ):
        # Objects other than strings are rejected, because TensorFlow would silently
        # convert them to strings.
        return None
    try:
        return tf.TensorSpec(array.shape, tf.as_dtype(array.dtype))
    except TypeError:
        return None


def _checked_parts(
    element: Any, index: int, first: Any, specs: list[tf.TensorSpec]
) -> list[np.ndarray]:
    """Flatten an element; raise a `ValueError` if its specs differ from the first's.

    Args:
        element: Element of the source.
        index: Int, index of the element, for the message.
        first: The first element of the source.
        specs: List of `tf.TensorSpec`, one for each part of the first element.
    """
    element = keras.tree.lists_to_tuples(element)
    parts = tf.nest.flatten(element)
    part_specs = [_spec_of(part) for part in parts]
    try:
        tf.nest.assert_same_structure(first, element)
    except (TypeError, ValueError):
        part_specs = []
    if part_specs != specs:
        raise ValueError(
            "All elements of a source must have the structure, shapes and types of the "
            f"first. Received: {_describe_element(element)} at {index}, after "
            f"{_describe_element(first)}"
        )
    return [np.asarray(part) for part in parts]


def _describe_element(element: Any) -> str:
    """Format the dtypes and shapes of an element, such as '{'x': int64[3]}'."""

    def describe(part: Any) -> str:
        """Format a part of an element, such as 'int64[3]', or name its class."""
        spec = _spec_of(part)
        if spec is None:
            return type(part).__name__
        return f"{spec.dtype.name}{list(spec.shape)}"

    return str(keras.tree.map_structure(describe, element, none_is_leaf=True))
