"""Free ports for local workers."""

from __future__ import annotations

import contextlib
import pathlib
import random
import socket
from collections.abc import Iterator

from tfdp.communication.cluster.limits import lack_of_files

_LOWEST_PORT = 10000
_PORT_RANGE_FILE = "/proc/sys/net/ipv4/ip_local_port_range"


def free_ports(count: int) -> list[int]:
    """Find different ports that are free on all interfaces.

    They are drawn at random from below the range in which the kernel picks
    source ports: from inside it, a worker's first outgoing connection could
    take the port on which another worker is about to listen.

    Args:
        count: Int, how many.

    Returns:
        List of int.

    Raises:
        ValueError: If there are not that many.
    """
    with reserved_ports(count) as (ports, _):
        return ports


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[tuple[list[int], list[socket.socket]]]:
    """Hold ports as `free_ports` finds them, so that no other process gets them.

    Args:
        count: Int, how many.

    Yields:
        List of int, and the sockets that are bound to them, which listen to nobody.

    Raises:
        ValueError: If there are not that many.
    """
    candidates = range(_LOWEST_PORT, _first_ephemeral_port())
    ports: list[int] = []
    sockets: list[socket.socket] = []
    # Every socket stays bound until all are chosen, so that no two are equal.
    with contextlib.ExitStack() as stack:
        # Not from the generator that a script may have seeded.
        for port in random.Random().sample(candidates, len(candidates)):
            if len(ports) == count:
                break
            try:
                probe = stack.enter_context(socket.socket())
            except OSError as error:
                raise ValueError(lack_of_files(error) or str(error)) from error
            with contextlib.suppress(OSError):
                probe.bind(("", port))  # TensorFlow listens on all interfaces
                ports.append(port)
                sockets.append(probe)
        if len(ports) < count:
            raise ValueError(
                f"There are not enough free ports for the workers. Received: -n {count}"
                f", with {len(ports)} free"
            )
        yield ports, sockets


def _first_ephemeral_port() -> int:
    try:
        first = int(pathlib.Path(_PORT_RANGE_FILE).read_text("ascii").split()[0])
    except (OSError, ValueError):
        first = 32768
    # A machine may have been told to use nearly all ports for connections.
    return first if first >= _LOWEST_PORT + 2000 else 32768
