"""Output stream whose writes never block and never fail."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from typing import TextIO

from tfdp.ground.text import pluralize

# Pending text must not fill the memory, so above this many bytes text is dropped while
# the reader has stalled.
_MAX_BYTES = 1 << 20
# A reader that is only slow makes some progress within this many seconds; one that
# makes none has stalled.
_STALLED_SECONDS = 1.0
# A write has only this many bytes, so even the progress of a slow reader is noticed.
_CHUNK_BYTES = 4096


class NonBlockingStream:
    """Text stream that a thread writes out, so that callers never block.

    A write blocks indefinitely on a pager that is not scrolled, or after Ctrl-S, and
    fails on a closed terminal or a full disk. The loop that manages processes must not
    be affected by either. While more than 1 MiB waits for a reader that has stalled,
    new text is dropped, and its lines are counted. After the first error all text is
    dropped.

    Args:
        stream: The text stream whose descriptor is written to, or `None` if it was
            closed before the program began.
        as_line: Function that formats a sentence as a line of the output. The line
            replaces dropped text. Defaults to a plain line.

    Attributes:
        encoding: String, encoding of the text.
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
            # The thread is a daemon, so a blocked write does not keep the process
            # alive.
            threading.Thread(target=self._serve, args=(self._fd,), daemon=True).start()

    @property
    def is_behind(self) -> bool:
        """Bool, whether over 1 MiB waits for a reader that is slow but not stalled."""
        return len(self._pending) > _MAX_BYTES and not self._is_stalled()

    def fileno(self) -> int:
        """Return the descriptor of the output, or -1 if it is closed."""
        return -1 if self._fd is None else self._fd

    def isatty(self) -> bool:
        """Return whether the output is a terminal."""
        return self._fd is not None and os.isatty(self._fd)

    def write(self, text: str) -> int:
        """Queue text, which the thread writes after `flush` or with later text.

        Returns:
            Int, the length of the text, as `TextIO.write` does.
        """
        with self._changed:
            if self._fd is None or self.error is not None:
                pass  # dropped: the output is closed or has failed
            elif len(self._pending) > _MAX_BYTES and self._is_stalled():
                self._num_dropped += text.count("\n")
            else:
                self._append_notice()
                self._append(text)
        return len(text)

    def flush(self) -> None:
        """Make the thread write all queued text, without waiting for it."""
        with self._changed:
            self._changed.notify_all()

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until all queued text is written.

        Args:
            timeout_seconds: Float, longest wait.

        Returns:
            Bool, whether all text is written.
        """
        with self._changed:
            self._append_notice()
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._pending, timeout_seconds)

    def _append(self, text: str) -> None:
        """Add text to the queue.

        If the queue was empty, the time after which the reader counts as stalled begins
        now.
        """
        if not self._pending:
            self._taken_at = time.monotonic()
        self._pending += text.encode(self.encoding, errors="replace")

    def _append_notice(self) -> None:
        """Queue a line with the number of dropped lines, if any were dropped."""
        if self._num_dropped and self.error is None:
            lines = pluralize(self._num_dropped, "line is", "lines are")
            text = f"tfdp: the output was not read in time; {lines} only in the logs"
            self._append(self._as_line(text))
        self._num_dropped = 0

    def _is_stalled(self) -> bool:
        """Return whether the reader has read nothing for `_STALLED_SECONDS`."""
        return time.monotonic() - self._taken_at > _STALLED_SECONDS

    def _serve(self, fd: int) -> None:
        """Write queued text until the first error; runs in a thread."""
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
    """Write data; return the number of written bytes, and an error or `None`.

    If the file would block, wait until it is writable, and write nothing.
    """
    try:
        return os.write(fd, data), None
    except BlockingIOError:  # another process has set the shared file to non-blocking
        select.select([], [fd], [])
        return 0, None
    except OSError as error:
        return 0, error
