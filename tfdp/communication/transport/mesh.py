"""Connections of this worker to the other workers of its job.

A *lane* is the name of one connection between two workers, the same at both ends. The
first connection of two workers is their control connection: it carries the reasons for
which the connections of the lanes are closed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import logging
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Protocol

from tfdp.communication.cluster.limits import lack_of_files
from tfdp.communication.cluster.own_addresses import (
    family_of,
    is_loopback,
    socket_address,
)
from tfdp.communication.connection.acceptor import Acceptor
from tfdp.communication.connection.handshake import (
    Authenticated,
    ConnectionFailed,
    UnauthenticatedPeer,
    authenticate,
    dial_steps,
)
from tfdp.communication.transport.addresses import (
    Addresses,
    listening_address,
    this_machine,
)
from tfdp.communication.transport.communicator import (
    PeerLost,
    TransportClosed,
    TransportError,
)
from tfdp.communication.transport.connections import (
    CONTROL,
    CloseReason,
    Connection,
    ControlConnection,
    shut_down,
    tune,
)
from tfdp.ground.forks import Owner, close_in_forks

_logger = logging.getLogger("tfdp.transport")

# Claim of a dialer in the handshake: its rank, and a digest of its lane, since a claim
# has a fixed length and the name of a lane does not.
_CLAIM = struct.Struct("!I32s")
# Longest wait for the answer to one attempt to dial: a peer that was busy or suspended
# may answer the next attempt.
_ATTEMPT_SECONDS = 10.0
# A thread that waits for a key of the store notices `Mesh.close` only between two
# reads, so each read is limited to this time.
_STORE_SECONDS = 2.0
_RETRY_SECONDS = 0.05
_BACKLOG = 512
# A peer sends its reason before it closes a connection, but over the control
# connection, so the reason may arrive later. This is the longest wait for it.
_REASON_SECONDS = 0.5
# Meshes of this process, which are closed at exit, so that peers receive a reason and
# do not take the end for a loss.
_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()


class Store(Protocol):
    """Interface of a job's key-value store, with the addresses of its workers."""

    def put(self, key: str, text: str) -> None:
        """Set the text of a key; a `Mesh` sets no key twice."""

    def get(self, key: str, timeout_seconds: float) -> str:
        """Wait until a key has a text, and return it.

        Args:
            key: String, the key.
            timeout_seconds: Float, the longest wait.

        Raises:
            TimeoutError: If the key has no text in time.
        """


