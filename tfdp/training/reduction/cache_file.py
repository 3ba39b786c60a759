"""Files of the user's cache: JSON objects that are replaced atomically.

One file holds measured links, so that the next run need not measure them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import platformdirs

from tfdp.ground.base.files import read_text, replaced
from tfdp.ground.links import Links

# A cache file with more bytes is damaged or was written by another program. It counts
# as empty and is not read, so that it costs no memory.
_MAX_FILE_BYTES = 2**20


def cache_path(name: str) -> pathlib.Path:
    """Return the path of a file of the user's cache.

    Args:
        name: String, name of the file.

    Returns:
        `Path` in the folder `tfdp` of `XDG_CACHE_HOME`, or if that is not an absolute
        path, of the platform's cache folder: `~/.cache` on Linux.

    Source: the XDG base directory specification.
    """
    return platformdirs.user_cache_path("tfdp") / name


def read_entries(path: pathlib.Path) -> dict[str, Any]:
    """Read the entries of a cache file.

    Args:
        path: `Path` of the file.

    Returns:
        Dict from keys to unchecked JSON values; empty if the file is missing, too large
        or not a JSON object.
    """
    try:
        entries = json.loads(read_text(path, _MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return entries if isinstance(entries, dict) else {}


def write_entries(path: pathlib.Path, entries: Mapping[str, Any]) -> bool:
    """Replace all entries of a cache file.

    The file is replaced atomically, so that no process reads half of it. If two
    processes write at the same time, the entries of one may be lost.

    Args:
        path: `Path` of the file; missing folders are created.
        entries: Mapping, the new content.

    Returns:
        Bool, whether the file was written. A full or read-only disk does not stop
        training.

    Example:

    >>> import tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "tfdp" / "some.json"
    >>> write_entries(path, {"a": 1})
    True
    >>> read_entries(path)
    {'a': 1}
    """
    text = json.dumps(entries, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as temporary:
            pathlib.Path(temporary).write_text(text, "utf-8")
    except (OSError, ValueError):
        return False
    return True


def store_entry(path: pathlib.Path, key: str, entry: Any) -> bool:
    """Set one entry of a cache file; the others stay. Return whether it was written."""
    return write_entries(path, {**read_entries(path), key: entry})


def links_path() -> pathlib.Path:
    """Return the path of the user's file of measured links, `links.json`."""
    return cache_path("links.json")


def load_links(key: str, path: pathlib.Path | None = None) -> Links | None:
    """Load links that were measured before.

    Args:
        key: String, topology, backend and versions that the links were measured with.
        path: `Path` of the file, or `None` for the user's. Defaults to `None`.

    Returns:
        `Links`, or `None` if the file has none for this key or cannot be read.

    Example:

    >>> import tempfile
    >>> from tfdp.ground.links import Link
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "links.json"
    >>> store_links("2 x 4", Links(Link(0.5, 0.25), Link(1.0, 0.5)), path)
    True
    >>> load_links("2 x 4", path).across
    Link(alpha_seconds=1.0, seconds_per_byte=0.5)
    >>> load_links("another", path) is None
    True
    """
    return _read_links(path or links_path()).get(key)


def store_links(key: str, links: Links, path: pathlib.Path | None = None) -> bool:
    """Store measured links for later runs; other entries of the file stay.

    If two processes store at the same time, the entry of one may be lost. Its links are
    then measured again.

    Args:
        key: String, topology, backend and versions that the links were measured with.
        links: `Links` to store.
        path: `Path` of the file, or `None` for the user's. Defaults to `None`.

    Returns:
        Bool, whether the file was written.
    """
    path = path or links_path()
    entries = {**_read_links(path), key: links}
    rows = {name: dataclasses.asdict(entry) for name, entry in entries.items()}
    return write_entries(path, rows)


def _read_links(path: pathlib.Path) -> dict[str, Links]:
    """Return the valid links in a file, by their keys: cluster and versions."""
    links = {}
    for key, entry in read_entries(path).items():
        with contextlib.suppress(TypeError, KeyError, ValueError):
            links[key] = Links.from_dict(entry)
    return links
