"""This process as a member of its cluster: its port and its store."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import logging
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence

from tfdp.communication.cluster.address import is_local_name, split_address
from tfdp.communication.cluster.own_addresses import addresses_of, is_own
from tfdp.communication.cluster.ports import describe_workers, listen
from tfdp.communication.cluster.spec import Cluster
from tfdp.communication.connection.acceptor import Acceptor, is_own_user
from tfdp.communication.connection.handshake import (
    Authenticated,
    ConnectionFailed,
    UnauthenticatedPeer,
    WrongService,
    authenticate,
    dial_steps,
)
from tfdp.communication.connection.secret import VARIABLE, derive_secret, read_secret
from tfdp.communication.store.client import HostLost, Store
from tfdp.communication.store.contents import Contents
from tfdp.communication.store.hosts import ATTEMPT_SECONDS, Connection
from tfdp.communication.store.server import Server
from tfdp.ground import user_code
from tfdp.ground.forks import Owner, close_in_forks

_logger = logging.getLogger("tfdp.store")

# Rank of the worker that hosts the store at first.
HOST = 0
_SERVICE = "store"
_CLAIM = struct.Struct("!I")  # the rank of a worker
_WARN_AFTER_SECONDS = 10.0
# Pause between two attempts to connect, and interval at which a worker that waits for
# the others asks which are missing.
_RETRY_SECONDS, _WAIT_SECONDS = 0.1, 1.0
_BACKLOG = 512


@dataclasses.dataclass(frozen=True)
class Admission:
    """How a process proves to the store's host that it is a worker of the job.

    Args:
        is_local: Bool, whether all workers are on this machine and have no secret, so
            that they connect by a Unix socket, and the user at its other end counts.
        secret: String, what both ends prove: derived from the job's secret, if any, and
            the addresses of the workers.
        is_safe: Bool, whether no other user can join.
    """

    is_local: bool
    secret: str = dataclasses.field(repr=False)
    is_safe: bool

    @classmethod
    def of(cls, cluster: Cluster) -> Admission:
        """Return how the workers of a cluster are admitted.

        Args:
            cluster: `Cluster`.

        Raises:
            ValueError: If the file of the job's secret is wrong.
        """
        secret = cluster.secret or read_secret()
        is_local = (
            secret is None
            and sys.platform == "linux"
            and _is_one_machine(cluster.hosts)
        )
        # With the addresses in it, workers of different clusters do not connect.
        own = derive_secret(secret or "", " ".join(cluster.workers))
        return cls(is_local, own, is_local or secret is not None)


class Membership:
    """This process as a member of its cluster.

    It listens on the port that the cluster gives it, by which the other workers see
    whether it lives. Worker 0 serves the store of the job there; if it ends, another
    worker does. Workers of one machine connect by a Unix socket: the kernel knows the
    user of the process at its other end.

    Args:
        cluster: `Cluster` of several workers; this process is one of them.

    Raises:
        ValueError: If the port is taken, or the file of the job's secret is wrong.

    Attributes:
        leaving: List of callables, called before the connections end.
        store: `Store`, after `join`.
        server: `Server` on the worker that hosts the store, `None` on the others.
    """

    store: Store

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.server: Server | None = None
        if cluster.rank == HOST:
            self.server = Server(cluster.num_workers, HOST)
        self.leaving: list[Callable[[], None]] = []
        self._owner, self._has_left = Owner(), False
        admission = Admission.of(cluster)
        self._is_local, self._secret = admission.is_local, admission.secret
        if not admission.is_safe and cluster.rank == HOST:
            user_code.warn(
                "The workers of this job have no secret: any process that reaches "
                f"{cluster.workers[HOST]} and knows TF_CONFIG could join it. Set "
                f"{VARIABLE} to the name of a file with the same secret on all of "
                "them, or let only the workers reach this port.",
                once_for=self,
                topic="no secret",
            )
        sockets = listen(cluster.workers[cluster.rank])
        if self._is_local:
            sockets.append(self._listen_locally(sockets))
        # Set once `_acceptor` is: its thread may accept a connection before.
        self._has_acceptor = threading.Event()
        self._acceptor = Acceptor(
            self._secret,
            _SERVICE,
            sockets,
            self._accept,
            lacks_files=_logger.warning,
            claim_bytes=_CLAIM.size,
            failed=self._fail,
        )
        self._has_acceptor.set()

    def join(self, timeout_seconds: float | None) -> None:
        """Connect to the store, and wait until all workers have.

        Args:
            timeout_seconds: Float or `None`, the longest wait. `None` means no limit,
                with a warning that names the missing workers.

        Raises:
            TimeoutError: If a worker does not come in time.
            ValueError: If another program listens on the port of the store's host, or
                workers run different versions of tfdp.
        """
        begin = time.monotonic()
        while True:
            try:
                self.store = Store(self.cluster.rank, HOST, self)
                self._wait_for_all(begin, timeout_seconds)
                return
            except (ConnectionFailed, HostLost) as error:
                self._report_missing([HOST], str(error), begin, timeout_seconds)
            time.sleep(_RETRY_SECONDS)

    def leave(self) -> None:
        """End all connections, after the other workers have received the answers."""
        if not self._owner.is_current or self._has_left:
            return
        self._has_left = True
        for function in self.leaving:
            function()
        if has_joined := hasattr(self, "store"):
            self.store.is_ending = True
        if self.server is not None:
            self.server.drain()
        if has_joined:
            self.store.close(
                "This process has left the cluster of this strategy, for that of a "
                "later strategy."
            )
        self._acceptor.close()

    def _wait_for_all(self, begin: float, timeout_seconds: float | None) -> None:
        """Wait until all workers have connected to the store.

        Args:
            begin: Float, time of the beginning of `join`.
            timeout_seconds: Float or `None`, see `join`.

        Raises:
            TimeoutError: If a worker does not come in time. All workers that wait raise
                it together: the next one would name the first to end, too.
            ValueError: If workers run different versions of tfdp.
            HostLost: If the host ends meanwhile; it may start again.
        """
        gathering = self.store.gather("join", own_version())
        while (versions := gathering.texts(_WAIT_SECONDS)) is None:
            if not (missing := gathering.missing()):
                continue
            try:
                self._report_missing(missing, "", begin, timeout_seconds)
            except TimeoutError as error:
                if gathering.withdraw(str(error)):
                    raise
        for rank, version in enumerate(versions):
            if version != versions[0]:
                raise ValueError(
                    f"Workers have different tfdp version: worker 0 has {versions[0]}, "
                    f"worker {rank} has {version}. Use the same on all."
                )

    def _report_missing(
        self, ranks: list[int], reason: str, begin: float, timeout_seconds: float | None
    ) -> None:
        """Warn of workers that are missing; raise once the time is over.

        Args:
            ranks: List of ints, the workers.
            reason: String, why the last connection has failed, or `""`.
            begin: Float, time of the beginning of `join`.
            timeout_seconds: Float or `None`, see `join`.
        """
        names = describe_workers(self.cluster, ranks)
        because = f" ({reason})" if reason else ""
        waited = time.monotonic() - begin
        if timeout_seconds is not None and waited >= timeout_seconds:
            raise TimeoutError(
                f"Waited {timeout_seconds:.0f} s for {names}, which did not start"
                f"{because}. Start every worker of TF_CONFIG, and check that they "
                "reach each other's ports."
            )
        if waited >= _WARN_AFTER_SECONDS:
            user_code.warn(
                f"Waiting for {names} to start{because}. Start every worker of "
                "TF_CONFIG.",
                once_for=self,
                topic="missing workers",
            )

    # Interface `Hosts`, which the store uses.

    def connect(self, rank: int, seconds: float = ATTEMPT_SECONDS) -> Connection:
        """Connect once to a worker that hosts the store, or soon will.

        Args:
            rank: Int, rank of the worker.
            seconds: Float, the longest wait for each of its addresses.

        Raises:
            ConnectionFailed: If it was not reached, or refuses this process for now.
            ValueError: If the process that listens there is not of this job.
        """
        failures: list[ConnectionFailed] = []
        for family, address in self._addresses_of(rank):
            sock = _new_socket(family)
            steps = dial_steps(self._secret, _SERVICE, _CLAIM.pack(self.cluster.rank))
            try:
                keys = authenticate(sock, steps, seconds, address)
                if not is_own_user(sock):
                    raise UnauthenticatedPeer("it belongs to another user")
                return Connection(sock, keys)
            except UnauthenticatedPeer as error:
                sock.close()
                raise ValueError(self._wrong_peer(rank, error)) from None
            except ConnectionFailed as error:
                sock.close()
                failures.append(error)
        # At an address that refuses, no process listens: another one may tell more.
        failures.sort(key=lambda e: isinstance(e.__cause__, ConnectionRefusedError))
        raise failures[0] if failures else ConnectionFailed("its name has no address")

    def watch(self, connection: Connection, read: Callable[[], bool]) -> None:
        """Call `read` on the acceptor's thread whenever a connection has data."""
        self._acceptor.watch(connection, read)

    def host(self, contents: Contents) -> None:
        """Host the store in this process, after the end of its host.

        Args:
            contents: `Contents` of the store.
        """
        self.server = Server(self.cluster.num_workers, self.cluster.rank, contents)

    def _addresses_of(self, rank: int) -> list[tuple[int, tuple | str]]:
        """Return the families and addresses at which a worker may answer."""
        if self._is_local:
            return [(socket.AF_UNIX, self._local_name(rank))]
        host, port = split_address(self.cluster.workers[rank])
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            reason = f"its host name does not resolve here: {error}"
            raise ConnectionFailed(reason) from None
        return [(family, address) for family, _, _, _, address in found]

    def _fail(self) -> None:
        """End all calls of this process if the thread of its connections has failed."""
        if hasattr(self, "store"):
            self.store.fail(
                "The thread of this worker's connections has failed: the error is in "
                "its output."
            )

    def _accept(self, sock: socket.socket, authenticated: Authenticated) -> None:
        """Take an authenticated connection; called on the acceptor's thread."""
        # What admits a worker of this machine is its user, which TCP does not tell.
        is_proved = not self._is_local or sock.family == socket.AF_UNIX
        if self.server is None or not is_proved:
            sock.close()
            return
        (rank,) = _CLAIM.unpack(authenticated.claim)
        self._has_acceptor.wait()
        self.server.add(self._acceptor, sock, authenticated, rank)

    def _listen_locally(self, opened: list[socket.socket]) -> socket.socket:
        """Listen on this worker's Unix socket; close the opened ones if that fails."""
        sock = _new_socket(socket.AF_UNIX)
        name = self._local_name(self.cluster.rank)
        try:
            sock.bind(name)
            sock.listen(_BACKLOG)
        except OSError as error:
            for each in (sock, *opened):
                each.close()
            raise ValueError(
                f"The Unix socket @{name[1:]}, on which this worker has to listen, "
                f"cannot be opened: {error.strerror}. Stop the process that holds it, "
                "or give this worker another port in TF_CONFIG."
            ) from error
        return sock

    def _local_name(self, rank: int) -> str:
        """Return the name of a worker's abstract Unix socket, which leaves no file."""
        _, port = split_address(self.cluster.workers[rank])
        return f"\0tfdp-store-{port}"

    def _wrong_peer(self, rank: int, error: UnauthenticatedPeer) -> str:
        """Return the message about a process on a worker's port that is not it."""
        what = str(error)
        if isinstance(error, WrongService) and error.version is not None:
            what = "it runs another version of tfdp"
        return (
            f"Another program listens on the port of "
            f"{describe_workers(self.cluster, [rank])}: {what}. Check which process "
            f"has it, whether the cluster of TF_CONFIG and {VARIABLE} are the same on "
            "all workers, and whether another job uses the port; then restart all."
        )


def own_version() -> str:
    """Return the installed version of tfdp, or `"not installed"`."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("tfdp")
    return "not installed"


def _is_one_machine(hosts: Sequence[str]) -> bool:
    """Return whether hosts are names of this machine that no other one has."""
    if all(map(is_local_name, hosts)):
        return True
    return len(set(hosts)) == 1 and any(map(is_own, addresses_of(hosts[0])))


def _new_socket(family: int) -> socket.socket:
    """Create a socket that forked processes do not keep open."""
    return close_in_forks(socket.socket(family, socket.SOCK_STREAM))
