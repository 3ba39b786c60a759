"""Data over several connections at once, in both directions, in one thread.

Each connection has an ordered list of pieces to send and one of pieces to receive. All
make progress as their sockets allow; `poll` waits if none does. So two members that
send to each other do not deadlock. A piece may have to wait until other data is
received and added: it then names a `SegmentCounter`, which counts that data.
"""

from __future__ import annotations

import dataclasses
import select
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

# macOS lacks these constants. The module is imported there but not used, so 0 stands in
# for them.
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
_PEER_CLOSED = getattr(select, "POLLRDHUP", 0)
_NON_BLOCKING = socket.MSG_DONTWAIT | _NO_SIGNAL
_ENDED = _PEER_CLOSED | select.POLLHUP | select.POLLERR | select.POLLNVAL


class Link(Protocol):
    """Interface of a connection that a flow needs: its socket, and why it has ended.

    Attributes:
        sock: Connected `socket.socket`.
    """

    sock: socket.socket

    def lost(self, error: OSError | None) -> Exception:
        """Return the error to raise after the connection has ended, with the reason.

        Args:
            error: `OSError` of the socket, or `None` at the end of its stream.
        """

    def has_left(self) -> bool:
        """Return whether the other end has closed the connection without an error."""


class SegmentCounter:
    """Number of segments that have arrived or were added; `Piece`s may wait for it.

    The number grows by calls of `increment`, such as from `Piece.then`.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def increment(self) -> None:
        """Add one to the count."""
        self.count += 1


@dataclasses.dataclass(slots=True)
class Piece:
    """Bytes that a `Flow` sends or receives, maybe only after other data.

    Args:
        view: `memoryview` of bytes, to send or to receive into.
        counter: `SegmentCounter` that the piece waits for, or `None`.
        needed: Int, least count at which the piece may move.
        then: Callable without arguments or `None`, called when all bytes have moved.
    """

    view: memoryview
    counter: SegmentCounter | None = None
    needed: int = 0
    then: Callable[[], None] | None = None

    @property
    def is_ready(self) -> bool:
        """Bool, whether the piece may move: its counter has reached `needed`."""
        return self.counter is None or self.counter.count >= self.needed


class _Queue:
    """Pieces of one direction of a flow, which move one after another.

    Args:
        pieces: Iterable of `Piece`s, in order.

    Attributes:
        piece: `Piece` that moves at present, or `None` at the end.
        rest: `memoryview` of the bytes of that piece that have not moved yet.
        is_blocked: Bool, whether the socket has taken or given fewer bytes than asked.
    """

    __slots__ = ("_pieces", "is_blocked", "piece", "rest")

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces: Iterator[Piece] = iter(pieces)
        self.piece: Piece | None = None
        self.rest = memoryview(b"")
        self.is_blocked = False
        self.next()

    def next(self) -> None:
        """Make the next piece the current one, or `None` after the last."""
        self.piece = next(self._pieces, None)
        if self.piece is not None:
            self.rest = self.piece.view

    def pass_empty(self) -> bool:
        """Finish the next pieces as long as they have no bytes and need not wait.

        Returns:
            Bool, whether any was finished: other pieces may have waited for it.
        """
        passed = False
        while (piece := self.piece) is not None:
            if self.rest.nbytes or not piece.is_ready:
                break
            self.finish(piece)
            passed = True
        return passed

    def can_move(self) -> bool:
        """Return whether the current piece is ready, and its socket has not blocked."""
        return self.piece is not None and not self.is_blocked and self.piece.is_ready

    def advance(self, num_bytes: int) -> None:
        """Record that bytes of the current piece have moved; finish it if all have.

        If some are left, the socket has taken or given fewer than asked: it is blocked.
        """
        if num_bytes < self.rest.nbytes:
            self.rest = self.rest[num_bytes:]
            self.is_blocked = True
        elif self.piece is not None:
            self.finish(self.piece)

    def finish(self, piece: Piece) -> None:
        """Call the `then` of a completed piece, and make the next one current."""
        if piece.then is not None:
            piece.then()
        self.next()


class Flow:
    """Transfer of data in both directions over one connection.

    Args:
        link: `Connection`.
        outgoing: Iterable of `Piece`s, sent in this order; the flow is not done while
            an empty one waits for its counter.
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
        """Bool, whether all pieces have been sent and received."""
        return self._out.piece is None and self._in.piece is None

    def push(self) -> bool:
        """Send as much of the current outgoing piece as possible without blocking.

        Returns:
            Bool, whether bytes have moved, or a piece without bytes is finished.

        Raises:
            PeerLost: If the connection has ended.
        """
        return self._move(self._out, self._sock.send, _NON_BLOCKING)

    def pull(self) -> bool:
        """Receive as much of the current incoming piece as possible without blocking.

        Returns:
            Bool, whether bytes have moved, or a piece without bytes is finished.

        Raises:
            PeerLost: If the connection has ended.
        """
        return self._move(self._in, self._sock.recv_into, 0, _NON_BLOCKING)

    def _move(self, queue: _Queue, transfer: Callable[..., int], *options: int) -> bool:
        """Send or receive bytes of a queue's pieces without blocking.

        Args:
            queue: `_Queue` of the pieces to send, or of those to receive.
            transfer: Method of the socket that sends or receives; returns the number of
                bytes that have moved.
            *options: Further arguments of `transfer`.

        Returns:
            Bool, whether bytes have moved, or a piece without bytes is finished.

        Raises:
            PeerLost: If the connection has ended.
        """
        passed = queue.pass_empty()
        if not queue.can_move():
            return passed
        try:
            num_bytes = transfer(queue.rest, *options)
        except BlockingIOError:
            queue.is_blocked = True
            return passed
        except OSError as error:
            raise self._link.lost(error) from error
        if num_bytes == 0:  # only `recv_into` returns 0: the peer has closed the stream
            raise self._link.lost(None)
        queue.advance(num_bytes)
        return True

    @property
    def descriptor(self) -> int:
        """Int, the file descriptor of the connection."""
        return self._sock.fileno()

    @property
    def events(self) -> int:
        """Int, bit mask of the events to poll for; 0 for none.

        It has the events that unblock the flow, and the end of the connection while
        data is to be sent. The end is also watched after the flow is done: if the peer
        dies, other members may never send their data.
        """
        if self.is_done:
            return 0 if self._has_left else _PEER_CLOSED
        events = 0
        if self._in.is_blocked:
            events |= select.POLLIN
        if self._out.is_blocked:
            events |= select.POLLOUT
        if self._out.piece is not None:
            # A peer that closes the connection before it has received all data is lost.
            # The poll must report that, even while this flow waits for other flows.
            events |= _PEER_CLOSED
        return events

    def handle(self, events: int) -> None:
        """Let the flow send or receive again, by the events that `poll` has reported.

        Args:
            events: Int, the bit mask of the events.

        Raises:
            PeerLost: If the connection has ended, and no data is left to read.
        """
        if self.is_done and events & _ENDED:
            self._has_left = self._link.has_left()
            if not self._has_left:
                raise self._link.lost(None)
            return
        if events & select.POLLOUT:
            self._out.is_blocked = False
        if self._in.is_blocked:
            # The end of the connection also unblocks reading: data that arrived before
            # the end may be unread.
            self._in.is_blocked = not events & (select.POLLIN | _ENDED)
        elif events & _ENDED:
            raise self._link.lost(None)


def run(flows: Sequence[Flow]) -> None:
    """Send and receive the data of all flows, until each flow is done.

    Args:
        flows: Sequence of `Flow`s, each over a different connection.

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
    """Wait until a connection can move data again or has ended; handle all such events.

    Raises:
        PeerLost: If a connection has ended, and no data is left to read.
    """
    poll = select.poll()
    watched = {}
    for flow in flows:
        if events := flow.events:
            poll.register(flow.descriptor, events)
            watched[flow.descriptor] = flow
    for descriptor, found in poll.poll():
        watched[descriptor].handle(found)
