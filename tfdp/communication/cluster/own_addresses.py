"""IP addresses of this host, and probes of which addresses other hosts reach."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from tfdp.communication.cluster.address import ip_address
from tfdp.ground.base.process_identity import boot_id

_NETWORK_FILE = "/proc/self/ns/net"
# Largest number of addresses of a host that are used. A host with many containers has
# more, but other hosts can hardly ever reach the containers' addresses.
_MAX_ADDRESSES = 16
_TOKEN_BYTES = 16
_PROBE_SECONDS = 3.0

_Item = TypeVar("_Item", bound=Hashable)
_Result = TypeVar("_Result")


def network_of_host() -> str | None:
    """Return a key of this host, of its boot and of this process's network namespace.

    Returns:
        String, equal for processes that share all three; or `None` if `/proc` does not
        have them.
    """
    with contextlib.suppress(OSError):
        return f"{boot_id()} {os.readlink(_NETWORK_FILE)}"
    return None


def host_key() -> str:
    """Return a key that is equal for processes that share a host and its network.

    Returns:
        String; more than the host name, which two containers may share.
    """
    return network_of_host() or socket.gethostname()


def own_addresses() -> list[str]:
    """List the IP addresses of this host: those of its name first, then IPv4.

    Returns:
        List of strings, without loopback, link-local and multicast addresses.
    """
    found = [*addresses_of(socket.gethostname()), *_addresses_of_interfaces()]
    usable = [text for text in dict.fromkeys(found) if _is_usable(text)]
    return usable[:_MAX_ADDRESSES]


def _addresses_of_interfaces() -> list[str]:
    """Return the IP addresses of all network interfaces, IPv4 first."""
    # Interfaces that are down are included: a link reports late that it is up, and a
    # probe shows which addresses work. Benchmarks import this module in environments
    # without psutil, so the import is here.
    import psutil

    interfaces = psutil.net_if_addrs().values()
    return [
        each.address
        for family in (socket.AF_INET, socket.AF_INET6)
        for addresses in interfaces
        for each in addresses
        if each.family == family
    ]


def _is_usable(text: str) -> bool:
    """Return whether a text is an IP address that other hosts may reach.

    Loopback, link-local, multicast and unspecified addresses are not.
    """
    address = ip_address(text)
    return address is not None and not (
        address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_unspecified
    )


def addresses_of(host: str) -> list[str]:
    """Return the IP addresses of a host, none if its name does not resolve here.

    Args:
        host: String, a name or an IP address.

    Example:

    >>> addresses_of("127.0.0.1")
    ['127.0.0.1']
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(info[4][0]) for info in found))


def is_own(address: str) -> bool:
    """Return whether an address belongs to this host.

    Args:
        address: String, an IPv4 or IPv6 address.

    Returns:
        Bool.
    """
    # An unspecified address, such as 0.0.0.0, belongs to no single host. Every host can
    # bind a socket to it, so a successful bind would not show that it belongs to this
    # one.
    if parse_address(address).is_unspecified:
        return False
    try:
        with socket.socket(family_of(address), socket.SOCK_STREAM) as probe:
            probe.bind(socket_address(address, 0))
    except OSError:
        return False
    return True


def family_of(address: str) -> socket.AddressFamily:
    """Return the socket family of an IPv4 or IPv6 address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def socket_address(address: str, port: int) -> tuple:
    """Return the tuple that `socket.bind` and `connect` take, with a link-local scope.

    Args:
        address: String, an IPv4 or IPv6 address.
        port: Int, the port.
    """
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    found = socket.getaddrinfo(
        address, port, family_of(address), socket.SOCK_STREAM, flags=flags
    )
    return found[0][4]


def parse_address(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an IP address without its scope."""
    return ipaddress.ip_address(address.partition("%")[0])


def is_loopback(address: str) -> bool:
    """Return whether an IPv4 or IPv6 address is reachable only from this host."""
    return parse_address(address).is_loopback


@contextlib.contextmanager
def answer_with_token(bound: socket.socket) -> Iterator[str]:
    """Return a context that answers connections to a port with a random token.

    A process that receives the token knows that it has reached this one. A connection
    alone does not prove which host was reached: container bridges have the same address
    on many hosts.

    Args:
        bound: Socket that is bound to the port, and does not listen yet.

    Yields:
        String, the token. A thread sends it to each connection until the context ends.
    """
    token = secrets.token_hex(_TOKEN_BYTES)
    bound.listen(128)
    is_over = threading.Event()
    thread = threading.Thread(target=_answer, args=(bound, token, is_over), daemon=True)
    thread.start()
    try:
        yield token
    finally:
        is_over.set()
        thread.join()


def _answer(listener: socket.socket, token: str, is_over: threading.Event) -> None:
    """Send the token to each connection until the event is set.

    Args:
        listener: Listening socket.
        token: String.
        is_over: `threading.Event` that ends the thread.
    """
    listener.settimeout(0.1)
    while not is_over.is_set():
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(1.0)
                connection.sendall(token.encode())
                # This end waits for the client to close first: otherwise a connection
                # of this end in the state TIME_WAIT would keep the port in use.
                connection.recv(1)


def reachable_addresses(
    candidates: Mapping[int, tuple[Sequence[str], int, str]],
) -> dict[int, list[str]]:
    """Find the addresses at which other processes are reachable from this host.

    Args:
        candidates: Mapping from a rank to its addresses, its port and its token.

    Returns:
        Dict from a rank to its addresses that answered with its token.
    """
    pairs = [
        (rank, address)
        for rank, (addresses, _, _) in candidates.items()
        for address in addresses
    ]
    answers = call_concurrently(
        lambda pair: _answers(pair[1], *candidates[pair[0]][1:]), pairs
    )
    return {
        rank: [address for address in addresses if answers[rank, address]]
        for rank, (addresses, _, _) in candidates.items()
    }


def _answers(address: str, port: int, token: str) -> bool:
    """Return whether a process at an address and a port sends the expected token."""
    try:
        with socket.create_connection((address, port), _PROBE_SECONDS) as connection:
            return connection.makefile("rb").read(len(token)) == token.encode()
    except OSError:
        return False


def call_concurrently(
    function: Callable[[_Item], _Result],
    items: Iterable[_Item],
    timeout_seconds: float | None = None,
) -> dict[_Item, _Result]:
    """Call a function for each item concurrently, in a thread each.

    Args:
        function: Callable, from an item to a result.
        items: Iterable of hashable items.
        timeout_seconds: Float or `None`, the longest wait. Defaults to `None`.

    Returns:
        Dict from items to results, only of calls that have returned in time.
    """
    results: dict[_Item, _Result] = {}

    def call(item: _Item) -> None:
        """Store `function(item)` in `results`; nothing is stored if it raises."""
        results[item] = function(item)

    # The threads are daemons, because a look-up of a host name cannot be interrupted
    # and must not keep the process alive past the deadline.
    threads = [
        threading.Thread(target=call, args=(item,), daemon=True) for item in items
    ]
    end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(None if end is None else max(0.0, end - time.monotonic()))
    return results.copy()
