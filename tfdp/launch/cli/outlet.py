"""Output stream whose writes never block and never fail."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from typing import TextIO

from tfdp.ground.text import pluralize

# More than this does not wait for a reader.
_MAX_BYTES = 1 << 20
# A reader that has taken nothing for so long has stopped reading.
_STALLED_SECONDS = 1.0
# What a reader takes shows in pieces of this size.
_CHUNK_BYTES = 4096


class Outlet:
    """Text stream that a thread writes out, so that its user never waits.

    A pager that nobody scrolls, or Ctrl-S, blocks a write for ever, and a terminal
    that was closed, or a full disk, fails it; the loop that looks after processes
    cannot afford either. What does not fit while nobody reads is dropped, and counted.
    After the first error all is dropped.

    Args:
        stream: The text stream to write to, whose descriptor is used; `None` if it
            was closed before the program began.
        as_line: Function that makes a line of the output of a sentence, which stands
            where a piece of the output is missing.

    Attributes:
        error: The `OSError` that ended the output, or `None`.
    """

    def __init__(
        self, stream: TextIO | None, as_line: Callable[[str], str] = "{}\n".format
    ) -> None:
        self.error: OSError | None = None
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self._fd = None if stream is None else stream.fileno()
        self._pending = bytearray()
        self._as_line = as_line
        self._num_dropped = 0
        self._taken_at = time.monotonic()
        self._changed = threading.Condition()
        if self._fd is not None:
            # A daemon: a write that never returns does not keep the process.
            threading.Thread(target=self._serve, args=(self._fd,), daemon=True).start()

    @property
    def is_behind(self) -> bool:
        """Bool, whether the reader is slower than the writer, but reads."""
        return len(self._pending) > _MAX_BYTES and not self._is_stalled()

    def fileno(self) -> int:
        """Return the descriptor that is written to, or -1."""
        return -1 if self._fd is None else self._fd

    def isatty(self) -> bool:
        """Return whether the output is a terminal."""
        return self._fd is not None and os.isatty(self._fd)

    def write(self, text: str) -> int:
        """Take text; it appears after `flush`, or once there is more."""
        with self._changed:
            if self._fd is None or self.error is not None:
                pass  # nobody would ever write it out
            elif len(self._pending) > _MAX_BYTES and self._is_stalled():
                self._num_dropped += text.count("\n")
            else:
                self._append_notice()
                self._append(text)
        return len(text)

    def flush(self) -> None:
        """Have the thread write what there is; does not wait for it."""
        with self._changed:
            self._changed.notify_all()

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until all is written.

        Args:
            timeout_seconds: Float, how long to wait.

        Returns:
            Bool, whether nothing is left to write.
        """
        with self._changed:
            self._append_notice()
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._pending, timeout_seconds)

    def _append(self, text: str) -> None:
        if not self._pending:
            self._taken_at = time.monotonic()
        self._pending += text.encode(self.encoding, errors="replace")

    def _append_notice(self) -> None:
        """Say in the output itself where a piece of it is missing."""
        if self._num_dropped and self.error is None:
            lines = pluralize(self._num_dropped, "line is", "lines are")
            text = (
                f"tfdp: nobody read the output; {lines} not shown here but kept in the "
                "logs"
            )
            self._append(self._as_line(text))
        self._num_dropped = 0

    def _is_stalled(self) -> bool:
        return time.monotonic() - self._taken_at > _STALLED_SECONDS

    def _serve(self, fd: int) -> None:
        while self.error is None:
            with self._changed:
                self._changed.wait_for(lambda: self._pending)
                data = bytes(self._pending[:_CHUNK_BYTES])
            size, error = _write(fd, data)
            with self._changed:
                del self._pending[:size]
                self._taken_at = time.monotonic()
                if error is not None:
                    self.error = error
                    self._pending.clear()
                self._changed.notify_all()


def _write(fd: int, data: bytes) -> tuple[int, OSError | None]:
    """Write some of the data; return how much, and the error if there is one."""
    try:
        return os.write(fd, data), None
    except BlockingIOError:  # another process has made it so
        select.select([], [fd], [])
        return 0, None
    except OSError as error:
        return 0, error
