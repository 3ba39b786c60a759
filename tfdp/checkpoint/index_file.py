"""Index file of a checkpoint: JSON with a checksum of its content."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import math
import os
import re
import zlib
from typing import Any

from tfdp.checkpoint import schema
from tfdp.checkpoint.index import (
    ALGORITHMS,
    CRC32,
    DTYPES,
    Extent,
    File,
    Index,
    Shard,
    TensorMetadata,
    check_files,
    check_index,
)
from tfdp.checkpoint.object_store import open_storage
from tfdp.checkpoint.storage import Storage

# Checkpoints of format 1, whose shards TensorFlow wrote, are still read, so that users
# can restore old checkpoints. New ones have format 2.
FORMAT = 2
FORMAT_OF_TENSORFLOW = 1
INDEX_FILE = "index.json"
# Limits on the bytes and on the number of JSON values of an index file, so that parsing
# a damaged file takes at most about 1 GB of memory. An index within the limits
# describes up to 2 TB of state.
INDEX_BYTES = 2**28
_VALUES = 2**23
# To suggest a checkpoint in an error message, only this many names in a folder are
# tried, since each takes a request to an object store.
_TRIED_NAMES = 8
_FOLDER = re.compile(r"data-[0-9a-f]{12}")
# NumPy supports at most 64 dimensions, so an index that lists a tensor of higher rank
# is damaged.
_RANK = 64


class UnknownFormat(ValueError):
    """Error: the checkpoint needs a newer version of tfdp, or another package."""


def is_folder_name(name: str) -> bool:
    """Return whether a name is that of a save's data folder: `data-0123456789ab`."""
    return _FOLDER.fullmatch(name) is not None


def _check_folder_name(value: Any, where: str) -> None:
    """Raise `Malformed`, which names `where`, unless a value names a data folder."""
    if type(value) is not str or not is_folder_name(value):
        schema.raise_malformed(value, where, "the name of a folder of data")


def _check_shape(value: Any, where: str) -> None:
    """Raise `Malformed`, which names `where`, unless a value is a tensor's shape."""
    _SIZES(value, where)
    if math.prod(value) >= 2**63:
        schema.raise_malformed(value, where, "a shape")


# The content of an index file is checked by these schemas before use, so that a damaged
# file raises an error that names the wrong value.
_SIZES = schema.list_of(schema.COUNT, most=_RANK)
_FILE = (schema.name, schema.COUNT, schema.COUNT)
EXTENTS = [(schema.COUNT, schema.COUNT, schema.COUNT)]
TENSORS = [(schema.name, _check_shape, set(DTYPES))]
_CONTENT = {
    "token": _check_folder_name,
    "versions": schema.mapping(schema.name),
    "tensors": TENSORS,
    "parts": [(schema.name, schema.COUNT, [_FILE], EXTENTS)],
    "model": schema.optional(schema.string),
    "run?": schema.check_depth,
    "algorithm?": set(ALGORITHMS),
}


def shards_from_json(rows: list) -> tuple[Shard, ...]:
    """Convert parsed JSON back to the `Shard`s that were written.

    Args:
        rows: List of lists: prefix, worker, files and extents of a shard.
    """
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
    """Return the text of the index file, with a checksum of its content."""
    content = {
        "token": index.token,
        "versions": index.versions,
        "tensors": index.tensors,
        "parts": index.shards,
        "model": index.model,
    }
    if index.run is not None:
        content["run"] = index.run
    if index.algorithm != CRC32:
        # The field is left out for CRC-32, the default of `from_text`, so that such
        # indexes look as they did before the field existed.
        content["algorithm"] = index.algorithm
    return with_checksum(content)


def with_checksum(content: Any) -> str:
    """Return a JSON text of an object with the content and its checksum.

    The fields are `"format"`, the version of the format; `"checksum"`, the CRC-32 of
    the content; and `"content"`.

    Args:
        content: Value that JSON supports.
    """
    body = {"format": FORMAT, "checksum": _checksum(content), "content": content}
    return json.dumps(body)


