"""Arrays that stand in files: memory maps and HDF5 datasets, read row by row.

Keras copies such an array into memory, whole, on every worker. Here its adapter is
given the numbers of the rows in its place: it shuffles and batches these, each worker
takes its own of each batch (`early_rows`), and reads the rows of these numbers.
"""

from __future__ import annotations

from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf

from tfdp.ground import _compat
from tfdp.training.data.stages import no_autograph

_PARTS = ("x", "y", "sample_weight")
_NUMBERS = "biuf"  # kinds of dtype: booleans, integers, floats


class StoredRows:
    """An array in a file.

    Args:
        array: `np.memmap` or `h5py.Dataset`.
    """

    def __init__(self, array: Any) -> None:
        self._array = array
        is_float = array.dtype.kind == "f"
        self._dtype = tf.as_dtype(keras.config.floatx() if is_float else array.dtype)

    def numbers(self) -> np.ndarray:
        """Return the numbers of all rows, of shape `[num_rows]`, int64."""
        return np.arange(len(self._array), dtype="int64")

    def gather(self, numbers: tf.Tensor) -> tf.Tensor:
        """Read rows, in a graph.

        Args:
            numbers: Tensor of shape `[num]`, int64, each number once.
        """
        rows = tf.numpy_function(self.read, [numbers], self._dtype, stateful=False)
        return tf.ensure_shape(rows, [numbers.shape[0], *self._array.shape[1:]])

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """Read rows.

        Args:
            numbers: Array of shape `[num]`, int64, each number once.
        """
        dtype = self._dtype.as_numpy_dtype
        if len(numbers) == 0:
            return np.zeros([0, *self._array.shape[1:]], dtype)
        order = np.argsort(numbers)
        rising = numbers[order]
        first, last = int(rising[0]), int(rising[-1])
        # HDF5 reads rows in rising order, and a range much faster.
        is_range = last - first + 1 == len(rising)
        rows = self._array[first : last + 1] if is_range else self._array[rising]
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        return np.asarray(rows)[place].astype(dtype, copy=False)


class StoredArraysAdapter(_compat.ArrayDataAdapter):
    """Keras's adapter of arrays, some of which stand in files.

    Args:
        arguments: Dict, keyword arguments of Keras's epoch iterator.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        # By the number of a stand-in, which Keras holds as it is.
        self._stored: dict[int, StoredRows] = {}
        shuffle = arguments.get("shuffle", False)
        self._of_classes = arguments.get("class_weight") is not None

        def stand_in(leaf: Any) -> Any:
            if not _is_read_by_rows(leaf, shuffle):
                return leaf
            stored = StoredRows(leaf)
            numbers = stored.numbers()
            self._stored[id(numbers)] = stored
            return numbers

        given = {name: arguments.get(name) for name in _PARTS}
        for name, part in given.items():
            if name != "y" or not self._of_classes:  # Keras reads them for the weights
                given[name] = keras.tree.map_structure(stand_in, part)
        super().__init__(
            given["x"],
            given["y"],
            sample_weight=given["sample_weight"],
            batch_size=arguments.get("batch_size"),
            steps=arguments.get("steps_per_epoch"),
            shuffle=shuffle,
            class_weight=arguments.get("class_weight"),
        )

    def get_tf_dataset(self) -> tf.data.Dataset:
        """Make a dataset of batches; the rows are read by its last stage."""
        inputs = keras.tree.lists_to_tuples(_compat.inputs_of(self))
        stored = keras.tree.map_structure(
            lambda leaf: self._stored.get(id(leaf)), inputs
        )

        def read(leaf: Any, rows: StoredRows | None) -> Any:
            return leaf if rows is None else rows.gather(leaf)

        @no_autograph
        def read_stored_rows(*batch: Any) -> Any:
            batch = batch if type(stored) is tuple else batch[0]
            return keras.tree.map_structure(read, batch, stored)

        return super().get_tf_dataset().map(read_stored_rows)


def has_stored_arrays(arguments: dict[str, Any]) -> bool:
    """Return whether arrays for a loop are better read row by row.

    Args:
        arguments: Dict, keyword arguments of Keras's epoch iterator.
    """
    given = [arguments.get(name) for name in _PARTS]
    if arguments.get("class_weight") is not None:
        given[1] = None
    shuffle = arguments.get("shuffle", False)
    is_any = any(_is_read_by_rows(leaf, shuffle) for leaf in keras.tree.flatten(given))
    return is_any and _compat.can_convert_arrays(
        tuple(arguments.get(name) for name in _PARTS)
    )


def _is_read_by_rows(leaf: Any, shuffle: bool | str) -> bool:
    """Return whether rows of an array are read from its file.

    Rows of a chunked or compressed HDF5 dataset in random order cost a chunk each:
    that one goes into memory, as Keras does it.
    """
    if not isinstance(leaf, (np.memmap, h5py.Dataset)):
        return False
    if not leaf.ndim or leaf.dtype.kind not in _NUMBERS:
        return False
    is_contiguous = getattr(leaf, "chunks", None) is None
    return is_contiguous or shuffle is False or shuffle == "batch"
