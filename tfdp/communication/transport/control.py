"""Short messages between two workers beside their data: why a connection is closed."""

from __future__ import annotations

import contextlib
import json
import socket
import threading

from tfdp.communication.transport.connections import Ending

LANE = "control"
_MOST_BYTES = 65536
_MOST_LETTERS = 4096


class ControlLine:
    """Connection for messages, written by any thread, read by the acceptor's.

    Args:
        sock: `socket.socket`, after the handshake.
        peer: Int, the rank of the other worker.
    """

    def __init__(self, sock: socket.socket, peer: int) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.peer = peer
        self._lock = threading.Lock()
        self._buffer = b""

    def send(self, lane: str, ending: Ending) -> None:
        """Send why a connection is closed; in vain if the peer is gone.

        Args:
            lane: String, that of the connection.
            ending: `Ending`.
        """
        cause = ending.cause[:_MOST_LETTERS]
        text = json.dumps([lane, ending.rank, cause, ending.is_error])
        with self._lock, contextlib.suppress(OSError):
            self.sock.send(text.encode() + b"\n", socket.MSG_NOSIGNAL)

    def receive(self) -> list[tuple[str, Ending]] | None:
        """Read the messages that are there.

        Returns:
            List of lanes and `Ending`s, or `None` at the end of the connection.
        """
        try:
            received = self.sock.recv(_MOST_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        if not received or len(self._buffer) > _MOST_BYTES:
            return None
        try:
            return [_parsed(line) for line in lines]
        except (ValueError, TypeError):  # another version of tfdp
            return None

    def fileno(self) -> int:
        """Return the descriptor, -1 once it is closed."""
        return self.sock.fileno()

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self.sock.close()


def _parsed(line: bytes) -> tuple[str, Ending]:
    lane, rank, cause, is_error = json.loads(line)
    return str(lane), Ending(int(rank), str(cause), bool(is_error))