def from_text(text: str) -> Index:
    """Parse the text of an index file.

    Args:
        text: String.

    Returns:
        `Index`, which is complete: each element of its tensors is in exactly one file.

    Raises:
        ValueError: If the text is not an index, was altered, or has another format.

    Example:

    >>> index = Index("data-0123456789ab", (), (), {"keras": "3"})
    >>> from_text(to_text(index)) == index
    True
    """
    content = verified_content(text)
    schema.check(content, _CONTENT, "content")
    index = Index(
        token=content["token"],
        tensors=tensors_from_json(content["tensors"]),
        shards=shards_from_json(content["parts"]),
        versions=content["versions"],
        model=content["model"],
        run=content.get("run"),
        algorithm=content.get("algorithm", CRC32),
    )
    check_index(index)
    for shard in index.shards:
        check_files(shard, index.tensors)
    return index


def tensors_from_json(rows: list) -> tuple[TensorMetadata, ...]:
    """Convert parsed JSON back to the `TensorMetadata` that were written.

    Args:
        rows: List of lists: name, shape and dtype of a tensor.
    """
    return tuple(TensorMetadata(row[0], tuple(row[1]), row[2]) for row in rows)


def verified_content(text: str) -> Any:
    """Return the content of a text from `with_checksum`; raise if it was altered.

    Args:
        text: String.

    Raises:
        ValueError: If the text was altered, or has another format.
    """
    if len(text) > INDEX_BYTES or sum(map(text.count, "[{,")) > _VALUES:
        raise ValueError(f"it has more than {INDEX_BYTES} bytes or {_VALUES} values")
    try:
        body = json.loads(text)
        version, content = body["format"], body["content"]
        is_whole = body["checksum"] == _checksum(content)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError("it is truncated or not an index of a checkpoint") from error
    schema.check(version, schema.COUNT, "format")
    if version not in (FORMAT, FORMAT_OF_TENSORFLOW):
        raise UnknownFormat(
            f"it has format {version}, and this tfdp reads up to {FORMAT}"
        )
    if not is_whole:
        raise ValueError("it was altered: its checksum does not match")
    return content


def load_index(directory: str) -> Index:
    """Read the index of the checkpoint in a directory.

    Args:
        directory: String, a path or a URL.

    Returns:
        `Index`.

    Raises:
        ValueError: If there is no index, or it is damaged.
        OSError: If the index cannot be read.
    """
    storage = open_storage(directory)
    path = os.path.join(directory, INDEX_FILE)
    try:
        return from_text(storage.read_text(INDEX_FILE, INDEX_BYTES))
    except FileNotFoundError as error:
        inside = _find_checkpoint(storage)
        hint = f" Give the checkpoint in it: {os.path.join(directory, inside or '')!r}."
        raise ValueError(
            f"There is no checkpoint in {directory!r}: it has no {INDEX_FILE!r}."
            f"{hint if inside else ''}"
        ) from error
    except NotADirectoryError as error:
        raise ValueError(f"{directory!r} is not a directory.") from error
    except UnknownFormat as error:
        raise UnknownFormat(
            f"The file {path!r} is damaged, or a newer tfdp wrote it: {error}."
        ) from error
    except ValueError as error:  # such as `UnicodeDecodeError` for damaged text
        raise ValueError(f"The file {path!r} is damaged: {error}.") from error


def _find_checkpoint(storage: Storage) -> str | None:
    """Return the name of the newest checkpoint in a folder of backups.

    Args:
        storage: `Storage`, the folder.

    Returns:
        String, the last name in natural order (`step-12` after `step-8`) that is a
        checkpoint, or `None`. In an object store each name takes a request, so only a
        few are tried.
    """

    def natural(name: str) -> list[str | int]:
        """Return a sort key of a name that compares numbers in it by value."""
        parts = re.split("([0-9]{1,18})", name)
        return [int(part) if i % 2 else part for i, part in enumerate(parts)]

    with contextlib.suppress(OSError):
        names = sorted(storage.names(), key=natural, reverse=True)[:_TRIED_NAMES]
        return next((n for n in names if storage.below(n).has(INDEX_FILE)), None)
    return None


def versions() -> dict[str, str]:
    """Return the installed versions of packages that write a checkpoint, by name."""
    names = ("tfdp", "keras", "tensorflow", "tensorflow-cpu")
    return {name: found for name in names if (found := _version(name))}


# The version of a package is cached: a look-up takes a millisecond, and a run may save
# after each step.
@functools.cache
def _version(package: str) -> str:
    """Return the installed version of a package, or `""`."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def _checksum(content: Any) -> int:
    """Return the CRC-32 of the content as JSON with sorted keys."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
