"""Channel of sealed messages between two ends that have proved themselves."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import time
from collections.abc import Mapping
from typing import Any

from tfdp.communication.connection.handshake import Authenticated
from tfdp.launch.rendezvous.failure import Lost, MalformedMessage
from tfdp.launch.rendezvous.messages import Seal

BEAT_SECONDS = 1.0
# A machine that has more to do than it can may be silent for some seconds.
SILENT_SECONDS = 15.0
_BEAT = {"type": "beat"}
_CLOSING_SECONDS = 2.0


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
