"""The process of which workers are forks, as the launcher sees it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdp.launch.cli.signals import SignalPipe

# Later each worker imports by itself, whose output says what takes so long.
_IMPORT_SECONDS = 60.0
_TURN_SECONDS = 0.1
# A fork takes milliseconds; who is suspended answers nothing.
_FORK_SECONDS = 30.0
_END_SECONDS = 5.0
_FOLDER = Path(__file__).parent


class Parent:
    """Process that has imported TensorFlow, and becomes worker after worker.

    The launcher has to be a subreaper, see
    `tfdp.communication.cluster.process_tree.adopt_orphans`.

    Args:
        command: Sequence of strings, what every worker runs.
        packages: Sequence of strings, what it imports.
        environment: Dict of the variables in which it does.
    """

    def __init__(
        self,
        command: Sequence[str],
        packages: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        path = environment.get("PYTHONPATH")
        hooked = f"{_FOLDER}{os.pathsep}{path}" if path else str(_FOLDER)
        self._connection, theirs = socket.socketpair()
        try:
            with theirs, tempfile.TemporaryFile() as output:
                # In a session of its own: Ctrl-C reaches the launcher alone.
                self._process = subprocess.Popen(
                    list(command),
                    env={**environment, "PYTHONPATH": hooked},
                    stdin=theirs.fileno(),
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
        """Int, its process id."""
        return self._process.pid

    def wait(self, signals: SignalPipe, until: float | None) -> bool:
        """Wait until it has imported TensorFlow; return whether it has.

        Args:
            signals: `SignalPipe` whose signals end the wait.
            until: Float, by `time.monotonic()`, when the wait ends, or `None`.
        """
        end = time.monotonic() + _IMPORT_SECONDS
        end = end if until is None else min(end, until)
        while not signals.received and (left := end - time.monotonic()) > 0:
            timeout = min(left, _TURN_SECONDS)
            if select.select([self._connection], [], [], timeout)[0]:
                with contextlib.suppress(OSError):
                    return self._number() == 0
                return False
            signals.read()
        return False

    def fork(self, environment: Mapping[str, str], output: int) -> int:
        """Fork a worker.

        Args:
            environment: Dict of its environment variables.
            output: Int, the descriptor of its stdout and stderr.

        Returns:
            Int, its process id. It is a child of this process, with a session of its
            own.

        Raises:
            OSError: If it could not be started, or there is no answer in time.
        """
        self._send(json.dumps(dict(environment)), output)
        number = self._number()
        if number < 0:
            raise OSError(-number, os.strerror(-number))
        return number

    def close(self) -> None:
        """End the process; its forks are not affected."""
        self._connection.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)

    def _send(self, text: str, *descriptors: int) -> None:
        data = text.encode()
        head = len(data).to_bytes(8, "little")
        socket.send_fds(self._connection, [head], descriptors)
        self._connection.sendall(data)

    def _number(self) -> int:
        answer = self._connection.recv(8, socket.MSG_WAITALL)
        if len(answer) < 8:
            raise ConnectionError("The process that forks workers has ended")
        return int.from_bytes(answer, "little", signed=True)
