"""This process as a member of its cluster: its port and its store."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence

from tfdp.communication.cluster.ports import (
    ProbeResult,
    describe_workers,
    listen,
    probe_port,
)
from tfdp.communication.cluster.spec import Cluster
from tfdp.communication.connection.acceptor import Acceptor
from tfdp.communication.connection.handshake import (
    Authenticated,
    ConnectionFailed,
    UnauthenticatedPeer,
    WrongService,
)
from tfdp.communication.connection.messages import MessageConnection
from tfdp.communication.connection.secret import VARIABLE
from tfdp.communication.store.admission import (
    APPLIES,
    ASKS,
    CLAIM,
    PROBE_SECONDS,
    SERVICE,
    Admission,
    JobState,
    ask_job,
    new_socket,
    unix_socket_name,
)
from tfdp.communication.store.client import HostLost, Store
from tfdp.communication.store.contents import Contents
from tfdp.communication.store.hosts import ATTEMPT_SECONDS, HostConnection
from tfdp.communication.store.server import Server
from tfdp.ground import user_code
from tfdp.ground.forks import Owner

_logger = logging.getLogger("tfdp.store")

# All workers must know the host of the store before they can exchange anything, so it
# is worker 0 at first.
HOST = 0
_WARN_AFTER_SECONDS = 10.0
# A failed attempt to connect is repeated after `_RETRY_SECONDS`. A worker that waits
# for others asks the host every `_WAIT_SECONDS` which are missing, to warn of them.
_RETRY_SECONDS, _WAIT_SECONDS = 0.1, 1.0
# In a later cluster of a job, a missing worker is lost if no process has listened on
# its port for this many seconds, since ports are closed for a moment after the previous
# cluster.
_LOST_SECONDS = 5.0
# An application to join is valid for this many seconds. A process that still applies
# repeats it sooner, so the sender of an older one has ended or given up.
_APPLICATION_SECONDS = 3.0
_BACKLOG = 512


class JobAlreadyRunning(Exception):
    """Error: the missing workers are in a later cluster of the job, which runs."""


class Membership:
    """This process in its cluster: it holds its port, and hosts or uses the store.

    It listens on its port in the cluster, which shows the other workers that it runs.
    Worker 0 hosts the job's key-value store; if worker 0 ends, another worker does.
    Workers of one machine connect by a Unix socket, on which the kernel knows the user
    of the process at the other end.

    Args:
        cluster: `Cluster`; this process is one of its workers.
        origin: `Cluster` of all workers that the job may have, or `None` for `cluster`,
            the default.
        generation: Int, number of previous clusters of the job. Defaults to 0.

    Raises:
        ValueError: If the port is taken, or the file of the job's secret cannot be
            used.

    Attributes:
        origin: `Cluster` of all workers that the job may have.
        generation: Int, number of previous clusters of the job.
        facts: Dict of strings, settings that a process that joins later must share.
        absent: List of ints, ranks of the workers that did not join.
        is_replaced: Bool, whether the workers leave for the next cluster of the job:
            then no worker needs to announce its end.
        leaving: List of callables, called before the connections end.
        store: `Store`, after `join`.
        server: `Server` on the worker that hosts the store, `None` on the others.
    """

    store: Store

    def __init__(
        self, cluster: Cluster, origin: Cluster | None = None, generation: int = 0
    ) -> None:
        self.cluster, self.origin = cluster, origin or cluster
        self.generation = generation
        self.facts: dict[str, str] = {}
        self.absent: list[int] = []
        self._may_run_already, self._asked_at = False, 0.0
        self.is_replaced = False
        self._is_running = False
        # Applications to join are valid for a few seconds. So this has the time of the
        # last application of each process, keyed by the address of the process.
        self._applications: dict[str, float] = {}
        # A missing worker is lost only some time after its port has closed. So this has
        # the time since which no process has listened on the port, keyed by rank.
        self._closed_since: dict[int, float] = {}
        self.server: Server | None = None
        if cluster.rank == HOST:
            self.server = Server(cluster.num_workers, HOST)
        self.leaving: list[Callable[[], None]] = []
        self._owner, self._has_left = Owner(), False
        admission = Admission.of(self.origin)
        self._admission, self._is_local = admission, admission.is_local
        if not admission.is_safe and cluster.rank == HOST and not generation:
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
        # Event that is set once `_acceptor` is assigned. The acceptor's thread waits
        # for the event, since it may accept a connection earlier.
        self._has_acceptor = threading.Event()
        self._acceptor = Acceptor(
            admission.secret,
            SERVICE,
            sockets,
            self._accept,
            lacks_files=_logger.warning,
            claim_bytes=CLAIM.size,
            failed=self._fail,
        )
        self._has_acceptor.set()

    def join(
        self, timeout_seconds: float | None, *, may_run_already: bool = False
    ) -> None:
        """Connect to the store, and wait until all workers have connected.

        Args:
            timeout_seconds: Float or `None`, the longest wait. `None` means no limit,
                with a warning that names the missing workers.
            may_run_already: Bool, whether the missing workers may be in a later cluster
                of the job. Defaults to `False`.

        Raises:
            JobAlreadyRunning: If the missing workers are in a later cluster.
            TimeoutError: If a worker does not join in time.
            ValueError: If another program listens on the port of the store's host, or
                workers run different versions of tfdp.
        """
        begin, host = time.monotonic(), HOST
        self._may_run_already = may_run_already
        while True:
            try:
                self.store = Store(self.cluster.rank, host, self)
                self._wait_for_all(begin, timeout_seconds)
                self._is_running = True
                return
            except (ConnectionFailed, HostLost) as error:
                self._report_missing([host], str(error), begin, timeout_seconds)
                lost = self._find_lost(range(self.cluster.rank))
                if host in lost:
                    host = self._choose_new_host(lost)
            time.sleep(_RETRY_SECONDS)

    def restart_store(self, lost: Sequence[int]) -> None:
        """Replace a lost store by an empty one on the first worker that is left.

        Args:
            lost: Sequence of ints, ranks of workers that are known to be lost.

        Raises:
            ConnectionFailed: If that worker does not host the store yet.
        """
        self.store.close("The store of the job is lost.")
        ended = self.ended(range(self.cluster.rank))
        host = self._choose_new_host(sorted({*lost, *ended}))
        self.store = Store(self.cluster.rank, host, self)

    def applicants(self, lost: Sequence[int] = ()) -> list[str]:
        """Return the addresses of the processes that apply to join the job.

        Args:
            lost: Sequence of ints, ranks of lost workers, whose addresses an applicant
                may have; processes with the address of any other worker of the cluster
                are left out. Defaults to none.
        """
        taken = set(self.cluster.workers) - {self.cluster.workers[r] for r in lost}
        since = time.monotonic() - _APPLICATION_SECONDS
        return sorted(
            address
            for address, then in self._applications.copy().items()
            if then > since and address not in taken
        )

    def ended(self, ranks: Sequence[int]) -> list[int]:
        """Return the workers whose ports refuse connections: their processes ended.

        The ports are probed one after another, each for at most a second.

        Args:
            ranks: Sequence of ints, the workers.
        """
        addresses = self.cluster.workers
        return [
            rank
            for rank in ranks
            if probe_port(addresses[rank], PROBE_SECONDS) is ProbeResult.REFUSED
        ]

    def leave(self) -> None:
        """Leave the cluster: end all connections, after all answers were received."""
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
            timeout_seconds: Float or `None`, as in `join`.

        Raises:
            TimeoutError: If a worker does not join in time. All waiting workers raise
                it together: later ones would also name the first worker that ended.
            ValueError: If workers run different versions of tfdp.
            HostLost: If the host ends during the wait; it may start again.
        """
        # Workers may be lost during this wait in a later cluster of the job, so the
        # all-gather then waits only for workers that are not lost.
        is_of_living = self.generation > 0
        gathering = self.store.gather("join", own_version(), is_of_living=is_of_living)
        while (versions := gathering.texts(_WAIT_SECONDS)) is None:
            if not (missing := gathering.missing()):
                continue
            if lost := self._find_lost(missing):
                self.store.expel(lost)
            try:
                self._report_missing(missing, "", begin, timeout_seconds)
            except JobAlreadyRunning:
                # The job that runs may be this worker's own, whose last missing worker
                # has just joined. Then all workers' texts have arrived, and the wait is
                # over.
                if (versions := gathering.texts(_WAIT_SECONDS)) is None:
                    raise
                break
            except TimeoutError as error:
                if gathering.withdraw(str(error)):
                    raise
        self.absent = [rank for rank, v in enumerate(versions) if v is None]
        found = {rank: version for rank, version in enumerate(versions) if version}
        first = min(found)
        for rank, version in found.items():
            if version != found[first]:
                raise ValueError(
                    f"Workers have different tfdp version: worker {first} has "
                    f"{found[first]}, worker {rank} has {version}. Use the same on all."
                )

    def _find_lost(self, missing: Sequence[int]) -> list[int]:
        """Return the missing workers of a later cluster that are lost.

        A worker is lost if no process has listened on its port for five seconds. The
        result is empty in the first cluster, whose processes may not have started yet.

        Args:
            missing: Sequence of ints, the workers that have not joined.
        """
        if not self.generation:
            return []
        now, since = time.monotonic(), self._closed_since
        ended = self.ended(missing)
        for rank in missing:
            if rank in ended:
                since.setdefault(rank, now)
            else:
                since.pop(rank, None)
        return [rank for rank in ended if now - since[rank] > _LOST_SECONDS]

    def _choose_new_host(self, lost: Sequence[int]) -> int:
        """Choose the first worker that is left as the store's host.

        If it is this worker, it begins to host an empty store.

        Args:
            lost: Sequence of ints, ranks of the workers that are lost.

        Returns:
            Int, the rank of the host.
        """
        own = self.cluster.rank
        host = min(set(range(own + 1)) - set(lost), default=own)
        if host == own and self.server is None:
            contents = Contents()
            contents.apply({"lost": list(lost)})
            self.host(contents)
        return host

    def _report_missing(
        self, ranks: list[int], reason: str, begin: float, timeout_seconds: float | None
    ) -> None:
        """Warn of missing workers after 10 seconds; raise if the wait for them is over.

        Args:
            ranks: List of ints, the missing workers.
            reason: String, why the last connection has failed, or `""` if none has.
            begin: Float, time of the beginning of `join`.
            timeout_seconds: Float or `None`, see `join`.

        Raises:
            JobAlreadyRunning: If a worker answers that the job runs. This worker asks
                at most once a second, and only with `may_run_already`.
            TimeoutError: If `timeout_seconds` have passed since `begin`.
        """
        if self._may_run_already and self._asked_at + _WAIT_SECONDS < time.monotonic():
            self._asked_at = time.monotonic()
            if ask_job(self.cluster) is not None:
                raise JobAlreadyRunning
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

    # `Store` cannot import this class, which imports `Store`. So it calls `connect`,
    # `watch` and `host` through the interface `Hosts`.

    def connect(self, rank: int, seconds: float = ATTEMPT_SECONDS) -> HostConnection:
        """Connect once to a worker that hosts the store, or soon will.

        Args:
            rank: Int, rank of the worker.
            seconds: Float, the longest wait for each of its addresses.

        Raises:
            ConnectionFailed: If the worker was not reached, or refuses this process
                now.
            ValueError: If the process that listens there is not of this job.
        """
        own = self.cluster.workers[self.cluster.rank].encode()
        claim = CLAIM.pack(self.cluster.rank, self.generation, own)
        try:
            return self._admission.dial(
                self.cluster.workers[rank], claim, seconds, HostConnection
            )
        except UnauthenticatedPeer as error:
            raise ValueError(self._wrong_peer(rank, error)) from None

    def watch(self, connection: HostConnection, read: Callable[[], bool]) -> None:
        """Call `read` on the acceptor's thread whenever a connection has data.

        Implements `Hosts.watch`.

        Args:
            connection: `HostConnection` of this process.
            read: Callable that reads from it, and returns false at its end.
        """
        self._acceptor.watch(connection, read)

    def host(self, contents: Contents) -> None:
        """Begin to host the store in this process, in place of the former host.

        Args:
            contents: `Contents` of the store.
        """
        self.server = Server(self.cluster.num_workers, self.cluster.rank, contents)

    def _fail(self) -> None:
        """Make all calls of the store fail, after the acceptor's thread has failed."""
        if hasattr(self, "store"):
            self.store.fail(
                "The thread of this worker's connections has failed: the error is in "
                "its output."
            )

    def _accept(self, sock: socket.socket, authenticated: Authenticated) -> None:
        """Handle an authenticated connection; called on the acceptor's thread.

        A worker of this cluster is added to the store, if this process hosts it. A
        process that asks for the job's state, or applies to join, receives that state.
        Any other connection is closed.
        """
        # Without a secret, a worker of this machine is admitted if its process belongs
        # to the same user, as the acceptor has checked for its Unix socket. A TCP
        # connection shows no user, so it is closed.
        is_proved = not self._is_local or sock.family == socket.AF_UNIX
        rank, generation, text = CLAIM.unpack(authenticated.claim)
        if not is_proved:
            sock.close()
            return
        self._has_acceptor.wait()
        if generation in (ASKS, APPLIES):
            address = text.rstrip(b"\0").decode(errors="replace")
            is_known = address in self.origin.workers or self.origin.may_grow
            if generation == APPLIES and is_known:
                self._applications[address] = time.monotonic()
            self._describe_job(MessageConnection(sock, authenticated))
            return
        if self.server is None or generation != self.generation:
            sock.close()
            return
        self.server.add(self._acceptor, sock, authenticated, rank)

    def _describe_job(self, connection: MessageConnection) -> None:
        """Send the state of this job to a process that asks; close the connection."""
        state = JobState(
            self._is_running, self.generation, self.cluster.workers, self.facts
        )
        connection.send(dataclasses.asdict(state))
        connection.close()

    def _listen_locally(self, opened: list[socket.socket]) -> socket.socket:
        """Listen on this worker's abstract Unix socket.

        Args:
            opened: List of listening sockets, closed if this fails.

        Raises:
            ValueError: If the socket cannot be opened: its name may be taken.
        """
        sock = new_socket(socket.AF_UNIX)
        name = unix_socket_name(self.cluster.workers[self.cluster.rank])
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

    def _wrong_peer(self, rank: int, error: UnauthenticatedPeer) -> str:
        """Format the error that another program listens on a worker's port."""
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
