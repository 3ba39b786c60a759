"""Files of the user's cache: JSON objects, replaced whole.

One holds measured links, so that the next run need not measure them.
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

_FILE_BYTES = 2**20


def cache_path(name: str) -> pathlib.Path:
    """Path of a file of the user's cache.

    Args:
        name: String, the file's.

    Returns:
        A path: in `tfdp` in `XDG_CACHE_HOME`, or in `~/.cache` where that is not an
        absolute path.

    Source: the XDG base directory specification.
    """
    return platformdirs.user_cache_path("tfdp") / name


def read_entries(path: pathlib.Path) -> dict[str, Any]:
    """Read the entries of a file.

    Args:
        path: Path of the file.

    Returns:
        Dict from keys to what anybody may have written; empty where the file is
        missing, too large or no JSON object.
    """
    try:
        entries = json.loads(read_text(path, _FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return entries if isinstance(entries, dict) else {}


def write_entries(path: pathlib.Path, entries: Mapping[str, Any]) -> bool:
    """Replace the entries of a file.

    The file is replaced at once, so that nobody reads half of it. Of two
    processes that store at the same time, one may lose its entry.

    Args:
        path: Path of the file; folders above it are made.
        entries: Mapping, all that it is to hold.

    Returns:
        Bool, whether they could be written; a disk that is full or read-only is
        no reason to stop a training.

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


def links_path() -> pathlib.Path:
    """Path of the user's file of measured links, `links.json`, see `cache_path`."""
    return cache_path("links.json")


def load_links(key: str, path: pathlib.Path | None = None) -> Links | None:
    """Load links that were measured before.

    Args:
        key: String, what they were measured on: topology, backend, versions.
        path: Path of the file, or `None` for the user's. Defaults to `None`.

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
    return _read(path or links_path()).get(key)


def store_links(key: str, links: Links, path: pathlib.Path | None = None) -> bool:
    """Store links for another run; other entries of the file stay.

    Of two processes that store at the same time, one may lose its entry: it will be
    measured again.

    Args:
        key: String, what they were measured on: topology, backend, versions.
        links: `Links`.
        path: Path of the file, or `None` for the user's. Defaults to `None`.

    Returns:
        Bool, whether they could be written.
    """
    path = path or links_path()
    entries = {**_read(path), key: links}
    rows = {name: dataclasses.asdict(entry) for name, entry in entries.items()}
    return write_entries(path, rows)


def _read(path: pathlib.Path) -> dict[str, Links]:
    """Links by their keys, without entries that are none."""
    found = {}
    for key, entry in read_entries(path).items():
        with contextlib.suppress(TypeError, KeyError, ValueError):
            found[key] = Links.from_dict(entry)
    return found
