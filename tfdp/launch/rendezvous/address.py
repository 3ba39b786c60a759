"""Address of the rendezvous: where node 0 listens, and whether it is this machine's."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

from tfdp.communication.cluster.address import is_local_name
from tfdp.communication.cluster.own_addresses import is_own
from tfdp.launch.rendezvous.failure import RendezvousError

# Connections that may wait to be accepted.
_BACKLOG = 128
# Both loopback addresses, since a host may have IPv6 only.
_LOOPBACKS = ("127.0.0.1", "::1")


def listen(host: str, port: int, *, is_node_0: bool) -> socket.socket | None:
    """Listen at the rendezvous, if it is an address of this machine.

    Args:
        host: String, name or IP address of the rendezvous.
        port: Int, port of the rendezvous.
        is_node_0: Bool, whether the user has declared this machine node 0.

    Returns:
        The listening socket; or `None` if the address belongs to another machine, or
        another node of this machine listens there already.

    Raises:
        RendezvousError: If the name cannot be resolved, or node 0 cannot open the port.
    """
    reasons: list[OSError] = []
    for family, address in resolve(host, port):
        try:
            return _listen_at(host, family, address)
        except OSError as error:
            reasons.append(error)
    if not is_node_0:
        return None
    # The host may name a router or a service that forwards to this machine.
    if all(error.errno == errno.EADDRNOTAVAIL for error in reasons):
        try:
            return _listen_everywhere(port)
        except OSError as error:
            reasons = [error]
    reason = next(e for e in reasons if e.errno != errno.EADDRNOTAVAIL)
    taken = reason.errno == errno.EADDRINUSE
    why = "another process has it" if taken else os.strerror(reason.errno or 0)
    raise RendezvousError(
        f"Node 0 cannot open port {port}: {why}. Give another one with --rendezvous, "
        f"on all machines. Received: --rendezvous {host}:{port}"
    ) from reason


def resolve(host: str, port: int) -> list[tuple[int, tuple]]:
    """Resolve a host to socket addresses.

    Args:
        host: String, name or IP address.
        port: Int, port of the socket addresses.

    Returns:
        List of tuples of a socket family and a socket address.

    Raises:
        RendezvousError: If the name cannot be resolved.
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # An empty label of a host name raises `UnicodeError`.
    except (OSError, UnicodeError) as error:
        invalid = "it is not a valid host name"
        reason = error.strerror if isinstance(error, OSError) else invalid
        raise RendezvousError(
            f"The host of --rendezvous does not resolve here ({reason}). Give the name "
            "or the IP address of node 0 by which the other machines reach it. "
            f"Received: {host}"
        ) from error
    return list(dict.fromkeys((int(each[0]), tuple(each[4])) for each in infos))


def own_address(listener: socket.socket) -> tuple[str, int]:
    """Return the address at which this machine itself reaches a listening socket.

    Args:
        listener: Listening socket.

    Returns:
        The IP address and the port.
    """
    # `getnameinfo` includes the interface of a link-local address.
    numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    host = socket.getnameinfo(listener.getsockname(), numeric)[0]
    port = listener.getsockname()[1]
    if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
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
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return address.version == 6 and address.is_link_local


def _listen_at(host: str, family: int, address: tuple) -> socket.socket:
    """Listen at a socket address, or everywhere if other machines cannot reach it.

    Args:
        host: String, the host that the user has named.
        family: Int, socket family of the address.
        address: Tuple, the socket address that the host resolves to.
    """
    listener = socket.create_server(address, family=family, backlog=_BACKLOG)
    # Debian resolves a machine's own host name to 127.0.1.1, which no other machine
    # can reach.
    if is_local_name(address[0]) and not is_local_name(host):
        listener.close()
        return _listen_everywhere(address[1])
    return listener


def _listen_everywhere(port: int) -> socket.socket:
    """Listen on all interfaces, by IPv6 and IPv4 where the system allows both."""
    dual = socket.has_dualstack_ipv6()
    return socket.create_server(
        ("", port),
        family=socket.AF_INET6 if dual else socket.AF_INET,
        dualstack_ipv6=dual,
        backlog=_BACKLOG,
    )
