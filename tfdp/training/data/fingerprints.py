"""Fingerprints of arrays, by which workers compare the values that they hold.

Fingerprints travel with what workers compare anyway. Only where they differ does a
second message describe the values, by which rounding is told from other values, and
another order from other rows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import h5py
import numpy as np
import tensorflow as tf

from tfdp.communication.coordination.worker_group import WorkerGroup

# SHA-256 of so many bytes takes 50 ms at 0.5 GB/s, the rate of a processor without
# instructions for it. A number of bytes is the same on all workers, a time is not.
_WHOLE_BYTES = 25_000_000
_SAMPLED_ROWS = 4096
# Each row of an array in a file may cost an access to a disk or to a network.
_STORED_BYTES = 4_000_000
_STORED_ROWS = 64
# A string or another object costs as much as so many bytes of numbers.
_OBJECT_BYTES = 256
# Numbers that workers have computed may differ by rounding: floats, and images of
# 8 bits. So many blocks are compared by a projection and the norm of each.
_ROUNDING = 1e-3
_MOST_BLOCKS = 64
_BLOCK_SIZE = 1024
# Of larger arrays nobody tells whether they hold the same rows in another order.
_ORDERED_BYTES = 250_000_000
_ORDERED_ROWS = 100_000
_ORDERED_COLUMNS = 64  # of long rows as many numbers tell them apart
_NUM_KEPT_HASHES = 32
_MOST_GROUPS = 3

_COMPOSITE = (tf.RaggedTensor, tf.SparseTensor)
_SAME_ROWS = "with the same rows in another order"
_OTHER_VALUES = "with other values"


class ArrayValues:
    """Values of the arrays of this worker, to be compared with those of the others.

    Args:
        arrays: Dict of arrays by name: of NumPy, TensorFlow, pandas, torch or SciPy, or
            in files. `None` is passed over.
        are_sources: Bool, whether these are the sources of a dataset, whose strings may
            be paths: files may lie in another folder on each worker. Defaults to
            `False`.
    """

    def __init__(self, arrays: dict[str, Any], *, are_sources: bool = False) -> None:
        self._are_sources = are_sources
        self._arrays = arrays
        self._parts = {name: _parts_of(array) for name, array in arrays.items()}
        budget = _budget([p.num_bytes for p in self._all_parts() if not p.is_stored])
        for part in self._all_parts():
            part.choose_rows(budget)

    def fingerprints(self) -> dict[str, Any]:
        """Return for each array the numbers of rows that were read, and a digest.

        The digest is `None` of what cannot be read as numbers, strings or the like.
        """
        return {
            name: [[part.num_read for part in parts], self._digest(parts)]
            for name, parts in self._parts.items()
        }

    def describe(self, name: str) -> dict[str, Any] | None:
        """Describe the values of an array by more than a digest.

        Returns:
            Dict, or `None` for what cannot be described. Its entries are the blocks of
            each part of the array, or a digest where nothing is rounded; a digest of
            the rows in any order and some hashes of rows, or `None`; and whether the
            values are paths.
        """
        parts = self._parts[name]
        try:
            return {
                "parts": [part.describe(self._hashed(part)) for part in parts],
                "rows": self._rows(name),
                "paths": self._are_sources and any(p.holds_paths() for p in parts),
            }
        except Exception:  # noqa: BLE001 the other workers wait for the description
            return None

    def _all_parts(self) -> Iterator[_Part]:
        for parts in self._parts.values():
            yield from parts

    def _digest(self, parts: list[_Part]) -> str | None:
        try:
            texts = [self._hashed(part) for part in parts]
        except Exception:  # noqa: BLE001 an array is any class of a user's
            return None
        return hashlib.sha256(" ".join(texts).encode()).hexdigest() if texts else None

    def _hashed(self, part: _Part) -> str:
        values = part.read()
        digest = hashlib.sha256(str(values.shape).encode())
        digest.update(_bytes_of(values, only_names=self._are_sources))
        return digest.hexdigest()

    def _rows(self, name: str) -> list | None:
        """A digest of the rows in any order, and the smallest hashes of rows."""
        array, parts = self._arrays[name], self._parts[name]
        num_bytes = sum(part.num_bytes for part in parts)
        is_plain = not isinstance(array, _COMPOSITE)
        is_plain = is_plain and not _is_scipy_sparse(array)
        is_small = num_bytes <= _ORDERED_BYTES and parts[0].num_rows <= _ORDERED_ROWS
        if not is_plain or not is_small or any(part.is_stored for part in parts):
            return None
        rows = as_numpy(array).reshape(parts[0].num_rows, -1)
        rows = rows[:, :: max(rows.shape[1] // _ORDERED_COLUMNS, 1)]
        hashes = sorted(
            hashlib.blake2b(
                _bytes_of(row, only_names=self._are_sources), digest_size=8
            ).hexdigest()
            for row in rows
        )
        whole = hashlib.sha256("".join(hashes).encode()).hexdigest()
        return [whole, sorted(set(hashes))[:_NUM_KEPT_HASHES]]


class _Part:
    """An array of numbers, strings or objects: one, or one of those that make one up.

    Attributes:
        num_read: Int, the number of rows that are read: all, or some evenly spaced.
    """

    def __init__(self, array: Any) -> None:
        self._array = array
        self._shape = tuple(array.shape)
        self.num_rows = int(self._shape[0]) if self._shape else 1
        self.num_bytes = math.prod(self._shape) * _item_bytes(array)
        self.is_stored = isinstance(array, (np.memmap, h5py.Dataset))
        self.num_read = self.num_rows

    def choose_rows(self, budget: int) -> None:
        """Choose how many rows are read.

        Args:
            budget: Int, the number of bytes of an array in memory.
        """
        most = _SAMPLED_ROWS
        row_bytes = max(self.num_bytes // max(self.num_rows, 1), 1)
        if self.is_stored:
            budget, most = _STORED_BYTES, _STORED_ROWS
        if self.num_bytes <= budget:
            return
        if self.is_stored and getattr(self._array, "chunks", None):
            # A row of a chunked HDF5 dataset is read with its whole chunk.
            row_bytes *= self._array.chunks[0]
        self.num_read = min(max(budget // row_bytes, 2), most, self.num_rows)

    def read(self) -> np.ndarray:
        """Read the chosen rows."""
        if self.num_read == self.num_rows:
            return as_numpy(self._array)
        last = self.num_read - 1
        rows = np.arange(self.num_read) * (self.num_rows - 1) // last
        if tf.is_tensor(self._array):
            return tf.gather(self._array, rows).numpy()
        by_position = getattr(self._array, "iloc", self._array)  # of pandas
        return as_numpy(by_position[rows])

    def describe(self, digest: str) -> Any:
        """Return the projection and the norm of each block, or else the digest."""
        values = self.read()
        # Of the kind V are bfloat16 and float8, and records.
        is_float = values.dtype.kind in "fcV" and values.dtype.names is None
        if not is_float and (values.dtype.kind not in "biu" or values.itemsize > 1):
            return digest
        if values.dtype.kind == "c":
            values = np.ascontiguousarray(values).view(values.real.dtype)
        numbers = values.astype("float64").ravel()
        is_finite = np.isfinite(numbers)
        numbers = np.where(is_finite, numbers, 0.0)
        # NumPy keeps the numbers that this generator draws.
        weights = np.random.RandomState(0).uniform(-1, 1, len(numbers))
        num_blocks = min(max(len(numbers) // _BLOCK_SIZE, 1), _MOST_BLOCKS)
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
        """Return whether these are strings, of which any has a folder."""
        values = self.read()
        if values.dtype.kind != "O":
            return False
        return any(b"/" in _encoded(item) for item in values.ravel().tolist())


def find_difference(
    worker_group: WorkerGroup,
    topic: str,
    told: Sequence[dict[str, Any]],
    values: ArrayValues,
) -> str:
    """Describe how arrays of workers differ, by another message if fingerprints do.

    All workers call it with the same `told`.

    Args:
        worker_group: `WorkerGroup` between the workers.
        topic: String, what is compared, for messages.
        told: Sequence, for each worker the fingerprints of its arrays.
        values: `ArrayValues` of this worker.

    Returns:
        String, or an empty one if they do not differ.
    """
    names = [
        name
        for name in told[0]
        if _are_comparable([found.get(name) for found in told])
        and any(found[name] != told[0][name] for found in told)
    ]
    if not names:
        return ""
    # One worker of those with equal values describes them.
    ranks: dict[str, list[int]] = {}
    for rank, found in enumerate(told):
        ranks.setdefault(str([found[name] for name in names]), []).append(rank)
    firsts = [of_group[0] for of_group in ranks.values()]
    is_first = worker_group.rank in firsts
    own = {name: values.describe(name) for name in names} if is_first else {}
    told = worker_group.all_gather(f"{topic}: values", own)
    described = [told[rank] for rank in firsts]
    groups = list(ranks.values())[1:]
    sentences = [
        f"{_describe_pair(described[0], other)} on {_workers(of_group)}"
        for of_group, other in zip(groups, described[1:], strict=True)
        if _different_names(described[0], other)
    ]
    if not sentences:
        return ""
    more = ["others on more workers"] if len(sentences) > _MOST_GROUPS else []
    return f"{'; '.join([*sentences[:_MOST_GROUPS], *more])} than on worker 0"


def _are_comparable(found: list[Any]) -> bool:
    """Whether all workers have read as many rows of an array.

    Arrays of other lengths are compared elsewhere. An array in memory and one in a file
    are read at other rows.
    """
    if any(each is None or each[1] is None for each in found):
        return False
    return all(each[0] == found[0][0] for each in found)


def _different_names(first: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in first if _is_different(first[name], other[name])]


def _is_different(first: dict | None, other: dict | None) -> bool:
    if first is None or other is None:
        return True  # as their digests are
    if first["paths"] and other["paths"] and first["rows"] and other["rows"]:
        # Copies of the data may have other names, but not the names of other files.
        return bool(set(first["rows"][1]) & set(other["rows"][1]))
    if len(first["parts"]) != len(other["parts"]):
        return True
    pairs = zip(first["parts"], other["parts"], strict=True)
    return any(_parts_differ(*pair) for pair in pairs)


def _parts_differ(first: Any, other: Any) -> bool:
    if isinstance(first, str) or isinstance(other, str):
        return first != other
    if len(first) != len(other):
        return True
    blocks, others = np.array(first), np.array(other)  # [num_blocks, 3]
    most = _ROUNDING * np.maximum(blocks[:, 1], others[:, 1])
    differences = np.abs(blocks - others)
    is_rounding = (differences[:, :2] <= most[:, np.newaxis]).all()
    return not is_rounding or bool(differences[:, 2].any())


def _describe_pair(first: dict[str, Any], other: dict[str, Any]) -> str:
    names = _different_names(first, other)
    same_rows = all(_have_same_rows(first[name], other[name]) for name in names)
    return f"{', '.join(names)} {_SAME_ROWS if same_rows else _OTHER_VALUES}"


def _have_same_rows(first: dict | None, other: dict | None) -> bool:
    if first is None or other is None or not first["rows"] or not other["rows"]:
        return False
    return first["rows"][0] == other["rows"][0]


def _workers(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"worker {shown}" if len(ranks) == 1 else f"workers {shown}"


def _budget(sizes: list[int]) -> int:
    """The number of bytes to read of each array: all, or as many of each large one."""
    if sum(sizes) <= _WHOLE_BYTES:
        return _WHOLE_BYTES
    small = [size for size in sizes if size <= _WHOLE_BYTES // len(sizes)]
    return (_WHOLE_BYTES - sum(small)) // (len(sizes) - len(small))


def _parts_of(array: Any) -> list[_Part]:
    """The arrays of numbers that make an array up: the columns of a table, say."""
    if array is None:
        return []
    try:
        if isinstance(array, _COMPOSITE):
            arrays = tf.nest.flatten(array, expand_composites=True)
        elif _is_scipy_sparse(array):
            rows = array.tocsr()
            arrays = [rows.indptr, rows.indices, rows.data]
        elif hasattr(array, "iloc") and len(array.shape) == 2:
            arrays = [array.iloc[:, column] for column in range(array.shape[1])]
        else:
            arrays = [array]
        return [_Part(each) for each in arrays]
    except Exception:  # noqa: BLE001 an array is any class of a user's
        return []


def _is_scipy_sparse(array: Any) -> bool:
    return callable(getattr(array, "tocsr", None))


def _item_bytes(array: Any) -> int:
    if hasattr(array, "element_size"):  # of torch
        return array.element_size()
    dtype = getattr(array.dtype, "as_numpy_dtype", array.dtype)  # of TensorFlow
    try:
        dtype = np.dtype(dtype)
    except TypeError:  # a type of pandas
        return _OBJECT_BYTES
    return _OBJECT_BYTES if dtype.kind == "O" else dtype.itemsize


def as_numpy(array: Any) -> np.ndarray:
    """Return an array of any class as one of NumPy, read whole."""
    if hasattr(array, "detach"):  # of torch
        array = array.detach().cpu()
    return np.asarray(array[()] if isinstance(array, h5py.Dataset) else array)


def _bytes_of(values: np.ndarray, *, only_names: bool) -> Any:
    """The bytes of an array, the same on all machines."""
    # Between the fields of a record there may be bytes that mean nothing.
    if values.dtype.kind == "O" or values.dtype.names is not None:
        texts = [_encoded(item) for item in values.ravel().tolist()]
        if only_names:
            texts = [text.rpartition(b"/")[2] for text in texts]
        return b"\0".join(texts)
    if values.dtype.byteorder == ">":
        values = values.astype(values.dtype.newbyteorder("<"))
    return np.ascontiguousarray(values).reshape(-1).view("uint8")


def _encoded(item: Any) -> bytes:
    """The bytes of an object that is alike on all workers, as far as it tells."""
    if isinstance(item, bytes):
        return item
    if isinstance(item, str):
        return item.encode("utf-8", "surrogatepass")
    if isinstance(item, (bool, int, float, complex, np.generic)):
        return repr(getattr(item, "tolist", lambda: item)()).encode()
    if isinstance(item, (list, tuple, np.ndarray)):
        return b"[" + b",".join(_encoded(each) for each in item) + b"]"
    return type(item).__name__.encode()
