"""Checks of arguments that several callbacks take."""

from __future__ import annotations

import os
from typing import Any


def check_count(name: str, value: Any) -> None:
    """Raise unless an argument is an integer of at least 1."""
    if not is_count(value):
        raise ValueError(
            f"`{name}` must be an integer of at least 1. Received: {name}={value!r}"
        )


def is_count(value: Any) -> bool:
    """True for an integer of at least 1, which a bool is not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_directory(directory: Any) -> None:
    """Raise unless an argument can be the path of a directory, or a URL."""
    if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory):
        raise ValueError(
            "`directory` must be the path of a directory, or a URL. "
            f"Received: directory={directory!r}"
        )
