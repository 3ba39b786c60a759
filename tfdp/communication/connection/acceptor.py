"""Thread that accepts connections, with limits on unauthenticated ones."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tfdp.communication.cluster.limits import lack_of_files
from tfdp.communication.connection.handshake import (
    Authenticated,
    ConnectionFailed,
    Steps,
    UnauthenticatedPeer,
    accept_steps,
)
from tfdp.ground.forks import close_in_forks

_logger = logging.getLogger("tfdp.connection")

# For the whole handshake, however slowly it comes.
_PROOF_SECONDS = 5.0
_MOST_UNAUTHENTICATED = 256
_FULL_LOG = 10
_RETRY_SECONDS = 0.01
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group


class Readable(Protocol):
    """What the thread of an acceptor reads for others, and closes at the end."""

    def fileno(self) -> int:
        """Return the descriptor."""

    def close(self) -> None:
        """Close it."""


class _Unauthenticated:
    """Connection whose other end has not proved itself yet.

    Args:
        sock: `socket.socket`.
        address: String, where it comes from.
        steps: Generator, from `accept_steps`.
    """

    def __init__(self, sock: socket.socket, address: str, steps: Steps) -> None:
        self.sock = sock
        self.address = address
        self.deadline = time.monotonic() + _PROOF_SECONDS
        self._steps = steps
        self._wanted = 0
        self.fileno, self.close = sock.fileno, sock.close

    def proceed(self) -> Authenticated | None:
        """Continue the handshake without waiting; returns what its end has given."""
        try:
            received = self.sock.recv(self._wanted) if self._wanted else None
        except BlockingIOError:
            return None
        try:
            while isinstance(step := self._steps.send(received), bytes):
                self.sock.sendall(step, socket.MSG_NOSIGNAL)
                received = None
        except StopIteration as end:
            return end.value
        self._wanted = step
        return None


class Acceptor:
    """Thread that accepts connections and authenticates their other ends.

    A connection is closed after five seconds without a proof; and, of too many without
    one, any: a flood of them keeps nobody out who has the secret and dials again.

    Args:
        secret: String, the job's.
        service: String, what this end is.
        sockets: Sequence of listening `socket.socket`s, which it closes at the end.
        accepted: Callable, gets each authenticated connection, a `socket.socket` that
            does not block, and its `Authenticated`; from the thread.
        lacks_files: Callable, gets the reason if no connection can be accepted.
        log: Callable as `logging.Logger.info`, the default, for refused connections.
        claim_bytes: Int, the length of a claim. Defaults to 0.
    """

    def __init__(
        self,
        secret: str,
        service: str,
        sockets: Sequence[socket.socket],
        accepted: Callable[[socket.socket, Authenticated], None],
        *,
        lacks_files: Callable[[str], None],
        log: Callable[..., None] = _logger.info,
        claim_bytes: int = 0,
    ) -> None:
        self._new_steps = functools.partial(accept_steps, secret, service, claim_bytes)
        self._accepted, self._log, self._lacks_files = accepted, log, lacks_files
        # In the order in which they came.
        self._unauthenticated: dict[_Unauthenticated, None] = {}
        self._num_refused = 0
        self._selector = selectors.PollSelector()  # without a descriptor
        self._wakes, self._waker = map(close_in_forks, socket.socketpair())
        self._new: list[tuple[Readable, Callable[[], bool]]] = []
        self._is_closed = False
        self._register(self._wakes, functools.partial(self._wakes.recv, 4096))
        for sock in map(close_in_forks, sockets):
            sock.setblocking(False)
            self._register(sock, functools.partial(self._accept, sock))
        self._thread = threading.Thread(
            target=self._run, name=f"tfdp acceptor {service}", daemon=True
        )
        self._thread.start()

    def watch(self, readable: Readable, read: Callable[[], bool]) -> None:
        """Read a connection on the thread of the acceptor, too.

        Args:
            readable: `Readable`, closed at the end or when `read` says so.
            read: Callable, returns false at the end of the connection.
        """
        self._new.append((readable, read))
        self._wake()

    def close(self) -> None:
        """Close all that the thread has open, and wait for its end."""
        self._is_closed = True
        self._wake()
        self._thread.join()
        self._waker.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._waker.send(b"\0")

    def _register(self, readable: Readable, act: Callable[[], Any]) -> None:
        self._selector.register(readable, selectors.EVENT_READ, act)

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._turn()
        finally:
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            for readable, _ in self._new:
                readable.close()
            self._selector.close()

    def _turn(self) -> None:
        """Wait for the next events, and act on them."""
        oldest = next(iter(self._unauthenticated), None)
        left = None if oldest is None else oldest.deadline - time.monotonic()
        for key, _ in self._selector.select(None if left is None else max(0.0, left)):
            # One that was refused meanwhile has no descriptor any more.
            if key.fileobj.fileno() >= 0:  # type: ignore[union-attr]
                key.data()
        while self._new:
            readable, read = self._new.pop()
            self._register(readable, functools.partial(self._read, readable, read))
        now = time.monotonic()
        for peer in list(self._unauthenticated):
            if now >= peer.deadline:
                self._refuse(peer, "it says nothing")

    def _accept(self, listening: socket.socket) -> None:
        try:
            sock, address = listening.accept()
        except OSError as error:
            if (lack := lack_of_files(error)) is not None:
                self._lacks_files(lack)
            time.sleep(_RETRY_SECONDS)  # it is gone again, or waits for a file
            return
        sock = close_in_forks(sock)
        sock.setblocking(False)
        peer = _Unauthenticated(sock, _described(sock, address), self._new_steps())
        self._unauthenticated[peer] = None
        self._register(peer, functools.partial(self._hear, peer))
        if not _is_own_user(sock):
            self._refuse(peer, "it belongs to another user")
            return
        if len(self._unauthenticated) > _MOST_UNAUTHENTICATED:
            # Of many workers that come at once, the newest keep each other out where
            # the oldest are closed, and silent ends keep all out where the newest are.
            found = random.choice(tuple(self._unauthenticated))
            self._refuse(found, "it says nothing, and too many others do")
        if peer in self._unauthenticated:
            self._hear(peer)

    def _hear(self, peer: _Unauthenticated) -> None:
        try:
            authenticated = peer.proceed()
        except (ConnectionFailed, UnauthenticatedPeer) as error:
            self._refuse(peer, str(error))
            return
        except OSError:
            self._refuse(peer, "it ended the connection")
            return
        if authenticated is not None:
            self._selector.unregister(peer)
            del self._unauthenticated[peer]
            self._accepted(peer.sock, authenticated)

    def _refuse(self, peer: _Unauthenticated, why: str) -> None:
        del self._unauthenticated[peer]
        self._selector.unregister(peer)
        peer.close()
        self._num_refused += 1
        count = self._num_refused
        # All of the first ones; later the 16th, the 32nd and so on.
        if count <= _FULL_LOG or count & (count - 1) == 0:
            text = "Refused a connection from %s (number %d): %s"
            self._log(text, peer.address, count, why)

    def _read(self, readable: Readable, read: Callable[[], bool]) -> None:
        if not read():
            self._selector.unregister(readable)
            readable.close()


def _is_own_user(sock: socket.socket) -> bool:
    """Whether the other end of a Unix socket is this user's; of TCP none is known."""
    if sock.family != socket.AF_UNIX:
        return True
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(found)[1] == os.getuid()


def _described(sock: socket.socket, address: tuple | str | bytes) -> str:
    if sock.family == socket.AF_UNIX:
        return "a process of this host"
    return f"{address[0]} port {address[1]}"
