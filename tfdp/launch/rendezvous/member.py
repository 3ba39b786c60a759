"""The thread of each node that keeps its connection to node 0."""

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

# Timeout of one attempt to connect.
_DIAL_SECONDS = 5.0
# Timeout of the handshake of a new connection.
_HANDSHAKE_SECONDS = 10.0
# Wait for the end of the thread before it is cancelled again.
_CANCEL_SECONDS = 1.0
# The pause between attempts to connect doubles from the first to the longest.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 1.0


class Member:
    """Connection of this node to node 0, for a loop that selects on descriptors.

    A thread connects to node 0, retrying until it answers, and sends heartbeats.
    Received messages are put in a queue: those of the coordinator, and as the last one
    `{"type": "refused", "text": ...}` if this node cannot join,
    `{"type": "unreachable", "text": ...}` if node 0 does not answer in time, or
    `{"type": "lost", "text": ...}` if the connection has ended.

    Args:
        address: Tuple of the IP address or name of node 0, and its port.
        secret: String, the job's secret.
        hello: `Hello` of this node.
        join_seconds: Float, seconds to try to reach node 0.
        place: String, the address as the user gave it, for messages. Defaults to
            `None`, which is `address`.
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
        """Return the descriptor that is readable while the queue has a message."""
        return self._wakes.fileno()

    def take(self) -> dict[str, Any] | None:
        """Return and remove the next message, or `None` if the queue is empty."""
        with contextlib.suppress(BlockingIOError):
            self._wakes.recv(4096)
        with contextlib.suppress(IndexError):
            message = self._inbox.popleft()
            if self._inbox:
                self._wake()  # keeps the descriptor readable for the remaining ones
            return message
        return None

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to node 0, if it is connected.

        Args:
            message: Mapping of JSON values.
        """
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._send, dict(message))

    def close(self) -> None:
        """Close the connection and end the thread."""
        # The cancellation is repeated, since `asyncio.wait_for` of Python 3.10 and 3.11
        # may swallow one that coincides with a message.
        while self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join(_CANCEL_SECONDS)
        self._wakes.close()
        self._waker.close()

    def _send(self, message: dict[str, Any]) -> None:
        """Send a message in the thread of the event loop, if node 0 is connected."""
        if self._channel is not None:
            self._channel.send(message)

    def _cancel(self) -> None:
        """Cancel the task of the connection, in the thread of the event loop."""
        if self._task is not None:
            self._task.cancel()

    def _run(self) -> None:
        """Run the event loop of the connection; the target of the thread."""
        with contextlib.closing(self._loop):
            self._task = self._loop.create_task(self._serve())
            try:
                with contextlib.suppress(asyncio.CancelledError):
                    self._loop.run_until_complete(self._task)
            finally:
                # Sent also after an unforeseen error, so that the launcher, which waits
                # for a last message, does not wait indefinitely.
                text = f"the connection to node 0 at {self._place} was lost"
                self._put({"type": "lost", "text": text})
            self._loop.run_until_complete(self._loop.shutdown_default_executor())

    def _put(self, message: dict[str, Any]) -> None:
        """Add a message to the queue, and make the descriptor readable."""
        self._inbox.append(message)
        self._wake()

    def _wake(self) -> None:
        """Make the descriptor of `fileno` readable."""
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"\0")

    async def _serve(self) -> None:
        """Join node 0, and queue its messages until the connection ends."""
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
        """Connect to node 0, retrying for `join_seconds`."""
        deadline = time.monotonic() + self._join_seconds
        pause, reason = _FIRST_PAUSE_SECONDS, ""
        while True:
            try:
                return await self._dial()
            except UnauthenticatedPeer as error:
                raise RendezvousError(_describe_mismatch(error, self._place)) from error
            except (ConnectionFailed, asyncio.TimeoutError) as error:
                reason = str(error) or "no answer"
            except OSError as error:
                reason = error.strerror or str(error)
            if time.monotonic() + pause >= deadline:
                raise Lost(
                    f"waited {self._join_seconds:g} s for node 0, and nothing answers "
                    f"at {self._place} ({reason}). Start the same `tfdp run` there, "
                    "and check that no firewall closes the port"
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _dial(self) -> Channel:
        """Connect to node 0 once, and authenticate."""
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


def _describe_mismatch(error: UnauthenticatedPeer, place: str) -> str:
    """Return the error text for a peer at `place` that is not node 0 of this job."""
    if isinstance(error, WrongService) and error.version is not None:
        return (
            f"Node 0 at {place} has another version of tfdp; install the same one on "
            f"all machines. Received: protocol {error.version!r}, here {VERSION!r}"
        )
    if isinstance(error, WrongService):
        return (
            f"The process that listens at {place} is not a rendezvous of `tfdp run`; "
            "give the address of node 0, and a port that nothing else uses. "
            f"Received: {error.received[:40]!r}"
        )
    return (
        f"The secret of this node differs from that of node 0 at {place}: paste the "
        "line that node 0 has printed, or give both the same file. "
        "Received: another TFDP_JOB_SECRET_FILE"
    )
