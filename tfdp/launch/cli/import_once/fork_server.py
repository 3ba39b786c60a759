"""The launcher's handle of the process that forks workers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdp.launch.cli.signals import SignalPipe

# Longest wait in seconds for the imports. After it, each worker imports TensorFlow by
# itself, and its output shows which import is slow.
_IMPORT_SECONDS = 60.0
# Longest wait in seconds for a fork, which takes milliseconds unless the process that
# forks is suspended.
_FORK_SECONDS = 30.0
# A killed process may be blocked in the kernel, so `close` waits for the end of the
# process that forks for at most this many seconds.
_END_SECONDS = 5.0
_FOLDER = Path(__file__).parent


class ForkServer:
    """Process that imports TensorFlow once, and forks a worker for each request.

    The launcher must have called
    `tfdp.communication.cluster.process_tree.adopt_orphans`, since workers become its
    children as orphans.

    Args:
        command: Sequence of strings, the command line of each worker.
        packages: Sequence of strings, names of the packages to import.
        environment: Dict of environment variables during the imports.
    """

    def __init__(
        self,
        command: Sequence[str],
        packages: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        path = environment.get("PYTHONPATH")
        python_path = f"{_FOLDER}{os.pathsep}{path}" if path else str(_FOLDER)
        self._connection, child_end = socket.socketpair()
        try:
            with child_end, tempfile.TemporaryFile() as output:
                # The process has a separate session, so Ctrl-C does not reach it.
                self._process = subprocess.Popen(
                    list(command),
                    env={**environment, "PYTHONPATH": python_path},
                    stdin=child_end.fileno(),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError:
            self._connection.close()
            raise
        self._connection.settimeout(_FORK_SECONDS)
        try:
            self._send(json.dumps(packages))
        except OSError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Int, id of the process that imports TensorFlow and forks workers."""
        return self._process.pid

    def wait(self, signals: SignalPipe) -> bool:
        """Wait up to 60 s until TensorFlow is imported; return whether it is.

        Args:
            signals: `SignalPipe` whose signals and time limit end the wait.
        """
        with contextlib.suppress(OSError):
            is_ready = signals.wait(_IMPORT_SECONDS, self._connection)
            return is_ready and self._receive_number() == 0
        return False

    def fork(self, environment: Mapping[str, str], output: int) -> int:
        """Fork a worker, which becomes a child of the launcher in a separate session.

        Args:
            environment: Dict of the worker's environment variables.
            output: Int, descriptor for the worker's stdout and stderr.

        Returns:
            Int, process id of the worker.

        Raises:
            OSError: If the fork failed, or was not answered in time.
        """
        self._send(json.dumps(dict(environment)), output)
        number = self._receive_number()
        if number < 0:
            raise OSError(-number, os.strerror(-number))
        return number

    def close(self) -> None:
        """Kill the process that forks workers; the workers continue."""
        self._connection.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)

    def _send(self, text: str, *descriptors: int) -> None:
        """Send a text, after its length in 8 bytes, with file descriptors."""
        data = text.encode()
        head = len(data).to_bytes(8, "little")
        socket.send_fds(self._connection, [head], descriptors)
        self._connection.sendall(data)

    def _receive_number(self) -> int:
        """Receive the answer: a process id, 0 for "ready", or a negative `errno`.

        Raises:
            ConnectionError: If the process has ended.
            TimeoutError: If it does not answer in time.
        """
        answer = self._connection.recv(8, socket.MSG_WAITALL)
        if len(answer) < 8:
            raise ConnectionError("The process that forks workers has ended")
        return int.from_bytes(answer, "little", signed=True)
