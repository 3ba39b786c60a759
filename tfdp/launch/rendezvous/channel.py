"""Channel of sealed lines of JSON between two ends that have proved themselves."""

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

# What is dialled, see `tfdp.communication.connection`.
SERVICE = "rendezvous"
MAX_LINE_BYTES = 1 << 19
# What node 0 reads: no node has more to say.
MAX_REPORT_BYTES = 1 << 16
_MAC_DIGITS = 64
_COUNT_BYTES = 8
BEAT_SECONDS = 1.0
# A machine that has more to do than it can may be silent for some seconds.
SILENT_SECONDS = 15.0
_BEAT = {"type": "beat"}
_CLOSING_SECONDS = 2.0


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


class Channel:
    """Connection to a node of the job: messages both ways, and heartbeats.

    To be used in the event loop of its streams.

    Args:
        reader: `asyncio.StreamReader`.
        writer: `asyncio.StreamWriter`.
        keys: `Authenticated`, of the handshake.
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
        return _plain(self._writer.get_extra_info("peername"))

    @property
    def local(self) -> str:
        """String, the IP address at which the other end has reached this one."""
        return _plain(self._writer.get_extra_info("sockname"))

    @property
    def silent_seconds(self) -> float:
        """Float, seconds since something was heard of the other end."""
        return time.monotonic() - self._heard_at

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; one that cannot be sent shows as a lost connection.

        Args:
            message: Mapping of what JSON holds.
        """
        if not self._writer.is_closing():
            self._writer.write(self._outgoing.close(message))

    async def beat(self) -> None:
        """Send a heartbeat every second, until it is cancelled."""
        while True:
            self.send(_BEAT)
            await asyncio.sleep(BEAT_SECONDS)

    async def receive(self, silent_seconds: float = SILENT_SECONDS) -> dict[str, Any]:
        """Wait for the next message that is no heartbeat.

        Args:
            silent_seconds: Float, after so long without a heartbeat the other end is
                lost. Defaults to `15.0`.

        Returns:
            Dict.

        Raises:
            Lost: If the connection has ended, is silent, or was tampered with.
        """
        while True:
            try:
                line = await asyncio.wait_for(
                    self._reader.readuntil(b"\n"), silent_seconds
                )
                message = self._incoming.open(line)
            except asyncio.TimeoutError as error:
                raise Lost(f"has not answered for {silent_seconds:.0f} s") from error
            except (OSError, asyncio.IncompleteReadError) as error:
                raise Lost("has ended its connection") from error
            except (asyncio.LimitOverrunError, MalformedMessage) as error:
                raise Lost("has sent what is no message") from error
            self._heard_at = time.monotonic()
            if message != _BEAT:
                return message

    async def close(self) -> None:
        """Send what is left, for a moment, and end the connection."""
        try:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                self._writer.close()
                await asyncio.wait_for(self._writer.wait_closed(), _CLOSING_SECONDS)
        finally:
            self._writer.transport.abort()


def _plain(address: Any) -> str:
    """Return the IP address of a socket's address, IPv4 also where IPv6 carries it."""
    text = str(address[0]) if address else ""
    with contextlib.suppress(ValueError):
        found = ipaddress.ip_address(text)
        mapped = getattr(found, "ipv4_mapped", None)
        return str(found if mapped is None else mapped)
    return text
