"""What the index of a checkpoint says: which file holds which elements of what.

Elements are counted in the flattened tensor, so that neither the number of
workers nor the way in which they had sliced it shows.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor of the training state.

    Args:
        name: String, unique among all.
        shape: Tuple of ints.
        dtype: String.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Int, the number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, order=True)
class Extent:
    """Elements `start` to `stop` of a flattened tensor.

    Args:
        tensor: Int, its position in the list of all.
        start: Int, the first element.
        stop: Int, one after the last.
    """

    tensor: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class File:
    """A file as it was written.

    Args:
        name: String, without the directory.
        num_bytes: Int.
        checksum: Int, the CRC-32 of its bytes.
    """

    name: str
    num_bytes: int
    checksum: int


@dataclasses.dataclass(frozen=True)
class Shard:
    """A small checkpoint of TensorFlow's, with some elements of some tensors.

    Args:
        prefix: String, what its files are called.
        worker: Int, who wrote it.
        files: Tuple of `File`.
        extents: Tuple of `Extent`.
    """

    prefix: str
    worker: int
    files: tuple[File, ...]
    extents: tuple[Extent, ...]


@dataclasses.dataclass(frozen=True)
class Index:
    """All that a checkpoint holds.

    Args:
        token: String, the subdirectory with the parts.
        entries: Tuple of `Entry`.
        parts: Tuple of `Shard`.
        versions: Dict of strings, what it was written with.
        model: String, the model as Keras serializes it, or `None` if it cannot
            be.
        run: What is known of the run that saved it and is no tensor, as JSON can
            hold it, or `None`.
    """

    token: str
    entries: tuple[Entry, ...]
    parts: tuple[Shard, ...]
    versions: dict[str, str]
    model: str | None = None
    run: Any = None

    def find(self, wanted: Extent) -> list[tuple[Shard, Extent]]:
        """Where elements are.

        Args:
            wanted: `Extent`.

        Returns:
            List of pairs, ordered by element: a part, and an extent in it that
            holds some of them.

        Example:

        >>> parts = [Part("a", 0, (), (Extent(0, 0, 4),))]
        >>> parts += [Part("b", 1, (), (Extent(0, 4, 7), Extent(0, 7, 9)))]
        >>> index = Index("t", (Entry("x", (3, 3), "float32"),), tuple(parts), {})
        >>> [(part.prefix, e.start) for part, e in index.find(Extent(0, 3, 6))]
        [('a', 0), ('b', 4)]
        """
        held = self._held[wanted.tensor]
        first = bisect.bisect_right(held, wanted.start, key=lambda pair: pair[1].start)
        found = []
        for part, extent in held[max(first - 1, 0) :]:
            if extent.start >= wanted.stop or wanted.start == wanted.stop:
                break
            if extent.stop > wanted.start:
                found.append((part, extent))
        return found

    @functools.cached_property
    def _held(self) -> list[list[tuple[Shard, Extent]]]:
        """For each tensor, its extents in order."""
        held: list[list[tuple[Shard, Extent]]] = [[] for _ in self.entries]
        for part in self.parts:
            for extent in part.extents:
                held[extent.tensor].append((part, extent))
        for pairs in held:
            pairs.sort(key=lambda pair: pair[1])
        return held


def cut(
    extents: Iterable[tuple[Extent, int]], part_bytes: int, run_bytes: int
) -> list[tuple[Extent, ...]]:
    """Divides what a worker writes into parts.

    Args:
        extents: Iterable of pairs: an `Extent`, and the bytes of an element.
        part_bytes: Int, the largest size of a part.
        run_bytes: Int, the largest size of an extent in it.

    Returns:
        List of tuples of `Extent`, one tuple for each part, in order.

    Example:

    >>> parts = cut([(Extent(0, 0, 10), 4), (Extent(1, 5, 6), 4)], 32, 16)
    >>> [[(e.tensor, e.start, e.stop) for e in part] for part in parts]
    [[(0, 0, 4), (0, 4, 8)], [(0, 8, 10), (1, 5, 6)]]
    """
    parts: list[tuple[Extent, ...]] = []
    part: list[Extent] = []
    room = part_bytes
    for extent, item_bytes in extents:
        step = max(min(run_bytes, part_bytes) // item_bytes, 1)
        for start in range(extent.start, extent.stop, step):
            piece = Extent(extent.tensor, start, min(start + step, extent.stop))
            num_bytes = (piece.stop - piece.start) * item_bytes
            if part and num_bytes > room:
                parts.append(tuple(part))
                part, room = [], part_bytes
            part.append(piece)
            room -= num_bytes
    return [*parts, tuple(part)] if part else parts


def check_complete(entries: Sequence[Entry], parts: Iterable[Shard]) -> None:
    """Raises if the parts do not hold every element once.

    Args:
        entries: Sequence of `Entry`.
        parts: Iterable of `Shard`.

    Raises:
        ValueError: Naming the first tensor of which elements are missing or
            there twice.
    """
    reached = [0] * len(entries)
    for extent in sorted(extent for part in parts for extent in part.extents):
        entry = entries[extent.tensor]
        begin = reached[extent.tensor]
        if extent.start != begin:
            fault = "missing" if extent.start > begin else "there twice"
            raise ValueError(f"Elements of {entry.name!r} are {fault}, at {begin}.")
        reached[extent.tensor] = extent.stop
    for entry, begin in zip(entries, reached, strict=True):
        if begin != entry.size:
            fault = "missing" if begin < entry.size else "too many"
            raise ValueError(f"Elements of {entry.name!r} are {fault}, at {begin}.")


def first_difference(saved: Sequence[Entry], own: Sequence[Entry]) -> str | None:
    """How a checkpoint differs from a model.

    Args:
        saved: Sequence of `Entry`, those of the checkpoint.
        own: Sequence of `Entry`, those of the model.

    Returns:
        String that names the first tensor that differs and how, or `None`.

    Example:

    >>> saved = [Entry("dense/kernel", (2, 3), "float32")]
    >>> first_difference(saved, [Entry("dense/kernel", (2, 4), "float32")])
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
