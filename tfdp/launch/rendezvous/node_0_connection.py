"""The thread of each node that keeps its connection to node 0."""

from __future__ import annotations

import collections
import contextlib
import select
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
    authenticate,
    dial_steps,
    reason_of,
)
from tfdp.ground.base.threads import start_thread
from tfdp.ground.forks import close_in_forks
from tfdp.launch.rendezvous.failure import RendezvousError
from tfdp.launch.rendezvous.link import MAX_BYTES, SERVICE, HeartbeatConnection
from tfdp.launch.rendezvous.roster import Hello

# A host behind a firewall may never answer, so one attempt to connect ends after this
# many seconds.
_DIAL_SECONDS = 5.0
# Another process than node 0 may have the port and send nothing, so the handshake ends
# after this many seconds.
_HANDSHAKE_SECONDS = 10.0
# Node 0 may start at the same moment or minutes later, so the pauses between attempts
# to connect double from the first to the longest, in seconds.
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.1, 1.0
# The thread sees a call of `close` only between two waits for messages, so a wait lasts
# at most this many seconds.
_POLL_SECONDS = 0.05
# Node 0 may not read any more, so `close` sends pending messages for at most this many
# seconds.
_CLOSING_SECONDS = 2.0


class Node0Connection:
    """Connection of this node to node 0, for a loop that selects on descriptors.

    A thread connects to node 0, retrying until it answers, and sends heartbeats.
    Received messages are put in a queue: those of the coordinator, and at the end of a
    connection `{"type": "refused", "text": ...}` if this node cannot join,
    `{"type": "unreachable", "text": ...}` if node 0 does not answer in time, or
    `{"type": "lost", "text": ...}` if the connection was lost.

    Args:
        address: Tuple of the IP address or name of node 0, and its port.
        secret: String, the job's secret.
        hello: `Hello` of this node.
        join_seconds: Float, seconds to try to reach node 0.
        place: String, the address as the user gave it, for messages. Defaults to
            `None`, which is `address`.

    Attributes:
        secret: String, the job's secret.
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
        self.secret = secret
        self._hello = hello
        self._join_seconds = join_seconds
        self._inbox: collections.deque[dict[str, Any]] = collections.deque()
        self._wakes, self._waker = socket.socketpair()
        self._wakes.setblocking(False)
        self._waker.setblocking(False)
        self._link: HeartbeatConnection | None = None
        self._is_closed = threading.Event()
        self._thread = start_thread("tfdp connection to node 0", self._run)

    def fileno(self) -> int:
        """Return the descriptor that is readable while the queue has a message."""
        return self._wakes.fileno()

    def pop_message(self) -> dict[str, Any] | None:
        """Return and remove the next message, or `None` if the queue is empty."""
        with contextlib.suppress(BlockingIOError):
            self._wakes.recv(4096)
        with contextlib.suppress(IndexError):
            message = self._inbox.popleft()
            if self._inbox:
                self._wake()  # keeps the descriptor readable for the other messages
            return message
        return None

    def put_back(self, message: dict[str, Any]) -> None:
        """Make a message that `pop_message` has returned the next one again.

        It does not make the descriptor readable: until the message is handled, a loop
        that waits for the descriptor would otherwise spin.
        """
        self._inbox.appendleft(message)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to node 0, if it is connected.

        Args:
            message: Mapping of JSON values.
        """
        # The thread may set `_link` to `None` at any time, so the attribute is read
        # once.
        if (link := self._link) is not None:
            link.send(message)

    def close(self) -> None:
        """Send pending messages for up to 2 s, and close the connection."""
        self._is_closed.set()
        # A thread that is still connecting is not joined, since it has nothing to send
        # and ends by itself.
        if self._link is not None:
            self._thread.join()
        self._wakes.close()
        self._waker.close()

    def _run(self) -> None:
        """Join node 0, and serve the connection until it ends; target of the thread.

        A subclass overrides this method to join again after a loss.
        """
        self._stay_connected()

    def _stay_connected(self, link: HeartbeatConnection | None = None) -> None:
        """Join node 0, and queue its messages until the connection ends.

        Args:
            link: `HeartbeatConnection` to node 0, or `None`, the default, to connect
                first.
        """
        # The last message is queued after any error, since the launcher waits for it
        # without a timeout.
        kind, text = "lost", f"the connection to node 0 at {self._place} was lost"
        try:
            with contextlib.closing(link or self._join()) as link:
                self._serve(link)
        except RendezvousError as error:
            kind, text = "refused", str(error)
        except ConnectionFailed as error:
            if self._link is None:
                kind, text = "unreachable", str(error)
            else:
                text = f"node 0 at {self._place} {error}"
        finally:
            self._link = None
            self._put({"type": kind, "text": text})

    def _put(self, message: dict[str, Any]) -> None:
        """Add a message to the queue, and make the descriptor of `fileno` readable."""
        self._inbox.append(message)
        self._wake()

    def _wake(self) -> None:
        """Make the descriptor of `fileno` readable."""
        with contextlib.suppress(OSError):  # a full or closed socket needs no byte
            self._waker.send(b"\0")

    def _join(self) -> HeartbeatConnection:
        """Connect to node 0, retrying for `join_seconds`.

        Returns:
            `HeartbeatConnection` to node 0.

        Raises:
            RendezvousError: If another process than node 0 of this job answers.
            ConnectionFailed: If nothing answers in time.
        """
        deadline = time.monotonic() + self._join_seconds
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return self._dial()
            except UnauthenticatedPeer as error:
                raise RendezvousError(_describe_mismatch(error, self._place)) from error
            except ConnectionFailed as error:
                reason = str(error)
            is_late = time.monotonic() + pause >= deadline
            if is_late or self._is_closed.wait(pause):
                raise ConnectionFailed(
                    f"waited {self._join_seconds:g} s for node 0, and nothing answers "
                    f"at {self._place} ({reason}). Start the same `tfdp run` there, "
                    "and check that no firewall closes the port"
                )
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    def _dial(self) -> HeartbeatConnection:
        """Connect to node 0 once, and authenticate.

        Raises:
            UnauthenticatedPeer: If another process than node 0 of this job answers.
            ConnectionFailed: If nothing answers.
        """
        try:
            sock = socket.create_connection(self._address, _DIAL_SECONDS)
        except OSError as error:
            raise ConnectionFailed(reason_of(error)) from error
        steps = dial_steps(self.secret, SERVICE)
        keys = authenticate(close_in_forks(sock), steps, _HANDSHAKE_SECONDS)
        sock.setblocking(False)
        return HeartbeatConnection(sock, keys, MAX_BYTES)

    def _serve(self, link: HeartbeatConnection) -> None:
        """Queue the messages of node 0 until `close`.

        Raises:
            ConnectionFailed: If the connection is lost, or was tampered with.
        """
        link.send(self._hello.to_message())
        self._link = link
        while not self._is_closed.is_set():
            self._exchange_messages(link)
        deadline = time.monotonic() + _CLOSING_SECONDS
        while link.has_output and time.monotonic() < deadline:
            self._exchange_messages(link)

    def _exchange_messages(self, link: HeartbeatConnection) -> None:
        """Send pending bytes, and queue received messages; wait up to 50 ms for any."""
        poll = select.poll()
        poll.register(link, select.POLLIN | (select.POLLOUT if link.has_output else 0))
        poll.poll(_POLL_SECONDS * 1000)
        for message in link.proceed():
            self._put(message)
        link.tick()


def _describe_mismatch(error: UnauthenticatedPeer, place: str) -> str:
    """Return the error text for a peer at `place` that failed to authenticate."""
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
