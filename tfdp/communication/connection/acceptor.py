"""Thread that accepts connections, with limits on unauthenticated ones."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
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
    NO_SIGNAL,
    Authenticated,
    ConnectionFailed,
    Steps,
    UnauthenticatedPeer,
    accept_steps,
)
from tfdp.ground.forks import close_in_forks

_logger = logging.getLogger("tfdp.connection")

# Time limit of a whole handshake. The number of connections that are not authenticated
# is limited, so a silent peer must not keep one for longer.
_PROOF_SECONDS = 5.0
_MAX_UNAUTHENTICATED = 256
# The first refused connections are all logged. Of later ones, only the 16th, the 32nd,
# the 64th and so on are, so that a flood of them does not fill the log.
_FULL_LOG = 10
# Without events on its sockets, the acceptor's thread wakes at this interval to call
# `tick`, so that its owner can check time limits.
_TICK_SECONDS = 0.05
# Pause after an `accept` that has failed, such as for the lack of a file descriptor:
# the listening socket stays readable, so the thread would otherwise keep a core busy.
_RETRY_SECONDS = 0.01
_CREDENTIALS = struct.Struct("3i")  # SO_PEERCRED returns process, user and group


class Readable(Protocol):
    """Connection that the acceptor's thread watches, and closes at the end."""

    def fileno(self) -> int:
        """Return the file descriptor."""

    def close(self) -> None:
        """Close the connection."""


