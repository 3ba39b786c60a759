"""Thread of every node that keeps its connection to the rendezvous."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from tfdp.communication.connection.handshake import (
    VERSION,
    ConnectionFailed,
    UnauthenticatedPeer,
    WrongService,
    authenticate_stream,
    dial_steps,
)
from tfdp.launch.rendezvous.channel import MAX_LINE_BYTES, SERVICE, Channel
from tfdp.launch.rendezvous.failure import Lost, RendezvousError
from tfdp.launch.rendezvous.roster import Hello

_DIAL_SECONDS = 5.0
_HANDSHAKE_SECONDS = 10.0
_CANCEL_SECONDS = 1.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 1.0


class Member:
    """Connection of this node to the rendezvous, for a loop that waits on many things.

    A thread dials until node 0 is there, and keeps the heartbeats going. What it hears
    is taken from a queue: the messages of the coordinator, and as the last one
    `{"type": "refused", "text": ...}`, when this node cannot take part,
    `{"type": "unreachable", "text": ...}`, when there is no node 0 in time, or
    `{"type": "lost", "text": ...}`, when it has gone.

    Args:
        address: The IP address or name of node 0 and its port.
        secret: String, the job's.
        hello: `Hello` of this node.
        join_seconds: Float, how long to try to reach node 0.
        place: String, the address as the user gave it. Defaults to `None`, that which
            is dialled.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: str,
        hello: Hello,
        join_seconds: float,
        place: str | None = None,
    ) -> None:
        self._address = address
        self._place = place or f"{address[0]}:{address[1]}"
        self._secret = secret
        self._hello = hello
        self._join_seconds = join_seconds
        self._inbox: collections.deque[dict[str, Any]] = collections.deque()
        self._wakes, self._waker = socket.socketpair()
        self._wakes.setblocking(False)
        self._waker.setblocking(False)
        self._loop = asyncio.new_event_loop()
        self._channel: Channel | None = None
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(
            target=self._run, name="tfdp-rendezvous-member", daemon=True
        )
        self._thread.start()

    def fileno(self) -> int:
        """Return the descriptor that can be read when there is a message."""
        return self._wakes.fileno()

    def take(self) -> dict[str, Any] | None:
        """Take the next message, or `None` if there is none."""
        with contextlib.suppress(BlockingIOError):
            self._wakes.recv(4096)
        with contextlib.suppress(IndexError):
            message = self._inbox.popleft()
            if self._inbox:
                self._wake()  # a selector has to see the rest
            return message
        return None

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to node 0, if there is a connection.

        Args:
            message: Mapping of what JSON holds.
        """
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._send, dict(message))

    def close(self) -> None:
        """End the connection and the thread."""
        # Again and again: `asyncio.wait_for` of Python 3.10 and 3.11 may swallow a
        # cancellation that comes together with a message.
        while self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join(_CANCEL_SECONDS)
        self._wakes.close()
        self._waker.close()

    def _send(self, message: dict[str, Any]) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._task = self._loop.create_task(self._serve())
            try:
                with contextlib.suppress(asyncio.CancelledError):
                    self._loop.run_until_complete(self._task)
            finally:
                # Also if nobody has foreseen it: who waits for a message gets one.
                text = f"node 0 at {self._place} is not heard any more"
                self._put({"type": "lost", "text": text})
            self._loop.run_until_complete(self._loop.shutdown_default_executor())

    def _put(self, message: dict[str, Any]) -> None:
        self._inbox.append(message)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"\0")

    async def _serve(self) -> None:
        try:
            channel = await self._join()
        except RendezvousError as error:
            self._put({"type": "refused", "text": str(error)})
            return
        except Lost as error:
            self._put({"type": "unreachable", "text": str(error)})
            return
        self._channel = channel
        channel.send(self._hello.to_message())
        beats = asyncio.create_task(channel.beat())
        try:
            while True:
                self._put(await channel.receive())
        except Lost as error:
            self._put({"type": "lost", "text": f"node 0 at {self._place} {error}"})
        finally:
            beats.cancel()
            await channel.close()

    async def _join(self) -> Channel:
        """Dial until node 0 has answered, or for too long."""
        deadline = time.monotonic() + self._join_seconds
        pause, reason = _FIRST_PAUSE_SECONDS, ""
        while True:
            try:
                return await self._dial()
            except UnauthenticatedPeer as error:
                raise RendezvousError(_difference(error, self._place)) from error
            except (ConnectionFailed, asyncio.TimeoutError) as error:
                reason = str(error) or "no answer"
            except OSError as error:
                reason = error.strerror or str(error)
            if time.monotonic() + pause >= deadline:
                raise Lost(
                    f"waited {self._join_seconds:g} s for node 0, and nothing answers "
                    f"at {self._place} ({reason}). Start the same `tfdp run` there, "
                    "and see whether a firewall closes the port"
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _dial(self) -> Channel:
        host, port = self._address
        connecting = asyncio.open_connection(host, port, limit=MAX_LINE_BYTES)
        reader, writer = await asyncio.wait_for(connecting, _DIAL_SECONDS)
        try:
            steps = dial_steps(self._secret, SERVICE)
            keys = await asyncio.wait_for(
                authenticate_stream(reader, writer, steps), _HANDSHAKE_SECONDS
            )
        except BaseException:
            writer.transport.abort()
            raise
        return Channel(reader, writer, keys)


def _difference(error: UnauthenticatedPeer, place: str) -> str:
    """Say in what the end that was dialled is not this job's node 0."""
    if isinstance(error, WrongService) and error.version is not None:
        return (
            f"Node 0 at {place} has another version of tfdp; install the same one on "
            f"all machines. Received: protocol {error.version!r}, here {VERSION!r}"
        )
    if isinstance(error, WrongService):
        return (
            f"What listens at {place} is no rendezvous of `tfdp run`; give the address "
            "of node 0, and a port that nothing else uses. "
            f"Received: {error.received[:40]!r}"
        )
    return (
        f"The secret of this node is not that of node 0 at {place}: paste the line "
        "that node 0 has printed, or give both the same file. "
        "Received: another TFDP_JOB_SECRET_FILE"
    )
