"""One worker process of a local job: its output, its log, its end."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import signal
import time
from collections.abc import Callable

import psutil

from tfdp.communication.coordination.preemption import PREEMPTED
from tfdp.launch.cli.log_file import LogFile
from tfdp.launch.cli.noise import is_noise
from tfdp.launch.cli.screen import LineReader, without_escapes
from tfdp.launch.rendezvous.failure import Failure

TAIL_LINES = 20
_SNAPSHOT_SECONDS = 10.0
_REAP_SECONDS = 1.0
_CHUNK_BYTES = 1 << 16
# What a worker wrote before it ended is in the pipe, which holds no more than
# this. What its own children go on writing there must not keep us reading.
_MAX_PIPE_BYTES = 1 << 20
# The text of `tfdp.communication.coordination.watch.errors.failure_message`, whose
# import loads TensorFlow.
_LOST = re.compile(r"\bWorker (\d+) \([^()\s]+\) was lost\b")


class Worker:
    """A worker process, in a session of its own.

    Args:
        rank: Int, the worker's rank.
        start: Callable of the descriptor for the worker's output, which starts the
            process and returns its id, see `Starter.start`.
        log: `LogFile` that gets the lines the worker writes.

    Attributes:
        pid: Int, the id of the process and of its session.

    Raises:
        OSError: If the process cannot be started.
    """

    def __init__(self, rank: int, start: Callable[[int], int], log: LogFile) -> None:
        self.rank = rank
        self.log = log
        self.exit_code: int | None = None
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._reader = LineReader()
        # When the line being drawn began, or anything was logged after that.
        self._shown_at = time.monotonic()
        reader, writer = os.pipe()
        self._pipe = open(reader, "rb", buffering=0)  # noqa: SIM115 `close` does
        os.set_blocking(reader, False)
        try:
            self.pid = start(writer)
        except OSError:
            self._pipe.close()
            raise
        finally:
            os.close(writer)

    @property
    def is_running(self) -> bool:
        """Bool, whether the process has not been seen to end."""
        return self.exit_code is None

    @property
    def is_suspended(self) -> bool:
        """Bool, whether the process was stopped, so that it does not end by itself."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        return False

    @property
    def unfinished(self) -> str:
        """String, the line that the worker is drawing."""
        return self._reader.unfinished

    @property
    def lost_rank(self) -> int | None:
        """Int, which other worker its last lines say was lost, or `None`."""
        found = [match for line in self.tail for match in _LOST.findall(line)]
        return int(found[-1]) if found else None

    def fileno(self) -> int:
        """Return the descriptor of the worker's output, for a selector."""
        return self._pipe.fileno()

    def read(self) -> list[str] | None:
        """Read what there is, at most one chunk of it.

        Returns:
            The lines that became complete, or `None` at the end of the output.
        """
        try:
            data = os.read(self._pipe.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return []
        if not data:
            return None
        is_new_line = not self.unfinished
        lines = self._reader.feed(data)
        if is_new_line:
            # Python writes a line and its end apart: the half of one is no bar.
            self._shown_at = time.monotonic()
        self._note(lines)
        return lines

    def read_rest(self) -> list[str]:
        """Read what is left once the process has ended."""
        lines: list[str] = []
        for _ in range(_MAX_PIPE_BYTES // _CHUNK_BYTES):
            more = self.read()
            if more is None:
                break
            lines += more
        last = self._reader.close()
        self._note(last)
        return lines + last

    def snapshot(self) -> str | None:
        """Return, and log, the line being drawn if it is time to show it.

        A progress bar ends its line only when it is full. In a log it is drawn
        once for each of these moments, and not for each step.
        """
        text = self.unfinished
        if not text or time.monotonic() - self._shown_at < _SNAPSHOT_SECONDS:
            return None
        self._log_lines([text])
        return text

    def _note(self, lines: list[str]) -> None:
        self.tail.extend(line for line in lines if not is_noise(line))
        if lines:
            self._log_lines(lines)

    def _log_lines(self, lines: list[str]) -> None:
        self._shown_at = time.monotonic()
        self.log.write("".join(f"{without_escapes(line).rstrip()}\n" for line in lines))

    def poll(self) -> bool:
        """Note the end of the process; return whether it has just ended.

        The process is not reaped: as a zombie it keeps its id from being given
        to another process, to which our signals would then go.
        """
        if not self.is_running:
            return False
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        status = os.waitid(os.P_PID, self.pid, options)
        if status is None:
            return False
        by_signal = status.si_code != os.CLD_EXITED
        self.exit_code = -status.si_status if by_signal else status.si_status
        return True

    def send(self, signum: int) -> None:
        """Send a signal: Ctrl-C to all its processes, as a terminal does."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if signum == signal.SIGINT:
                os.killpg(self.pid, signum)
            else:
                os.kill(self.pid, signum)

    def describe_end(self) -> str:
        """Say in words how the process ended."""
        code = self.exit_code or 0
        if code == PREEMPTED:
            return f"was preempted and has saved its training (exit code {code})"
        if code >= 0:
            return f"failed with exit code {code}"
        hint = " (by the system, if memory ran out)" if code == -signal.SIGKILL else ""
        return f"was killed by {signal_name(-code)}{hint}"

    @property
    def failure(self) -> Failure:
        """`Failure`, its end as others read of it."""
        return Failure(
            self.rank,
            shell_code(self.exit_code or 0),
            self.describe_end(),
            str(self.log.path.absolute()),
            self.lost_rank,
        )

    def close(self) -> None:
        """Reap the process, which must have been killed, and close its output."""
        end = time.monotonic() + _REAP_SECONDS
        with contextlib.suppress(ChildProcessError):
            while not os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG):
                if time.monotonic() > end:
                    break
                time.sleep(0.005)
        self._pipe.close()


def signal_name(signum: int) -> str:
    """Return a signal's name, such as `"SIGTERM"`."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def shell_code(exit_code: int) -> int:
    """Return the code by which a shell reports the end of a process."""
    return exit_code if exit_code >= 0 else 128 - exit_code
