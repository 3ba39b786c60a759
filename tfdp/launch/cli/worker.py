"""Worker process of a local job, with its output and its log."""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import re
import signal
import stat
import time
from collections.abc import Callable, Sequence

import psutil

from tfdp.communication.cluster import process_tree
from tfdp.communication.coordination.flight_record import LAUNCHER_SIGNAL, file_name
from tfdp.communication.coordination.preemption import PREEMPTED
from tfdp.ground import user_code
from tfdp.launch.cli.errors import usage_errors
from tfdp.launch.cli.lines import CHUNK_BYTES, PipeReader, without_escapes
from tfdp.launch.cli.noise import is_noise
from tfdp.launch.cli.screen import Screen
from tfdp.launch.cli.signals import signal_name
from tfdp.launch.rendezvous.failure import Failure

# The last lines of a worker show its error, so this many lines are kept for the
# report of its failure.
TAIL_LINES = 20
# A progress bar is one line that ends late, so its state is logged at this interval in
# seconds.
_SNAPSHOT_SECONDS = 10.0
# A killed process may be blocked in the kernel, so its end is awaited for at most this
# many seconds.
_REAP_SECONDS = 1.0
# Children of a worker may continue to write after its end, so at most this many bytes
# are read then: the largest size of a pipe by default.
_MAX_PIPE_BYTES = 1 << 20
# Matches the text of `tfdp.communication.coordination.watch.errors.failure_message`,
# repeated here since importing that module imports TensorFlow.
_LOST = re.compile(r"\bWorker (\d+) \([^()\s]+\) was lost\b")

