"""Signals as bytes in a pipe, for a loop that waits on several things."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import time

# What asks the launcher to end.
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# One Ctrl-C may come twice, from the terminal and from a parent process.
_SAME_SIGNAL_SECONDS = 0.5


class SignalPipe:
    """Pipe that wakes a selector when a signal arrives; no code is interrupted.

    Python's own handler for Ctrl-C raises between any two lines, also while
    workers are being started or killed. Here a signal is a byte that waits
    until the loop reads it. The end of a child process (SIGCHLD) wakes the
    loop too, but is not noted.

    Attributes:
        received: List of ints, the signals that ask for the end, in their order; of
            those that come together only the first.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._received_at = float("-inf")
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(
            self._writer.fileno(), warn_on_full_buffer=False
        )
        self._old_handlers = {
            signum: signal.signal(signum, lambda signum, frame: None)
            for signum in (*_END_SIGNALS, signal.SIGCHLD)
            # The user may have asked, by nohup, to survive the end of the terminal.
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN
        }

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._reader.fileno()

    def read(self) -> None:
        """Move the signals that have arrived to `received`."""
        with contextlib.suppress(BlockingIOError):
            found = [code for code in self._reader.recv(4096) if code in _END_SIGNALS]
            now = time.monotonic()
            if found and now - self._received_at >= _SAME_SIGNAL_SECONDS:
                self.received.append(found[0])
                self._received_at = now

    def wait(self, seconds: float) -> None:
        """Wait for as long, or until a signal is received."""
        end = time.monotonic() + seconds
        while not self.received and (left := end - time.monotonic()) > 0:
            select.select([self._reader], [], [], left)
            self.read()

    def close(self) -> None:
        """Put the earlier handlers back."""
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._reader.close()
        self._writer.close()
