"""What a member of a ring sends and receives: segments, in the order of a pipeline."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from tfdp.communication.transport.arithmetic import sum_into
from tfdp.communication.transport.communicator import Array
from tfdp.communication.transport.flows import Gate, Piece
from tfdp.communication.transport.schedules import Segments


class Ring:
    """Steps of a ring: the first `size - 1` add, the others only copy.

    In step `s` member `i` sends its segments of part `i - s - 1`, which it has received
    in the step before, and receives those of part `i - s - 2`. So the own part is
    complete after `size - 1` steps. Only step 0 sends what is in the array and not a
    sum, and each part is added once: so no copy is needed where the sum has an array of
    its own.

    Args:
        segments: `Segments`.
        index: Int, the own place among the members.
        scratch: Array of the bytes of a segment at least, in which they are received.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for
    clusters of workstations".
    """

    def __init__(self, segments: Segments, index: int, scratch: Array) -> None:
        self._segments = segments
        self._index = index
        self._scratch = scratch
        self._arrived = {step: Gate() for _, step in segments.order}

    def outgoing(self) -> Iterator[Piece]:
        """Yield what is sent to the next member, as soon as it has arrived."""
        segments = self._segments
        for number, step in segments.order:
            where = segments.where(self._index - step - 1, number)
            sent = segments.summed if step else segments.sent
            yield Piece(sent[where], self._arrived.get(step - 1), number + 1)

    def incoming(self) -> Iterator[Piece]:
        """Yield where what the member before sends is received."""
        segments = self._segments
        for number, step in segments.order:
            where = segments.where(self._index - step - 2, number)
            gate = self._arrived[step]
            if step < segments.size - 1:
                into = self._scratch.data[: where.stop - where.start]
                yield Piece(into, then=functools.partial(self._add, where, gate))
            else:
                yield Piece(segments.summed[where], then=gate.pass_one)

    def _add(self, where: slice, gate: Gate) -> None:
        target = self._segments.target(where)
        received = self._scratch[: target.nbytes].view(target.dtype)
        sum_into(target, (self._segments.addend(where), received))
        gate.pass_one()
