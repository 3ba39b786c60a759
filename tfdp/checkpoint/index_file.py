"""The file that holds the index of a checkpoint: JSON with a checksum of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import zlib
from collections.abc import Iterable
from typing import Any

from tfdp.checkpoint.index import Entry, Extent, File, Index, Shard

FORMAT = 1
INDEX_FILE = "index.json"


class UnknownFormat(ValueError):
    """A file that a newer version of tfdp has written."""


def parts_to_json(parts: Iterable[Shard]) -> list:
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


def parts_from_json(rows: list) -> tuple[Shard, ...]:
    """The parts that `parts_to_json` was given."""
    return tuple(
        Shard(
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
