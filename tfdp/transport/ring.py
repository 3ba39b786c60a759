"""What a member of a ring sends and receives: segments, in the order of a pipeline."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from tfdp.transport.arithmetic import sum_into
from tfdp.transport.communicator import Array
from tfdp.transport.flows import Gate, Piece
from tfdp.transport.schedules import (
    bytes_of,
    elements,
    num_segments,
    pipeline,
    segment_of,
)


class Ring:
    """Steps of a ring: the first `size - 1` add, the others only copy.

    In step `s` member `i` sends its segments of part `i - s - 1`, which it has received
    in the step before, and receives those of part `i - s - 2`. So the own part is
    complete after `size - 1` steps. Only step 0 sends what is in `array` and not a sum,
    and each part is added once: so no copy is needed where `total` is another array.

    Args:
        array: Flat array.
        total: Flat array of its length, which becomes the sum; it may be `array`.
        bounds: Sequence of int, where the parts of the members begin and end.
        index: Int, the own place among the members.
        steps: Range of int, the steps that are taken.
        segment: Int, bytes that travel as one.
        scratch: Array of at least as many bytes, in which they are received.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for
    clusters of workstations".
    """

    def __init__(
        self,
        array: Array,
        total: Array,
        bounds: Sequence[int],
        *,
        index: int,
        steps: range,
        segment: int,
        scratch: Array,
    ) -> None:
        self._array, self._total = array, total
        self._first, self._view = bytes_of(array), bytes_of(total)
        self._limits = [bound * array.itemsize for bound in bounds]
        self._size = len(bounds) - 1
        self._index = index
        self._segment = segment
        self._scratch = scratch
        self._order = list(pipeline(num_segments(self._limits, segment), steps))
        self._arrived = {step: Gate() for step in steps}

    def outgoing(self) -> Iterator[Piece]:
        """Yield what is sent to the next member, as soon as it has arrived."""
        for number, step in self._order:
            where = self._segment_of(self._index - step - 1, number)
            sent = self._view if step else self._first
            yield Piece(sent[where], self._arrived.get(step - 1), number + 1)

    def incoming(self) -> Iterator[Piece]:
        """Yield where what the member before sends is received."""
        for number, step in self._order:
            where = self._segment_of(self._index - step - 2, number)
            gate = self._arrived[step]
            if step < self._size - 1:
                into = self._scratch.data[: where.stop - where.start]
                yield Piece(into, then=functools.partial(self._add, where, gate))
            else:
                yield Piece(self._view[where], then=gate.pass_one)

    def _segment_of(self, part: int, number: int) -> slice:
        return segment_of(self._limits, part % self._size, number, self._segment)

    def _add(self, where: slice, gate: Gate) -> None:
        target = elements(self._total, where)
        received = self._scratch[: target.nbytes].view(target.dtype)
        sum_into(target, (elements(self._array, where), received))
        gate.pass_one()
