"""Log of a worker, in a file of its own."""

from __future__ import annotations

import os
import pathlib
import stat
from collections.abc import Callable

from tfdp.ground import user_code

# Neither follow a link nor wait for the reader of a FIFO.
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
_FLAGS |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class LogFile:
    """File that lines are added to; failures are reported once and not raised.

    Args:
        path: Path of the file. One that is there is continued, never overwritten.
        warn: Function that takes one sentence.

    Raises:
        ValueError: If something else than a regular file is there, or it cannot be
            opened.
    """

    def __init__(self, path: pathlib.Path, warn: Callable[[str], None]) -> None:
        self.path = path
        self._warn = warn
        try:
            self._fd = os.open(path, _FLAGS, 0o666)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ValueError(_cannot_be_used(path, reason)) from error
        found = os.fstat(self._fd)
        # What has a second name may be anybody's file.
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            os.close(self._fd)
            raise ValueError(_cannot_be_used(path, "it is no regular file of its own"))

    def write(self, text: str) -> None:
        """Add text to the file."""
        data = text.encode("utf-8", errors="replace")
        # A full disk ends the log, not the training.
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            if user_code.is_new("unwritten log", self):
                self._warn(
                    f"tfdp: warning: {self.path} cannot be written ({error.strerror}); "
                    "the job goes on"
                )

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _cannot_be_used(path: pathlib.Path, reason: str) -> str:
    return (
        f"A log cannot be written: {reason}. Remove what is there, or give another "
        f"folder with --log-dir. Received: {path}"
    )
