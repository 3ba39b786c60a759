"""Messages as lines of JSON of limited length, and their seals."""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from typing import Any

from tfdp.ground.text import pluralize
from tfdp.launch.rendezvous.failure import MalformedMessage

# What is dialled, see `tfdp.communication.connection`.
SERVICE = "rendezvous"
MAX_LINE_BYTES = 1 << 19
# What node 0 reads: no node has more to say.
MAX_REPORT_BYTES = 1 << 16
_MAC_DIGITS = 64
_COUNT_BYTES = 8


def encode(message: Mapping[str, Any]) -> bytes:
    r"""Write a message as one line.

    Args:
        message: Mapping of what JSON holds.

    Returns:
        Bytes that end with a line feed.

    Raises:
        ValueError: If the line would be too long.

    Example:

    >>> encode({"type": "beat"})
    b'{"type":"beat"}\n'
    """
    line = json.dumps(dict(message), separators=(",", ":")).encode() + b"\n"
    if len(line) > MAX_LINE_BYTES - _MAC_DIGITS - 1:
        raise ValueError(
            f"The message is too long. Received: {pluralize(len(line), 'byte')}"
        )
    return line


def decode(line: bytes) -> dict[str, Any]:
    """Read a message.

    Args:
        line: Bytes, one line.

    Returns:
        Dict.

    Raises:
        MalformedMessage: If it is no JSON object.

    Example:

    >>> decode(b'{"type":"beat"}')
    {'type': 'beat'}
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage from error
    if not isinstance(message, dict):
        raise MalformedMessage
    return message


class Seal:
    """Seal of the messages in one direction of a connection.

    Before each line stands an HMAC-SHA256 of it and of its number, so that nobody
    between the two ends can add a line, alter one or repeat it.

    Args:
        key: Bytes, of this connection and direction.

    Example:

    >>> there, here = Seal(b"key"), Seal(b"key")
    >>> here.open(there.close({"type": "beat"}))
    {'type': 'beat'}
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def close(self, message: Mapping[str, Any]) -> bytes:
        """Write the next message.

        Args:
            message: Mapping of what JSON holds.

        Returns:
            Bytes that end with a line feed.
        """
        line = encode(message)
        return self._mac(line) + b" " + line

    def open(self, line: bytes) -> dict[str, Any]:
        """Read the next message.

        Args:
            line: Bytes that end with a line feed.

        Returns:
            Dict.

        Raises:
            MalformedMessage: If the seal is not that of this line.
        """
        mac, _, rest = line.partition(b" ")
        if not hmac.compare_digest(mac, self._mac(rest)):
            raise MalformedMessage
        return decode(rest)

    def _mac(self, line: bytes) -> bytes:
        number = self._count.to_bytes(_COUNT_BYTES, "big")
        self._count += 1
        return hmac.digest(self._key, number + line, "sha256").hex().encode()
