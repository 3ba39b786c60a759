"""Addresses of the form `"host:port"`."""

from __future__ import annotations

import re

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+(?:%\w+)?\]|[^\s:/\[\]]+):([0-9]{1,5})")


def split_address(address: str) -> tuple[str, int]:
    """Split an address into its host and its port.

    Args:
        address: String, `"host:port"`; an IPv6 host stands in brackets.

    Returns:
        The host, without brackets, and the port.

    Raises:
        ValueError: If the address has no host, or no port from 1 to 65535.

    Example:
    >>> split_address("[::1]:2222")
    ('::1', 2222)
    """
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ValueError(
            "Every task of the cluster needs an address of the form 'host:port' "
            f"with a port from 1 to 65535. Received: {address!r}"
        )
    return match[1].strip("[]"), int(match[2])
