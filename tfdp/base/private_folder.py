"""Folders for logs and checkpoints, which nobody but the user can look into."""

from __future__ import annotations

import os


def make_private_folder(path: str | os.PathLike, *, exist_ok: bool = True) -> None:
    """Makes a folder that only its owner can read; one that is there stays as it is.

    Args:
        path: String or path-like. Folders above it are made where they are missing.
        exist_ok: Bool, whether it may be there. Defaults to `True`.

    Raises:
        OSError: If it cannot be made.

    Example:

    >>> import tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "logs")
    >>> make_private_folder(path)
    >>> oct(os.stat(path).st_mode & 0o777)
    '0o700'
    """
    os.makedirs(path, mode=0o700, exist_ok=exist_ok)
