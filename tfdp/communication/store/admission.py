"""Admission of a process to a job: what both ends prove, and a job's state.

The claim of a process that connects is its rank, and its generation of the cluster or
one of two other numbers: it asks for the state of a job that may run already, or
applies to join it. Its address follows, since the workers of a job that may grow do not
know it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tfdp.communication.cluster.address import is_local_name, split_address
from tfdp.communication.cluster.own_addresses import addresses_of, is_own
from tfdp.communication.cluster.spec import Cluster
from tfdp.communication.connection.acceptor import is_own_user
from tfdp.communication.connection.handshake import (
    Authenticated,
    ConnectionFailed,
    UnauthenticatedPeer,
    authenticate,
    dial_steps,
)
from tfdp.communication.connection.messages import MessageConnection
from tfdp.communication.connection.secret import derive_secret, read_secret
from tfdp.ground.forks import close_in_forks

SERVICE = "store"
# A claim has a fixed length: rank, generation and address of a process. The address is
# at most 259 bytes: a host name of at most 253 characters, a colon and a port.
CLAIM = struct.Struct("!II260s")
ASKS, APPLIES = 0xFFFFFFFE, 0xFFFFFFFF
# Longest wait for one worker, in an attempt to reach it or in a probe of its port: a
# host that is off must not delay a process that asks many workers.
PROBE_SECONDS = 1.0
# A process asks at most this many workers at once whether the job is running, which
# limits its threads, and the load on the workers of a large job.
_MAX_ASKED = 32
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Admission:
    """How a process proves to the store's host that it is a worker of the job.

    Args:
        is_local: Bool, whether all workers are on this machine and have no secret. They
            then connect by a Unix socket, whose other end must be of the same user.
        secret: String that both ends must have, derived from the job's secret, if any,
            and the addresses of the workers.
        is_safe: Bool, whether processes of other users cannot join.
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
            ValueError: If the file of the job's secret cannot be used.
        """
        secret = cluster.secret or read_secret()
        is_local = (
            secret is None
            and sys.platform == "linux"
            and _is_one_machine(cluster.hosts)
        )
        # The addresses are part of the secret, so that workers of different clusters do
        # not connect.
        addresses = "" if cluster.may_grow else " ".join(cluster.workers)
        own = derive_secret(secret or "", addresses)
        return cls(is_local, own, is_local or secret is not None)

    def dial(
        self,
        worker: str,
        claim: bytes,
        seconds: float,
        connection: Callable[[socket.socket, Authenticated], _T],
    ) -> _T:
        """Connect once to a worker of the job; return what `connection` creates.

        Args:
            worker: String, its `"host:port"`.
            claim: Bytes, packed by `CLAIM`: rank, generation and address of this
                process.
            seconds: Float, the longest wait for each address of the worker.
            connection: Callable, from the socket and its `Authenticated` to the result.

        Raises:
            ConnectionFailed: If the worker was not reached, or refuses this process
                now.
            UnauthenticatedPeer: If the process that listens there is not of this job.
        """
        failures: list[ConnectionFailed] = []
        for family, address in self._addresses_of(worker):
            sock = new_socket(family)
            steps = dial_steps(self.secret, SERVICE, claim)
            try:
                keys = authenticate(sock, steps, seconds, address)
            except ConnectionFailed as error:
                failures.append(error)
                continue
            try:
                if not is_own_user(sock):
                    raise UnauthenticatedPeer("it belongs to another user")
                # If the worker refuses this process, no other address is tried: all
                # belong to the same worker, and one that never answers would take all
                # the time.
                return connection(sock, keys)
            except (UnauthenticatedPeer, ConnectionFailed):
                sock.close()
                raise
        # A refused connection says no more than that no process listens at that
        # address. So its error is raised only if no address has failed for another
        # reason.
        failures.sort(key=lambda e: isinstance(e.__cause__, ConnectionRefusedError))
        raise failures[0] if failures else ConnectionFailed("its name has no address")

    def _addresses_of(self, worker: str) -> list[tuple[int, tuple | str]]:
        """Return the socket family and the address of each way to reach a worker.

        Args:
            worker: String, its `"host:port"`.

        Raises:
            ConnectionFailed: If its host name does not resolve here.
        """
        if self.is_local:
            return [(socket.AF_UNIX, unix_socket_name(worker))]
        host, port = split_address(worker)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            reason = f"its host name does not resolve here: {error}"
            raise ConnectionFailed(reason) from None
        return [(family, address) for family, _, _, _, address in found]


@dataclasses.dataclass(frozen=True)
class JobState:
    """State of a job, as one of its workers sends it to a process that asks.

    Args:
        is_running: Bool, whether all workers of the present cluster have joined.
        generation: Int, number of previous clusters of the job.
        workers: Sequence of strings, `"host:port"` of each worker of the cluster.
        facts: Dict of strings, settings that a process that joins must share.
    """

    is_running: bool
    generation: int
    workers: Sequence[str]
    facts: dict[str, str]


def ask_job(cluster: Cluster, *, applies: bool = False) -> JobState | None:
    """Ask the workers of a cluster whether its job is running already.

    Args:
        cluster: `Cluster` of this process, which is not a member of the job.
        applies: Bool, whether this process applies to join. Defaults to `False`.

    Returns:
        `JobState` of the latest generation, or `None` if the job has not started. Of
        more than 32 workers only some are asked, so a running job may be missed once.
    """
    own = cluster.workers[cluster.rank]
    others = [worker for worker in cluster.workers if worker != own]
    return ask_workers(cluster, others, applies=applies)


def ask_workers(
    cluster: Cluster, workers: Sequence[str], *, applies: bool = False
) -> JobState | None:
    """Ask some workers of a cluster whether its job is running already.

    Args:
        cluster: `Cluster`, whose task is that of this process, if it applies.
        workers: Sequence of strings, `"host:port"` of each worker; at most 32 of them,
            drawn at random, are asked.
        applies: Bool, whether this process applies to join. Defaults to `False`.

    Returns:
        `JobState` of the latest generation among the answers, or `None` if no answer is
        of a job that has started.
    """
    found = _states(cluster, workers, APPLIES if applies else ASKS)
    started = [state for state in found if state.is_running or state.generation]
    return max(started, key=lambda state: state.generation, default=None)


def have_all_joined(cluster: Cluster, workers: Sequence[str]) -> bool | None:
    """Return whether all workers of the first cluster have joined, as some of them say.

    Args:
        cluster: `Cluster`.
        workers: Sequence of strings, `"host:port"` of each worker that is asked.

    Returns:
        Bool, false if those that answer wait for others; `None` if none answers.
    """
    found = _states(cluster, workers, ASKS)
    has_started = any(state.is_running or state.generation for state in found)
    return has_started if found else None


def _states(cluster: Cluster, workers: Sequence[str], kind: int) -> list[JobState]:
    """Return the answers of some workers that are asked for the state of their job.

    Args:
        cluster: `Cluster`, whose task is that of this process, if it applies.
        workers: Sequence of strings, as for `ask_workers`.
        kind: Int, `APPLIES` if this process applies to join the job, else `ASKS`.
    """
    admission = Admission.of(cluster)
    own = cluster.workers[cluster.rank].encode()
    claim = CLAIM.pack(cluster.rank, kind, own)

    def ask(worker: str) -> JobState | None:
        """Ask one worker for the job's state; return `None` if it does not answer."""
        try:
            connection = admission.dial(worker, claim, PROBE_SECONDS, MessageConnection)
            with contextlib.closing(connection):
                messages: list[dict] = []
                while not messages:
                    messages = connection.receive(waits=True)
                return JobState(**messages[0])
        except (ConnectionFailed, UnauthenticatedPeer, TypeError):
            return None

    # Each call draws the workers to ask, since many processes may start at once and ask
    # every second. The module `random` is not used: the user may have seeded it, and
    # initial weights depend on its state.
    asked = random.SystemRandom().sample(workers, min(len(workers), _MAX_ASKED))
    with ThreadPoolExecutor(len(asked) or 1) as pool:
        return [state for state in pool.map(ask, asked) if state is not None]


def _is_one_machine(hosts: Sequence[str]) -> bool:
    """Return whether the hosts are names of this machine, and of no other machine."""
    if all(map(is_local_name, hosts)):
        return True
    return len(set(hosts)) == 1 and any(map(is_own, addresses_of(hosts[0])))


def unix_socket_name(worker: str) -> str:
    """Return the name of a worker's abstract Unix socket, which leaves no file.

    Args:
        worker: String, its `"host:port"`; the name has only the port, and not the job.
    """
    _, port = split_address(worker)
    return f"\0tfdp-store-{port}"


def new_socket(family: int) -> socket.socket:
    """Create a stream socket of an address family, which forked processes close."""
    return close_in_forks(socket.socket(family, socket.SOCK_STREAM))
