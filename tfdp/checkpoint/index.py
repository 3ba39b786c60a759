"""Index of a checkpoint: which file holds which elements of which tensor.

Elements are counted in the flattened tensor, so that the index does not depend on the
number of workers, nor on how they had sharded the tensor.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tfdp.ground.text import pluralize

# An index names the algorithm of its checksums: zlib's CRC-32 works everywhere, and the
# faster CRC-32C needs the package google-crc32c.
CRC32, CRC32C = ALGORITHMS = ("crc32", "crc32c")


class TensorMetadata(NamedTuple):
    """Name, shape and dtype of a tensor of the training state.

    Args:
        name: String, unique in the checkpoint.
        shape: Tuple of ints.
        dtype: String, name of the dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Int, number of elements."""
        return math.prod(self.shape)


class Extent(NamedTuple):
    """Range of elements of a flattened tensor.

    Args:
        tensor: Int, position of the tensor in the index.
        start: Int, the first element.
        stop: Int, one after the last element.
    """

    tensor: int
    start: int
    stop: int


class File(NamedTuple):
    """Name, size and checksum of a file of a checkpoint when it was written.

    Args:
        name: String, without the directory.
        num_bytes: Int, its size.
        checksum: Int, checksum of its bytes, by the algorithm that the index names.
    """

    name: str
    num_bytes: int
    checksum: int


class Shard(NamedTuple):
    """File of a checkpoint that holds some elements of some tensors.

    Args:
        prefix: String, the name of the file without its ending.
        worker: Int, rank of the worker that wrote it.
        files: Tuple of `File`: the data file, which has the bytes of the extents one
            after another. In `index_file.FORMAT_OF_TENSORFLOW` another file precedes
            it, which TensorFlow needs to open the data file as its own checkpoint.
        extents: Tuple of `Extent`, in the order of their bytes.
    """

    prefix: str
    worker: int
    files: tuple[File, ...]
    extents: tuple[Extent, ...]

    @property
    def data(self) -> File:
        """`File` with the bytes of the extents."""
        return self.files[-1]


@dataclasses.dataclass(frozen=True)
class Index:
    """Contents of a checkpoint.

    Args:
        token: String, name of the subdirectory with the shards.
        tensors: Tuple of `TensorMetadata`.
        shards: Tuple of `Shard`.
        versions: Dict from packages to the versions that wrote the checkpoint.
        model: String, the serialized Keras model, or `None` if it cannot be
            serialized.
        run: Metadata of the run that saved a backup, a value that JSON supports, or
            `None`.
        algorithm: String, algorithm of the files' checksums, one of `ALGORITHMS`.
    """

    token: str
    tensors: tuple[TensorMetadata, ...]
    shards: tuple[Shard, ...]
    versions: dict[str, str]
    model: str | None = None
    run: Any = None
    algorithm: str = CRC32

    def find(self, wanted: Extent) -> list[tuple[Shard, Extent]]:
        """Find the shards that hold the elements of an extent.

        Args:
            wanted: `Extent`.

        Returns:
            List of pairs of a shard and an extent in it that overlaps `wanted`,
            ordered by element.

        Example:

        >>> shards = [Shard("a", 0, (), (Extent(0, 0, 4),))]
        >>> shards += [Shard("b", 1, (), (Extent(0, 4, 7), Extent(0, 7, 9)))]
        >>> x = TensorMetadata("x", (3, 3), "float32")
        >>> index = Index("t", (x,), tuple(shards), {})
        >>> [(shard.prefix, e.start) for shard, e in index.find(Extent(0, 3, 6))]
        [('a', 0), ('b', 4)]
        """
        return [
            (shard, extent)
            for shard, extent in self._by_tensor[wanted.tensor]
            if max(extent.start, wanted.start) < min(extent.stop, wanted.stop)
        ]

    @functools.cached_property
    def _by_tensor(self) -> list[list[tuple[Shard, Extent]]]:
        """List of the shards and extents of each tensor, ordered by element."""
        by_tensor: list[list[tuple[Shard, Extent]]] = [[] for _ in self.tensors]
        for shard in self.shards:
            for extent in shard.extents:
                by_tensor[extent.tensor].append((shard, extent))
        for pairs in by_tensor:
            pairs.sort(key=lambda pair: pair[1])
        return by_tensor


def plan_shards(
    extents: Iterable[tuple[Extent, int]], shard_bytes: int
) -> list[tuple[Extent, ...]]:
    """Divide the extents that a worker writes into shards.

    Args:
        extents: Iterable of pairs of an `Extent` and the size of an element in bytes.
        shard_bytes: Int, the largest size of a shard in bytes, at least that of an
            element.

    Returns:
        List of tuples of `Extent`, one tuple for each shard, in order.

    Example:

    >>> shards = plan_shards([(Extent(0, 0, 10), 4), (Extent(1, 5, 6), 4)], 32)
    >>> [[(e.tensor, e.start, e.stop) for e in shard] for shard in shards]
    [[(0, 0, 8)], [(0, 8, 10), (1, 5, 6)]]
    """
    shards: list[tuple[Extent, ...]] = []
    shard: list[Extent] = []
    room = shard_bytes
    for extent, item_bytes in extents:
        start = extent.start
        while start < extent.stop:
            if room < item_bytes:
                shards.append(tuple(shard))
                shard, room = [], shard_bytes
            stop = min(start + room // item_bytes, extent.stop)
            shard.append(Extent(extent.tensor, start, stop))
            room -= (stop - start) * item_bytes
            start = stop
    return [*shards, tuple(shard)] if shard else shards


def check_complete(tensors: Sequence[TensorMetadata], shards: Iterable[Shard]) -> None:
    """Raise unless the shards hold every element exactly once.

    Args:
        tensors: Sequence of `TensorMetadata`.
        shards: Iterable of `Shard`.

    Raises:
        ValueError: If elements are missing or duplicated; the message names the first
            tensor.
    """
    reached = [0] * len(tensors)
    for extent in sorted(_extents(shards)):
        entry = tensors[extent.tensor]
        begin = reached[extent.tensor]
        if extent.start != begin or extent.stop <= begin:
            fault = "missing" if extent.start > begin else "duplicated"
            raise ValueError(f"Elements of {entry.name!r} are {fault}, at {begin}.")
        reached[extent.tensor] = extent.stop
    for entry, begin in zip(tensors, reached, strict=True):
        if begin != entry.size:
            fault = "missing" if begin < entry.size else "too many"
            raise ValueError(f"Elements of {entry.name!r} are {fault}, at {begin}.")


# Bytes of an element, by the dtype of a variable. NumPy lacks some of these dtypes, and
# TensorFlow is not imported by commands that only read an index.
ITEM_BYTES = {
    **dict.fromkeys(("bool", "int4", "uint4", "int8", "uint8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
DTYPES = tuple(ITEM_BYTES)
# Endings of a shard's files. TensorFlow wrote two files per shard in older checkpoints,
# which are still read, so its endings are also allowed.
DATA_ENDING = ".data"
_ENDINGS = ((DATA_ENDING,), (".index", ".data-00000-of-00001"))


def check_index(index: Index) -> None:
    """Check that an index is consistent and complete, like one that a save writes.

    Args:
        index: `Index` whose values have the right types.

    Raises:
        ValueError: The message has the first fault.
    """
    names = {entry.name for entry in index.tensors}
    if len(names) < len(index.tensors):
        raise ValueError("it lists a tensor twice")
    if len({shard.prefix for shard in index.shards}) < len(index.shards):
        raise ValueError("it lists a shard twice")
    if any(extent.tensor >= len(index.tensors) for extent in _extents(index.shards)):
        raise ValueError("it has elements of a tensor that it does not list")
    check_complete(index.tensors, index.shards)


def check_files(shard: Shard, tensors: Sequence[TensorMetadata]) -> None:
    """Raise if the file names or the data size of a shard are not those of a save.

    File names are checked since they are opened as paths.

    Args:
        shard: `Shard`.
        tensors: Sequence of `TensorMetadata`, the tensors of the index.

    Raises:
        ValueError: The message has the first fault.
    """
    writer, _, number = shard.prefix.rpartition("-")
    names = tuple(file.name for file in shard.files)
    if (
        writer != f"worker-{shard.worker}"
        or not (number.isascii() and number.isdecimal())
        or names not in [tuple(shard.prefix + e for e in found) for found in _ENDINGS]
    ):
        raise ValueError("it lists files with names that no save writes")
    num_bytes = sum(
        (extent.stop - extent.start) * ITEM_BYTES[tensors[extent.tensor].dtype]
        for extent in shard.extents
    )
    if num_bytes != shard.data.num_bytes:
        raise ValueError(
            f"the elements in {names[-1]!r} have {pluralize(num_bytes, 'byte')}, but "
            f"the file has {shard.data.num_bytes:,}"
        )


def _extents(shards: Iterable[Shard]) -> Iterable[Extent]:
    """Iterate over the extents of all shards."""
    return (extent for shard in shards for extent in shard.extents)


def first_difference(
    saved: Sequence[TensorMetadata], own: Sequence[TensorMetadata]
) -> str | None:
    """Describe the first difference between the tensors of a checkpoint and a model.

    Args:
        saved: Sequence of `TensorMetadata` of the checkpoint.
        own: Sequence of `TensorMetadata` of the model.

    Returns:
        String that names the first tensor that differs, and how; or `None`.

    Example:

    >>> saved = [TensorMetadata("dense/kernel", (2, 3), "float32")]
    >>> first_difference(saved, [TensorMetadata("dense/kernel", (2, 4), "float32")])
    "'dense/kernel' has shape (2, 3) in the checkpoint and (2, 4) in the model"
    """
    by_name = {entry.name: entry for entry in saved}
    for entry in own:
        other = by_name.pop(entry.name, None)
        if other is None:
            return f"{entry.name!r} is in the model and not in the checkpoint"
        for field in ("shape", "dtype"):
            there, here = getattr(other, field), getattr(entry, field)
            if there != here:
                where = f"{there} in the checkpoint and {here} in the model"
                return f"{entry.name!r} has {field} {where}"
    for name in by_name:
        return f"{name!r} is in the checkpoint and not in the model"
    return None
