"""Files of the user's cache: JSON objects, replaced whole."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import platformdirs

from tfdp.ground.base.files import read_text, replaced

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
