"""File of a checkpoint's index: JSON with a checksum of its own."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import re
import zlib
from typing import Any

from tfdp.checkpoint import schema
from tfdp.checkpoint.index import (
    DTYPES,
    Extent,
    File,
    Index,
    Shard,
    TensorMetadata,
    check_index,
)
from tfdp.checkpoint.object_store import open_storage

FORMAT = 1
INDEX_FILE = "index.json"
# So much of one is read, and so many values of it are made: about 1 GB of memory at
# most, and enough for the state of a model of 2 TB.
INDEX_BYTES = 2**28
_VALUES = 2**23
_FOLDER = re.compile(r"data-[0-9a-f]{12}")
_RANK = 64


class UnknownFormat(ValueError):
    """Index file that a newer version of tfdp has written."""


def is_folder_name(name: str) -> bool:
    """Whether a save may have given that name to its folder of data."""
    return _FOLDER.fullmatch(name) is not None


def _folder_name(value: Any, where: str) -> None:
    if type(value) is not str or not is_folder_name(value):
        schema.refuse(value, where, "the name of a folder of data")


def _shape(value: Any, where: str) -> None:
    _SIZES(value, where)
    if math.prod(value) >= 2**63:
        schema.refuse(value, where, "a shape")


_SIZES = schema.list_of(schema.COUNT, most=_RANK)
_FILE = (schema.name, schema.COUNT, schema.COUNT)
_EXTENT = (schema.COUNT, schema.COUNT, schema.COUNT)
_CONTENT = {
    "token": _folder_name,
    "versions": schema.mapping(schema.name),
    "tensors": [(schema.name, _shape, set(DTYPES))],
    "parts": [(schema.name, schema.COUNT, (_FILE, _FILE), [_EXTENT])],
    "model": schema.optional(schema.string),
    "run?": schema.check_depth,
}


def shards_from_json(rows: list) -> tuple[Shard, ...]:
    """Shards of what JSON has made of a sequence of `Shard`."""
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
    """Text of an index file, with a checksum of its own."""
    content = {
        "token": index.token,
        "versions": index.versions,
        "tensors": index.tensors,
        "parts": index.shards,
        "model": index.model,
    }
    if index.run is not None:
        content["run"] = index.run
    body = {"format": FORMAT, "checksum": _checksum(content), "content": content}
    return json.dumps(body)


def from_text(text: str) -> Index:
    """Parse the text of an index file.

    Args:
        text: String.

    Returns:
        `Index`, whole: every element of its tensors is in one of its files.

    Raises:
        ValueError: If it is not one, was altered, or is of another format.

    Example:

    >>> index = Index("data-0123456789ab", (), (), {"keras": "3"})
    >>> from_text(to_text(index)) == index
    True
    """
    content = _content_of(text)
    schema.check(content, _CONTENT, "content")
    tensors = ((name, tuple(shape), dtype) for name, shape, dtype in content["tensors"])
    index = Index(
        token=content["token"],
        tensors=tuple(TensorMetadata(*tensor) for tensor in tensors),
        shards=shards_from_json(content["parts"]),
        versions=content["versions"],
        model=content["model"],
        run=content.get("run"),
    )
    check_index(index)
    return index


def _content_of(text: str) -> Any:
    """What an index file holds, as JSON has it, with a checksum that fits."""
    if len(text) > INDEX_BYTES or sum(map(text.count, "[{,")) > _VALUES:
        raise ValueError(f"it has more than {INDEX_BYTES} bytes or {_VALUES} values")
    try:
        body = json.loads(text)
        version, content = body["format"], body["content"]
        is_whole = body["checksum"] == _checksum(content)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError("it is truncated or no index of a checkpoint") from error
    schema.check(version, schema.COUNT, "format")
    if version != FORMAT:
        raise UnknownFormat(f"it has format {version}, and this tfdp reads {FORMAT}")
    if not is_whole:
        raise ValueError("it was altered: its checksum does not fit")
    return content


def load_index(directory: str) -> Index:
    """Read the index of a directory.

    Args:
        directory: String, a path or a URL.

    Returns:
        `Index`.

    Raises:
        ValueError: If there is none, or it is damaged.
        OSError: If it cannot be read.
    """
    storage = open_storage(directory)
    path = os.path.join(directory, INDEX_FILE)
    try:
        return from_text(storage.read_text(INDEX_FILE, INDEX_BYTES))
    except FileNotFoundError as error:
        raise ValueError(
            f"There is no checkpoint in {directory!r}: it has no {INDEX_FILE!r}."
        ) from error
    except NotADirectoryError as error:
        raise ValueError(f"{directory!r} is not a directory.") from error
    except UnknownFormat as error:
        raise UnknownFormat(
            f"The file {path!r} is damaged, or of a newer tfdp: {error}."
        ) from error
    except ValueError as error:  # also bytes that are no text
        raise ValueError(f"The file {path!r} is damaged: {error}.") from error


def versions() -> dict[str, str]:
    """Versions of the packages that write a checkpoint."""
    found = {}
    for name in ("tfdp", "keras", "tensorflow", "tensorflow-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
