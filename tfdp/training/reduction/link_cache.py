"""Cache of measured links on disk, so that the next run need not measure them."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib

from tfdp.ground.links import Links
from tfdp.training.reduction.cache_file import cache_path, read_entries, write_entries


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
