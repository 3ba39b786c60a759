"""Messages between the members of an MPI communicator, which can be ended."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tfdp.communication.cluster.mpi_job import Backoff, MpiJob
from tfdp.communication.transport import calls
from tfdp.communication.transport.calls import HEADER_BYTES, Call
from tfdp.communication.transport.communicator import (
    Array,
    PeerLost,
    TransportClosed,
    TransportError,
)

# Up to here the bytes come with the header, in one message that MPI sends at once.
SMALL_BYTES = 16 << 10

# The kind of a call in which members send and receive different numbers of bytes.
ALL_TO_ALL = "all-to-all"

# MPI's tags, within the communicator of a lane.
_HEADER, _DATA, _GOODBYE = 1, 2, 3
_GOODBYE_BYTES = 1024
# MPI counts in 32 bits.
_MOST_BYTES = 1 << 30
# The longest pauses: until the others are there they compute, and want the cores; then
# bytes move only while MPI is asked.
_LONGEST_WAIT_SECONDS, _LONGEST_MOVE_SECONDS = 1e-3, 1e-4
# Pauses between two looks at who has left. One that has may have sent all that is
# awaited: it is on its way.
_TURNS_PER_LOOK, _LAST_CHANCES = 8, 3
_CLOSE_SECONDS = 1.0


@dataclasses.dataclass
class _Peer:
    """What is under way with one member in an exchange.

    Args:
        sent: Bytes for it.
        received: Where its bytes go.
        inbox: Buffer of its header, and of bytes that come with it.
        pending: Number of requests that are not complete.
        is_moving: Whether more than a header is under way.
    """

    sent: memoryview
    received: memoryview
    inbox: bytearray
    pending: int = 0
    is_moving: bool = False


@dataclasses.dataclass
class _Pending:
    """A message under way: MPI's request, and what to do when it is complete."""

    request: Any
    peer: _Peer
    is_send: bool
    then: Callable[[Any], None] | None = None


