"""What the index of a checkpoint says: which file holds which elements of what.

Elements are counted in the flattened tensor, so that neither the number of
workers nor the way in which they had sliced it shows.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

FORMAT = 1
INDEX_FILE = "index.json"


class UnknownFormat(ValueError):
    """A file that a newer version of tfdp has written."""


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
class Part:
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
        parts: Tuple of `Part`.
        versions: Dict of strings, what it was written with.
        model: String, the model as Keras serializes it, or `None` if it cannot
            be.
        run: What is known of the run that saved it and is no tensor, as JSON can
            hold it, or `None`.
    """

    token: str
    entries: tuple[Entry, ...]
    parts: tuple[Part, ...]
    versions: dict[str, str]
    model: str | None = None
    run: Any = None

    def find(self, wanted: Extent) -> list[tuple[Part, Extent]]:
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
    def _held(self) -> list[list[tuple[Part, Extent]]]:
        """For each tensor, its extents in order."""
        held: list[list[tuple[Part, Extent]]] = [[] for _ in self.entries]
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


def check_complete(entries: Sequence[Entry], parts: Iterable[Part]) -> None:
    """Raises if the parts do not hold every element once.

    Args:
        entries: Sequence of `Entry`.
        parts: Iterable of `Part`.

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


def parts_to_json(parts: Iterable[Part]) -> list:
    """Parts as JSON holds them: short, for there may be many."""
    return [
        [
            part.prefix,
            part.worker,
            [dataclasses.astuple(file) for file in part.files],
            [dataclasses.astuple(extent) for extent in part.extents],
        ]
        for part in parts
    ]


def parts_from_json(rows: list) -> tuple[Part, ...]:
    """The parts that `parts_to_json` was given."""
    return tuple(
        Part(
            prefix,
            worker,
            tuple(File(*file) for file in files),
            tuple(Extent(*extent) for extent in extents),
        )
        for prefix, worker, files, extents in rows
    )


def to_text(index: Index) -> str:
    """The text of an index file, with a checksum of its own."""
    content = {
        "token": index.token,
        "versions": index.versions,
        "tensors": [[e.name, list(e.shape), e.dtype] for e in index.entries],
        "parts": parts_to_json(index.parts),
        "model": index.model,
    }
    if index.run is not None:
        content["run"] = index.run
    body = {"format": FORMAT, "checksum": _checksum(content), "content": content}
    return json.dumps(body)


def from_text(text: str) -> Index:
    """Reads an index file.

    Args:
        text: String.

    Returns:
        `Index`.

    Raises:
        ValueError: If it is not one, was altered, or is of another format.

    Example:

    >>> index = Index("t", (Entry("x", (2,), "bool"),), (), {"keras": "3"})
    >>> from_text(to_text(index)) == index
    True
    """
    try:
        body = json.loads(text)
        version, content = body["format"], body["content"]
        is_whole = body["checksum"] == _checksum(content)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError("it is truncated or no index of a checkpoint") from error
    if version != FORMAT:
        raise UnknownFormat(f"it has format {version}, and this tfdp reads {FORMAT}")
    if not is_whole:
        raise ValueError("it was altered: its checksum does not fit")
    tensors = ((name, tuple(shape), dtype) for name, shape, dtype in content["tensors"])
    return Index(
        token=content["token"],
        entries=tuple(Entry(*tensor) for tensor in tensors),
        parts=parts_from_json(content["parts"]),
        versions=content["versions"],
        model=content["model"],
        run=content.get("run"),
    )


def load_index(directory: str) -> Index:
    """Reads the index of a directory.

    Args:
        directory: String.

    Returns:
        `Index`.

    Raises:
        ValueError: If there is none, or it is damaged.
    """
    path = os.path.join(directory, INDEX_FILE)
    try:
        with open(path, encoding="utf-8") as file:
            return from_text(file.read())
    except FileNotFoundError as error:
        raise ValueError(
            f"There is no checkpoint in {directory!r}: it has no {INDEX_FILE!r}."
        ) from error
    except (NotADirectoryError, IsADirectoryError) as error:
        raise ValueError(f"{directory!r} is not a directory.") from error
    except UnknownFormat as error:
        raise UnknownFormat(
            f"The file {path!r} is damaged, or of a newer tfdp: {error}."
        ) from error
    except ValueError as error:  # also bytes that are no text
        raise ValueError(f"The file {path!r} is damaged: {error}.") from error


def versions() -> dict[str, str]:
    """What a checkpoint is written with: distributions and their versions."""
    found = {}
    for name in ("tfdp", "keras", "tensorflow", "tensorflow-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
