"""Checks of arguments that several callbacks take."""

from __future__ import annotations

import os
from typing import Any


def check_directory(directory: Any) -> None:
    """Raise unless an argument can be the path of a directory, or a URL."""
    if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory):
        raise ValueError(
            "`directory` must be the path of a directory, or a URL. "
            f"Received: directory={directory!r}"
        )
