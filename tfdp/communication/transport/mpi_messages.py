"""Messages between the members of an MPI communicator, which can be cancelled.

A *lane* is the channel of a group on which its collectives run one after another; it
has an MPI communicator of its own. A member that leaves sends the others the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tfdp.communication.cluster.mpi_job import Backoff, MpiJob
from tfdp.communication.transport import calls
from tfdp.communication.transport.calls import HEADER_BYTES, CollectiveHeader
from tfdp.communication.transport.communicator import (
    Array,
    PeerLost,
    TransportClosed,
    TransportError,
)

# Largest size in bytes of data that is sent in one message with the header. MPI sends
# such a small message at once, and not only when the peer receives it.
SMALL_BYTES = 16 << 10

# Kind of the only collective in which members may send and receive different numbers of
# bytes, so its headers differ between pairs of members.
ALL_TO_ALL = "all-to-all"

# MPI tags of headers, data and reasons for leaving. They differ, so that a member that
# waits for one of these does not receive another.
_HEADER, _DATA, _LEAVE = 1, 2, 3
_LEAVE_REASON_BYTES = 1024
# Larger arrays are sent in several messages, since MPI counts the bytes of a message in
# a signed integer of 32 bits.
_MAX_BYTES = 1 << 30
# Longest pauses in seconds between two polls of MPI. Before data moves, pauses are
# longer, since the other members compute and need the cores. While data moves, they are
# shorter, since MPI makes progress only during polls.
_MAX_WAIT_SECONDS, _MAX_MOVE_SECONDS = 1e-3, 1e-4
# While a collective waits, it pauses between polls of MPI. It checks whether members
# have left at every eighth pause only, since a check tests a request for each of the
# other members. The last messages of a member that has left may still arrive, so a
# member counts as lost only at the third check that finds one gone.
_PAUSES_PER_CHECK, _CHECKS_UNTIL_LOST = 8, 3
# Longest wait of `close` for a thread in a collective, which may be computing a sum:
# after a longer time, that thread cleans up by itself.
_CLOSE_SECONDS = 1.0


@dataclasses.dataclass
class _Peer:
    """State of an exchange with one member.

    Args:
        sent: `memoryview` of the bytes to send.
        received: `memoryview` to receive into.
        inbox: Bytearray for the member's header and the bytes sent with it.
        pending: Int, number of incomplete requests. Defaults to `0`.
        is_moving: Bool, whether data messages are pending. Defaults to `False`.
    """

    sent: memoryview
    received: memoryview
    inbox: bytearray
    pending: int = 0
    is_moving: bool = False


@dataclasses.dataclass
class _Pending:
    """Pending MPI request.

    Args:
        request: MPI request.
        peer: `_Peer`, the state of the exchange that the request belongs to.
        is_send: Bool, whether it sends, rather than receives.
        then: Callable that takes the status of the completed request, or `None`.
            Defaults to `None`.
    """

    request: Any
    peer: _Peer
    is_send: bool
    then: Callable[[Any], None] | None = None


class MpiMessages:
    """Exchanges of bytes between the members of an MPI communicator.

    One thread calls `exchange`, within `call`; any thread may call `close`.

    Args:
        job: `MpiJob`.
        comm: MPI communicator, whose ranks are the indices of the members.
        ranks: Tuple of int, the rank of each member among the workers.
    """

    def __init__(self, job: MpiJob, comm: Any, ranks: tuple[int, ...]) -> None:
        self._job, self._comm, self._ranks = job, comm, ranks
        self._index = comm.rank
        self._others = [place for place in range(len(ranks)) if place != self._index]
        self._reason: str | None = None
        # A thread holds this lock during a collective. `close` needs it to clean up,
        # but tries only for a limited time, since the thread may compute for longer.
        self._in_call = threading.Lock()
        self._closing = threading.Lock()
        self._pending: list[_Pending] = []
        self._statuses: list[Any] = []
        self._leave_reasons: dict[int, str] = {}
        self._leave_requests: dict[int, tuple[Any, bytearray]] = {}
        with job.lock:
            for peer in self._others:
                text = bytearray(_LEAVE_REASON_BYTES)
                request = comm.Irecv(text, source=peer, tag=_LEAVE)
                self._leave_requests[peer] = (request, text)

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Run a collective in the block; an error closes the communicator.

        Raises:
            TransportClosed: If the communicator is closed already.
            TransportError: In place of an exception of MPI.
        """
        with self._in_call:
            if self._reason is not None:
                self._clean_up()
                raise TransportClosed(self._reason)
            try:
                yield
            except BaseException as error:
                self._fail(f"it has failed: {error or type(error).__name__}")
                if isinstance(error, self._job.mpi.Exception):
                    raise TransportError(f"MPI has failed: {error}") from error
                raise

    def exchange(
        self, pairs: Mapping[int, tuple[Array, Array]], call: CollectiveHeader
    ) -> None:
        """Exchange arrays with some members, which make the matching call.

        Args:
            pairs: Mapping from a member's index to the array to send, and the array to
                receive into.
            call: `CollectiveHeader`, the same on all members; its `num_bytes` is
                ignored in an all-to-all.

        Raises:
            PeerLost: If a member has left before its data arrived.
            TransportError: If a member calls another collective, or this communicator
                is closed.
        """
        peers = {
            place: _Peer(
                _bytes_of(sent),
                _bytes_of(received),
                bytearray(HEADER_BYTES + SMALL_BYTES),
            )
            for place, (sent, received) in pairs.items()
        }
        for place, peer in peers.items():
            self._begin(place, peer, call)
        self._wait(peers)

    def close(self, reason: str) -> None:
        """Close the communicator: a waiting `exchange` raises an error at once.

        The other members receive the reason.

        Args:
            reason: String, sent to the other members.
        """
        if not self._set_reason(reason) or self._job.mpi.Is_finalized():
            return
        self._send_leave_reason()
        # A thread in a collective holds `_in_call`. While it waits for messages, it
        # checks `_reason` after each pause, and then releases the lock. While it
        # computes a sum, it may hold the lock for longer than the timeout, and cleans
        # up itself afterwards.
        if self._in_call.acquire(timeout=_CLOSE_SECONDS):
            try:
                self._clean_up()
            finally:
                self._in_call.release()

    def _begin(self, member: int, peer: _Peer, call: CollectiveHeader) -> None:
        """Start to exchange headers with a member; data follows the member's header.

        Args:
            member: Int, index of the member.
            peer: `_Peer`, the state of the exchange with it.
            call: `CollectiveHeader`, the same on all members.
        """
        own = expected = call
        if call.kind == ALL_TO_ALL:
            own = dataclasses.replace(call, num_bytes=len(peer.sent))
            expected = dataclasses.replace(call, num_bytes=len(peer.received))
        header = own.packed()
        is_small = len(peer.sent) <= SMALL_BYTES

        def take_header(status: Any) -> None:
            """Check a member's header; take its data, and send it large data.

            Small data is sent with the headers. Large data follows in both directions,
            once the member's header has arrived.

            Args:
                status: MPI status of the received message.
            """
            length = status.Get_count(self._job.mpi.BYTE)
            received = bytes(peer.inbox[: min(length, HEADER_BYTES)])
            ranks = self._ranks[self._index], self._ranks[member]
            calls.check(received, expected, *ranks)
            size = len(peer.received)
            if size <= SMALL_BYTES:
                begin = HEADER_BYTES
                peer.received[:] = memoryview(peer.inbox)[begin : begin + size]
            else:
                self._start_data(member, peer, peer.received, is_send=False)
            # Large data is sent only after the peer's header, since a send of data that
            # the peer never receives cannot be cancelled.
            if not is_small:
                self._start_data(member, peer, peer.sent, is_send=True)

        with self._job.lock:
            request = self._comm.Irecv(peer.inbox, source=member, tag=_HEADER)
            self._add(_Pending(request, peer, False, take_header))
            message = header + bytes(peer.sent) if is_small else header
            request = self._comm.Isend(message, dest=member, tag=_HEADER)
            self._add(_Pending(request, peer, True))

    def _start_data(
        self, member: int, peer: _Peer, data: memoryview, *, is_send: bool
    ) -> None:
        """Start to send or receive data, in pieces of at most `_MAX_BYTES`.

        Args:
            member: Int, index of the member.
            peer: `_Peer`, the state of the exchange with it.
            data: `memoryview`, to send or to receive into.
            is_send: Bool, whether the data is sent.
        """
        peer.is_moving = True
        start = self._comm.Isend if is_send else self._comm.Irecv
        for begin in range(0, len(data), _MAX_BYTES):
            piece = data[begin : begin + _MAX_BYTES]
            with self._job.lock:
                request = start([piece, self._job.mpi.BYTE], member, _DATA)
                self._add(_Pending(request, peer, is_send))

    def _add(self, pending: _Pending) -> None:
        """Add a request to the pending ones, and count it for its peer."""
        pending.peer.pending += 1
        self._pending.append(pending)

    def _wait(self, peers: Mapping[int, _Peer]) -> None:
        """Wait until all pending requests are complete.

        Args:
            peers: Mapping from a member's index to the state of the exchange with it.

        Raises:
            PeerLost: If a member has left before its requests are complete.
            TransportClosed: If `close` is called during the wait.
            TransportError: If a member calls another collective.
        """
        waiting = Backoff(_MAX_WAIT_SECONDS)
        moving = Backoff(_MAX_MOVE_SECONDS)
        backoff = waiting
        checks_left, num_pauses = _CHECKS_UNTIL_LOST, 0
        while self._pending:
            if self._handle_complete_requests():
                is_moving = any(peer.is_moving for peer in peers.values())
                backoff = moving if is_moving else waiting
                backoff.reset()
                continue
            if self._reason is not None:
                raise TransportClosed(self._reason)
            num_pauses += 1
            lost = self._lost(peers) if num_pauses % _PAUSES_PER_CHECK == 0 else None
            if lost is not None:
                checks_left -= 1
                if not checks_left:
                    raise PeerLost(self._ranks[lost], self._leave_reasons[lost])
            backoff.pause()

    def _handle_complete_requests(self) -> bool:
        """Poll MPI once for complete requests; return whether there were any.

        They are removed from the pending ones, and `then` of each is called with its
        status: after a header it starts the exchange of large data.
        """
        mpi = self._job.mpi
        while len(self._statuses) < len(self._pending):
            self._statuses.append(mpi.Status())
        requests = [pending.request for pending in self._pending]
        with self._job.lock:
            indices = mpi.Request.Testsome(requests, self._statuses)
        if not indices:
            return False
        done = [self._pending[index] for index in indices]
        for index in sorted(indices, reverse=True):
            del self._pending[index]
        for pending, status in zip(done, self._statuses, strict=False):
            pending.peer.pending -= 1
            pending.peer.is_moving &= pending.peer.pending > 0
            if pending.then is not None:
                pending.then(status)
        return True

    # MPI does not report that a member has left a group for good. So a member that
    # leaves sends the others its reason, which shows them the loss.

    def _lost(self, peers: Mapping[int, _Peer]) -> int | None:
        """Return the index of a member that left before its requests were complete.

        The call also receives the reasons of members that have left. It returns `None`
        if none of these has pending requests.

        Args:
            peers: Mapping from a member's index to the state of the exchange with it.
        """
        for place in [p for p in self._leave_requests if p not in self._leave_reasons]:
            request, text = self._leave_requests[place]
            with self._job.lock:
                if request.Test():
                    self._leave_reasons[place] = text.rstrip(b"\0").decode(
                        errors="replace"
                    )
        waiting = (p for p in self._leave_reasons if p in peers and peers[p].pending)
        return next(waiting, None)

    def _set_reason(self, reason: str) -> bool:
        """Record the reason for closing; return false if there is one already."""
        with self._closing:
            is_first = self._reason is None
            if is_first:
                self._reason = reason
            return is_first

    def _fail(self, reason: str) -> None:
        """Close the communicator after an error; the job keeps its pending requests.

        Args:
            reason: String, the error, sent to the other members unless this one has
                sent them a reason before.
        """
        pending, self._pending = self._pending, []
        if pending:
            sends = [each.request for each in pending if each.is_send]
            receives = [each.request for each in pending if not each.is_send]
            self._job.keep_requests(sends, receives, pending)
        if self._set_reason(reason):
            self._send_leave_reason()
        self._clean_up()

    def _send_leave_reason(self) -> None:
        """Send all other members the reason that this member leaves."""
        reason = self._reason or "it has closed the communicator"
        text = reason.encode()[:_LEAVE_REASON_BYTES]
        sends: list[Any] = []
        with self._job.lock, contextlib.suppress(self._job.mpi.Exception):
            for place in self._others:
                sends.append(self._comm.Isend(text, dest=place, tag=_LEAVE))
        self._job.keep_requests(sends, (), text)

    def _clean_up(self) -> None:
        """Pass the MPI communicator to the job, which keeps it until MPI ends.

        To free it, all members would have to take part.
        """
        leave_requests, self._leave_requests = self._leave_requests, {}
        if leave_requests:
            receives = [request for request, _ in leave_requests.values()]
            self._job.keep_requests((), receives, leave_requests, self._comm)


def _bytes_of(array: Array) -> memoryview:
    """Return a view of a flat array's memory, as bytes."""
    return memoryview(array.view(np.uint8).data if array.size else bytearray())
