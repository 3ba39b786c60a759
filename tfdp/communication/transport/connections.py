"""Connections between two workers that have proved who they are.

Beside those for data there is one for short messages: why a connection is closed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
from types import TracebackType
from typing import Protocol, TypeAlias

from tfdp.communication.transport.communicator import (
    PeerLost,
    TransportClosed,
    TransportError,
)

Buffer: TypeAlias = bytes | bytearray | memoryview

CONTROL = "control"
_CLOSED = "it has closed its connections"
# Of the messages that are read at once, and of a cause.
_MOST_BYTES, _MOST_LETTERS = 65536, 4096
_UNIX_BUFFER_BYTES = 1 << 20
# Between processes of one host a buffer that grows to megabytes is read when the cache
# has lost it: with this one all-reduces took four fifths of the processor's time. The
# kernel takes twice of it, or what `net.core.wmem_max` grants, which served as well.
_LOCAL_TCP_BUFFER_BYTES = 512 << 10


@dataclasses.dataclass(frozen=True)
class Ending:
    """Why a worker has closed a connection.

    Args:
        rank: Int, the worker that is lost; the one that closes, if it leaves itself.
        cause: String.
        is_error: Bool, whether nobody is lost: the workers did not agree.
    """

    rank: int
    cause: str
    is_error: bool = False


class Registry(Protocol):
    """Tells the other ends of connections why they are closed."""

    rank: int

    def tell(self, peer: int, lane: str, ending: Ending) -> None:
        """Tell a peer why this worker closes the connection of a lane."""

    def ending_of(self, peer: int, lane: str) -> Ending | None:
        """Return what the peer has told, or `None` if it could not."""

    def forget(self, connection: Connection) -> None:
        """Take note that a connection is closed."""


class Connection:
    """Connection to another worker, over TCP or a Unix socket.

    One thread sends and receives; any may call `close`.

    Args:
        sock: `socket.socket`, after the handshake.
        peer: Int, the rank of the other worker.
        lane: String, the name under which both ends know the connection.
        registry: `Registry`, of this worker's mesh.
    """

    def __init__(
        self, sock: socket.socket, peer: int, lane: str, registry: Registry
    ) -> None:
        sock.settimeout(None)
        self.sock = sock
        self.peer = peer
        self.lane = lane
        self.is_unix = sock.family == socket.AF_UNIX
        self._registry = registry
        self._lock = threading.Lock()
        self._users = 0
        self._ending: Ending | None = None

    def __enter__(self) -> Connection:
        """Keep the descriptor from being closed, and its number from being reused."""
        with self._lock:
            if self._ending is not None:
                raise _closed_here(self._ending)
            self._users += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._users -= 1
            if self._ending is not None and not self._users:
                self.sock.close()

    def fileno(self) -> int:
        """Return the file descriptor, -1 once it is closed."""
        return self.sock.fileno()

    def send(self, *buffers: Buffer) -> None:
        """Send buffers, one after the other, and wait until all have gone.

        Args:
            *buffers: Contiguous buffers.

        Raises:
            PeerLost: If the connection has ended.
        """
        rest = [view for view in map(_bytes_of, buffers) if view.nbytes]
        with self:
            while rest:
                try:
                    sent = self.sock.sendmsg(rest, (), socket.MSG_NOSIGNAL)
                except OSError as error:
                    raise self.lost(error) from error
                rest = _after(rest, sent)

    def receive_into(self, view: Buffer) -> None:
        """Fill a buffer, and wait until it is full.

        Args:
            view: Contiguous, writable buffer.

        Raises:
            PeerLost: If the connection has ended.
        """
        rest = _bytes_of(view)
        with self:
            while rest.nbytes:
                try:
                    received = self.sock.recv_into(rest, 0, socket.MSG_WAITALL)
                except OSError as error:
                    raise self.lost(error) from error
                if received == 0:
                    raise self.lost(None)
                rest = rest[received:]

    def send_descriptor(self, descriptor: int) -> None:
        """Send an open file to a worker of this host; over Unix sockets only.

        Args:
            descriptor: Int, which stays open here.

        Raises:
            PeerLost: If the connection has ended.
        """
        with self:
            try:
                socket.send_fds(self.sock, [b"\0"], [descriptor])
            except OSError as error:
                raise self.lost(error) from error

    def receive_descriptor(self) -> int:
        """Receive an open file; over Unix sockets only.

        Returns:
            Int, the descriptor, which the caller closes.

        Raises:
            PeerLost: If the connection has ended.
            TransportError: If something else was sent.
        """
        with self:
            try:
                text, found, _, _ = socket.recv_fds(
                    self.sock, 1, 1, socket.MSG_CMSG_CLOEXEC
                )
            except OSError as error:
                raise self.lost(error) from error
        if len(found) == 1:
            return found[0]
        if not text:
            raise self.lost(None)
        raise TransportError(
            f"Worker {self.peer} sent no open file where one is expected: the workers "
            "do not run the same version of tfdp, or this process may open no more "
            "files (`ulimit -n`)."
        )

    def lost(self, error: OSError | None) -> Exception:
        """Return the error that says how the connection ended.

        Args:
            error: `OSError` that was met, or `None` at the end of what was sent.

        Returns:
            `PeerLost`; `TransportClosed` if this worker closed the connection itself;
            `TransportError` if the workers did not agree.
        """
        if self._ending is not None:
            return _closed_here(self._ending)
        told = self._registry.ending_of(self.peer, self.lane)
        if told is None:
            if error is None or isinstance(error, ConnectionError):
                return PeerLost(self.peer, "its connection was closed")
            return PeerLost(self.peer, f"its connection has failed: {error.strerror}")
        if told.is_error:
            return TransportError(told.cause)
        if told.rank == self._registry.rank:
            return PeerLost(self.peer, f"it has lost this worker: {told.cause}")
        return PeerLost(told.rank, told.cause)

    def has_left(self) -> bool:
        """Whether the other end has closed the connection in good order.

        Returns:
            Bool; it may take a moment until the end of a process is told from that.
        """
        if self._ending is not None:
            return False
        told = self._registry.ending_of(self.peer, self.lane)
        return told == Ending(self.peer, _CLOSED)

    def close(self, reason: str = "", ending: Ending | None = None) -> None:
        """Close the connection, once; a waiting call ends at once, on both sides.

        Args:
            reason: String, which the other end is told.
            ending: `Ending` to tell instead, if this worker does not leave by itself.
        """
        with self._lock:
            if self._ending is not None:
                return
            self._ending = ending or Ending(self._registry.rank, reason or _CLOSED)
        self._registry.tell(self.peer, self.lane, self._ending)
        with self._lock:
            if self._users:
                shut_down(self.sock)  # its user closes it
            else:
                self.sock.close()
        self._registry.forget(self)


def _closed_here(ending: Ending) -> TransportClosed:
    return TransportClosed("" if ending.cause == _CLOSED else ending.cause)


def _bytes_of(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _after(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Leave out the bytes that have been sent."""
    for position, view in enumerate(views):
        if num_bytes < view.nbytes:
            return [view[num_bytes:], *views[position + 1 :]]
        num_bytes -= view.nbytes
    return []


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


def tune(sock: socket.socket) -> None:
    """Set what pays: the size of buffers on one host; between hosts they grow."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        return
    if _is_within_host(sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_TCP_BUFFER_BYTES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that has gone without a word is noticed after half a minute of silence.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _is_within_host(sock: socket.socket) -> bool:
    try:
        return bool(sock.getsockname()[0] == sock.getpeername()[0])
    except OSError:  # it has ended already; whoever uses it will see
        return False


def shut_down(sock: socket.socket) -> None:
    """End what waits on a socket, here and at its other end."""
    with contextlib.suppress(OSError):  # not connected yet, or ended
        sock.shutdown(socket.SHUT_RDWR)