class MpiMessages:
    """Exchanges of bytes between the members of an MPI communicator.

    One thread calls `exchange`, within `call`; `close` may be called by any.

    Args:
        job: `MpiJob`.
        comm: The MPI communicator, whose ranks are the members' places.
        ranks: Tuple of int, the workers that are the members.
    """

    def __init__(self, job: MpiJob, comm: Any, ranks: tuple[int, ...]) -> None:
        self._job, self._comm, self._ranks = job, comm, ranks
        self._index = comm.rank
        self._others = [place for place in range(len(ranks)) if place != self._index]
        self._reason: str | None = None
        # Held during a collective; who closes waits for it, and not for long.
        self._in_call = threading.Lock()
        self._closing = threading.Lock()
        self._pending: list[_Pending] = []
        self._statuses: list[Any] = []
        self._left: dict[int, str] = {}
        self._goodbyes: dict[int, tuple[Any, bytearray]] = {}
        with job.lock:
            for peer in self._others:
                text = bytearray(_GOODBYE_BYTES)
                request = comm.Irecv(text, source=peer, tag=_GOODBYE)
                self._goodbyes[peer] = (request, text)

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Enter a collective; an error inside closes the communicator."""
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

    def exchange(self, pairs: Mapping[int, tuple[Array, Array]], call: Call) -> None:
        """Send to, and receive from, some of the members, who do the same with us.

        Args:
            pairs: Mapping from a member's place to the array that it gets, and the one
                that is filled with what it sends.
            call: `Call`, the collective as all of them call it. In an all-to-all
                `num_bytes` is left out here.

        Raises:
            PeerLost: If a member that something is awaited from has left.
            TransportError: If a member calls another collective, or this one is closed.
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
        """End a call that waits, and tell the other members.

        Args:
            reason: String, for them.
        """
        if not self._take_reason(reason) or self._job.mpi.Is_finalized():
            return
        self._say_goodbye()
        # The thread of the lane sees `_reason` between two pauses. Where it does not,
        # it adds numbers, and cleans up itself when it next looks.
        if self._in_call.acquire(timeout=_CLOSE_SECONDS):
            try:
                self._clean_up()
            finally:
                self._in_call.release()

    # An exchange.

    def _begin(self, place: int, peer: _Peer, call: Call) -> None:
        own = expected = call
        if call.kind == ALL_TO_ALL:
            own = dataclasses.replace(call, num_bytes=len(peer.sent))
            expected = dataclasses.replace(call, num_bytes=len(peer.received))
        header = own.packed()
        is_small = len(peer.sent) <= SMALL_BYTES

        def take_header(status: Any) -> None:
            length = status.Get_count(self._job.mpi.BYTE)
            got = bytes(peer.inbox[: min(length, HEADER_BYTES)])
            ranks = self._ranks[self._index], self._ranks[place]
            calls.check(got, expected, *ranks)
            size = len(peer.received)
            if size <= SMALL_BYTES:
                begin = HEADER_BYTES
                peer.received[:] = memoryview(peer.inbox)[begin : begin + size]
            else:
                self._move(place, peer, peer.received, is_send=False)
            # Not before the other side is known to want it: it is not taken back.
            if not is_small:
                self._move(place, peer, peer.sent, is_send=True)

        with self._job.lock:
            request = self._comm.Irecv(peer.inbox, source=place, tag=_HEADER)
            self._add(_Pending(request, peer, False, take_header))
            message = header + bytes(peer.sent) if is_small else header
            request = self._comm.Isend(message, dest=place, tag=_HEADER)
            self._add(_Pending(request, peer, True))

    def _move(
        self, place: int, peer: _Peer, data: memoryview, *, is_send: bool
    ) -> None:
        peer.is_moving = True
        start = self._comm.Isend if is_send else self._comm.Irecv
        for begin in range(0, len(data), _MOST_BYTES):
            piece = data[begin : begin + _MOST_BYTES]
            with self._job.lock:
                request = start([piece, self._job.mpi.BYTE], place, _DATA)
                self._add(_Pending(request, peer, is_send))

    def _add(self, pending: _Pending) -> None:
        pending.peer.pending += 1
        self._pending.append(pending)

    def _wait(self, peers: Mapping[int, _Peer]) -> None:
        waiting = Backoff(_LONGEST_WAIT_SECONDS)
        moving = Backoff(_LONGEST_MOVE_SECONDS)
        backoff = waiting
        chances, turn = _LAST_CHANCES, 0
        while self._pending:
            if self._take_complete():
                is_moving = any(peer.is_moving for peer in peers.values())
                backoff = moving if is_moving else waiting
                backoff.reset()
                continue
            if self._reason is not None:
                raise TransportClosed(self._reason)
            turn += 1
            lost = self._lost(peers) if turn % _TURNS_PER_LOOK == 0 else None
            if lost is not None:
                chances -= 1
                if not chances:
                    raise PeerLost(self._ranks[lost], self._left[lost])
            backoff.pause()

    def _take_complete(self) -> bool:
        """Ask MPI once; return whether anything has come."""
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

    # The end.

    def _lost(self, peers: Mapping[int, _Peer]) -> int | None:
        """A member that has left while something is awaited from it."""
        for place in [p for p in self._goodbyes if p not in self._left]:
            request, text = self._goodbyes[place]
            with self._job.lock:
                if request.Test():
                    self._left[place] = text.rstrip(b"\0").decode(errors="replace")
        waiting = (p for p in self._left if p in peers and peers[p].pending)
        return next(waiting, None)

    def _take_reason(self, reason: str) -> bool:
        with self._closing:
            is_first = self._reason is None
            if is_first:
                self._reason = reason
            return is_first

    def _fail(self, reason: str) -> None:
        """Leave what is under way; MPI may touch its memory until it is complete."""
        pending, self._pending = self._pending, []
        if pending:
            sends = [each.request for each in pending if each.is_send]
            receives = [each.request for each in pending if not each.is_send]
            self._job.leave(sends, receives, pending)
        if self._take_reason(reason):
            self._say_goodbye()
        self._clean_up()

    def _say_goodbye(self) -> None:
        reason = self._reason or "it has closed the communicator"
        text = reason.encode()[:_GOODBYE_BYTES]
        sends: list[Any] = []
        with self._job.lock, contextlib.suppress(self._job.mpi.Exception):
            for place in self._others:
                sends.append(self._comm.Isend(text, dest=place, tag=_GOODBYE))
        self._job.leave(sends, (), text)

    def _clean_up(self) -> None:
        """Leave the MPI communicator, which ends with MPI.

        To free it all members would have to be there.
        """
        goodbyes, self._goodbyes = self._goodbyes, {}
        if goodbyes:
            receives = [request for request, _ in goodbyes.values()]
            self._job.leave((), receives, goodbyes, self._comm)


def _bytes_of(array: Array) -> memoryview:
    return memoryview(array.view(np.uint8).data if array.size else bytearray())
