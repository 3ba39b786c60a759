"""Collectives over sockets: TCP, and Unix sockets between processes of one host."""

from __future__ import annotations

import contextlib
import functools
import itertools
import socket
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from tfdp.communication.transport.arithmetic import is_half, sum_into
from tfdp.communication.transport.calls import (
    HEADER_BYTES,
    CollectiveHeader,
    call_of,
    check,
)
from tfdp.communication.transport.communicator import (
    Array,
    PeerLost,
    TransportClosed,
    TransportError,
)
from tfdp.communication.transport.connections import CloseReason, Connection
from tfdp.communication.transport.flows import Flow, Piece, SegmentCounter, run
from tfdp.communication.transport.mesh import Mesh
from tfdp.communication.transport.schedules import (
    SEGMENT_BYTES,
    OrderedSums,
    Ring,
    Segments,
    bytes_of,
    equal_bounds,
)

# Largest number of received bytes for which one exchange of whole arrays is faster than
# a reduce-scatter and an all-gather: by a third between two members of one host, by
# half between three.
SMALL_BYTES = 128 << 10


class SocketCommunicator:
    """Collectives of a group of workers over the connections of a mesh.

    An all-reduce is a ring of reduce-scatter and all-gather, in segments: one segment
    is added while the next one arrives, and is sent as soon as it is added. Each of N
    members sends and receives 2 (N - 1) / N of the array's bytes. The kernel copies
    each received byte once, and NumPy adds segments from a buffer that stays in the
    cache; data is sent from the array itself. If a member receives at most 128 kB, the
    array is exchanged whole. Half precision is not rounded at each hop of a ring: with
    more than two members, each receives its part from all others, and adds the parts in
    float32.

    Two members have one connection. Two or three were no faster: between network
    namespaces the CPU is the limit, and on a link of 1 Gbit/s one connection already
    transfers 0.95 Gbit/s.

    Args:
        mesh: `Mesh` of this worker.
        ranks: Sequence of int, the members, including this worker.
        lane: String, purpose of the group, the same on all members.
        segment_bytes: Int, size of the segments of large arrays, a multiple of 8.
        small_bytes: Int, largest number of bytes that a member receives in an exchange
            of whole arrays.

    Raises:
        PeerLost: If a member ends before the group is connected.
        TransportError: If a member does not connect in time.
    """

    def __init__(
        self,
        mesh: Mesh,
        ranks: Sequence[int],
        lane: str,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        small_bytes: int = SMALL_BYTES,
    ) -> None:
        self.ranks = tuple(ranks)
        self.index = self.ranks.index(mesh.rank)
        self._rank = mesh.rank
        self._size = len(self.ranks)
        self._links: dict[int, Connection] = {}
        self._segment = segment_bytes
        self._small_bytes = small_bytes
        self._scratch = np.empty(0, np.uint8)
        try:
            for index, rank in enumerate(self.ranks):
                if index != self.index:
                    self._links[index] = mesh.connect(rank, lane)
        except BaseException:
            self.close("its group could not be formed")
            raise
        is_local = all(link.is_unix for link in self._links.values())
        self.name = "unix sockets" if is_local and self._links else "tcp"

    def all_reduce(self, array: Array, tag: int, into: Array | None = None) -> None:
        """Sum `array` over all members, in place or into `into`.

        Implements `Communicator.all_reduce`; `tag` identifies the call.
        """
        total = array if into is None else into
        call = call_of("all-reduce", array, tag)
        with self._collective():
            if array.nbytes * (self._size - 1) <= self._small_bytes:
                self._exchange_whole(call, array, total)
            else:
                bounds = equal_bounds(len(array), self._size)
                self._reduce(call, array, bounds, total, gather=True)

    def reduce_scatter(
        self, array: Array, bounds: Sequence[int], tag: int, into: Array | None = None
    ) -> None:
        """Sum this member's part of `array` over all members, in place or into `into`.

        Implements `Communicator.reduce_scatter`. The part of member `i` is from
        `bounds[i]` to `bounds[i + 1]`; `tag` identifies the call.
        """
        if into is not None:
            array = array.copy()
        call = call_of("reduce-scatter", array, tag, bounds)
        with self._collective():
            self._reduce(call, array, bounds, array, gather=False)
        if into is not None:
            into[:] = array[bounds[self.index] : bounds[self.index + 1]]

    def all_gather(self, array: Array, bounds: Sequence[int], tag: int) -> None:
        """Receive the parts of the other members into `array`.

        Implements `Communicator.all_gather`. The part of member `i` is from
        `bounds[i]` to `bounds[i + 1]`; `tag` identifies the call.
        """
        call = call_of("all-gather", array, tag, bounds)
        with self._collective():
            steps = range(self._size - 1, 2 * self._size - 2)
            self._ring(call, array, bounds, array, steps)

    def all_to_all(
        self, sent: Sequence[Array], received: Sequence[Array], tag: int
    ) -> None:
        """Send `sent[i]` to member `i`, and receive from it into `received[i]`.

        Implements `Communicator.all_to_all`; `tag` identifies the call.
        """
        with self._collective():
            received[self.index][:] = sent[self.index]
            flows = []
            for index, link in self._links.items():
                own = call_of("all-to-all", sent[index], tag)
                expected = call_of("all-to-all", received[index], tag)
                outgoing = [Piece(bytes_of(sent[index]))]
                incoming = [Piece(bytes_of(received[index]))]
                flows.append(self._flow(link, own, outgoing, expected, incoming))
            self._run(flows)

    def broadcast(self, array: Array, source: int, tag: int) -> None:
        """Copy `array` of the member with index `source` to all members.

        Implements `Communicator.broadcast`; `tag` identifies the call.
        """
        call = call_of(f"broadcast {source}", array, tag)
        with self._collective():
            if self._size > 2 and array.nbytes <= self._small_bytes:
                self._broadcast_flat(call, array, source)
            elif self._size > 1:
                self._broadcast_chain(call, array, source)

    def barrier(self, tag: int) -> None:
        """Wait until all members have called this with the same `tag`, an int."""
        with self._collective():
            nothing = np.empty(0, np.uint8)
            self._exchange_whole(CollectiveHeader("barrier", tag), nothing, nothing)

    def close(self, reason: str = "") -> None:
        """Close the connections; waiting members get `PeerLost` with the reason."""
        for link in self._links.values():
            link.close(reason)

    @contextlib.contextmanager
    def _collective(self) -> Iterator[None]:
        """Run a collective in the block; on an error, close all connections.

        In the block, `close` ends calls that wait, but does not free the descriptors of
        the connections. Raises `TransportClosed` if one is closed already.
        """
        try:
            with contextlib.ExitStack() as stack:
                for link in self._links.values():
                    stack.enter_context(link)
                yield
        except BaseException as error:
            self._end(error)
            raise

    def _end(self, error: BaseException) -> None:
        """Close all connections, and send all members the cause of an error."""
        if isinstance(error, TransportClosed):
            close_reason = CloseReason(self._rank, error.reason)
        elif isinstance(error, PeerLost):
            close_reason = CloseReason(error.rank, error.cause)
        elif isinstance(error, TransportError):
            close_reason = CloseReason(self._rank, str(error), is_error=True)
        else:
            cause = f"it failed with {type(error).__name__}: {error}"
            close_reason = CloseReason(self._rank, cause)
        for link in self._links.values():
            link.close(close_reason.cause, close_reason if close_reason.cause else None)

    # Small arrays are exchanged whole between all pairs, since the steps of a ring
    # would take longer than the additional bytes.

    def _exchange_whole(
        self, call: CollectiveHeader, array: Array, total: Array
    ) -> None:
        """Exchange small arrays, and add them in the order of the members.

        Args:
            call: `CollectiveHeader`, the same on all members.
            array: Flat array to sum.
            total: Flat array for the sum; it may be `array`.
        """
        num_bytes = HEADER_BYTES + array.nbytes
        self._need_scratch(num_bytes * self._size)
        places = [
            self._scratch.data[index * num_bytes : (index + 1) * num_bytes]
            for index in range(self._size)
        ]
        own = places[self.index]
        own[:HEADER_BYTES] = call.packed()
        own[HEADER_BYTES:] = bytes_of(array)
        if self._size == 2:
            self._swap(own, places[1 - self.index])
        else:
            self._run(
                [
                    Flow(link, [Piece(own)], [Piece(places[index])])
                    for index, link in self._links.items()
                ]
            )
        for index in self._links:
            self._check(places[index][:HEADER_BYTES], call, index)
        if array.nbytes:
            addends = [
                np.frombuffer(place, np.uint8, offset=HEADER_BYTES).view(array.dtype)
                for place in places
            ]
            sum_into(total, addends)

    def _swap(self, own: memoryview, other: memoryview) -> None:
        """Exchange small messages of one length with the only peer.

        Args:
            own: `memoryview` of the message to send.
            other: `memoryview` to receive into.
        """
        link = self._links[1 - self.index]
        try:
            sent = link.sock.send(own, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise link.lost(error) from error
        if sent < own.nbytes:
            run([Flow(link, [Piece(own[sent:])], [Piece(other)])])
        else:
            link.receive_into(other)

    # Large arrays are exchanged in segments, so that sums and transfers overlap.

    def _reduce(
        self,
        call: CollectiveHeader,
        array: Array,
        bounds: Sequence[int],
        total: Array,
        *,
        gather: bool,
    ) -> None:
        """Reduce-scatter into `total`; with `gather`, all-gather the sums.

        Args:
            call: `CollectiveHeader`, the same on all members.
            array: Flat array to sum.
            bounds: Sequence of ints, the bounds of the members' parts.
            total: Flat array for the sum; it may be `array`.
            gather: Bool, whether each member receives the sums of all parts.
        """
        if self._size > 2 and is_half(array.dtype):
            self._reduce_direct(call, array, bounds, total, gather=gather)
        else:
            steps = range((self._size - 1) * (2 if gather else 1))
            self._ring(call, array, bounds, total, steps)

    def _ring(
        self,
        call: CollectiveHeader,
        array: Array,
        bounds: Sequence[int],
        total: Array,
        steps: range,
    ) -> None:
        """Run steps of a ring: those of reduce-scatter, of all-gather, or all.

        Args:
            call: `CollectiveHeader`, the same on all members.
            array: Flat array to sum.
            bounds: Sequence of ints, the bounds of the members' parts.
            total: Flat array for the sum; it may be `array`.
            steps: Range, the steps to run, as `Ring` counts them.
        """
        if self._size == 1:
            return
        segments = Segments(array, total, bounds, steps=steps, num_bytes=self._segment)
        ring = Ring(segments, self.index, self._need_scratch(self._segment))
        following = (self.index + 1) % self._size
        preceding = (self.index - 1) % self._size
        incoming, outgoing = ring.incoming(), ring.outgoing()
        self._run(self._between(call, preceding, incoming, following, outgoing))

    def _between(
        self,
        call: CollectiveHeader,
        preceding: int,
        incoming: Iterable[Piece],
        following: int,
        outgoing: Iterable[Piece],
    ) -> list[Flow]:
        """Create the flows that receive from one member and send to the next.

        The two may be one member, which then has one flow for both directions.

        Args:
            call: `CollectiveHeader`, the same on all members.
            preceding: Int, index of the member to receive from.
            incoming: Iterable of `Piece`s to receive.
            following: Int, index of the member to send to.
            outgoing: Iterable of `Piece`s to send.
        """
        before, after = self._links[preceding], self._links[following]
        if before is after:
            return [self._flow(before, call, outgoing, call, incoming)]
        return [
            self._flow(after, call, outgoing, None, ()),
            self._flow(before, None, (), call, incoming),
        ]

    # Broadcasts and sums in half precision use no ring: a broadcast has only one
    # source, and each hop of a ring would round a half.

    def _reduce_direct(
        self,
        call: CollectiveHeader,
        array: Array,
        bounds: Sequence[int],
        total: Array,
        *,
        gather: bool,
    ) -> None:
        """Reduce-scatter by `OrderedSums`: each member adds its part of all arrays.

        With `gather`, all-gather the sums. The arguments are those of `_reduce`.
        """
        steps = range(2 if gather else 1)
        segments = Segments(array, total, bounds, steps=steps, num_bytes=self._segment)
        sums = OrderedSums(segments, self.index)
        self._run(
            [
                self._flow(link, call, sums.outgoing(index), call, sums.incoming(index))
                for index, link in self._links.items()
            ]
        )

    def _broadcast_flat(
        self, call: CollectiveHeader, array: Array, source: int
    ) -> None:
        """Send the whole array from the source to each other member.

        Args:
            call: `CollectiveHeader`, the same on all members.
            array: Flat array, sent or received.
            source: Int, index of the member that sends.
        """
        data = [Piece(bytes_of(array))]
        if self.index != source:
            self._run([self._flow(self._links[source], None, (), call, data)])
            return
        self._run(
            [self._flow(link, call, data, None, ()) for link in self._links.values()]
        )

    def _broadcast_chain(
        self, call: CollectiveHeader, array: Array, source: int
    ) -> None:
        """Send an array along a chain of members from the source, in segments.

        The arguments are those of `_broadcast_flat`.
        """
        view = bytes_of(array)
        arrived = SegmentCounter()
        segments = [
            view[begin : begin + self._segment]
            for begin in range(0, view.nbytes, self._segment)
        ]
        following = (self.index + 1) % self._size
        flows = []
        if self.index != source:
            incoming = [Piece(segment, then=arrived.increment) for segment in segments]
            before = self._links[(self.index - 1) % self._size]
            flows.append(self._flow(before, None, (), call, incoming))
        if following != source:
            counter = None if self.index == source else arrived
            outgoing = [
                Piece(segment, counter, number + 1)
                for number, segment in enumerate(segments)
            ]
            flows.append(self._flow(self._links[following], call, outgoing, None, ()))
        self._run(flows)

    # Members that call different collectives would sum wrong values. So a member checks
    # the header of each peer that sends to it, in every collective.

    def _run(self, flows: list[Flow]) -> None:
        """Run flows; raise an error if any member is lost, even one without a flow."""
        used = {flow.descriptor for flow in flows}
        others = [link for link in self._links.values() if link.fileno() not in used]
        run([*flows, *map(Flow, others)])

    def _flow(
        self,
        link: Connection,
        own: CollectiveHeader | None,
        outgoing: Iterable[Piece],
        expected: CollectiveHeader | None,
        incoming: Iterable[Piece],
    ) -> Flow:
        """Create a flow in which the headers of calls precede the data.

        Args:
            link: `Connection` to a member.
            own: `CollectiveHeader` of this member, or `None` if this member does
                not send.
            outgoing: Iterable of `Piece`s to send.
            expected: `CollectiveHeader` that the other member should send, or `None`
                if it does not.
            incoming: Iterable of `Piece`s to receive.
        """
        index = self.ranks.index(link.peer)
        sent, received = [], []
        if own is not None:
            sent.append(Piece(memoryview(own.packed())))
        if expected is not None:
            header = memoryview(bytearray(HEADER_BYTES))
            then = functools.partial(self._check, header, expected, index)
            received.append(Piece(header, then=then))
        # Empty pieces are left out: a peer expects no bytes of them, but the flow would
        # wait until their counters let them move.
        full = (piece for piece in outgoing if piece.view.nbytes)
        return Flow(
            link, itertools.chain(sent, full), itertools.chain(received, incoming)
        )

    def _check(
        self, header: memoryview, expected: CollectiveHeader, index: int
    ) -> None:
        """Raise `TransportError` unless the header of member `index` is as expected."""
        check(header, expected, self._rank, self.ranks[index])

    def _need_scratch(self, num_bytes: int) -> Array:
        """Return scratch memory of at least `num_bytes`, allocated if necessary."""
        if self._scratch.nbytes < num_bytes:
            self._scratch = np.empty(num_bytes, np.uint8)
        return self._scratch
