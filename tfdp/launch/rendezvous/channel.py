"""Channel of authenticated lines of JSON between two ends that share the secret."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import time
from collections.abc import Mapping
from typing import Any

from tfdp.communication.connection.handshake import Authenticated
from tfdp.ground.text import pluralize
from tfdp.launch.rendezvous.failure import Lost, MalformedMessage

# Name of the service in the handshake of `tfdp.communication.connection`.
SERVICE = "rendezvous"
# Longest line that node 0 sends: the addresses of all workers are one message.
MAX_LINE_BYTES = 1 << 19
# Longest line that node 0 reads: the reports of nodes are shorter than that.
MAX_REPORT_BYTES = 1 << 16
# Hexadecimal digits of an HMAC-SHA256.
_MAC_DIGITS = 64
# Bytes of the message number that is part of what the HMAC covers.
_COUNT_BYTES = 8
# Interval of the heartbeats.
BEAT_SECONDS = 1.0
# Silence after which a node counts as lost: an overloaded machine may be silent for
# some seconds.
SILENT_SECONDS = 15.0
_BEAT = {"type": "beat"}
# Longest wait of `close` until all pending lines are sent.
_CLOSING_SECONDS = 2.0


def encode(message: Mapping[str, Any]) -> bytes:
    r"""Encode a message as one line.

    Args:
        message: Mapping of JSON values.

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
    """Decode a message.

    Args:
        line: Bytes, one line.

    Returns:
        Dict, the message.

    Raises:
        MalformedMessage: If the line is no JSON object.

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
    """Authentication of the messages in one direction of a connection.

    Each line begins with an HMAC-SHA256 of its number and content, so that an attacker
    between the two ends cannot add, alter or repeat a line.

    Args:
        key: Bytes, the key of this connection and direction.

    Example:

    >>> sender, receiver = Seal(b"key"), Seal(b"key")
    >>> receiver.unseal(sender.seal({"type": "beat"}))
    {'type': 'beat'}
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def seal(self, message: Mapping[str, Any]) -> bytes:
        """Encode and authenticate the next outgoing message.

        Args:
            message: Mapping of JSON values.

        Returns:
            Bytes that end with a line feed.
        """
        line = encode(message)
        return self._mac(line) + b" " + line

    def unseal(self, line: bytes) -> dict[str, Any]:
        """Verify and decode the next incoming message.

        Args:
            line: Bytes that end with a line feed.

        Returns:
            Dict, the message.

        Raises:
            MalformedMessage: If the HMAC does not match the line.
        """
        mac, _, rest = line.partition(b" ")
        if not hmac.compare_digest(mac, self._mac(rest)):
            raise MalformedMessage
        return decode(rest)

    def _mac(self, line: bytes) -> bytes:
        """Return the HMAC of the next line in hexadecimal digits."""
        number = self._count.to_bytes(_COUNT_BYTES, "big")
        self._count += 1
        return hmac.digest(self._key, number + line, "sha256").hex().encode()


class Channel:
    """Connection to a node of the job: messages in both directions, and heartbeats.

    All methods must be called in the event loop of the streams.

    Args:
        reader: `asyncio.StreamReader`.
        writer: `asyncio.StreamWriter`.
        keys: `Authenticated`, the result of the handshake.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        keys: Authenticated,
    ) -> None:
        self._reader, self._writer = reader, writer
        self._outgoing, self._incoming = Seal(keys.outgoing), Seal(keys.incoming)
        self._heard_at = time.monotonic()

    @property
    def peer(self) -> str:
        """String, the IP address of the other end."""
        return _ip_address(self._writer.get_extra_info("peername"))

    @property
    def local(self) -> str:
        """String, the IP address of this end that the other end is connected to."""
        return _ip_address(self._writer.get_extra_info("sockname"))

    @property
    def silent_seconds(self) -> float:
        """Float, seconds since the last message or heartbeat of the other end."""
        return time.monotonic() - self._heard_at

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; a failure to send shows in `receive` as a lost connection.

        Args:
            message: Mapping of JSON values.
        """
        if not self._writer.is_closing():
            self._writer.write(self._outgoing.seal(message))

    async def beat(self) -> None:
        """Send a heartbeat every second, until the task is cancelled."""
        while True:
            self.send(_BEAT)
            await asyncio.sleep(BEAT_SECONDS)

    async def receive(self, silent_seconds: float = SILENT_SECONDS) -> dict[str, Any]:
        """Wait for the next message that is no heartbeat.

        Args:
            silent_seconds: Float, silence after which the other end counts as lost.
                Defaults to `15.0`.

        Returns:
            Dict, the message.

        Raises:
            Lost: If the connection has ended, is silent, or was tampered with.
        """
        while True:
            try:
                line = await asyncio.wait_for(
                    self._reader.readuntil(b"\n"), silent_seconds
                )
                message = self._incoming.unseal(line)
            except asyncio.TimeoutError as error:
                raise Lost(f"has not answered for {silent_seconds:.0f} s") from error
            except (OSError, asyncio.IncompleteReadError) as error:
                raise Lost("has closed its connection") from error
            except (asyncio.LimitOverrunError, MalformedMessage) as error:
                raise Lost("has sent an invalid message") from error
            self._heard_at = time.monotonic()
            if message != _BEAT:
                return message

    async def close(self) -> None:
        """Flush pending messages for up to 2 s, and close the connection."""
        try:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                self._writer.close()
                await asyncio.wait_for(self._writer.wait_closed(), _CLOSING_SECONDS)
        finally:
            self._writer.transport.abort()


def _ip_address(address: Any) -> str:
    """Return the IP address of a socket address; IPv4-mapped IPv6 becomes IPv4."""
    text = str(address[0]) if address else ""
    with contextlib.suppress(ValueError):
        parsed = ipaddress.ip_address(text)
        mapped = getattr(parsed, "ipv4_mapped", None)
        return str(parsed if mapped is None else mapped)
    return text
