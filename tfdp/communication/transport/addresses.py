"""Addresses of this worker: the interface it listens on, and a key of its host."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import socket

import psutil

from tfdp.communication.cluster.address import ip_address, is_local_name
from tfdp.communication.cluster.own_addresses import (
    is_loopback,
    is_own,
    network_of_host,
    parse_address,
)
from tfdp.communication.transport.communicator import TransportError


@dataclasses.dataclass(frozen=True)
class Addresses:
    """Published addresses at which a worker can be reached.

    Args:
        host: String, the worker's host as `TF_CONFIG` names it.
        ip: String, the address that its TCP port is bound to.
        port: Int, its TCP port.
        unix_name: String, name of its abstract Unix socket.
        machine: String, equal for workers whose Unix sockets reach each other: the
            boot of the kernel, the network namespace and the user.
    """

    host: str
    ip: str
    port: int
    unix_name: str
    machine: str

    def to_json(self) -> str:
        """Format the addresses as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Addresses:
        """Parse the result of `to_json`."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        shown = f"[{self.ip}]" if ":" in self.ip else self.ip
        return f"{shown}:{self.port}"


def this_machine() -> str:
    """Return a key of this machine, this network namespace and this user.

    Returns:
        String, equal for two processes if and only if they run as one user and their
        abstract Unix sockets reach each other.
    """
    # Without a key of the network namespace, it is unknown whether Unix sockets reach
    # another process. A random key equals no other, so workers then connect by TCP.
    network = network_of_host() or secrets.token_hex(16)
    return f"{network} {os.getuid()}"


def listening_address(host: str, interface: str | None) -> str:
    """Choose the address that this worker listens on.

    Args:
        host: String, this worker's host as `TF_CONFIG` names it.
        interface: String or `None`, the name or an address of an interface of this
            host, which overrides `host`.

    Returns:
        String, an IPv4 or IPv6 address of this host.

    Raises:
        TransportError: If this host has no such address, or no unique one.

    Example:
    >>> listening_address("localhost", None)
    '127.0.0.1'
    """
    if interface is not None:
        return _address_of_interface(interface)
    found = _resolve(host)
    local = [address for address in found if is_own(address)]
    if not local:
        raise TransportError(
            f"The host of this worker, {host!r}, resolves to "
            f"{_format_addresses(found)} here, which is not an address of this host; "
            f"its addresses are {_format_own_addresses()}. Correct TF_CONFIG or the "
            "name's entry, or choose an address with "
            '`CommunicationOptions(interface="...")`.'
        )
    external = [address for address in local if not is_loopback(address)]
    if external or is_local_name(host):
        return (external or local)[0]
    return _external_address(host, local[0])


def interface_addresses() -> dict[str, list[str]]:
    """Return the IPv4 and IPv6 addresses of each interface that is up.

    Returns:
        Dict of interface names to addresses, IPv4 first and link-local ones last.
    """
    stats = psutil.net_if_stats()
    found = {
        name: sorted(
            (
                address.address
                for address in addresses
                if address.family in (socket.AF_INET, socket.AF_INET6)
            ),
            key=_preference,
        )
        for name, addresses in psutil.net_if_addrs().items()
        if name in stats and stats[name].isup
    }
    return {name: addresses for name, addresses in found.items() if addresses}


def _preference(address: str) -> tuple[bool, bool]:
    """Return a sort key: IPv4 before IPv6, and link-local addresses last."""
    return parse_address(address).is_link_local, ":" in address


def _address_of_interface(interface: str) -> str:
    """Return the address of an interface, given by its name or an address of it.

    Raises `TransportError` if this host has no such interface that is up.
    """
    own = interface_addresses()
    if interface in own:
        return own[interface][0]
    if ip_address(interface) is not None and is_own(interface):
        return interface
    raise TransportError(
        "`interface` must be the name or an address of an interface of this host that "
        f"is up: {_format_own_addresses()}. Received: interface={interface!r}"
    )


def _resolve(host: str) -> list[str]:
    """Resolve a host name, IPv4 addresses first; `TransportError` if that fails."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise TransportError(
            f"The host of this worker, {host!r}, does not resolve here: {error}. "
            "Correct TF_CONFIG or the name's entry, or choose an address of this host "
            'with `CommunicationOptions(interface="...")`.'
        ) from error
    addresses = dict.fromkeys(str(entry[4][0]) for entry in found)
    return sorted(addresses, key=_preference)


def _external_address(host: str, loopback: str) -> str:
    """Return this host's only address that other hosts reach, else `loopback`.

    Called for a host name that resolves to loopback here: Debian's `/etc/hosts` maps
    the host's own name to 127.0.1.1, which is not reachable from other hosts.

    Args:
        host: String, the name, for the error.
        loopback: String, the loopback address to which the name resolves.

    Raises:
        TransportError: If several interfaces have an address that other hosts reach.
    """
    others = {
        name: addresses[0]
        for name, addresses in interface_addresses().items()
        if not _preference(addresses[0])[0] and not is_loopback(addresses[0])
    }
    if len(others) > 1:
        raise TransportError(
            f"The host of this worker, {host!r}, resolves to {loopback} here, which no "
            "other host can reach, and this host has several other addresses: "
            f"{_format_own_addresses()}. Choose one with "
            '`CommunicationOptions(interface="...")`.'
        )
    return next(iter(others.values()), loopback)


def _format_addresses(addresses: list[str]) -> str:
    """Join addresses with commas."""
    return ", ".join(addresses)


def _format_own_addresses() -> str:
    """Format this host's addresses with their interfaces: `"10.0.0.2 (eth0)"`."""
    return ", ".join(
        f"{_format_addresses(addresses)} ({name})"
        for name, addresses in interface_addresses().items()
    )
