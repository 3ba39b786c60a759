"""Sockets in place of connections between workers."""

from __future__ import annotations

import contextlib
import socket

from tfdp.communication.transport import PeerLost


class End:
    """One end of a pair of sockets."""

    def __init__(self, sock: socket.socket, peer: int = 1) -> None:
        self.sock, self.peer = sock, peer

    def send(self, *buffers: bytes | memoryview) -> None:
        try:
            for buffer in buffers:
                self.sock.sendall(buffer)
        except OSError as error:
            raise PeerLost(self.peer, "its connection was closed") from error

    def receive_into(self, view: bytearray | memoryview) -> None:
        if self.sock.recv_into(view, 0, socket.MSG_WAITALL) < len(memoryview(view)):
            raise PeerLost(self.peer, "its connection was closed")

    def close(self, reason: str = "", close_reason: object = None) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
