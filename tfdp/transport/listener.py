"""Thread that accepts connections, checks who dials, and reads control messages."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Protocol

from tfdp.cluster.limits import lack_of_files
from tfdp.forks import close_in_forks
from tfdp.transport import handshake
from tfdp.transport.connections import Ending
from tfdp.transport.control import ControlLine

_logger = logging.getLogger("tfdp.transport")

_STRANGER_SECONDS = 5.0
_MOST_STRANGERS = 256
_FULL_LOG = 10
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group


class Host(Protocol):
    """What is done with those who have proved that they belong to the job."""

    def accepted(self, sock: socket.socket, claim: handshake.Claim) -> None:
        """Take over the connection of another worker."""

    def lacks_files(self, sentence: str) -> None:
        """Take note that no connection can be accepted, and why."""

    def told(self, peer: int, lane: str, ending: Ending) -> None:
        """Take note why a peer closes a connection."""

    def gone(self, line: ControlLine) -> None:
        """Take note that a control line has ended."""


class Stranger:
    """Connection that has not proved yet who it is.

    Args:
        sock: `socket.socket`.
        address: String, where it comes from.
    """

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.sock = sock
        self.address = address
        self.greeting = handshake.new_greeting()
        self.deadline = time.monotonic() + _STRANGER_SECONDS
        self.received = b""

    def receive(self) -> bool:
        """Read what is there of the claim.

        Returns:
            Bool, whether all of it is.

        Raises:
            HandshakeError: If the connection has ended.
        """
        missing = handshake.CLAIM_BYTES - len(self.received)
        try:
            received = self.sock.recv(missing)
        except BlockingIOError:
            return False
        if not received:
            raise handshake.HandshakeError("it ended the connection")
        self.received += received
        return len(received) == missing


class Listener:
    """Thread of a mesh that accepts connections.

    Args:
        rank: Int, this worker's.
        secret: Bytes, the job's.
        sockets: List of listening `socket.socket`s, which it closes at the end.
        host: `Host`, called from the thread.
    """

    def __init__(
        self, rank: int, secret: bytes, sockets: list[socket.socket], host: Host
    ) -> None:
        self._rank = rank
        self._secret = secret
        self._sockets = sockets
        self._host = host
        self._strangers: dict[socket.socket, Stranger] = {}
        self._num_refused = 0
        self._selector = selectors.PollSelector()  # without a descriptor
        self._wakes, self._waker = map(close_in_forks, socket.socketpair())
        self._new_lines: list[ControlLine] = []
        self._lines: set[ControlLine] = set()
        self._is_closed = False
        self._selector.register(self._wakes, selectors.EVENT_READ, None)
        for sock in sockets:
            sock.setblocking(False)
            self._register(sock, functools.partial(self._accept, sock))
        self._thread = threading.Thread(
            target=self._run, name="tfdp-transport", daemon=True
        )
        self._thread.start()

    def read(self, line: ControlLine) -> None:
        """Read a control line from now on, and close it at the end.

        Args:
            line: `ControlLine`.
        """
        self._new_lines.append(line)
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

    def _register(self, sock: socket.socket, act: Callable[[], None]) -> None:
        self._selector.register(sock, selectors.EVENT_READ, act)

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._turn()
        finally:
            self._end()

    def _turn(self) -> None:
        """Wait for the next events, and act on them."""
        for key, _ in self._selector.select(self._patience()):
            if key.data is None:
                self._wakes.recv(4096)
            else:
                key.data()
        while self._new_lines:
            self._watch(self._new_lines.pop())
        now = time.monotonic()
        for stranger in list(self._strangers.values()):
            if now >= stranger.deadline:
                self._refuse(stranger, "it says nothing")

    def _patience(self) -> float | None:
        deadlines = [stranger.deadline for stranger in self._strangers.values()]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _accept(self, listening: socket.socket) -> None:
        try:
            sock, address = listening.accept()
        except OSError as error:
            if (lack := lack_of_files(error)) is not None:
                self._host.lacks_files(lack)
            time.sleep(0.01)  # it is gone again, or waits for a file
            return
        stranger = Stranger(close_in_forks(sock), _described(sock, address))
        self._strangers[sock] = stranger
        if len(self._strangers) > _MOST_STRANGERS:
            self._refuse(stranger, "too many others have said nothing so far")
        elif not _is_own_user(sock):
            self._refuse(stranger, "it belongs to another user")
        else:
            sock.setblocking(False)
            self._greet(stranger)

    def _greet(self, stranger: Stranger) -> None:
        try:
            stranger.sock.send(stranger.greeting, socket.MSG_NOSIGNAL)
        except OSError:
            self._refuse(stranger, "it ended the connection")
        else:
            self._register(stranger.sock, functools.partial(self._hear, stranger))

    def _hear(self, stranger: Stranger) -> None:
        try:
            if not stranger.receive():
                return
            claim = handshake.checked_claim(
                stranger.received, stranger.greeting, self._secret, self._rank
            )
            proof = handshake.welcome(claim, stranger.greeting, self._secret)
            stranger.sock.send(proof, socket.MSG_NOSIGNAL)
        except handshake.HandshakeError as error:
            self._refuse(stranger, str(error))
            return
        except OSError:
            self._refuse(stranger, "it ended the connection")
            return
        self._selector.unregister(stranger.sock)
        del self._strangers[stranger.sock]
        self._host.accepted(stranger.sock, claim)

    def _refuse(self, stranger: Stranger, why: str) -> None:
        del self._strangers[stranger.sock]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(stranger.sock)
        stranger.sock.close()
        self._num_refused += 1
        count = self._num_refused
        # All of the first ones; later the 16th, the 32nd and so on.
        if count <= _FULL_LOG or count & (count - 1) == 0:
            _logger.warning(
                "Refused a connection from %s (number %d): %s",
                stranger.address,
                count,
                why,
            )

    def _watch(self, line: ControlLine) -> None:
        self._lines.add(line)
        self._register(line.sock, functools.partial(self._read, line))

    def _read(self, line: ControlLine) -> None:
        messages = line.receive()
        if messages is None:
            self._selector.unregister(line.sock)
            self._lines.remove(line)
            line.close()
            self._host.gone(line)
            return
        for lane, ending in messages:
            self._host.told(line.peer, lane, ending)

    def _end(self) -> None:
        for sock in (*self._sockets, *self._strangers, self._wakes):
            sock.close()
        for line in (*self._lines, *self._new_lines):
            line.close()
        self._selector.close()


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
