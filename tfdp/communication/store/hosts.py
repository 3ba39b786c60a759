"""Connection to the process that hosts the store."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, Protocol

from tfdp.communication.connection.handshake import Authenticated, ConnectionFailed
from tfdp.communication.connection.messages import MessageConnection
from tfdp.communication.store.contents import Contents

# Time limit of one attempt to connect to the store's host, so that a worker that waits
# for a host can warn of it between two attempts.
ATTEMPT_SECONDS = 5.0


class Refused(ConnectionFailed):
    """Error: the host has refused this process, with a reason.

    Args:
        reason: String.
        is_ending: Bool, whether the host's process is ending.
    """

    def __init__(self, reason: str, is_ending: bool) -> None:
        super().__init__(reason)
        self.is_ending = is_ending


class HostConnection(MessageConnection):
    """Connection to the process that hosts the store, after the host's admission.

    Args:
        sock: `socket.socket`, connected to the host, after the handshake.
        keys: `Authenticated`, the result of the handshake.

    Raises:
        ConnectionFailed: If the host refuses this process, or has ended.

    Attributes:
        first: List of the messages that have arrived together with the admission.
    """

    def __init__(self, sock: socket.socket, keys: Authenticated) -> None:
        super().__init__(sock, keys)
        self.first = self._await_admission()
        sock.settimeout(None)

    def _await_admission(self) -> list[dict[str, Any]]:
        """Receive the host's first message; raise `Refused` if it is a refusal.

        Returns:
            List of the messages that have arrived together with the first one.
        """
        messages: list[dict[str, Any]] = []
        while not messages:
            try:
                messages = self.receive(waits=True)
            except ConnectionFailed as error:
                raise ConnectionFailed(f"it {error}") from error
        first, *others = messages
        if first["refused"]:
            raise Refused(first["refused"], first["is_ending"])
        return others


class Hosts(Protocol):
    """Interface through which a member's `Store` reaches the processes that host it."""

    def connect(self, rank: int, seconds: float = ATTEMPT_SECONDS) -> HostConnection:
        """Connect to a worker that hosts the store, or soon will.

        Args:
            rank: Int, rank of the worker.
            seconds: Float, the longest wait for each address of the worker.

        Raises:
            ConnectionFailed: If the worker is not reached, or does not host the store.
            ValueError: If the process that listens there is not of this job.
        """

    def watch(self, connection: HostConnection, read: Callable[[], bool]) -> None:
        """Call `read` on the acceptor's thread whenever a connection has data.

        Args:
            connection: `HostConnection` of the member.
            read: Callable, returns false at the end of the connection.
        """

    def host(self, contents: Contents) -> None:
        """Begin to host the store in this process.

        Args:
            contents: `Contents` of the host that has ended.
        """
