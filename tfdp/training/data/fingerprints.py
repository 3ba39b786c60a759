"""Fingerprints of arrays, by which workers compare the values that they hold.

Workers send fingerprints in messages that they exchange anyway. Only if fingerprints
differ does a second message describe the values, which distinguishes rounding from
other values, and another order from other rows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import h5py
import numpy as np
import tensorflow as tf

from tfdp.communication.coordination.facts import SharedFact
from tfdp.communication.coordination.worker_group import WorkerGroup

# The maximum number of bytes that are hashed of all arrays together. SHA-256 takes
# 50 ms for them at 0.5 GB/s, the rate of a processor without SHA instructions. A limit
# in bytes is the same on all workers; a limit in seconds would not be.
_WHOLE_BYTES = 25_000_000
# The maximum number of rows that are read of an array that is too large to be hashed
# as a whole.
_SAMPLED_ROWS = 4096
# The maximum number of bytes and of rows that are read of an array in a file: each row
# may cost an access to a disk or to a network.
_STORED_BYTES = 4_000_000
_STORED_ROWS = 64
# The number of bytes that a string or another object counts for: its hash costs as much
# as that of this many bytes of numbers.
_OBJECT_BYTES = 256
# Workers may have computed floats, and 8-bit integers such as images, with different
# rounding. Values of a block count as equal up to this multiple of the block's norm.
_ROUNDING = 1e-3
# The maximum number of blocks into which an array is divided, and the minimum length of
# a block if there are several. A projection and the norm of each block are compared.
_MAX_BLOCKS = 64
_BLOCK_SIZE = 1024
# The maximum size of an array, in bytes and in rows, whose rows are hashed one by one,
# so that the same rows in another order can be recognized.
_ORDERED_BYTES = 250_000_000
_ORDERED_ROWS = 100_000
# The approximate number of evenly spaced numbers that are hashed of a long row.
_ORDERED_COLUMNS = 64
# The number of row hashes in the description of an array, see `ArrayValues.describe`.
_NUM_KEPT_HASHES = 32
# The maximum number of groups of workers that an error message lists.
_MAX_GROUPS = 3

_COMPOSITE = (tf.RaggedTensor, tf.SparseTensor)
_SAME_ROWS = "with the same rows in another order"
_OTHER_VALUES = "with other values"


class ArrayValues:
    """Values of the arrays of this worker, to be compared with those of the others.

    Args:
        arrays: Dict of arrays by name: of NumPy, TensorFlow, pandas, torch or SciPy, or
            in files. `None` is ignored.
        are_sources: Bool, whether the arrays are the sources of a dataset. Their
            strings may be paths; only their base names are compared, because
            workers may have the files in different folders. Defaults to `False`.
    """

    def __init__(self, arrays: dict[str, Any], *, are_sources: bool = False) -> None:
        self._are_sources = are_sources
        self._arrays = arrays
        self._parts = {name: _split_into_parts(array) for name, array in arrays.items()}
        budget = _bytes_per_array(
            [p.num_bytes for p in self._all_parts() if not p.is_stored]
        )
        for part in self._all_parts():
            part.choose_rows(budget)

    def fingerprints(self) -> dict[str, Any]:
        """Return a fingerprint of each array, by name.

        A fingerprint is a list of two items: the list of the numbers of rows read of
        each part, and a digest of these rows, or `None` if they cannot be read.
        """
        return {
            name: [[part.num_read for part in parts], self._digest(parts)]
            for name, parts in self._parts.items()
        }

    def describe(self, name: str) -> dict[str, Any] | None:
        """Describe the values of an array in more detail than a fingerprint.

        Returns:
            Dict, or `None` if the array cannot be described. `"parts"` are the blocks
            of each part of the array, or a digest for values without rounding;
            `"rows"` is an order-independent digest of the rows and some hashes of rows,
            or `None`; `"paths"` is whether the values are paths.
        """
        parts = self._parts[name]
        try:
            return {
                "parts": [part.describe(self._hash_of(part)) for part in parts],
                "rows": self._rows(name),
                "paths": self._are_sources and any(p.holds_paths() for p in parts),
            }
        except Exception:  # noqa: BLE001 the other workers wait for the description
            return None

    def _all_parts(self) -> Iterator[_ArrayPart]:
        """Yield the components of all arrays."""
        for parts in self._parts.values():
            yield from parts

    def _digest(self, parts: list[_ArrayPart]) -> str | None:
        """Return a SHA-256 of the values of all parts; `None` if one cannot be read."""
        try:
            texts = [self._hash_of(part) for part in parts]
        except Exception:  # noqa: BLE001 arrays may be of any user class
            return None
        return hashlib.sha256(" ".join(texts).encode()).hexdigest() if texts else None

    def _hash_of(self, part: _ArrayPart) -> str:
        """Return a SHA-256 of the shape and the values of the rows read of a part."""
        values = part.read()
        digest = hashlib.sha256(str(values.shape).encode())
        digest.update(_bytes_of(values, only_names=self._are_sources))
        return digest.hexdigest()

    def _rows(self, name: str) -> list | None:
        """Return an order-independent digest of rows, and the smallest row hashes.

        Returns:
            List of the digest, and a list of some hashes; or `None` if the array is
            large, ragged, sparse or in a file.
        """
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


class _ArrayPart:
    """An array of which `ArrayValues` reads all rows, or some evenly spaced ones.

    A composite array, such as a table or a sparse tensor, has one `_ArrayPart` for each
    of its columns or component tensors.

    Args:
        array: Array of numbers, strings or objects, of a class that `ArrayValues`
            accepts.

    Attributes:
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
        """Choose the number of rows to read.

        Args:
            budget: Int, maximum number of bytes to read of an array in memory.
        """
        most = _SAMPLED_ROWS
        row_bytes = max(self.num_bytes // max(self.num_rows, 1), 1)
        if self.is_stored:
            budget, most = _STORED_BYTES, _STORED_ROWS
        if self.num_bytes <= budget:
            return
        if self.is_stored and getattr(self._array, "chunks", None):
            # HDF5 reads a row of a chunked dataset with its whole chunk.
            row_bytes *= self._array.chunks[0]
        self.num_read = min(max(budget // row_bytes, 2), most, self.num_rows)

    def read(self) -> np.ndarray:
        """Read the rows that `choose_rows` has chosen, as a NumPy array."""
        if self.num_read == self.num_rows:
            return as_numpy(self._array)
        last = self.num_read - 1
        rows = np.arange(self.num_read) * (self.num_rows - 1) // last
        if tf.is_tensor(self._array):
            return tf.gather(self._array, rows).numpy()
        by_position = getattr(self._array, "iloc", self._array)  # a pandas object
        return as_numpy(by_position[rows])

    def describe(self, digest: str) -> Any:
        """Describe the chosen rows: by blocks if rounding may differ, or by the digest.

        Rounding may differ in floats, complex numbers and integers of one byte. A block
        is a range of the flattened numbers.

        Args:
            digest: String, digest of the values.

        Returns:
            List with, for each block, its dot product with random weights that are the
            same on all workers, its norm, and its number of non-finite values; or
            `digest`.
        """
        values = self.read()
        # NumPy's kind V includes bfloat16 and float8, which are floats, and records,
        # which are not, and whose fields have names.
        is_float = values.dtype.kind in "fcV" and values.dtype.names is None
        if not is_float and (values.dtype.kind not in "biu" or values.itemsize > 1):
            return digest
        if values.dtype.kind == "c":
            values = np.ascontiguousarray(values).view(values.real.dtype)
        numbers = values.astype("float64").ravel()
        is_finite = np.isfinite(numbers)
        numbers = np.where(is_finite, numbers, 0.0)
        # All workers need the same weights: every version of NumPy draws the same
        # numbers from a `RandomState` of one seed.
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


# Error of datasets with different values, to which a remedy is appended.
_DATA_DIFFER = (
    "Workers have data of different values, so that some rows would be read twice and "
    "others never."
)


def values_fact(
    worker_group: WorkerGroup,
    topic: str,
    values: ArrayValues,
    problem: str = _DATA_DIFFER,
) -> SharedFact:
    """Return a `SharedFact` of values that may differ by no more than rounding.

    Args:
        worker_group: `WorkerGroup` between the workers.
        topic: String, what is compared, for messages.
        values: `ArrayValues` of this worker.
        problem: String, beginning of the error. Defaults to one about datasets.
    """

    def explain(fingerprints: dict[int, dict]) -> str:
        """Return the error if values differ by more than rounding, or else `""`.

        All workers call it, since it may exchange a second message.

        Args:
            fingerprints: Dict from the rank of each worker to the result of
                `ArrayValues.fingerprints` there.
        """
        by_worker = list(fingerprints.values())
        difference = find_difference(worker_group, topic, by_worker, values)
        return difference and (
            f"{problem} Draw, shuffle, split and list data alike on every worker, by "
            "one seed and in sorted order, or give each a `tf.data.Dataset` of its own "
            f"with `AutoShardPolicy.OFF`. Received: {difference}"
        )

    return SharedFact("values", values.fingerprints(), explain)


def find_difference(
    worker_group: WorkerGroup,
    topic: str,
    fingerprints: Sequence[dict[str, Any]],
    values: ArrayValues,
) -> str:
    """Describe how the workers' arrays differ, after a second message if needed.

    All workers call it with the same fingerprints.

    Args:
        worker_group: `WorkerGroup` between the workers.
        topic: String, what is compared, for messages.
        fingerprints: Sequence of dicts, the fingerprints of each worker's arrays.
        values: `ArrayValues` of this worker.

    Returns:
        String, or an empty one if the arrays differ at most by rounding.
    """
    names = [
        name
        for name in fingerprints[0]
        if _are_comparable([of_worker.get(name) for of_worker in fingerprints])
        and any(of_worker[name] != fingerprints[0][name] for of_worker in fingerprints)
    ]
    if not names:
        return ""
    # Only the first worker of each group with equal values describes them.
    ranks: dict[str, list[int]] = {}
    for rank, of_worker in enumerate(fingerprints):
        ranks.setdefault(str([of_worker[name] for name in names]), []).append(rank)
    first_ranks = [of_group[0] for of_group in ranks.values()]
    describes = worker_group.rank in first_ranks
    descriptions = {name: values.describe(name) for name in names} if describes else {}
    fingerprints = worker_group.all_gather(f"{topic}: values", descriptions)
    described = [fingerprints[rank] for rank in first_ranks]
    groups = list(ranks.values())[1:]
    sentences = [
        f"{_describe_pair(described[0], other)} on {_list_workers(of_group)}"
        for of_group, other in zip(groups, described[1:], strict=True)
        if _different_names(described[0], other)
    ]
    if not sentences:
        return ""
    more = ["others on more workers"] if len(sentences) > _MAX_GROUPS else []
    return f"{'; '.join([*sentences[:_MAX_GROUPS], *more])} than on worker 0"


def _are_comparable(fingerprints: list[Any]) -> bool:
    """Return whether all workers have read the same rows of an array.

    Arrays of different lengths are compared elsewhere. Of an array in memory and one
    in a file different rows are read.

    Args:
        fingerprints: List of one array's fingerprint on each worker.
    """
    if any(each is None or each[1] is None for each in fingerprints):
        return False
    return all(each[0] == fingerprints[0][0] for each in fingerprints)


def _different_names(first: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the names of arrays whose descriptions differ by more than rounding.

    Both dicts have what `ArrayValues.describe` returned, by name.
    """
    return [name for name in first if _is_different(first[name], other[name])]


def _is_different(first: dict | None, other: dict | None) -> bool:
    """Return whether two descriptions of an array differ by more than rounding.

    `ArrayValues.describe` returned them on two workers; `None` always differs.
    """
    if first is None or other is None:
        # A missing description counts as a difference, because values are described
        # only if their fingerprints differ.
        return True
    if first["paths"] and other["paths"] and first["rows"] and other["rows"]:
        # Lists of paths without a common name may be copies of one data set under other
        # names, so they do not count as different. Lists with a common name that differ
        # do.
        return bool(set(first["rows"][1]) & set(other["rows"][1]))
    if len(first["parts"]) != len(other["parts"]):
        return True
    pairs = zip(first["parts"], other["parts"], strict=True)
    return any(_parts_differ(*pair) for pair in pairs)


def _parts_differ(first: Any, other: Any) -> bool:
    """Return whether the descriptions of a part differ by more than rounding.

    Each is a list of blocks, or a digest, see `_ArrayPart.describe`.
    """
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
    """Describe how arrays of two workers differ, such as 'x with other values'.

    Both dicts have what `ArrayValues.describe` returned, by name.
    """
    names = _different_names(first, other)
    same_rows = all(_have_same_rows(first[name], other[name]) for name in names)
    return f"{', '.join(names)} {_SAME_ROWS if same_rows else _OTHER_VALUES}"


def _have_same_rows(first: dict | None, other: dict | None) -> bool:
    """Return whether two described arrays have the same rows, in any order.

    The result is `False` if the rows of one array are not described.
    """
    if first is None or other is None or not first["rows"] or not other["rows"]:
        return False
    return first["rows"][0] == other["rows"][0]


def _list_workers(ranks: list[int]) -> str:
    """Format ranks for a message: 'worker 3', 'workers 0, 1'; at most eight."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"worker {shown}" if len(ranks) == 1 else f"workers {shown}"


def _bytes_per_array(bytes_of_arrays: list[int]) -> int:
    """Return how many bytes may be read of each array, within `_WHOLE_BYTES`.

    `bytes_of_arrays` are the sizes of the arrays in memory.

    Small arrays are read as a whole, and large ones share the rest equally.
    """
    if sum(bytes_of_arrays) <= _WHOLE_BYTES:
        return _WHOLE_BYTES
    small = [
        size for size in bytes_of_arrays if size <= _WHOLE_BYTES // len(bytes_of_arrays)
    ]
    return (_WHOLE_BYTES - sum(small)) // (len(bytes_of_arrays) - len(small))


def _split_into_parts(array: Any) -> list[_ArrayPart]:
    """Split an array into its parts, such as a table's columns; empty if it fails."""
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
        return [_ArrayPart(each) for each in arrays]
    except Exception:  # noqa: BLE001 arrays may be of any user class
        return []


def _is_scipy_sparse(array: Any) -> bool:
    """Return whether an array is a sparse matrix of SciPy."""
    return callable(getattr(array, "tocsr", None))


def _item_bytes(array: Any) -> int:
    """Return the bytes of one item of an array, of any class in `ArrayValues`."""
    if hasattr(array, "element_size"):  # a torch tensor
        return array.element_size()
    dtype = getattr(array.dtype, "as_numpy_dtype", array.dtype)  # a TensorFlow tensor
    try:
        dtype = np.dtype(dtype)
    except TypeError:  # a pandas dtype
        return _OBJECT_BYTES
    return _OBJECT_BYTES if dtype.kind == "O" else dtype.itemsize


def as_numpy(array: Any) -> np.ndarray:
    """Convert an array of any supported class to NumPy, read completely."""
    if hasattr(array, "detach"):  # a torch tensor
        array = array.detach().cpu()
    return np.asarray(array[()] if isinstance(array, h5py.Dataset) else array)


def _bytes_of(values: np.ndarray, *, only_names: bool) -> Any:
    """Return bytes that are the same for equal values on every machine.

    Args:
        values: Array of NumPy.
        only_names: Bool, whether only the base name of each path counts.
    """
    # Records are encoded item by item, because padding bytes between fields are random.
    if values.dtype.kind == "O" or values.dtype.names is not None:
        texts = [_encode(item) for item in values.ravel().tolist()]
        if only_names:
            texts = [text.rpartition(b"/")[2] for text in texts]
        return b"\0".join(texts)
    if values.dtype.byteorder == ">":
        values = values.astype(values.dtype.newbyteorder("<"))
    return np.ascontiguousarray(values).reshape(-1).view("uint8")


def _encode(item: Any) -> bytes:
    """Encode an object as bytes: a plain value itself, or else its class name."""
    if isinstance(item, bytes):
        return item
    if isinstance(item, str):
        return item.encode("utf-8", "surrogatepass")
    if isinstance(item, (bool, int, float, complex, np.generic)):
        return repr(getattr(item, "tolist", lambda: item)()).encode()
    if isinstance(item, (list, tuple, np.ndarray)):
        return b"[" + b",".join(_encode(each) for each in item) + b"]"
    return type(item).__name__.encode()
