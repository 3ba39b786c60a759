"""Local handle of the launcher of one host, behind an ssh connection."""

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

# In JSON, a character of a worker's line may become six, and the line of JSON has
# further fields, so it may be eight times as long as the worker's line.
_MAX_LINE_LENGTH = 8 * MAX_LINE_LENGTH
# ssh may hang on a lost connection, so it is killed after this many seconds.
_KILL_SECONDS = 2.0
# A child of ssh may keep the output open, so after the exit of ssh the rest is read for
# at most this many seconds.
_LAST_OUTPUT_SECONDS = 1.0


class SshWorker:
    """Handle of the launcher on another host, through a local ssh process.

    Args:
        node: Int, rank of the launcher's node.
        host: `Host` of the launcher.
        command: List of strings, command line of ssh.

    Attributes:
        node: Int, rank of the launcher's node.
        host: `Host` of the launcher.
        version: String, version of tfdp on the host, or `None` until it has answered.
        is_order_sent: Bool, whether the order to run was sent.
        is_restarted: Bool, whether it was started again after a lost connection.
        is_dismissed: Bool, whether it was ended because of a failure.
        errors: Deque of strings, the last lines of stderr.
        exit_code: Int, exit code of ssh, or `None` while it runs.
        output: `PipeReader` of the stdout of ssh.
        error_output: `PipeReader` of the stderr of ssh.

    Raises:
        OSError: If ssh cannot be started.
    """

    def __init__(self, node: int, host: Host, command: list[str]) -> None:
        self.node, self.host = node, host
        self.version: str | None = None
        self.is_order_sent = self.is_dismissed = self.is_restarted = False
        self.errors: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self.exit_code: int | None = None
        self._ended_at: float | None = None
        self._unsent = b""
        # A separate session keeps prompts off the terminal, and Ctrl-C away from ssh.
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
        self.error_output = PipeReader(self._process.stderr, _MAX_LINE_LENGTH)
        os.set_blocking(self._stdin.fileno(), False)

    @property
    def is_running(self) -> bool:
        """Bool, whether `poll` has not seen the end of ssh and its output yet."""
        return self.exit_code is None

    def answer(self, line: str) -> bool:
        """Store tfdp's version from the host's banner.

        Args:
            line: String, a line of the host's output.

        Returns:
            Bool, whether this line is the first banner.
        """
        if self.version is not None:
            return False
        self.version = version_of(without_escapes(line))
        return self.version is not None

    def send(self, data: bytes) -> None:
        """Queue a line for the host, and send as much as fits without blocking."""
        self._unsent += data
        self.flush()

    def flush(self) -> None:
        """Send the rest of the queued lines, as far as the pipe takes them."""
        with contextlib.suppress(OSError, ValueError):
            while self._unsent:
                size = os.write(self._stdin.fileno(), self._unsent)
                self._unsent = self._unsent[size:]

    def stop(self, signum: int) -> None:
        """Send the launcher a signal, or disconnect it if it has no order yet."""
        if self.is_order_sent:
            self.send(signal_line(signum))
        else:
            self.hang_up()

    def hang_up(self) -> None:
        """Disconnect from the host, without waiting for the end of ssh."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        if self._process.poll() is None:
            self._process.terminate()

    def poll(self) -> bool:
        """Check for the end of ssh and its output; return whether it has just ended."""
        if not self.is_running or self._process.poll() is None:
            return False
        now = time.monotonic()
        self._ended_at = self._ended_at or now
        is_read = self.output.has_ended and self.error_output.has_ended
        # A child of ssh, such as a ProxyCommand, may keep the output open after ssh has
        # ended, so the wait for the end of the output is limited.
        if is_read or now - self._ended_at > _LAST_OUTPUT_SECONDS:
            self.exit_code = self._process.returncode
        return not self.is_running

    def close(self) -> None:
        """Disconnect, which ends the launcher on the host, and wait for ssh."""
        self.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_SECONDS)
        self._process.kill()
        self._process.wait()
        self.output.pipe.close()
        self.error_output.pipe.close()
