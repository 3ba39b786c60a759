"""Arrays and signs of life over an authenticated connection."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tfdp.forks import close_in_forks
from tfdp.transport.communicator import Array
from tfdp.transport.schedules import bytes_of

# Seconds, and their like: also where it is gone while something is sent to it.
_LIVENESS = {
    "TCP_KEEPIDLE": 30,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 60_000,
}
# What is dialled, see `tfdp.connection`.
SERVICE = "hub"
# Each end sends a sign of life so often, and without any for so long is lost.
BEAT_SECONDS = 5.0
SILENT_SECONDS = 60
_TIMEVAL = struct.Struct("ll")
_BEAT = {"kind": "beat"}
# More is no head of a message.
_MOST_HEAD_BYTES = 1 << 22
# What a connection raises whose other end has gone.
GONE = (EOFError, OSError)


def framed(sock: socket.socket) -> Connection:
    """Make a connection for messages of a socket, after the handshake.

    Reading and writing fail after a minute in which the other end has sent, or taken,
    nothing: a process that is suspended keeps its connections.

    Args:
        sock: TCP socket, which belongs to the connection from then on.

    Raises:
        OSError: If the other end has gone.
    """
    sock.setblocking(True)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A machine that is gone without a word is noticed within minutes.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _LIVENESS.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    for option in socket.SO_RCVTIMEO, socket.SO_SNDTIMEO:
        sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(SILENT_SECONDS, 0))
    return close_in_forks(Connection(sock.detach()))


def send(
    connection: Connection, head: dict[str, Any], arrays: Sequence[Array] = ()
) -> None:
    """Send a message.

    Args:
        connection: `Connection`.
        head: Dict that JSON can hold.
        arrays: Sequence of arrays. Defaults to none.

    Raises:
        OSError: If the other end has gone.
    """
    own = [np.asarray(array) for array in arrays]
    specs = [(array.dtype.str, array.shape) for array in own]
    connection.send_bytes(json.dumps({**head, "arrays": specs}).encode())
    for array in own:
        if array.size:
            connection.send_bytes(_bytes_of(array))


def receive(connection: Connection) -> tuple[dict[str, Any], list[Array]]:
    """Receive a message, after signs of life.

    Args:
        connection: `Connection`.

    Returns:
        Tuple of a dict, and a list of arrays.

    Raises:
        EOFError, OSError: If the other end has gone, or is silent for too long.
    """
    while (head := json.loads(connection.recv_bytes(_MOST_HEAD_BYTES))) == _BEAT:
        pass
    arrays = []
    for dtype, shape in head.pop("arrays"):
        array = np.empty(shape, np.dtype(dtype))
        if array.size:
            connection.recv_bytes_into(_bytes_of(array))
        arrays.append(array)
    return head, arrays


def send_beat(connection: Connection) -> None:
    """Send a sign of life, which `receive` passes over.

    Args:
        connection: `Connection`.

    Raises:
        OSError: If the other end has gone.
    """
    connection.send_bytes(json.dumps(_BEAT).encode())


@contextlib.contextmanager
def beating(connection: Connection) -> Iterator[None]:
    """Send signs of life while the other end waits for what is computed inside.

    Args:
        connection: `Connection`, to which nothing else is sent meanwhile.
    """
    is_over = threading.Event()

    def beat() -> None:
        with contextlib.suppress(*GONE):  # what is sent next says so
            while not is_over.wait(BEAT_SECONDS):
                send_beat(connection)

    thread = threading.Thread(target=beat, name="tfdp beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def close(connection: Connection) -> None:
    """Close a connection, also one on which another thread waits."""
    with contextlib.suppress(OSError):
        sock = socket.socket(fileno=connection.fileno())
        try:
            sock.shutdown(socket.SHUT_RDWR)
        finally:
            sock.detach()
    with contextlib.suppress(OSError):
        connection.close()


def _bytes_of(array: Array) -> memoryview:
    return bytes_of(np.ascontiguousarray(array).reshape(-1))
