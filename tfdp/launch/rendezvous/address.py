"""Address of the rendezvous: where node 0 listens, and whether it is this machine's."""

from __future__ import annotations

import errno
import os
import socket

from tfdp.communication.cluster.address import ip_address, is_local_name
from tfdp.communication.cluster.own_addresses import (
    addresses_of,
    is_own,
    parse_address,
)
from tfdp.communication.cluster.ports import addresses_to_listen_on, listen_at
from tfdp.launch.rendezvous.failure import RendezvousError

# A host may have only one of the loopback addresses of IPv4 and IPv6, so both are
# tried.
_LOOPBACKS = ("127.0.0.1", "::1")


def listen(host: str, port: int, *, is_node_0: bool) -> socket.socket | None:
    """Listen at the rendezvous if its address is this machine's, or on node 0.

    Args:
        host: String, name or IP address of the rendezvous.
        port: Int, port of the rendezvous.
        is_node_0: Bool, whether this machine is declared node 0. It then listens even
            if the address is that of another machine, such as a router, and raises an
            error if another process has the port.

    Returns:
        The listening socket; or `None` if the address belongs to another machine, or
        another process of this machine, probably node 0, listens there already.

    Raises:
        RendezvousError: If the name cannot be resolved, or the port cannot be opened.
    """
    check_resolves(host)
    own = addresses_to_listen_on(host)[0]
    is_here = is_local_name(host) or any(map(is_own, addresses_of(host)))
    # A declared node 0 listens in any case: the host may name a router or a service
    # that forwards to this machine.
    if not (is_here or is_node_0):
        return None
    try:
        return listen_at(own, port)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        if is_taken and not is_node_0:
            return None
        why = "another process has it" if is_taken else os.strerror(error.errno or 0)
        raise RendezvousError(
            f"Node 0 cannot open port {port}: {why}. Give another one with "
            f"--rendezvous, on all machines. Received: --rendezvous {host}:{port}"
        ) from error


def check_resolves(host: str) -> None:
    """Raise unless this machine can resolve the host name of the rendezvous.

    Args:
        host: String, name or IP address.

    Raises:
        RendezvousError: If the name cannot be resolved.
    """
    try:
        socket.getaddrinfo(host, None)
    # `getaddrinfo` raises `UnicodeError` for a host name with an empty label.
    except (OSError, UnicodeError) as error:
        invalid = "it is not a valid host name"
        reason = error.strerror if isinstance(error, OSError) else invalid
        raise RendezvousError(
            f"The host of --rendezvous does not resolve here ({reason}). Give the name "
            "or the IP address of node 0 by which the other machines reach it. "
            f"Received: {host}"
        ) from error


def own_address(listener: socket.socket) -> tuple[str, int]:
    """Return the address at which this machine itself reaches a listening socket.

    Args:
        listener: Listening socket.

    Returns:
        The IP address and the port.
    """
    # A link-local address is valid only with the name of its interface, which
    # `getnameinfo` includes.
    numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    host = socket.getnameinfo(listener.getsockname(), numeric)[0]
    port = listener.getsockname()[1]
    if parse_address(host).is_unspecified:
        return next(filter(is_own, _LOOPBACKS), _LOOPBACKS[0]), port
    return host, port


def is_link_local(host: str) -> bool:
    """Return whether a host is a link-local IPv6 address, valid on one interface only.

    Args:
        host: String, name or IP address.

    Example:

    >>> is_link_local("fe80::1%eth0"), is_link_local("fd00::1"), is_link_local("fe80")
    (True, False, False)
    """
    address = ip_address(host.partition("%")[0])
    return address is not None and address.version == 6 and address.is_link_local
