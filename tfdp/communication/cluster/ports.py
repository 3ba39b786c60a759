"""TCP ports: find free ones, check and probe them; rendezvous of all workers."""

from __future__ import annotations

import contextlib
import enum
import errno
import pathlib
import random
import socket
import time
from collections.abc import Iterator

from tfdp.communication.cluster.address import split_address
from tfdp.communication.cluster.limits import lack_of_files
from tfdp.communication.cluster.own_addresses import call_at_once
from tfdp.communication.cluster.spec import Cluster
from tfdp.ground import user_code
from tfdp.ground.forks import close_in_forks

_WARN_AFTER_SECONDS = 10.0
# Time limit of one round of probes, in which the ports of all workers must answer.
_TOGETHER_SECONDS = 1.0
_LOWEST_PORT = 10000
_PORT_RANGE_FILE = "/proc/sys/net/ipv4/ip_local_port_range"


def check_port_free(address: str) -> None:
    """Check that this task can open the port of its own address.

    The port is bound on all interfaces, as TensorFlow's server does, whatever the
    host of the address, and is closed again.

    Args:
        address: String, this task's own `"host:port"`.

    Raises:
        ValueError: If another process holds the port, or this one may not
            open it.

    Example:
    >>> check_port_free("localhost:29")  # doctest: +SKIP
    """
    _, port = split_address(address)
    try:
        _bind(port, reuses=True).close()
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        reason = "is already taken by another process" if taken else error.strerror
        raise ValueError(
            f"Port {port}, on which this task has to listen, cannot be opened: "
            f"{reason}. Stop the process that holds it (it may be left over from "
            "an earlier run) or give this task another port in TF_CONFIG. "
            f"Received: {address!r}"
        ) from error


def unreachable_workers(cluster: Cluster, timeout_seconds: float) -> list[int]:
    """Find the workers whose port accepts no connection.

    Each other worker is probed by TCP connections, concurrently and repeatedly,
    until it accepts one or the time is over.

    Args:
        cluster: The `Cluster` to try.
        timeout_seconds: Float, seconds to keep trying.

    Returns:
        List of int, the ranks that did not answer, in ascending order. This
        task's own rank is never among them.

    Example:
    >>> unreachable_workers(Cluster(("localhost:2222",)), timeout_seconds=1.0)
    []
    """
    return sorted(_probe_workers(cluster, timeout_seconds))


def _probe_workers(cluster: Cluster, timeout_seconds: float) -> dict[int, ProbeResult]:
    """Return the last `ProbeResult` of each worker that accepts no connection, by rank.

    Args:
        cluster: `Cluster` whose other workers are probed.
        timeout_seconds: Float, seconds to keep trying.
    """
    deadline = time.monotonic() + timeout_seconds
    own_rank = None if cluster.is_evaluator else cluster.rank
    ranks = [rank for rank in range(cluster.num_workers) if rank != own_rank]
    found = dict.fromkeys(ranks, ProbeResult.NONE)

    def try_until(rank: int) -> None:
        """Probe a worker until its port accepts, or the deadline has passed."""
        while found[rank] is not ProbeResult.ACCEPTED:
            left = deadline - time.monotonic()
            found[rank] = probe_port(cluster.workers[rank], max(left, 0.05))
            if time.monotonic() + 0.1 >= deadline:
                return
            time.sleep(0.1)

    call_at_once(try_until, ranks, timeout_seconds)
    # The dict is copied, because threads that have not returned in time may still write
    # to it.
    return {r: at for r, at in found.copy().items() if at is not ProbeResult.ACCEPTED}


def rendezvous(cluster: Cluster, timeout_seconds: float | None = None) -> list[int]:
    """Wait until every worker has started, before TensorFlow does.

    TensorFlow waits in native code, without a timeout on the first worker and
    without the name of a missing worker on the others. So each worker first opens
    its port here and probes the ports of the others. All have seen each other before
    the last one returns; TensorFlow's server then opens the port again.

    Args:
        cluster: The `Cluster`; this task is one of its workers.
        timeout_seconds: Float or `None`, the longest wait. Defaults to `None`,
            no limit, with a warning that names the missing workers.

    Returns:
        List of int, the ranks of the workers that did not start.

    Raises:
        ValueError: If this task's own port is taken.

    Example:
    >>> rendezvous(Cluster(("localhost:2222",)), timeout_seconds=1.0)
    []
    """
    begin = time.monotonic()
    limit = float("inf") if timeout_seconds is None else timeout_seconds
    with _listening(cluster.workers[cluster.rank], cluster.num_workers):
        while True:
            # All workers must answer in one short round of probes: a worker that has
            # answered an earlier round may have given up since.
            found = _probe_workers(cluster, _TOGETHER_SECONDS)
            missing = sorted(found)
            waited = time.monotonic() - begin
            if not missing or waited >= limit:
                return missing
            unknown = [r for r in missing if found[r] is ProbeResult.UNKNOWN_HOST]
            if unknown:
                user_code.warn(
                    "The host name does not resolve here: "
                    f"{describe_workers(cluster, unknown)}. Check TF_CONFIG; the "
                    "machine may also not have started yet.",
                    once_for=cluster,
                    topic="unknown hosts",
                )
            if waited >= _WARN_AFTER_SECONDS:
                user_code.warn(
                    f"Waiting for {describe_workers(cluster, missing)} to start. Start "
                    "every worker of TF_CONFIG.",
                    once_for=cluster,
                    topic="missing workers",
                )


