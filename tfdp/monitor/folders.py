"""Whether a folder or file can be written, found out before training begins."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tfdp.base.private_folder import make_private_folder


def problem_of_folder(folder: Path, argument: str) -> str:
    """Makes a folder and tries to write into it.

    Args:
        folder: `Path`.
        argument: String, the name of the argument that it came from.

    Returns:
        String, one sentence, or `""` if it can be written.
    """
    try:
        make_private_folder(folder)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return (
            f"`{argument}` cannot be written: {error.strerror or error}. Give a folder "
            f"that the first worker can write to. Received: {argument}={str(folder)!r}"
        )
