"""Signals as bytes in a pipe, for a loop that selects on descriptors."""

from __future__ import annotations

import contextlib
import math
import select
import signal
import socket
import time
from typing import NamedTuple

from tfdp.communication.coordination.flight_record import RECORD_SIGNAL

# Scripts may know 124 from the command `timeout`, so `--timeout` has the same exit
# code.
TIMED_OUT = 124
# Ctrl-C, `kill` and a closed terminal send these signals, so each asks the launcher to
# exit.
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A single Ctrl-C may arrive both from the terminal and from a parent process, so
# signals within this many seconds count as one.
_SAME_SIGNAL_SECONDS = 0.5


def signal_name(signum: int) -> str:
    """Return a signal's name, such as `"SIGTERM"`."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


class EndReason(NamedTuple):
    """Reason for the end of a job, other than the end of its workers.

    Args:
        why: String, such as `"SIGINT received"`.
        code: Int, exit code of the job.
        signum: Int, signal that the workers receive.
    """

    why: str
    code: int
    signum: int


class SignalPipe:
    """Pipe that wakes a selector when a signal arrives, without interrupting any code.

    Python's default handler of Ctrl-C raises between any two instructions, also while
    workers are being started or killed. Here a signal is a byte that waits until the
    loop reads it. The end of a child process (SIGCHLD) also wakes the loop, but is not
    recorded.

    Args:
        until: Float, time by `time.monotonic()` at which `--timeout` ends the job.
            Defaults to infinity.

    Attributes:
        until: Float, the value of the argument.
        received: List of ints, the received signals that ask for an exit, in order. Of
            signals within half a second only the first is recorded.
        num_record_requests: Int, number of received signals that ask for the workers'
            flight records.
    """

    def __init__(self, until: float = math.inf) -> None:
        self.until = until
        self.received: list[int] = []
        self.num_record_requests = 0
        self._received_at = float("-inf")
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(
            self._writer.fileno(), warn_on_full_buffer=False
        )
        self._old_handlers = {
            signum: signal.signal(signum, lambda signum, frame: None)
            for signum in (*_END_SIGNALS, RECORD_SIGNAL, signal.SIGCHLD)
            # An ignored SIGHUP stays ignored: with nohup, the job shall outlive the
            # terminal.
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN
        }

    def fileno(self) -> int:
        """Return the descriptor that is readable after a signal."""
        return self._reader.fileno()

    def read(self) -> None:
        """Append arrived signals to `received`, or count requests of flight records."""
        with contextlib.suppress(BlockingIOError):
            codes = self._reader.recv(4096)
            self.num_record_requests += codes.count(RECORD_SIGNAL)
            signums = [code for code in codes if code in _END_SIGNALS]
            now = time.monotonic()
            if signums and now - self._received_at >= _SAME_SIGNAL_SECONDS:
                self.received.append(signums[0])
                self._received_at = now

    def wait(self, seconds: float, *streams: socket.socket) -> bool:
        """Wait for a number of seconds, or until a signal or `--timeout` ends the job.

        Args:
            seconds: Float, longest wait.
            *streams: Sockets; the wait also ends when one of them can be read.

        Returns:
            Bool, whether one of `streams` can be read.
        """
        end = min(time.monotonic() + seconds, self.until)
        while not self.received and (left := end - time.monotonic()) > 0:
            ready, _, _ = select.select([self._reader, *streams], [], [], left)
            if any(stream in ready for stream in streams):
                return True
            self.read()
        return False

    @property
    def end_reason(self) -> EndReason | None:
        """`EndReason` of a job that a signal or `--timeout` ends, else `None`."""
        for signum in self.received[:1]:
            return EndReason(f"{signal_name(signum)} received", 128 + signum, signum)
        if time.monotonic() < self.until:
            return None
        return EndReason("--timeout is over", TIMED_OUT, signal.SIGTERM)

    def close(self) -> None:
        """Restore the earlier signal handlers and wakeup descriptor."""
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._reader.close()
        self._writer.close()