class _Unauthenticated:
    """Connection whose other end has not authenticated itself yet.

    Args:
        sock: `socket.socket`.
        address: String, a description of the other end.
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
        """Continue the handshake without blocking.

        Returns:
            `Authenticated` at the end of the handshake, `None` before.
        """
        try:
            received = self.sock.recv(self._wanted) if self._wanted else None
        except BlockingIOError:
            return None
        try:
            while isinstance(step := self._steps.send(received), bytes):
                self.sock.sendall(step, NO_SIGNAL)
                received = None
        except StopIteration as end:
            return end.value
        self._wanted = step
        return None


class Acceptor:
    """Thread that accepts connections and authenticates their other ends.

    A connection is closed if it is not authenticated within five seconds, and at random
    if too many are unauthenticated: a flood of them does not keep out a peer with the
    secret that dials again.

    Args:
        secret: String, the secret of the job.
        service: String, name of the service that this end offers.
        sockets: Sequence of listening `socket.socket`s, closed at the end.
        accepted: Callable, receives the non-blocking `socket.socket` of an
            authenticated connection and its `Authenticated`; called on the thread.
        lacks_files: Callable, receives the reason if no file descriptor is left to
            accept a connection.
        log: Callable as `logging.Logger.info`, the default, for refused connections.
        claim_bytes: Int, length of the other end's claim. Defaults to 0.
        tick: Callable, called on the thread every 50 ms. Defaults to `None`.
        failed: Callable, called on the thread if an error ends it. Defaults to a
            function that does nothing.
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
        tick: Callable[[], None] | None = None,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._failed = failed
        self._tick, self._ticks_at = tick, math.inf if tick is None else -math.inf
        self._new_steps = functools.partial(accept_steps, secret, service, claim_bytes)
        self._accepted, self._log, self._lacks_files = accepted, log, lacks_files
        # Unauthenticated connections in the order of arrival, so the first one has the
        # earliest deadline.
        self._unauthenticated: dict[_Unauthenticated, None] = {}
        self._num_refused = 0
        self._selector = selectors.DefaultSelector()
        self._wakes, self._waker = map(close_in_forks, socket.socketpair())
        self._new: list[tuple[Readable, Callable[[], bool]]] = []
        self._is_closed = False
        self._register(self._wakes, functools.partial(self._wakes.recv, 4096))
        self._listening = list(map(close_in_forks, sockets))
        for sock in self._listening:
            sock.setblocking(False)
            self._register(sock, functools.partial(self._accept, sock))
        self._thread = threading.Thread(
            target=self._run, name=f"tfdp acceptor {service}", daemon=True
        )
        self._thread.start()

    def watch(self, readable: Readable, read: Callable[[], bool]) -> None:
        """Watch another connection on the thread of the acceptor.

        Args:
            readable: `Readable`, closed at the end or when `read` says so.
            read: Callable, called when data arrives; returns false to end the watch.
        """
        if threading.current_thread() is self._thread:
            self._register(readable, functools.partial(self._read, readable, read))
        else:
            self._new.append((readable, read))
            self._wake()

    def watch_output(self, readable: Readable, *, waits: bool) -> None:
        """Set whether `read` is also called when a watched connection can take bytes.

        Only the acceptor's thread may call this.

        Args:
            readable: `Readable`, a watched connection.
            waits: Bool, whether to call it then, since bytes wait to be sent.
        """
        key = self._selector.get_key(readable)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if waits else 0)
        self._selector.modify(readable, events, key.data)

    def unwatch(self, readable: Readable) -> None:
        """Stop watching a connection, and close it; only on the acceptor's thread.

        Args:
            readable: `Readable`, a watched connection.
        """
        self._selector.unregister(readable)
        readable.close()

    def stop_listening(self) -> None:
        """Stop accepting connections; only on the acceptor's thread.

        Watched connections stay open; connections that are not authenticated are
        closed.
        """
        closed: list[Readable] = [*self._listening, *self._unauthenticated]
        for readable in closed:
            self.unwatch(readable)
        self._listening.clear()
        self._unauthenticated.clear()

    def close(self) -> None:
        """Close all connections of the thread, and wait until it has ended."""
        self._is_closed = True
        self._wake()
        self._thread.join()
        self._waker.close()

    def _wake(self) -> None:
        """Wake the thread from its wait for events."""
        with contextlib.suppress(OSError):  # the thread has ended and closed its socket
            self._waker.send(b"\0")

    def _register(self, readable: Readable, act: Callable[[], Any]) -> None:
        """Call `act` on the thread whenever a socket or connection is readable."""
        self._selector.register(readable, selectors.EVENT_READ, act)

    def _run(self) -> None:
        """Handle events until `close` or an error; then close all connections.

        After an error, `failed` is called.
        """
        try:
            while not self._is_closed:
                self._handle_events()
        finally:
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            for readable, _ in self._new:
                readable.close()
            self._selector.close()
            if not self._is_closed:
                self._failed()

    def _handle_events(self) -> None:
        """Wait for events, and handle them and all deadlines and ticks that are due."""
        for key, _ in self._selector.select(self._seconds_to_wait()):
            # Another event of the same wait may have closed this connection, whose
            # descriptor is then -1.
            if key.fileobj.fileno() >= 0:  # type: ignore[union-attr]
                key.data()
        while self._new:
            self.watch(*self._new.pop())
        now = time.monotonic()
        for peer in list(self._unauthenticated):
            if now >= peer.deadline:
                self._refuse(peer, "authentication timed out")
        if self._tick is not None and now >= self._ticks_at:
            self._ticks_at = now + _TICK_SECONDS
            self._tick()

    def _seconds_to_wait(self) -> float | None:
        """Return the time until the next deadline or tick, `None` without one."""
        oldest = next(iter(self._unauthenticated), None)
        deadline = math.inf if oldest is None else oldest.deadline
        until = min(deadline, self._ticks_at)
        return None if until == math.inf else max(0.0, until - time.monotonic())

    def _accept(self, listening: socket.socket) -> None:
        """Accept a connection of a listening socket, and start its handshake."""
        try:
            sock, address = listening.accept()
        except OSError as error:
            if (lack := lack_of_files(error)) is not None:
                self._lacks_files(lack)
            # The peer has left, or no file descriptor is free. In the second case the
            # socket stays readable, and without a pause this thread would keep a core
            # busy.
            time.sleep(_RETRY_SECONDS)
            return
        sock = close_in_forks(sock)
        sock.setblocking(False)
        peer = _Unauthenticated(sock, _describe_peer(sock, address), self._new_steps())
        self._unauthenticated[peer] = None
        self._register(peer, functools.partial(self._proceed, peer))
        if not is_own_user(sock):
            self._refuse(peer, "it belongs to another user")
            return
        if len(self._unauthenticated) > _MAX_UNAUTHENTICATED:
            # A random connection is closed: if it were the oldest, many workers that
            # dial at once would displace each other; if the newest, silent peers would
            # keep all out.
            victim = random.SystemRandom().choice(tuple(self._unauthenticated))
            self._refuse(victim, "too many connections are not authenticated")
        if peer in self._unauthenticated:
            self._proceed(peer)

    def _proceed(self, peer: _Unauthenticated) -> None:
        """Continue a handshake; pass on or refuse the connection at its end."""
        try:
            authenticated = peer.proceed()
        except (ConnectionFailed, UnauthenticatedPeer) as error:
            self._refuse(peer, str(error))
            return
        except OSError:
            self._refuse(peer, "it closed the connection")
            return
        if authenticated is not None:
            self._selector.unregister(peer)
            del self._unauthenticated[peer]
            self._accepted(peer.sock, authenticated)

    def _refuse(self, peer: _Unauthenticated, reason: str) -> None:
        """Close an unauthenticated connection, and log the reason."""
        del self._unauthenticated[peer]
        self._selector.unregister(peer)
        peer.close()
        self._num_refused += 1
        count = self._num_refused
        # Of connections refused after the first ten, only the 16th, the 32nd and so on
        # are logged, so that a flood of them does not fill the log.
        if count <= _FULL_LOG or count & (count - 1) == 0:
            text = "Refused a connection from %s (number %d): %s"
            self._log(text, peer.address, count, reason)

    def _read(self, readable: Readable, read: Callable[[], bool]) -> None:
        """Read a watched connection; close it at its end.

        Args:
            readable: `Readable`, the connection.
            read: Callable that reads, and returns false at the end of the connection.
        """
        if not read():
            self.unwatch(readable)


def is_own_user(sock: socket.socket) -> bool:
    """Return whether a Unix socket's other end runs as this user; true for TCP.

    Args:
        sock: `socket.socket`, connected.
    """
    if sock.family != socket.AF_UNIX:
        return True
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(found)[1] == os.getuid()


def _describe_peer(sock: socket.socket, address: tuple | str | bytes) -> str:
    """Describe the other end of a connection for the log: `"10.0.0.2 port 40000"`.

    Args:
        sock: `socket.socket`, accepted.
        address: Address from `socket.accept`.
    """
    if sock.family == socket.AF_UNIX:
        return "a process of this host"
    return f"{address[0]} port {address[1]}"
