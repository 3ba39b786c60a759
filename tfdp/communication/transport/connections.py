"""Connections between two workers that have proved who they are."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, TypeAlias

from tfdp.communication.transport.communicator import (
    PeerLost,
    TransportClosed,
    TransportError,
)
from tfdp.communication.transport.flows import Flow, Piece, run

Buffer: TypeAlias = bytes | bytearray | memoryview

_CLOSED = "it has closed its connections"


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

    def exchange(
        self,
        sent: Sequence[Buffer],
        received: Sequence[Buffer],
        on_received: Callable[[int], None] | None = None,
    ) -> None:
        """Send and receive at once: neither end waits until the other has read.

        Args:
            sent: Sequence of buffers, sent one after the other.
            received: Sequence of writable buffers, filled one after the other.
            on_received: Callable or `None`, called with the index of each buffer of
                `received` when it is full.

        Raises:
            PeerLost: If the connection has ended.
        """
        then = on_received or (lambda index: None)
        outgoing = [Piece(_bytes_of(buffer)) for buffer in sent]
        incoming = [
            Piece(_bytes_of(buffer), then=lambda index=index: then(index))  # type: ignore[misc]
            for index, buffer in enumerate(received)
        ]
        with self:
            run([Flow(self, outgoing, incoming)])

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
                _shut_down(self.sock)  # its user closes it
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


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other end was first
        sock.shutdown(socket.SHUT_RDWR)
