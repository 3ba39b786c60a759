"""Launcher of one host, as it is seen through its ssh connection."""

from __future__ import annotations

import collections
import contextlib
import os
import subprocess
import time

from tfdp.launch.cli.hosts import Host
from tfdp.launch.cli.lines import MAX_LINE_LENGTH, PipeReader, without_escapes
from tfdp.launch.cli.remote_line import signal_line, version_of
from tfdp.launch.cli.worker import TAIL_LINES

# A worker's line in JSON, in which a character may take six, and what is said of it.
_MAX_LINE_LENGTH = 8 * MAX_LINE_LENGTH
_KILL_SECONDS = 2.0
_LAST_WORDS_SECONDS = 1.0


class SshWorker:
    """A host's launcher behind an ssh process of this machine.

    Args:
        node: Int, the rank of its node.
        host: `Host`.
        command: List of strings, of ssh.

    Attributes:
        node: Int, the same.
        host: `Host`.
        version: String, of tfdp there, or `None` while it has not answered.
        is_ordered: Bool, whether it was told what to run.
        is_return: Bool, whether it was started again, after a lost connection.
        is_dismissed: Bool, whether it was told to end because of another host.
        errors: Deque of strings, the last lines of its errors.
        exit_code: Int, that of ssh, or `None` while it runs.

    Raises:
        OSError: If ssh cannot be started.
    """

    def __init__(self, node: int, host: Host, command: list[str]) -> None:
        self.node, self.host = node, host
        self.version: str | None = None
        self.is_ordered = self.is_dismissed = self.is_return = False
        self.errors: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self.exit_code: int | None = None
        self._ended_at: float | None = None
        self._unsent = b""
        # A session of its own: no question on the terminal, no Ctrl-C from there.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        self.output = PipeReader(self._process.stdout, _MAX_LINE_LENGTH)
        self.words = PipeReader(self._process.stderr, _MAX_LINE_LENGTH)
        os.set_blocking(self._stdin.fileno(), False)

    @property
    def is_running(self) -> bool:
        """Bool, whether the connection has not been seen to end."""
        return self.exit_code is None

    def answer(self, line: str) -> bool:
        """Take a line that may be its first answer; return whether it is."""
        if self.version is not None:
            return False
        self.version = version_of(without_escapes(line))
        return self.version is not None

    def send(self, data: bytes) -> None:
        """Send a line, as soon as the other end reads; does not wait for it."""
        self._unsent += data
        self.flush()

    def flush(self) -> None:
        """Send what is left of the lines that did not fit into the pipe."""
        with contextlib.suppress(OSError, ValueError):
            while self._unsent:
                size = os.write(self._stdin.fileno(), self._unsent)
                self._unsent = self._unsent[size:]

    def stop(self, signum: int) -> None:
        """Pass a signal on; one that has no order yet loses its connection."""
        if self.is_ordered:
            self.send(signal_line(signum))
        else:
            self.hang_up()

    def hang_up(self) -> None:
        """End the connection; does not wait for it."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        if self._process.poll() is None:
            self._process.terminate()

    def poll(self) -> bool:
        """Note the end of ssh, once all that it wrote is read; return if it is new."""
        if not self.is_running or self._process.poll() is None:
            return False
        now = time.monotonic()
        self._ended_at = self._ended_at or now
        is_read = self.output.has_ended and self.words.has_ended
        # A process of ssh's own, such as a ProxyCommand, may hold its output open.
        if is_read or now - self._ended_at > _LAST_WORDS_SECONDS:
            self.exit_code = self._process.returncode
        return not self.is_running

    def close(self) -> None:
        """End the connection, which ends all that runs there, and wait for ssh."""
        self.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_SECONDS)
        self._process.kill()
        self._process.wait()
        self.output.pipe.close()
        self.words.pipe.close()