def describe_workers(cluster: Cluster, ranks: list[int]) -> str:
    """Format ranks and addresses of workers for a message.

    Args:
        cluster: The `Cluster`.
        ranks: List of int, the ranks to describe.

    Returns:
        String.

    Example:
    >>> describe_workers(Cluster(("a:1", "b:1")), [1])
    'worker 1 (b:1)'
    """
    return ", ".join(f"worker {rank} ({cluster.workers[rank]})" for rank in ranks)


@contextlib.contextmanager
def _listening(address: str, num_workers: int) -> Iterator[None]:
    """Listen on this task's port; the kernel completes connections without `accept`.

    Args:
        address: String, this task's `"host:port"`.
        num_workers: Int, number of workers that may connect.
    """
    check_port_free(address)
    _, port = split_address(address)
    server = _bind(port, reuses=True)
    server.listen(max(128, 2 * num_workers))
    with close_in_forks(server):
        yield


class ProbeResult(enum.Enum):
    """Result of a TCP connection attempt."""

    ACCEPTED = "a process listens, or did until it was stopped"
    REFUSED = "the host is up, and no process listens"
    UNKNOWN_HOST = "the name of the host does not resolve"
    NONE = "no answer in time, or no route to the host"


def probe_port(address: str, timeout_seconds: float) -> ProbeResult:
    """Attempt a TCP connection.

    Args:
        address: String, `"host:port"`.
        timeout_seconds: Float, longest time of the attempt.

    Returns:
        `ProbeResult`.

    Example:
    >>> probe_port("localhost:1", timeout_seconds=0.5).name
    'REFUSED'
    """
    try:
        with socket.create_connection(
            split_address(address), timeout=timeout_seconds
        ) as connection:
            # If no process listens, the kernel may pick the port as the connection's
            # source port: TCP then connects the socket to itself.
            is_itself = connection.getsockname() == connection.getpeername()
            return ProbeResult.REFUSED if is_itself else ProbeResult.ACCEPTED
    except ConnectionRefusedError:
        return ProbeResult.REFUSED
    except socket.gaierror:
        return ProbeResult.UNKNOWN_HOST
    except OSError:
        return ProbeResult.NONE


def _bind(port: int, *, reuses: bool) -> socket.socket:
    """Bind a port on all interfaces; raise `OSError` if it is taken on any.

    With `reuses`, as in gRPC, closed connections of an earlier run, which linger for a
    minute, do not take the port; a listening process does.
    """
    is_dual = socket.has_dualstack_ipv6()
    sock = socket.socket(socket.AF_INET6 if is_dual else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuses)
        if is_dual:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(("", port))
    except OSError:
        sock.close()
        raise
    return sock


def free_ports(count: int) -> list[int]:
    """Find distinct ports that are free on all interfaces.

    They are drawn at random from below the range in which the kernel picks
    source ports: from inside it, a worker's first outgoing connection could
    take the port on which another worker is about to listen.

    Args:
        count: Int, number of ports.

    Returns:
        List of int, the ports.

    Raises:
        ValueError: If fewer ports are free.
    """
    with reserved_ports(count) as (ports, _):
        return ports


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[tuple[list[int], list[socket.socket]]]:
    """Find free ports like `free_ports`, and keep them bound during the block.

    Args:
        count: Int, number of ports.

    Yields:
        List of int, the ports, and the sockets that are bound to them, not listening.

    Raises:
        ValueError: If fewer ports are free.
    """
    candidates = range(_LOWEST_PORT, _first_ephemeral_port())
    ports: list[int] = []
    sockets: list[socket.socket] = []
    # Every socket stays bound until all are chosen, so that the ports are distinct.
    with contextlib.ExitStack() as stack:
        # A generator of its own: a seed of the script would give all processes the
        # same ports.
        for port in random.Random().sample(candidates, len(candidates)):
            if len(ports) == count:
                break
            try:
                sock = _bind(port, reuses=False)
            except OSError as error:
                if (lack := lack_of_files(error)) is not None:
                    raise ValueError(lack) from error
                continue
            sockets.append(stack.enter_context(sock))
            ports.append(port)
        if len(ports) < count:
            raise ValueError(
                f"There are not enough free ports for the workers. Received: -n {count}"
                f", with {len(ports)} free"
            )
        yield ports, sockets


def _first_ephemeral_port() -> int:
    """Return the first port that the kernel picks for outgoing connections."""
    try:
        first = int(pathlib.Path(_PORT_RANGE_FILE).read_text("ascii").split()[0])
    except (OSError, ValueError):
        first = 32768
    # A machine may be configured to pick source ports from nearly all ports; then too
    # few are below its range.
    return first if first >= _LOWEST_PORT + 2000 else 32768
