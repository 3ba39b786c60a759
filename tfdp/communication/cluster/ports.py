"""TCP ports: find free ones, listen on them, and probe those of other tasks."""

from __future__ import annotations

import contextlib
import enum
import errno
import pathlib
import random
import socket
import time
from collections.abc import Iterator

from tfdp.communication.cluster.address import is_local_name, split_address
from tfdp.communication.cluster.limits import lack_of_files
from tfdp.communication.cluster.own_addresses import (
    addresses_of,
    call_concurrently,
    family_of,
    is_loopback,
    is_own,
    socket_address,
)
from tfdp.communication.cluster.spec import Cluster

_BACKLOG = 512
_LOWEST_PORT = 10000
_PORT_RANGE_FILE = "/proc/sys/net/ipv4/ip_local_port_range"


def listen(address: str) -> list[socket.socket]:
    """Listen on the port of this task, at each address of this host that its name has.

    Args:
        address: String, this task's own `"host:port"`.

    Returns:
        List of listening sockets. If the name has no address of this host, as behind a
        forwarding router, one socket listens on all interfaces.

    Raises:
        ValueError: If another process holds the port, or this one may not open it.

    Example:
    >>> [sock.close() for sock in listen("localhost:29")]  # doctest: +SKIP
    """
    host, port = split_address(address)
    sockets: list[socket.socket] = []
    try:
        for own in addresses_to_listen_on(host):
            sockets.append(listen_at(own, port))
    except OSError as error:
        for sock in sockets:
            sock.close()
        taken = error.errno == errno.EADDRINUSE
        reason = "is already taken by another process" if taken else error.strerror
        raise ValueError(
            f"Port {port}, on which this task has to listen, cannot be opened: "
            f"{reason}. Stop the process that holds it (it may be left over from "
            "an earlier run) or give this task another port in TF_CONFIG. "
            f"Received: {address!r}"
        ) from error
    return sockets


def addresses_to_listen_on(host: str) -> list[str]:
    """Return the addresses of this host on which to listen under a host name.

    Returns `[""]`, all interfaces, if the name has no address of this host. Other hosts
    do not reach a loopback address, to which Debian's `/etc/hosts` maps the host's own
    name. So loopback addresses are left out, unless `host` is `localhost` or one of
    them.

    Args:
        host: String, a name or an IP address.
    """
    own = [address for address in addresses_of(host) if is_own(address)]
    if not is_local_name(host):
        own = [address for address in own if not is_loopback(address)]
    return own or [""]


def listen_at(address: str, port: int) -> socket.socket:
    """Listen on a port; raise `OSError` if it cannot be opened.

    Args:
        address: String, an IP address of this host, or `""` for all interfaces.
        port: Int, the port.
    """
    sock = _bind(port, address, reuses=True)
    sock.listen(_BACKLOG)
    return sock


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
    deadline = time.monotonic() + timeout_seconds
    own_rank = None if cluster.is_evaluator else cluster.rank
    ranks = [rank for rank in range(cluster.num_workers) if rank != own_rank]
    silent = set(ranks)

    def try_until(rank: int) -> None:
        """Probe a worker until the deadline; remove it from `silent` if it accepts."""
        while True:
            left = max(deadline - time.monotonic(), 0.05)
            if probe_port(cluster.workers[rank], left) is ProbeResult.ACCEPTED:
                silent.discard(rank)
                return
            if time.monotonic() + 0.1 >= deadline:
                return
            time.sleep(0.1)

    call_concurrently(try_until, ranks, timeout_seconds)
    # Threads that have not returned in time may still write, so `sorted` makes a copy.
    return sorted(silent)


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


class ProbeResult(enum.Enum):
    """Result of a TCP connection attempt: `ACCEPTED`, `REFUSED` or `NONE`.

    With `NONE` there was no answer: in time, by a route, or from a host of that name.
    """

    ACCEPTED = "a process listens, or did until it was stopped"
    REFUSED = "the host is up, and no process listens"
    NONE = "no answer in time, no route to the host, or its name does not resolve"


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
    except OSError:
        return ProbeResult.NONE


def _bind(port: int, address: str = "", *, reuses: bool) -> socket.socket:
    """Bind a port at an address, or on all interfaces; raise `OSError` if it is taken.

    With `reuses`, closed connections of an earlier run, which linger for a minute, do
    not take the port; a listening process does.
    """
    is_dual = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else family_of(address)
    sock = socket.socket(family)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuses)
        if is_dual:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(socket_address(address, port) if address else ("", port))
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
        Tuple of a list of the ports, and a list of sockets that are bound to them, but
        do not listen.

    Raises:
        ValueError: If fewer ports are free.
    """
    candidates = range(_LOWEST_PORT, _first_ephemeral_port())
    ports: list[int] = []
    sockets: list[socket.socket] = []
    # Every socket stays bound until all ports are chosen, so that the ports are
    # distinct.
    with contextlib.ExitStack() as stack:
        # The ports are drawn by a new generator of random numbers: if the script has
        # seeded the global one, all processes would draw the same ports from it.
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
    # A machine may pick source ports from nearly all ports, which leaves too few below
    # that range. Linux's default range is assumed then.
    return first if first >= _LOWEST_PORT + 2000 else 32768