# A file of another kind may exist at the path of a log. With these flags, a symbolic
# link is not followed, and the opening of a FIFO does not block.
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
_FLAGS |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class Worker:
    """A worker process in a separate session, with its output and its log.

    Args:
        rank: Int, the worker's rank.
        start: Callable that takes a descriptor for the worker's output, starts the
            process and returns its id, such as `Starter.start`.
        log: `LogFile` of the worker's lines.

    Attributes:
        pid: Int, id of the process and of its session.
        output: `PipeReader` of the worker's output.
        exit_code: Int, exit code of the process, negative for a signal, or `None` while
            it runs.
        tail: Deque of strings, the last `TAIL_LINES` lines of the output, without
            noise.

    Raises:
        OSError: If the process cannot be started.
    """

    def __init__(self, rank: int, start: Callable[[int], int], log: LogFile) -> None:
        self.rank = rank
        self.log = log
        self.exit_code: int | None = None
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        # The unfinished line is logged once in an interval, which begins at this time:
        # that of its first text, or of its last log.
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
        """Bool, whether `poll` has not seen the end of the process yet."""
        return self.exit_code is None

    @property
    def is_suspended(self) -> bool:
        """Bool, whether the process is stopped, such as by SIGSTOP."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        return False

    @property
    def lost_rank(self) -> int | None:
        """Int, rank of the peer that the last lines report as lost, or `None`."""
        ranks = [rank for line in self.tail for rank in _LOST.findall(line)]
        return int(ranks[-1]) if ranks else None

    def read(self) -> list[str]:
        """Read at most one chunk of output, log it, and return the complete lines."""
        is_new_line = not self.output.unfinished
        lines = self.output.read()
        if is_new_line:
            # Python writes a line and its end separately, so the end of a new
            # unfinished line probably follows at once. The line is therefore shown only
            # after an interval.
            self._shown_at = time.monotonic()
        self._record(lines)
        return lines

    def read_rest(self) -> list[str]:
        """Read, log and return the remaining lines after the end of the process."""
        lines: list[str] = []
        for _ in range(_MAX_PIPE_BYTES // CHUNK_BYTES):
            if not self.output.has_ended:
                lines += self.read()
        last = self.output.close()
        self._record(last)
        return lines + last

    def snapshot(self) -> str | None:
        """Log and return the unfinished line if nothing was logged for 10 s.

        Otherwise, or without an unfinished line, the result is `None`. A progress bar
        ends its line only when it is full: the log gets its state at most
        once every 10 s, instead of a line for each step.
        """
        text = self.output.unfinished
        if not text or time.monotonic() - self._shown_at < _SNAPSHOT_SECONDS:
            return None
        self._log_lines([text])
        return text

    def _record(self, lines: list[str]) -> None:
        """Add lines to the log, and to the last lines that messages show."""
        self.tail.extend(line for line in lines if not is_noise(line))
        if lines:
            self._log_lines(lines)

    def _log_lines(self, lines: list[str]) -> None:
        """Append lines to the log, without escape sequences of a terminal."""
        self._shown_at = time.monotonic()
        self.log.write("".join(f"{without_escapes(line).rstrip()}\n" for line in lines))

    def poll(self) -> bool:
        """Check for the end of the process; return whether it has just ended.

        The process is not reaped: a zombie keeps its id, which another process could
        otherwise get, and with it the signals for this worker.
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
        """Send a signal to the worker; Ctrl-C to its whole process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if signum == signal.SIGINT:
                os.killpg(self.pid, signum)
            else:
                os.kill(self.pid, signum)

    def request_record(self) -> bool:
        """Have the worker write its flight record; return whether it will.

        A process without tfdp's handler is not sent the signal, which would end it.
        """
        if self.is_suspended or not process_tree.has_signal_handler(
            self.pid, LAUNCHER_SIGNAL
        ):
            return False
        self.send(LAUNCHER_SIGNAL)
        return True

    def has_record(self, since: float) -> bool:
        """Return whether the worker has written its flight record.

        Args:
            since: Float, time by `time.time()` after which it counts.
        """
        path = self.log.path.with_name(file_name(self.rank))
        with contextlib.suppress(OSError):
            return path.stat().st_mtime >= since
        return False

    def describe_end(self) -> str:
        """Describe how the process ended, such as "failed with exit code 1"."""
        code = self.exit_code or 0
        if code == PREEMPTED:
            return f"was preempted and has saved its training (exit code {code})"
        if code >= 0:
            return f"failed with exit code {code}"
        hint = " (by the system, if memory ran out)" if code == -signal.SIGKILL else ""
        return f"was killed by {signal_name(-code)}{hint}"

    @property
    def failure(self) -> Failure:
        """`Failure` that describes the end of the process."""
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


def shell_code(exit_code: int) -> int:
    """Convert an exit code of Python, negative for a signal, to that of a shell."""
    return exit_code if exit_code >= 0 else 128 - exit_code


def open_logs(folder: pathlib.Path, names: list[str], screen: Screen) -> list[LogFile]:
    """Open a log in a folder for each of the names, and return them in order.

    Args:
        folder: Path of the folder of logs.
        names: List of strings, names of the files.
        screen: `Screen` for a warning if a log cannot be written later.

    Raises:
        click.UsageError: If a log cannot be opened.
    """
    with usage_errors():
        return [LogFile(folder / name, screen.warn) for name in names]


def open_worker_logs(
    folder: pathlib.Path, ranks: Sequence[int], screen: Screen, *, has_history: bool
) -> tuple[list[LogFile], list[LogFile]]:
    """Open the logs of workers, and the log of restarts if there may be any.

    Args:
        folder: Path of the folder of logs.
        ranks: Sequence of ints, ranks of the workers.
        screen: `Screen` for warnings.
        has_history: Bool, whether restarts are recorded.

    Returns:
        Tuple of the list of the logs of workers, and the list with the log of restarts,
        empty without `has_history`.
    """
    logs = open_logs(folder, [f"worker-{rank}.log" for rank in ranks], screen)
    return logs, open_logs(folder, ["restarts.log"] * has_history, screen)


class LogFile:
    """File to append lines to; a failed write is reported once, and not raised.

    Args:
        path: Path of the file. An existing file is appended to.
        warn: Function that prints a sentence as a warning.

    Raises:
        ValueError: If the path is not a regular file, or cannot be opened.
    """

    def __init__(self, path: pathlib.Path, warn: Callable[[str], None]) -> None:
        self.path = path
        self._warn = warn
        try:
            self._fd = os.open(path, _FLAGS, 0o666)
            status = os.fstat(self._fd)
            # A file with several hard links is refused, since its other names may
            # belong to something else.
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                os.close(self._fd)
                raise OSError(0, "it is not a regular file with a single link")
        except OSError as error:
            raise ValueError(
                f"A log cannot be written: {error.strerror}. Remove this file, or "
                f"give another folder with --log-dir. Received: {path}"
            ) from error

    def write(self, text: str) -> None:
        """Append text to the file."""
        data = text.encode("utf-8", errors="replace")
        # A full disk must not end the training, so the error is not raised.
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            if user_code.record_if_new("unwritten log", self):
                self._warn(
                    f"tfdp: warning: {self.path} cannot be written ({error.strerror}); "
                    "the job continues"
                )

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
