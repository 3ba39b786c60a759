"""Parts of arrays: columns or component tensors, of which rows are read and encoded."""

from __future__ import annotations

import math
from typing import Any

import h5py
import numpy as np
import tensorflow as tf

# At most 25 MB of all arrays together are hashed. SHA-256 takes 50 ms for them at
# 0.5 GB/s, its rate on a processor without SHA instructions. A limit in seconds would
# stop at different bytes on different workers.
_WHOLE_BYTES = 25_000_000
# A large array with short rows has a limit of rows beside that of bytes, because evenly
# spaced rows lie apart in memory and each costs an access of its own.
_SAMPLED_ROWS = 4096
# Few bytes and rows are read of an array in a file, because each row may cost an access
# to a disk or to a network.
_STORED_BYTES = 4_000_000
_STORED_ROWS = 64
# A string or another object counts as 256 bytes, because its hash costs as much as that
# of 256 bytes of numbers.
_OBJECT_BYTES = 256
# Workers compare each block of an array, because a small difference would vanish in the
# norm of a large array. The number of blocks is limited, because workers send a
# projection and the norm of each.
_MAX_BLOCKS = 64
_BLOCK_SIZE = 1024

COMPOSITE = (tf.RaggedTensor, tf.SparseTensor)


class ArrayPart:
    """Array or column, read by `ArrayValues` in full or as evenly spaced rows.

    A composite array, such as a table or a sparse tensor, has one `ArrayPart` for each
    of its columns or component tensors.

    Args:
        array: Array of numbers, strings or objects, of a class that `ArrayValues`
            accepts.

    Attributes:
        num_rows: Int, number of rows of the array; 1 for a scalar.
        num_bytes: Int, size of all rows; an estimate for strings and objects.
        is_stored: Bool, whether the array is in a file, and not in memory.
        num_read: Int, number of rows that are read: all, until `choose_rows` lowers it.
    """

    def __init__(self, array: Any) -> None:
        self._array = array
        self._shape = tuple(array.shape)
        self.num_rows = int(self._shape[0]) if self._shape else 1
        self.num_bytes = math.prod(self._shape) * _item_bytes(array)
        self.is_stored = isinstance(array, (np.memmap, h5py.Dataset))
        self.num_read = self.num_rows

    def choose_rows(self, budget: int) -> None:
        """Lower `num_read` if the array has more bytes than may be read of it.

        Args:
            budget: Int, maximum number of bytes to read of an array in memory. It does
                not apply to an array in a file, which has a fixed maximum.
        """
        most = _SAMPLED_ROWS
        row_bytes = max(self.num_bytes // max(self.num_rows, 1), 1)
        if self.is_stored:
            budget, most = _STORED_BYTES, _STORED_ROWS
        if self.num_bytes <= budget:
            return
        if self.is_stored and getattr(self._array, "chunks", None):
            # HDF5 reads the whole chunk of a row, so a row costs a chunk's bytes.
            row_bytes *= self._array.chunks[0]
        self.num_read = min(max(budget // row_bytes, 2), most, self.num_rows)

    def read(self) -> np.ndarray:
        """Return all rows, or `num_read` evenly spaced ones, as a NumPy array."""
        if self.num_read == self.num_rows:
            return as_numpy(self._array)
        last = self.num_read - 1
        rows = np.arange(self.num_read) * (self.num_rows - 1) // last
        if tf.is_tensor(self._array):
            return tf.gather(self._array, rows).numpy()
        # Tables of pandas are indexed by label, and only their `iloc` by position.
        by_position = getattr(self._array, "iloc", self._array)
        return as_numpy(by_position[rows])

    def describe(self, digest: str) -> Any:
        """Describe the rows that are read, for comparisons that tolerate rounding.

        Rounding may differ in floats, complex numbers and integers of one byte. A block
        is a range of the flattened numbers.

        Args:
            digest: String, digest of the values, returned for types without rounding.

        Returns:
            List with a list of three numbers for each block: its dot product with
            random weights that are the same on all workers, its norm, and its number of
            non-finite values. For types without rounding, `digest`.
        """
        values = self.read()
        # NumPy's kind V includes bfloat16 and float8, which are floats, and records,
        # which are not. Only records have names of fields.
        is_float = values.dtype.kind in "fcV" and values.dtype.names is None
        if not is_float and (values.dtype.kind not in "biu" or values.itemsize > 1):
            return digest
        if values.dtype.kind == "c":
            values = np.ascontiguousarray(values).view(values.real.dtype)
        numbers = values.astype("float64").ravel()
        is_finite = np.isfinite(numbers)
        numbers = np.where(is_finite, numbers, 0.0)
        # All workers need the same weights, and a `RandomState` of one seed draws the
        # same numbers in every version of NumPy, unlike `default_rng`.
        weights = np.random.RandomState(0).uniform(-1, 1, len(numbers))
        num_blocks = min(max(len(numbers) // _BLOCK_SIZE, 1), _MAX_BLOCKS)
        blocks = zip(
            np.array_split(numbers, num_blocks),
            np.array_split(weights, num_blocks),
            np.array_split(is_finite, num_blocks),
            strict=True,
        )
        return [
            [float(block @ w), float(np.linalg.norm(block)), int(np.sum(~finite))]
            for block, w, finite in blocks
        ]

    def holds_paths(self) -> bool:
        """Return whether the values are strings, and any contains a slash."""
        values = self.read()
        if values.dtype.kind != "O":
            return False
        return any(b"/" in _encode(item) for item in values.ravel().tolist())


def split_into_parts(array: Any) -> list[ArrayPart]:
    """Return an `ArrayPart` for each column or component of an array.

    Most arrays have one part. The list is empty for `None`, and for an array of an
    unknown class.
    """
    if array is None:
        return []
    try:
        if isinstance(array, COMPOSITE):
            arrays = tf.nest.flatten(array, expand_composites=True)
        elif is_scipy_sparse(array):
            rows = array.tocsr()
            arrays = [rows.indptr, rows.indices, rows.data]
        elif hasattr(array, "iloc") and len(array.shape) == 2:
            arrays = [array.iloc[:, column] for column in range(array.shape[1])]
        else:
            arrays = [array]
        return [ArrayPart(each) for each in arrays]
    except Exception:  # noqa: BLE001 a user's array class may raise anything
        return []


def bytes_per_array(bytes_of_arrays: list[int]) -> int:
    """Return the maximum number of bytes to read of each array, 25 MB in all.

    `bytes_of_arrays` are the sizes of the arrays in memory. Small arrays are read as a
    whole, and large ones share the rest equally.
    """
    if sum(bytes_of_arrays) <= _WHOLE_BYTES:
        return _WHOLE_BYTES
    small = [
        size for size in bytes_of_arrays if size <= _WHOLE_BYTES // len(bytes_of_arrays)
    ]
    return (_WHOLE_BYTES - sum(small)) // (len(bytes_of_arrays) - len(small))


def is_scipy_sparse(array: Any) -> bool:
    """Return whether an array is a sparse matrix of SciPy."""
    return callable(getattr(array, "tocsr", None))


def _item_bytes(array: Any) -> int:
    """Return the bytes per item of an array; 256 for objects and unknown dtypes."""
    # NumPy does not know the dtypes of torch, but a torch tensor has `element_size`.
    if hasattr(array, "element_size"):
        return array.element_size()
    # A `tf.DType` is no NumPy dtype, but holds the equivalent one as `as_numpy_dtype`.
    dtype = getattr(array.dtype, "as_numpy_dtype", array.dtype)
    try:
        dtype = np.dtype(dtype)
    except TypeError:  # NumPy does not know pandas's own dtypes
        return _OBJECT_BYTES
    return _OBJECT_BYTES if dtype.kind == "O" else dtype.itemsize


def as_numpy(array: Any) -> np.ndarray:
    """Convert an array of any supported class to NumPy, read completely."""
    # NumPy converts a torch tensor only from host memory and without gradients.
    if hasattr(array, "detach"):
        array = array.detach().cpu()
    return np.asarray(array[()] if isinstance(array, h5py.Dataset) else array)


def bytes_of(values: np.ndarray, *, only_names: bool) -> Any:
    """Return an array's values as bytes, equal for equal values on any machine.

    The result is a flat uint8 array, or a `bytes` object for strings and objects.

    Args:
        values: NumPy array.
        only_names: Bool, whether only the part of each string after its last slash is
            encoded: the file name of a path, whose folders may differ by machine.
    """
    # Records are encoded item by item, because the padding bytes between their fields
    # are random, and would make the bytes of equal records differ.
    if values.dtype.kind == "O" or values.dtype.names is not None:
        texts = [_encode(item) for item in values.ravel().tolist()]
        if only_names:
            texts = [text.rpartition(b"/")[2] for text in texts]
        return b"\0".join(texts)
    if values.dtype.byteorder == ">":
        values = values.astype(values.dtype.newbyteorder("<"))
    return np.ascontiguousarray(values).reshape(-1).view("uint8")


def _encode(item: Any) -> bytes:
    """Encode an item as bytes, the same on any machine.

    Strings, bytes, numbers and nested lists of them are encoded by value, and any other
    object by the name of its class.
    """
    if isinstance(item, bytes):
        return item
    if isinstance(item, str):
        return item.encode("utf-8", "surrogatepass")
    if isinstance(item, (bool, int, float, complex, np.generic)):
        return repr(getattr(item, "tolist", lambda: item)()).encode()
    if isinstance(item, (list, tuple, np.ndarray)):
        return b"[" + b",".join(_encode(each) for each in item) + b"]"
    return type(item).__name__.encode()
