"""Connections between islands, launchers and their hub, with heartbeats."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

from tfdp.communication.transport.communicator import Array
from tfdp.communication.transport.frames import receive_frame, send_frame
from tfdp.ground.base.threads import run_on_thread
from tfdp.ground.forks import close_in_forks

# Name of the hub's service in the handshake: a client notices by it that it has reached
# another service of the job. The secret does not show this, since services share it.
SERVICE = "hub"
# Seconds between two heartbeats, and seconds without a message after which the other
# end counts as lost: the TCP connection of a suspended process stays open.
BEAT_SECONDS = 5.0
SILENT_SECONDS = 60
_BEAT = {"kind": "beat"}
# Errors of a lost connection: EOFError if the other end has closed it, and otherwise
# OSError, such as a timeout.
GONE = (EOFError, OSError)


class HubConnection:
    """Authenticated connection between the hub and an island or a launcher.

    Any thread may close it. Reading and writing fail if the other end sends or accepts
    no bytes for a minute: the TCP connections of a suspended process would stay open.

    Args:
        sock: TCP socket after the handshake; the connection takes ownership of it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = close_in_forks(sock)
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in socket.SO_RCVTIMEO, socket.SO_SNDTIMEO:
            timeval = struct.pack("ll", SILENT_SECONDS, 0)
            sock.setsockopt(socket.SOL_SOCKET, option, timeval)

    def send(self, *buffers: bytes | memoryview) -> None:
        """Send buffers, one after another.

        Raises:
            OSError: If the other end is lost.
        """
        for buffer in buffers:
            self._sock.sendall(buffer, socket.MSG_NOSIGNAL)

    def receive_into(self, view: bytearray | memoryview) -> None:
        """Receive bytes until the buffer `view` is full.

        Raises:
            EOFError, OSError: If the other end is lost, or is silent for too long.
        """
        rest = memoryview(view)
        while rest.nbytes:
            received = self._sock.recv_into(rest, 0, socket.MSG_WAITALL)
            if not received:
                raise EOFError
            rest = rest[received:]

    def receive(self) -> tuple[dict[str, Any], list[Array]]:
        """Receive a message, skipping heartbeats.

        Returns:
            Tuple of the message's head, a dict from JSON, and the list of its arrays.

        Raises:
            EOFError, OSError: If the other end is lost, or is silent for too long.
        """
        while True:
            head, arrays = receive_frame(self)
            if head != _BEAT:
                return head, arrays

    def beat(
        self, is_over: threading.Event, lock: contextlib.AbstractContextManager
    ) -> None:
        """Send heartbeats, which `receive` skips, until the other end is lost.

        Args:
            is_over: `threading.Event` that ends the heartbeats earlier.
            lock: Context manager, held while a heartbeat is sent.
        """
        # If the other end is lost, the heartbeats end without an error, since the next
        # message on this connection raises one.
        with contextlib.suppress(*GONE):
            while not is_over.wait(BEAT_SECONDS):
                with lock:
                    send_frame(self, _BEAT)

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Send heartbeats while the body of a `with` block runs.

        They show the other end, which waits for the body's result, that this end is
        alive. The body must not send on this connection.
        """
        is_over = threading.Event()
        beats = run_on_thread("tfdp beat", self.beat, is_over, contextlib.nullcontext())
        try:
            yield
        finally:
            is_over.set()
            beats.result()

    def close(self) -> None:
        """Close the connection, and wake up a thread that waits on it."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
