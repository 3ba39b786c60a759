"""Connection between node 0 and the launcher of a node, with heartbeats."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfdp.communication.cluster.address import ip_address
from tfdp.communication.connection.acceptor import Acceptor
from tfdp.communication.connection.handshake import Authenticated, ConnectionFailed
from tfdp.communication.connection.messages import MessageConnection, encode
from tfdp.ground.text import pluralize

# Both ends check this name in the handshake, so a launcher does not connect to another
# server of tfdp.
SERVICE = "rendezvous"
# Node 0 sends the addresses of all workers in one message, so a message may have this
# many bytes.
MAX_BYTES = 1 << 19
# Node 0 receives only short reports, so a message to it may have only this many bytes.
MAX_REPORT_BYTES = 1 << 16
# An idle connection is distinguished from a lost one by heartbeats, one every this many
# seconds.
BEAT_SECONDS = 1.0
# An overloaded machine may be silent for some seconds, so a node counts as lost only
# after this many seconds of silence.
SILENT_SECONDS = 15.0
_BEAT = {"type": "beat"}


class HeartbeatConnection(MessageConnection):
    """Connection between node 0 and the launcher of a node, with heartbeats.

    One thread calls `proceed` when the socket is readable, and `tick` several times a
    second.

    Args:
        sock: `socket.socket`, non-blocking, after the handshake.
        keys: `Authenticated`, the result of the handshake.
        most_bytes: Int, largest length of a received message.
        acceptor: `Acceptor` whose thread serves the connection, or `None`, the default.

    Attributes:
        peer: String, the IP address of the other end.
        local: String, the IP address of this end that the other end is connected to.
        most_silent_seconds: Float, silence after which the other end counts as lost.
    """

    def __init__(
        self,
        sock: socket.socket,
        keys: Authenticated,
        most_bytes: int,
        acceptor: Acceptor | None = None,
    ) -> None:
        super().__init__(sock, keys, most_bytes, acceptor)
        self.peer, self.local = map(_ip_address, (sock.getpeername, sock.getsockname))
        self.most_silent_seconds = SILENT_SECONDS
        self._heard_at, self._beats_at = time.monotonic(), 0.0

    @property
    def silent_seconds(self) -> float:
        """Float, seconds since the last message or heartbeat of the other end."""
        return time.monotonic() - self._heard_at

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; a failure to send shows in `proceed` as a lost connection.

        Args:
            message: Mapping of JSON values.

        Raises:
            ValueError: If the message is too long.
        """
        text = encode(message)
        if len(text) > MAX_BYTES:
            raise ValueError(
                f"The message is too long. Received: {pluralize(len(text), 'byte')}"
            )
        self.send_encoded(text)

    def proceed(self) -> list[dict[str, Any]]:
        """Send bytes that have waited, and return received messages except heartbeats.

        Raises:
            ConnectionFailed: If the connection has ended, or was tampered with.
        """
        if messages := super().proceed():
            self._heard_at = time.monotonic()
        return [message for message in messages if message != _BEAT]

    def tick(self) -> None:
        """Send a heartbeat if the last one was sent at least a second ago.

        Raises:
            ConnectionFailed: If the other end has been silent for too long.
        """
        if time.monotonic() >= self._beats_at:
            self._beats_at = time.monotonic() + BEAT_SECONDS
            self.send(_BEAT)
        if self.silent_seconds >= self.most_silent_seconds:
            seconds = self.most_silent_seconds
            raise ConnectionFailed(f"has not answered for {seconds:.0f} s")


def _ip_address(name: Callable[[], Any]) -> str:
    """Return the IP address of an end of a socket; IPv4-mapped IPv6 becomes IPv4.

    The result is `""` if the connection has ended.

    Args:
        name: Bound method of a socket, `getsockname` or `getpeername`.
    """
    with contextlib.suppress(OSError):  # an ended connection has no address
        text = str(name()[0])
        return str(ip_address(text) or text)
    return ""
