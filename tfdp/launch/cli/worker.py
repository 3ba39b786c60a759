"""One worker process of a local job: its output, its log, its end."""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import re
import signal
import stat
import time
from collections.abc import Callable

import psutil

from tfdp.communication.coordination.preemption import PREEMPTED
from tfdp.ground import user_code
from tfdp.launch.cli.errors import usage_errors
from tfdp.launch.cli.lines import CHUNK_BYTES, PipeReader, without_escapes
from tfdp.launch.cli.noise import is_noise
from tfdp.launch.cli.screen import Screen
from tfdp.launch.rendezvous.failure import Failure

TAIL_LINES = 20
_SNAPSHOT_SECONDS = 10.0
_REAP_SECONDS = 1.0
# What a worker wrote before it ended is in the pipe, which holds no more than
# this. What its own children go on writing there must not keep us reading.
_MAX_PIPE_BYTES = 1 << 20
# The text of `tfdp.communication.coordination.watch.errors.failure_message`, whose
# import loads TensorFlow.
_LOST = re.compile(r"\bWorker (\d+) \([^()\s]+\) was lost\b")

# Neither follow a link nor wait for the reader of a FIFO.
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
_FLAGS |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class Worker:
    """A worker process, in a session of its own.

    Args:
        rank: Int, the worker's rank.
        start: Callable of the descriptor for the worker's output, which starts the
            process and returns its id, see `Starter.start`.
        log: `LogFile` that gets the lines the worker writes.

    Attributes:
        pid: Int, the id of the process and of its session.
        output: `PipeReader` of its output.

    Raises:
        OSError: If the process cannot be started.
    """

    def __init__(self, rank: int, start: Callable[[int], int], log: LogFile) -> None:
        self.rank = rank
        self.log = log
        self.exit_code: int | None = None
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        # When the line being drawn began, or anything was logged after that.
        self._shown_at = time.monotonic()
        reader, writer = os.pipe()
        self.output = PipeReader(open(reader, "rb", buffering=0))  # noqa: SIM115
        try:
            self.pid = start(writer)
        except OSError:
            self.output.pipe.close()
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
        return self.output.unfinished

    @property
    def lost_rank(self) -> int | None:
        """Int, which other worker its last lines say was lost, or `None`."""
        found = [match for line in self.tail for match in _LOST.findall(line)]
        return int(found[-1]) if found else None

    def read(self) -> list[str]:
        """Read what there is, at most one chunk; return the complete lines."""
        is_new_line = not self.unfinished
        lines = self.output.read()
        if is_new_line:
            # Python writes a line and its end apart: the half of one is no bar.
            self._shown_at = time.monotonic()
        self._note(lines)
        return lines

    def read_rest(self) -> list[str]:
        """Read what is left once the process has ended."""
        lines: list[str] = []
        for _ in range(_MAX_PIPE_BYTES // CHUNK_BYTES):
            if not self.output.has_ended:
                lines += self.read()
        last = self.output.close()
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
        self.output.pipe.close()


def signal_name(signum: int) -> str:
    """Return a signal's name, such as `"SIGTERM"`."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def shell_code(exit_code: int) -> int:
    """Return the code by which a shell reports the end of a process."""
    return exit_code if exit_code >= 0 else 128 - exit_code


def open_logs(folder: pathlib.Path, names: list[str], screen: Screen) -> list[LogFile]:
    """Open logs of workers.

    Args:
        folder: Path.
        names: List of strings, of the files.
        screen: The `Screen` that is told where one cannot be written later.

    Raises:
        click.UsageError: If one cannot be opened.
    """
    with usage_errors():
        return [LogFile(folder / name, screen.warn) for name in names]


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
            found = os.fstat(self._fd)
            # What has a second name may be anybody's file.
            if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                os.close(self._fd)
                raise OSError(0, "it is no regular file of its own")
        except OSError as error:
            raise ValueError(
                f"A log cannot be written: {error.strerror}. Remove what is there, or "
                f"give another folder with --log-dir. Received: {path}"
            ) from error

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
