"""Addresses of the form `"host:port"`."""

from __future__ import annotations

import ipaddress
import re

from tfdp.communication.cluster.tf_config import describe

_ADDRESS = re.compile(
    r"(\[[0-9a-fA-F:.]+(?:%\w+)?\]|[^\s:/\[\]\x00-\x1f\x7f]+):([0-9]{1,5})"
)
_LOCAL_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")


def split_address(address: str) -> tuple[str, int]:
    """Split an address into its host and its port.

    Args:
        address: String, `"host:port"`; an IPv6 host is in brackets.

    Returns:
        The host, without brackets, and the port.

    Raises:
        ValueError: If the address has no host, or no port from 1 to 65535.

    Example:
    >>> split_address("[::1]:2222")
    ('::1', 2222)
    """
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    is_right = match is not None and 1 <= int(match[2]) <= 65535
    if match is None or not is_right or not _can_be_looked_up(match[1]):
        raise ValueError(
            "Every task of the cluster needs an address of the form 'host:port' "
            f"with a port from 1 to 65535. Received: {describe(address)}"
        )
    return match[1].strip("[]"), int(match[2])


def join_address(host: str, port: int) -> str:
    """Join a host and a port to an address; the inverse of `split_address`.

    Example:
    >>> join_address("::1", 2222)
    '[::1]:2222'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def canonical_address(address: str) -> tuple[str, int]:
    """Split an address, with one host name for all names of this machine.

    `"localhost"` and all loopback addresses become one host, and the spellings of one
    IP address become one. No name is looked up.

    Args:
        address: String, `"host:port"`.

    Returns:
        The host and the port.

    Raises:
        ValueError: As `split_address`.

    Example:
    >>> canonical_address("127.0.0.1:2222") == canonical_address("LocalHost:2222")
    True
    """
    host, port = split_address(address)
    return canonical_host(host), port


def canonical_host(host: str) -> str:
    """Return one spelling of a host: `"localhost"` for loopback names and addresses.

    The unspecified addresses count as loopback ones. Other IP addresses are normalized,
    and other names are in lower case.
    """
    host = host.lower().rstrip(".")
    address = ip_address(host)
    if address is None:
        return "localhost" if host in _LOCAL_NAMES else host
    # The unspecified addresses, 0.0.0.0 and ::, count as local, since a connection to
    # one of them reaches this machine.
    is_local = address.is_loopback or address.is_unspecified
    return "localhost" if is_local else str(address)


def is_local_name(host: str) -> bool:
    """Return whether a host is `localhost` or a loopback address."""
    return canonical_host(host) == "localhost"


def ip_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse an IP address, IPv4-mapped IPv6 as IPv4; return `None` for a name."""
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def _can_be_looked_up(host: str) -> bool:
    """Return whether a host's name can be encoded in IDNA, as for a look-up."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True
