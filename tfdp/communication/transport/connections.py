"""Authenticated connections between two workers.

In addition to the connections for data, two workers have one for short messages, which
carry the reason that a connection is closed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from types import TracebackType
from typing import Protocol, TypeAlias

from tfdp.communication.connection.handshake import Authenticated, ConnectionFailed
from tfdp.communication.connection.messages import MessageConnection
from tfdp.communication.transport.communicator import (
    PeerLost,
    TransportClosed,
    TransportError,
)

Buffer: TypeAlias = bytes | bytearray | memoryview

CONTROL = "control"
_CLOSED = "it has closed its connections"
# Limits of a control message in bytes, and of a cause in it in characters. JSON takes
# at most 12 bytes for a character, so a message with a shortened cause is within its
# limit.
_MAX_BYTES, _MAX_CHARACTERS = 65536, 4096
_UNIX_BUFFER_BYTES = 1 << 20
# Send buffer in bytes of TCP within a host. A default buffer grows to megabytes, which
# do not fit into the cache; with this size, all-reduces took a fifth less CPU time.
# They were as fast where `net.core.wmem_max` limits the buffer to less.
_LOCAL_TCP_BUFFER_BYTES = 512 << 10


@dataclasses.dataclass(frozen=True)
class CloseReason:
    """Reason that a worker has closed a connection.

    Args:
        rank: Int, the lost worker; the closing worker itself if none is lost.
        cause: String, the cause.
        is_error: Bool, whether workers called different collectives, or another error
            occurred without the loss of a worker.
    """

    rank: int
    cause: str
    is_error: bool = False


class Registry(Protocol):
    """Interface by which a `Connection` sends and receives reasons for closing it.

    `Mesh` implements it: the reasons travel over one control connection to each peer.

    Attributes:
        rank: Int, rank of this worker.
    """

    rank: int

    def send_close_reason(
        self, peer: int, lane: str, close_reason: CloseReason
    ) -> None:
        """Send a peer the reason that this worker closes the connection of a lane.

        Args:
            peer: Int, rank of the other worker.
            lane: String, name of the connection.
            close_reason: `CloseReason`, the reason.
        """

    def close_reason_of(self, peer: int, lane: str) -> CloseReason | None:
        """Return why a peer has closed the connection `lane`, `None` if unknown."""

    def forget(self, connection: Connection) -> None:
        """Remove a connection, which this worker has closed, from the registry."""


class Connection:
    """Connection to another worker, over TCP or a Unix socket.

    One thread sends and receives; any thread may call `close`.

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
        self._close_reason: CloseReason | None = None

    def __enter__(self) -> Connection:
        """Keep the descriptor open in the block, so that its number is not reused.

        Raises:
            TransportClosed: If this worker has closed the connection.
        """
        with self._lock:
            if self._close_reason is not None:
                raise _closed_error(self._close_reason)
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
            if self._close_reason is not None and not self._users:
                self.sock.close()

    def fileno(self) -> int:
        """Return the file descriptor, -1 after it is closed."""
        return self.sock.fileno()

    def send(self, *buffers: Buffer) -> None:
        """Send buffers, one after another, and wait until all are sent.

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
                rest = _without_first_bytes(rest, sent)

    def receive_into(self, view: Buffer) -> None:
        """Receive into a buffer, and wait until it is full.

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
        """Send an open file to a worker of this host; only over Unix sockets.

        Args:
            descriptor: Int, the file descriptor, which stays open in this process.

        Raises:
            PeerLost: If the connection has ended.
        """
        with self:
            try:
                socket.send_fds(self.sock, [b"\0"], [descriptor])
            except OSError as error:
                raise self.lost(error) from error

    def receive_descriptor(self) -> int:
        """Receive an open file; only over Unix sockets.

        Returns:
            Int, the file descriptor, which the caller must close.

        Raises:
            PeerLost: If the connection has ended.
            TransportError: If the peer has not sent a file descriptor.
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
            f"Worker {self.peer} sent no file descriptor where one was expected: the "
            "workers do not run the same version of tfdp, or this process cannot open "
            "more files (`ulimit -n`)."
        )

    def lost(self, error: OSError | None) -> Exception:
        """Return the error to raise after the connection has ended, with the reason.

        The call may wait a moment for the peer's reason.

        Args:
            error: `OSError` of the socket, or `None` at the end of its stream.

        Returns:
            `PeerLost`; `TransportClosed` if this worker closed the connection itself;
            `TransportError` if no worker is lost.
        """
        if self._close_reason is not None:
            return _closed_error(self._close_reason)
        close_reason = self._registry.close_reason_of(self.peer, self.lane)
        if close_reason is None:
            if error is None or isinstance(error, ConnectionError):
                return PeerLost(self.peer, "its connection was closed")
            return PeerLost(self.peer, f"its connection has failed: {error.strerror}")
        if close_reason.is_error:
            return TransportError(close_reason.cause)
        if close_reason.rank == self._registry.rank:
            return PeerLost(self.peer, f"it has lost this worker: {close_reason.cause}")
        return PeerLost(close_reason.rank, close_reason.cause)

    def has_left(self) -> bool:
        """Return whether the other end has closed the connection without an error.

        Returns:
            Bool. The call may wait a moment for the peer's reason, which shows whether
            the peer closed the connection or its process has ended.
        """
        if self._close_reason is not None:
            return False
        close_reason = self._registry.close_reason_of(self.peer, self.lane)
        return close_reason == CloseReason(self.peer, _CLOSED)

    def close(self, reason: str = "", close_reason: CloseReason | None = None) -> None:
        """Close the connection; calls that wait at either end raise an error at once.

        Only the first call has an effect.

        Args:
            reason: String, sent to the other end.
            close_reason: `CloseReason` to send instead, if another worker or an error
                is the cause; or `None`, the default.
        """
        with self._lock:
            if self._close_reason is not None:
                return
            self._close_reason = close_reason or CloseReason(
                self._registry.rank, reason or _CLOSED
            )
        self._registry.send_close_reason(self.peer, self.lane, self._close_reason)
        with self._lock:
            if self._users:
                # Another thread still uses the descriptor. A close would let the system
                # give its number to another file, so the last `__exit__` closes it.
                shut_down(self.sock)
            else:
                self.sock.close()
        self._registry.forget(self)


def _closed_error(close_reason: CloseReason) -> TransportClosed:
    """Return the error of a connection that this worker has closed."""
    return TransportClosed("" if close_reason.cause == _CLOSED else close_reason.cause)


def _bytes_of(buffer: Buffer) -> memoryview:
    """Return a flat view of a buffer's bytes."""
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _without_first_bytes(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return the views without the first `num_bytes` bytes, which were sent already."""
    for position, view in enumerate(views):
        if num_bytes < view.nbytes:
            return [view[num_bytes:], *views[position + 1 :]]
        num_bytes -= view.nbytes
    return []


class ControlConnection(MessageConnection):
    """Connection that carries the reasons why two workers close other connections.

    Only the thread of the mesh's `Acceptor` receives on it.

    Args:
        sock: `socket.socket`, after the handshake.
        keys: `Authenticated`, the result of the handshake.
        peer: Int, the rank of the other worker.
    """

    def __init__(self, sock: socket.socket, keys: Authenticated, peer: int) -> None:
        sock.setblocking(False)
        super().__init__(sock, keys, _MAX_BYTES)
        self.peer = peer

    def send_close_reason(self, lane: str, close_reason: CloseReason) -> None:
        """Send the reason that a connection is closed, unless the peer has ended.

        Args:
            lane: String, lane of the connection.
            close_reason: `CloseReason`, the reason.
        """
        short = dataclasses.replace(
            close_reason, cause=close_reason.cause[:_MAX_CHARACTERS]
        )
        self.send({"lane": lane, **dataclasses.asdict(short)})

    def receive_close_reasons(self) -> list[tuple[str, CloseReason]] | None:
        """Receive the close reasons that have arrived, without waiting.

        Returns:
            List of pairs, the lane of a closed connection and its `CloseReason`; or
            `None` at the end of this connection.
        """
        try:
            return [(each.pop("lane"), CloseReason(**each)) for each in self.receive()]
        except (ConnectionFailed, KeyError, TypeError):
            return None


def tune(sock: socket.socket) -> None:
    """Set options of a connected socket: send buffer, no delay and keep-alive.

    The size of the send buffer is set only within a host; a Unix socket gets no other
    option.
    """
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        return
    if _is_within_host(sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_TCP_BUFFER_BYTES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that loses power closes no connection. Keep-alive detects its loss after
    # half a minute: 15 seconds without data, and three probes at intervals of 5.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _is_within_host(sock: socket.socket) -> bool:
    """Return whether both ends of a TCP connection have the same address."""
    try:
        return bool(sock.getsockname()[0] == sock.getpeername()[0])
    except OSError:  # the connection has ended: its first use raises the error
        return False


def shut_down(sock: socket.socket) -> None:
    """Shut a socket down, so that waiting calls at both ends return."""
    # An `OSError` means that the socket has no connection to shut down: it has ended,
    # or was never made.
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
