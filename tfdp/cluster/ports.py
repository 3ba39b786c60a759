"""Whether ports are free on this host, and whether those of others answer."""

from __future__ import annotations

import errno
import socket
import threading
import time

from tfdp.cluster.address import split_address
from tfdp.cluster.spec import Cluster


def check_port_free(address: str) -> None:
    """Checks that this task can still open the port of its own address.

    TensorFlow's server listens on all interfaces, so that is what is tried;
    the host part is not looked at, and nothing is left open.

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
        _try_to_bind(port)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        reason = "is already taken by another process" if taken else error.strerror
        raise ValueError(
            f"Port {port}, on which this task has to listen, cannot be opened: "
            f"{reason}. Stop the process that holds it (it may be left over from "
            "an earlier run) or give this task another port in TF_CONFIG. "
            f"Received: {address!r}"
        ) from error


def unreachable(cluster: Cluster, timeout_seconds: float) -> list[int]:
    """Finds the workers whose port does not answer.

    Tries a plain TCP connection to each worker but this one, again and again
    and all at the same time, until each has answered or the time is over.

    Args:
        cluster: The `Cluster` to try.
        timeout_seconds: Float, seconds to go on trying.

    Returns:
        List of int, the ranks that did not answer, in ascending order. This
        task's own rank is never among them.

    Example:
    >>> unreachable(Cluster(("localhost:2222",)), timeout_seconds=1.0)
    []
    """
    deadline = time.monotonic() + timeout_seconds
    own_rank = None if cluster.is_evaluator else cluster.rank
    waiting = {rank for rank in range(cluster.num_workers) if rank != own_rank}
    # Daemon threads: looking up a host's name cannot be interrupted, and must
    # not keep the process alive past the deadline.
    threads = [
        threading.Thread(
            target=_wait_for_answer,
            args=(cluster.workers[rank], deadline, waiting, rank),
            daemon=True,
        )
        for rank in sorted(waiting)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return sorted(waiting.copy())


def _wait_for_answer(
    address: str, deadline: float, waiting: set[int], rank: int
) -> None:
    while True:
        left = deadline - time.monotonic()
        if answers(address, max(left, 0.05)):
            waiting.discard(rank)
            return
        if time.monotonic() + 0.1 >= deadline:
            return
        time.sleep(0.1)


def answers(address: str, timeout_seconds: float) -> bool:
    """Tells whether something accepts TCP connections at an address.

    Args:
        address: String, `"host:port"`.
        timeout_seconds: Float, seconds to wait for the connection.

    Returns:
        Bool.

    Example:
    >>> answers("localhost:1", timeout_seconds=0.5)
    False
    """
    try:
        with socket.create_connection(
            split_address(address), timeout=timeout_seconds
        ) as connection:
            # A port that nobody holds can be picked as the connection's own
            # source port: TCP then connects the socket to itself.
            return connection.getsockname() != connection.getpeername()
    except OSError:
        return False


def _try_to_bind(port: int) -> None:
    """Raises `OSError` if the port is taken on any interface."""
    families = [(socket.AF_INET, "")]
    if socket.has_dualstack_ipv6():
        families.append((socket.AF_INET6, "::"))
    for family, host in families:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As gRPC does: closed connections of an earlier run, which linger
            # for a minute, are no obstacle; a listening process is.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((host, port))
