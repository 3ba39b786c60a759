"""Connections between islands, launchers and their hub, with signs of life."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

from tfdp.communication.transport.communicator import Array
from tfdp.communication.transport.frames import receive_frame, send_frame
from tfdp.ground.forks import close_in_forks

# What is dialled, see `tfdp.communication.connection`.
SERVICE = "hub"
# Each end sends a sign of life so often, and without any for so long is lost.
BEAT_SECONDS = 5.0
SILENT_SECONDS = 60
_TIMEVAL = struct.Struct("ll")
_BEAT = {"kind": "beat"}
# What a connection raises whose other end has gone.
GONE = (EOFError, OSError)


class HubConnection:
    """Authenticated connection; any thread may close it.

    Reading and writing fail after a minute in which the other end has sent, or taken,
    nothing: a process that is suspended keeps its connections.

    Args:
        sock: TCP socket after the handshake, which belongs to the connection.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = close_in_forks(sock)
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in socket.SO_RCVTIMEO, socket.SO_SNDTIMEO:
            silence = _TIMEVAL.pack(SILENT_SECONDS, 0)
            sock.setsockopt(socket.SOL_SOCKET, option, silence)

    def send(self, *buffers: bytes | memoryview) -> None:
        """Send buffers, one after the other.

        Raises:
            OSError: If the other end has gone.
        """
        for buffer in buffers:
            self._sock.sendall(buffer, socket.MSG_NOSIGNAL)

    def receive_into(self, view: bytearray | memoryview) -> None:
        """Fill a buffer.

        Raises:
            EOFError, OSError: If the other end has gone, or is silent for too long.
        """
        rest = memoryview(view)
        while rest.nbytes:
            received = self._sock.recv_into(rest, 0, socket.MSG_WAITALL)
            if not received:
                raise EOFError
            rest = rest[received:]

    def receive(self) -> tuple[dict[str, Any], list[Array]]:
        """Receive a message, after signs of life.

        Raises:
            EOFError, OSError: If the other end has gone, or is silent for too long.
        """
        while True:
            head, arrays = receive_frame(self)
            if head != _BEAT:
                return head, arrays

    def send_beat(self) -> None:
        """Send a sign of life, which `receive` passes over.

        Raises:
            OSError: If the other end has gone.
        """
        send_frame(self, _BEAT)

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Send signs of life while the other end waits for what is computed inside.

        Nothing else is sent meanwhile.
        """
        is_over = threading.Event()

        def beat() -> None:
            with contextlib.suppress(*GONE):  # what is sent next says so
                while not is_over.wait(BEAT_SECONDS):
                    self.send_beat()

        thread = threading.Thread(target=beat, name="tfdp beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def close(self) -> None:
        """Close it, also where another thread waits on it."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
