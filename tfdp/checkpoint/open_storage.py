"""Storage for a path or a URL."""

from __future__ import annotations

import re

from tfdp.checkpoint.local_storage import LocalStorage
from tfdp.checkpoint.object_store import ObjectStore
from tfdp.checkpoint.storage import Storage

# What `pathlib` makes of `s3://bucket/run`.
_CUT_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")


def open_storage(path: str) -> Storage:
    """Storage at a path or a URL. Nothing is asked of it yet.

    Args:
        path: String.

    Returns:
        `Storage`.

    Raises:
        ValueError: If it is no URL of an object store, or what speaks to that store
            is not installed.

    Example:

    >>> open_storage("checkpoints").below("latest").path
    'checkpoints/latest'
    """
    if _CUT_URL.match(path):
        raise ValueError(
            "a URL has two slashes; give it as a string, and not as a Path"
        )
    return ObjectStore(path) if "://" in path else LocalStorage(path)
