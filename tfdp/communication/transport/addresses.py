"""Addresses of this worker: which interface it listens on, and which host it is on."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import secrets
import socket

import psutil

from tfdp.communication.cluster.address import ip_address, is_local_name
from tfdp.communication.cluster.own_addresses import network_of_host
from tfdp.communication.transport.communicator import TransportError


@dataclasses.dataclass(frozen=True)
class Addresses:
    """Where a worker can be reached, as it publishes it.

    Args:
        host: String, the worker's host as `TF_CONFIG` names it.
        ip: String, the address that its TCP port is bound to.
        port: Int.
        unix_name: String, of its abstract Unix socket.
        machine: String, alike for workers whose Unix sockets reach each other: the
            boot of the kernel, the network namespace and the user.
    """

    host: str
    ip: str
    port: int
    unix_name: str
    machine: str

    def to_json(self) -> str:
        """Format as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Addresses:
        """Parse what `to_json` returned."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        shown = f"[{self.ip}]" if ":" in self.ip else self.ip
        return f"{shown}:{self.port}"


def this_machine() -> str:
    """Identify the machine, the network namespace and the user of this process.

    Returns:
        String, equal for two processes if and only if their abstract Unix sockets
        reach each other and are of one user.
    """
    # Where the system does not tell, nothing is shared: TCP always works.
    network = network_of_host() or secrets.token_hex(16)
    return f"{network} {os.getuid()}"


def listening_address(host: str, interface: str | None) -> str:
    """Choose the address that this worker listens on.

    Args:
        host: String, this worker's host as `TF_CONFIG` names it.
        interface: String or `None`, the name or an address of an interface of this
            host; it goes before `host`.

    Returns:
        String, an IPv4 or IPv6 address of this host.

    Raises:
        TransportError: If there is none, or no single one.

    Example:
    >>> listening_address("localhost", None)
    '127.0.0.1'
    """
    if interface is not None:
        return _address_of_interface(interface)
    found = _resolved(host)
    own = [address for address in found if is_own(address)]
    if not own:
        raise TransportError(
            f"The host of this worker, {host!r}, resolves to {_listed(found)} here, "
            f"which is no address of this host; its own are {_listed_own()}. Mend "
            "TF_CONFIG or the name's entry, or choose one with "
            '`CommunicationOptions(interface="...")`.'
        )
    reached = [address for address in own if not is_loopback(address)]
    if reached or is_local_name(host):
        return (reached or own)[0]
    return _instead_of_loopback(host, own[0])


def is_own(address: str) -> bool:
    """Whether this host has an address.

    Args:
        address: String, an IPv4 or IPv6 address.

    Returns:
        Bool.
    """
    if _parsed(address).is_unspecified:  # stands for all, of which one is asked for
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
    """Return what `socket.bind` and `connect` take, with the scope of link-local ones.

    Args:
        address: String, an IPv4 or IPv6 address.
        port: Int.
    """
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    found = socket.getaddrinfo(
        address, port, family_of(address), socket.SOCK_STREAM, flags=flags
    )
    return found[0][4]


def own_addresses() -> dict[str, list[str]]:
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
    return _parsed(address).is_link_local, ":" in address


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address.partition("%")[0])


def is_loopback(address: str) -> bool:
    """Whether only this host reaches an IPv4 or IPv6 address."""
    return _parsed(address).is_loopback


def _address_of_interface(interface: str) -> str:
    own = own_addresses()
    if interface in own:
        return own[interface][0]
    if ip_address(interface) is not None and is_own(interface):
        return interface
    raise TransportError(
        "`interface` must be the name or an address of an interface of this host that "
        f"is up: {_listed_own()}. Received: interface={interface!r}"
    )


def _resolved(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise TransportError(
            f"The host of this worker, {host!r}, does not resolve here: {error}. Mend "
            "TF_CONFIG or the name's entry, or choose an address of this host with "
            '`CommunicationOptions(interface="...")`.'
        ) from error
    addresses = dict.fromkeys(str(entry[4][0]) for entry in found)
    return sorted(addresses, key=_preference)


def _instead_of_loopback(host: str, loopback: str) -> str:
    """Find the address that is meant by a name that `/etc/hosts` points at loopback.

    Debian writes the own name beside 127.0.1.1, where no other host reaches it.
    """
    others = {
        name: addresses[0]
        for name, addresses in own_addresses().items()
        if not _preference(addresses[0])[0] and not is_loopback(addresses[0])
    }
    if len(others) > 1:
        raise TransportError(
            f"The host of this worker, {host!r}, resolves to {loopback} here, where no "
            "other host reaches it, and this host has several other addresses: "
            f"{_listed_own()}. Choose one with "
            '`CommunicationOptions(interface="...")`.'
        )
    return next(iter(others.values()), loopback)


def _listed(addresses: list[str]) -> str:
    return ", ".join(addresses)


def _listed_own() -> str:
    return ", ".join(
        f"{_listed(addresses)} ({name})" for name, addresses in own_addresses().items()
    )