class Mesh:
    """Connections of this worker to the other workers of its job.

    The worker publishes its addresses in the store and listens on two sockets: TCP, on
    one address of this host and a port that the system chooses, and an abstract Unix
    socket, for workers of this host. The worker with the higher rank of two dials.

    Args:
        rank: Int, rank of this worker.
        num_workers: Int, number of workers.
        store: `Store` of the job. Worker 0 puts the job's secret into it.
        host: String, this worker's host as `TF_CONFIG` names it.
        interface: String or `None`, the name or an address of the interface to
            listen on. Defaults to `None`, the one that `host` resolves to.
        timeout_seconds: Float, the longest wait for another worker.
        use_unix: Bool, the same on all workers, whether workers of one host use Unix
            sockets and shared memory rather than TCP. Defaults to `True`.
        prefix: String, the beginning of the mesh's keys in the store, the same on all
            workers. Defaults to `"transport"`.

    Raises:
        TransportError: If this host has no such address or interface, or worker 0 does
            not put a secret into the store in time.
    """

    def __init__(
        self,
        rank: int,
        num_workers: int,
        store: Store,
        *,
        host: str,
        interface: str | None = None,
        timeout_seconds: float = 60.0,
        use_unix: bool = True,
        prefix: str = "transport",
    ) -> None:
        self.rank = rank
        self.num_workers = num_workers
        self._store, self._prefix = store, prefix
        self._timeout_seconds = timeout_seconds
        self._use_unix = use_unix
        self._changed = threading.Condition()
        self._closed: str | None = None
        # Why no connection can be accepted at the moment, or `None`. Waiting calls of
        # `connect` raise this reason at once rather than time out.
        self._accept_error: str | None = None
        self._owner = Owner()
        self._addresses: dict[int, Addresses] = {}
        self._accepted: dict[tuple[int, bytes], socket.socket] = {}
        self._controls: dict[int, ControlConnection] = {}
        self._control_locks: dict[int, threading.Lock] = {}
        self._ended_peers: set[int] = set()
        self._close_reasons: dict[tuple[int, str], CloseReason] = {}
        self._connections: set[Connection] = set()
        self._dialing: set[socket.socket] = set()
        address = listening_address(host, interface)
        self._secret = self._shared_secret()
        tcp = _listen(family_of(address), socket_address(address, 0))
        # An abstract socket leaves no file, and its random name cannot be guessed.
        unix = _listen(socket.AF_UNIX, f"\0tfdp-{secrets.token_hex(16)}")
        self.addresses = Addresses(
            host=host,
            ip=address,
            port=tcp.getsockname()[1],
            unix_name=unix.getsockname()[1:].decode(),
            machine=this_machine(),
        )
        self._acceptor = Acceptor(
            self._secret,
            _service(rank),
            [tcp, unix],
            self._accept,
            lacks_files=self._set_accept_error,
            log=_logger.warning,
            claim_bytes=_CLAIM.size,
        )
        _meshes.add(self)
        store.put(f"{self._prefix}/address/{rank}", self.addresses.to_json())

    def connect(self, peer: int, lane: str) -> Connection:
        """Connect to another worker, which must make the same call.

        Args:
            peer: Int, rank of the other worker.
            lane: String, purpose of the connection, unique for each connection.

        Returns:
            `Connection`, after both workers have called this.

        Raises:
            PeerLost: If the other worker ends meanwhile.
            TransportError: If the other worker does not connect in time, or cannot be
                reached.
        """
        deadline = time.monotonic() + self._timeout_seconds
        if self.rank > peer:
            sock = self._dial_lane(peer, lane, deadline)
        else:
            sock = self._wait_for_dial(peer, lane, deadline)
        connection = Connection(sock, peer, lane, self)
        with self._changed:
            if self._closed is None:
                self._connections.add(connection)
                return connection
        sock.close()
        raise self._closed_error()

    def share_host(self, ranks: Iterable[int]) -> bool:
        """Return whether workers share this host, its network namespace and its user.

        Args:
            ranks: Iterable of int, the workers.

        Returns:
            Bool; if true, Unix sockets and shared memory work between them.
        """
        if not self._use_unix:
            return False
        deadline = time.monotonic() + self._timeout_seconds
        return all(
            self._addresses_of(rank, deadline).machine == self.addresses.machine
            for rank in ranks
        )

    def close(self, reason: str = "") -> None:
        """Close all connections and listening sockets.

        Args:
            reason: String, sent to the peers.
        """
        if not self._owner.is_current:
            return
        with self._changed:
            if self._closed is not None:
                return
            self._closed = reason
            connections = list(self._connections)
            for sock in self._dialing:
                shut_down(sock)
            self._changed.notify_all()
        for connection in connections:
            connection.close(reason)
        self._acceptor.close()
        with self._changed:
            for sock in self._accepted.values():
                sock.close()
            self._accepted.clear()

    def send_close_reason(
        self, peer: int, lane: str, close_reason: CloseReason
    ) -> None:
        """Send a peer why connection `lane` is closed, over the control connection."""
        with self._changed:
            control = self._controls.get(peer)
        if control is not None:
            control.send_close_reason(lane, close_reason)

    def close_reason_of(self, peer: int, lane: str) -> CloseReason | None:
        """Return why a peer closed connection `lane`; `None` if unknown after 0.5 s."""

        def is_known() -> bool:
            """Return whether the reason is known, or can no longer arrive."""
            return (peer, lane) in self._close_reasons or peer not in self._controls

        with self._changed:
            self._changed.wait_for(is_known, _REASON_SECONDS)
            return self._close_reasons.get((peer, lane))

    def forget(self, connection: Connection) -> None:
        """Remove a connection, which this worker has closed, from the open ones."""
        with self._changed:
            self._connections.discard(connection)

    # `_accept`, `_set_accept_error` and `_read` run on the acceptor's thread, which
    # serves all peers, so they must not wait for one of them.

    def _accept(self, sock: socket.socket, authenticated: Authenticated) -> None:
        """Store an accepted connection until `connect` takes it.

        A control connection is read for close reasons instead.

        Args:
            sock: `socket.socket`, after the handshake.
            authenticated: `Authenticated`, whose claim has the peer's rank and its
                lane.
        """
        rank, lane = _CLAIM.unpack(authenticated.claim)
        if lane == _digest(CONTROL):
            self._add_control_connection(ControlConnection(sock, authenticated, rank))
            return
        with self._changed:
            self._accept_error = None
            previous = self._accepted.pop((rank, lane), None)
            self._accepted[rank, lane] = sock
            self._changed.notify_all()
        # A peer that dials a lane again has given up its earlier connection. If
        # `connect` has not taken that connection, it is closed here.
        if previous is not None:
            previous.close()

    def _set_accept_error(self, sentence: str) -> None:
        """Make waiting calls of `connect` fail, since no connection can be accepted.

        Args:
            sentence: String, the reason.
        """
        with self._changed:
            self._accept_error = sentence
            self._changed.notify_all()

    def _read(self, control: ControlConnection) -> bool:
        """Read a control connection: record close reasons, and the end of the peer.

        Returns:
            Bool, false if the peer has ended.
        """
        messages = control.receive_close_reasons()
        with self._changed:
            for lane, close_reason in messages or ():
                self._close_reasons[control.peer, lane] = close_reason
            if messages is None and self._controls.get(control.peer) is control:
                del self._controls[control.peer]
                self._ended_peers.add(control.peer)
            self._changed.notify_all()
        return messages is not None

    def _add_control_connection(self, control: ControlConnection) -> None:
        """Store the control connection to a peer, and have the acceptor read it."""
        with self._changed:
            self._controls[control.peer] = control
            self._changed.notify_all()
        self._acceptor.watch(control, functools.partial(self._read, control))

    def _shared_secret(self) -> str:
        """Return the job's secret; worker 0 creates it, others read it in the store."""
        key = f"{self._prefix}/secret"
        if self.rank == 0:
            secret = secrets.token_hex(32)
            self._store.put(key, secret)
            return secret
        return self._read_store(key, 0, time.monotonic() + self._timeout_seconds)

    def _addresses_of(self, peer: int, deadline: float) -> Addresses:
        """Return the addresses of a peer; wait until it has published them.

        Args:
            peer: Int, rank of the worker.
            deadline: Float, time by `time.monotonic`.
        """
        if peer == self.rank:
            return self.addresses
        if peer not in self._addresses:
            text = self._read_store(f"{self._prefix}/address/{peer}", peer, deadline)
            self._addresses[peer] = Addresses.from_json(text)
        return self._addresses[peer]

    def _read_store(self, key: str, peer: int, deadline: float) -> str:
        """Wait for a peer's text in the store, until the deadline or `close`.

        Raises `TransportError` at the deadline, and `TransportClosed` after `close`.

        Args:
            key: String, the key.
            peer: Int, rank of the worker that sets the key.
            deadline: Float, time by `time.monotonic`.
        """
        while True:
            if self._closed is not None:
                raise self._closed_error()
            left = deadline - time.monotonic()
            try:
                return self._store.get(key, max(0.01, min(left, _STORE_SECONDS)))
            except TimeoutError:
                if left > _STORE_SECONDS:
                    continue
            raise TransportError(
                f"Worker {peer} has not published its address within "
                f"{self._timeout_seconds:g} s. Start every worker, and check the end "
                "of its output."
            )

    def _dial_lane(self, peer: int, lane: str, deadline: float) -> socket.socket:
        """Dial a peer, and wait until it calls `connect`.

        The first call for a peer also dials a control connection.

        Args:
            peer: Int, rank of the worker.
            lane: String, name of the connection.
            deadline: Float, time by `time.monotonic`.

        Returns:
            `socket.socket`, connected and authenticated.
        """
        with self._control_locks.setdefault(peer, threading.Lock()):
            if peer not in self._controls:
                control = ControlConnection(*self._dial(peer, CONTROL, deadline), peer)
                self._add_control_connection(control)
        sock, _ = self._dial(peer, lane, deadline)
        try:
            with self._interruptible(sock):
                sock.settimeout(max(0.01, deadline - time.monotonic()))
                taken = sock.recv(1)
        except TimeoutError:
            sock.close()
            raise self._not_connected_error(peer) from None
        except OSError:
            taken = b""
        if not taken:
            sock.close()
            if self._closed is not None:
                raise self._closed_error()
            raise self._peer_ended_error(peer)
        return sock

    def _dial(
        self, peer: int, lane: str, deadline: float
    ) -> tuple[socket.socket, Authenticated]:
        """Dial repeatedly until the other worker answers, or the deadline.

        Args:
            peer: Int, rank of the worker.
            lane: String, name of the connection.
            deadline: Float, time by `time.monotonic`.

        Returns:
            Tuple of a connected `socket.socket` and the result of the handshake.

        Raises:
            PeerLost: If the worker has ended.
            TransportError: At the deadline, or if another job's process answers.
        """
        addresses = self._addresses_of(peer, deadline)
        claim = _CLAIM.pack(self.rank, _digest(lane))
        while True:
            if peer in self._ended_peers:
                raise self._peer_ended_error(peer)
            try:
                sock, target = self._new_socket(addresses)
            except OSError as error:
                raise TransportError(lack_of_files(error) or str(error)) from error
            left = min(deadline - time.monotonic(), _ATTEMPT_SECONDS)
            try:
                with self._interruptible(sock):
                    steps = dial_steps(self._secret, _service(peer), claim)
                    keys = authenticate(sock, steps, left, target)
                tune(sock)
                return sock, keys
            except UnauthenticatedPeer:
                raise TransportError(
                    f"The process that listens at {addresses}, the address of worker "
                    f"{peer}, does not have this job's secret. Another job may have "
                    "taken the port: restart all workers."
                ) from None
            except ConnectionFailed as error:
                if self._closed is not None:
                    raise self._closed_error() from None
                if deadline - time.monotonic() <= _RETRY_SECONDS:
                    raise self._unreachable_error(peer, addresses, error) from None
            time.sleep(_RETRY_SECONDS)

    def _new_socket(
        self, peer_addresses: Addresses
    ) -> tuple[socket.socket, tuple | str]:
        """Create a socket to dial a peer; return it and the address to connect to.

        Peers on this host are dialed over a Unix socket, if the mesh uses them, and all
        others over TCP.
        """
        if self._use_unix and peer_addresses.machine == self.addresses.machine:
            return close_in_forks(
                socket.socket(socket.AF_UNIX)
            ), f"\0{peer_addresses.unix_name}"
        sock = close_in_forks(socket.socket(family_of(peer_addresses.ip)))
        ip = self.addresses.ip
        # The socket is bound to the address that this worker listens on, so that data
        # uses the interface that the user has chosen. An address of another family, or
        # a loopback address at only one end, could not be connected.
        if family_of(ip) == sock.family and is_loopback(ip) == is_loopback(
            peer_addresses.ip
        ):
            sock.bind(socket_address(ip, 0))
        return sock, socket_address(peer_addresses.ip, peer_addresses.port)

    def _wait_for_dial(self, peer: int, lane: str, deadline: float) -> socket.socket:
        """Wait until a peer of higher rank has dialed, and confirm the connection.

        Errors are those of `connect`.

        Args:
            peer: Int, rank of the peer.
            lane: String, name of the connection.
            deadline: Float, time by `time.monotonic`.

        Returns:
            `socket.socket`, connected and authenticated.
        """
        key = peer, _digest(lane)
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    key in self._accepted
                    or peer in self._ended_peers
                    or self._closed is not None
                    or self._accept_error is not None
                ),
                max(0.0, deadline - time.monotonic()),
            )
            sock = self._accepted.pop(key, None)
        if sock is None:
            if self._closed is not None:
                raise self._closed_error()
            if peer in self._ended_peers:
                raise self._peer_ended_error(peer)
            if self._accept_error is not None:
                raise TransportError(self._accept_error)
            raise self._not_connected_error(peer)
        tune(sock)
        sock.settimeout(None)
        # An `OSError` means that the peer has ended. It is ignored, since the first use
        # of the connection raises an error that gives the reason.
        with contextlib.suppress(OSError):
            sock.send(b"\1", socket.MSG_NOSIGNAL)
        return sock

    @contextlib.contextmanager
    def _interruptible(self, sock: socket.socket) -> Iterator[None]:
        """Let `close` interrupt a thread that waits on a socket in the block.

        Raises `TransportClosed`, and closes the socket, if the mesh is closed already.
        """
        with self._changed:
            if self._closed is not None:
                sock.close()
                raise self._closed_error()
            self._dialing.add(sock)
        try:
            yield
        finally:
            with self._changed:
                self._dialing.discard(sock)

    def _closed_error(self) -> TransportClosed:
        """Return the error that this worker has closed the mesh itself."""
        return TransportClosed(self._closed or "")

    def _peer_ended_error(self, peer: int) -> PeerLost:
        """Return the error of a peer that has ended while connecting."""
        return PeerLost(peer, "it ended while the workers connected")

    def _not_connected_error(self, peer: int) -> TransportError:
        """Return the error of a peer that has not connected in time."""
        return TransportError(
            f"Worker {peer} has not connected to worker {self.rank} "
            f"({self.addresses}) within {self._timeout_seconds:g} s. It has ended, "
            "runs other collectives, or a firewall closes the port."
        )

    def _unreachable_error(
        self, peer: int, addresses: Addresses, error: ConnectionFailed
    ) -> TransportError:
        """Return the error of a peer that could not be dialed in time.

        Args:
            peer: Int, rank of the peer.
            addresses: `Addresses` that it has published.
            error: `ConnectionFailed` of the last attempt.
        """
        if is_loopback(addresses.ip) and addresses.machine != self.addresses.machine:
            return TransportError(
                f"Worker {peer} listens only at {addresses}, which no other host can "
                f"reach: its host {addresses.host!r} resolves to that address there. "
                "Correct TF_CONFIG or the name's entry, or choose an address with "
                '`CommunicationOptions(interface="...")`.'
            )
        return TransportError(
            f"Worker {self.rank} ({self.addresses.ip}) cannot reach worker {peer} at "
            f"{addresses} within {self._timeout_seconds:g} s: {error}. Workers listen "
            "on ports that the system chooses: open all TCP ports between them in the "
            "firewall, or choose another interface with "
            '`CommunicationOptions(interface="...")`.'
        )


def _listen(family: int, address: tuple | str) -> socket.socket:
    """Create a listening socket.

    Args:
        family: Int, such as `socket.AF_INET`.
        address: Tuple or string, the argument of `socket.bind`.
    """
    sock = close_in_forks(socket.socket(family, socket.SOCK_STREAM))
    sock.bind(address)
    sock.listen(_BACKLOG)
    return sock


def _service(rank: int) -> str:
    """Return the service name of a worker in handshakes, such as `"worker 1"`."""
    return f"worker {rank}"


def _digest(lane: str) -> bytes:
    """Return the SHA-256 digest of a lane's name, 32 bytes."""
    return hashlib.sha256(lane.encode()).digest()


@atexit.register
def _close_all() -> None:
    """Close all meshes at the end of the script."""
    for mesh in list(_meshes):
        mesh.close()
