"""Move data over several connections at once, in both directions, in one thread.

Each connection has an ordered list of what is sent and one of what is received. All
make progress as their sockets allow; poll waits where none does. So two members that
send to each other never wait for each other. What is sent may have to wait until
something else is received and added: it names a `Gate`, which counts that.
"""

from __future__ import annotations

import dataclasses
import select
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

# Missing on macOS, where tfdp is imported and uses none of this.
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
_LEFT = getattr(select, "POLLRDHUP", 0)
_AT_ONCE = socket.MSG_DONTWAIT | _NO_SIGNAL
_ENDED = _LEFT | select.POLLHUP | select.POLLERR | select.POLLNVAL


class Link(Protocol):
    """What a flow needs of a connection."""

    sock: socket.socket

    def lost(self, error: OSError | None) -> Exception:
        """Return the error that says how the connection ended."""

    def has_left(self) -> bool:
        """Whether the other end has closed the connection in good order."""


class Gate:
    """Count of what has been done, for which later pieces wait."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def pass_one(self) -> None:
        """Count one more."""
        self.count += 1


@dataclasses.dataclass(slots=True)
class Piece:
    """Bytes that are sent or received as one.

    Args:
        view: `memoryview` of bytes: what is sent, or where it is received.
        gate: `Gate` or `None`: the piece waits for it.
        needed: Int, the count of the gate from which on the piece moves.
        then: Callable without arguments or `None`, called when all of it has moved.
    """

    view: memoryview
    gate: Gate | None = None
    needed: int = 0
    then: Callable[[], None] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the piece may move."""
        return self.gate is None or self.gate.count >= self.needed


class _Queue:
    """The pieces of one direction, of which the first is under way."""

    __slots__ = ("_pieces", "is_blocked", "piece", "rest")

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces: Iterator[Piece] = iter(pieces)
        self.piece: Piece | None = None
        self.rest = memoryview(b"")
        self.is_blocked = False
        self.next()

    def next(self) -> None:
        self.piece = next(self._pieces, None)
        if self.piece is not None:
            self.rest = self.piece.view

    def pass_empty(self) -> bool:
        """Pass the pieces without bytes, which also wait for their gates.

        Returns:
            Bool, whether there were any: other pieces may have waited for them.
        """
        passed = False
        while (piece := self.piece) is not None:
            if self.rest.nbytes or not piece.is_ready:
                break
            self.finish(piece)
            passed = True
        return passed

    def can_move(self) -> bool:
        """Whether the first piece may move, and did not have to wait when it did."""
        return self.piece is not None and not self.is_blocked and self.piece.is_ready

    def advance(self, num_bytes: int) -> None:
        """Take note of bytes that have moved; fewer than asked for: no more now."""
        if num_bytes < self.rest.nbytes:
            self.rest = self.rest[num_bytes:]
            self.is_blocked = True
        elif self.piece is not None:
            self.finish(self.piece)

    def finish(self, piece: Piece) -> None:
        if piece.then is not None:
            piece.then()
        self.next()


class Flow:
    """Data in both directions over one connection.

    Args:
        link: `Connection`.
        outgoing: Iterable of `Piece`s, sent in this order; one without bytes keeps the
            flow from being done as long as it waits for its gate.
        incoming: Iterable of `Piece`s, received in this order.
    """

    def __init__(
        self, link: Link, outgoing: Iterable[Piece] = (), incoming: Iterable[Piece] = ()
    ) -> None:
        self._link = link
        self._sock = link.sock
        self._out = _Queue(outgoing)
        self._in = _Queue(incoming)
        self._has_left = False

    @property
    def is_done(self) -> bool:
        """Whether all has been sent and received."""
        return self._out.piece is None and self._in.piece is None

    def push(self) -> bool:
        """Send of the next piece what goes without waiting.

        Returns:
            Bool, whether anything moved.

        Raises:
            PeerLost: If the connection has ended.
        """
        queue = self._out
        passed = queue.pass_empty()
        if not queue.can_move():
            return passed
        try:
            num_bytes = self._sock.send(queue.rest, _AT_ONCE)
        except BlockingIOError:
            queue.is_blocked = True
            return passed
        except OSError as error:
            raise self._link.lost(error) from error
        queue.advance(num_bytes)
        return True

    def pull(self) -> bool:
        """Receive of the next piece what is there.

        Returns:
            Bool, whether anything moved.

        Raises:
            PeerLost: If the connection has ended.
        """
        queue = self._in
        passed = queue.pass_empty()
        if not queue.can_move():
            return passed
        try:
            num_bytes = self._sock.recv_into(queue.rest, 0, _AT_ONCE)
        except BlockingIOError:
            queue.is_blocked = True
            return passed
        except OSError as error:
            raise self._link.lost(error) from error
        if num_bytes == 0:
            raise self._link.lost(None)
        queue.advance(num_bytes)
        return True

    @property
    def descriptor(self) -> int:
        """The file descriptor of the connection."""
        return self._sock.fileno()

    @property
    def events(self) -> int:
        """The events to poll for; none where only other connections can help.

        A peer that has got and given all is still watched: if it dies, whoever else
        is waited for may never come.
        """
        if self.is_done:
            return 0 if self._has_left else _LEFT
        events = 0
        if self._in.is_blocked:
            events |= select.POLLIN
        if self._out.is_blocked:
            events |= select.POLLOUT
        if self._out.piece is not None:
            events |= _LEFT  # whoever ends now still wants something
        return events

    def note(self, events: int) -> None:
        """Take note of what poll has found.

        Raises:
            PeerLost: If the connection has ended, and nothing is left to be read.
        """
        if self.is_done and events & _ENDED:
            self._has_left = self._link.has_left()
            if not self._has_left:
                raise self._link.lost(None)
            return
        if events & select.POLLOUT:
            self._out.is_blocked = False
        if self._in.is_blocked:
            # At the connection's end, too: what has arrived before it is read.
            self._in.is_blocked = not events & (select.POLLIN | _ENDED)
        elif events & _ENDED:
            raise self._link.lost(None)


def run(flows: Sequence[Flow]) -> None:
    """Move the data of all flows.

    Args:
        flows: Sequence of `Flow`s, each over another connection.

    Raises:
        PeerLost: If a connection ends before its flow is done.
    """
    active = list(flows)
    while True:
        moved = False
        for flow in active:
            moved = flow.push() or moved
            moved = flow.pull() or moved
        if moved:
            continue
        active = [flow for flow in active if not flow.is_done]
        if not active:
            return
        _wait(flows)


def _wait(flows: Sequence[Flow]) -> None:
    poll = select.poll()
    watched = {}
    for flow in flows:
        if events := flow.events:
            poll.register(flow.descriptor, events)
            watched[flow.descriptor] = flow
    for descriptor, found in poll.poll():
        watched[descriptor].note(found)
