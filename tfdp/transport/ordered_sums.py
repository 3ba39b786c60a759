"""What all members send each other at once, added in the order of the members."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np

from tfdp.transport.arithmetic import sum_into
from tfdp.transport.communicator import Array
from tfdp.transport.flows import Gate, Piece
from tfdp.transport.schedules import (
    LAG,
    bytes_of,
    elements,
    num_segments,
    pipeline,
    segment_of,
)


class OrderedSums:
    """Sums of the segments of the own part, added in the order of the members.

    In step 0 each member sends each other its part of the array; in step 1 it sends
    all the sum of its own part, where they gather the sums. Each peer has two buffers,
    so that one segment arrives while another waits for those of the other peers.

    Args:
        array: Flat array.
        total: Flat array whose own part becomes the sum; it may be `array`.
        bounds: Sequence of int, where the parts of the members begin and end.
        index: Int, the own place among the members.
        steps: Range of int, the steps that are taken.
        segment: Int, bytes that travel as one.
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
    ) -> None:
        self._array, self._total = array, total
        self._first, self._view = bytes_of(array), bytes_of(total)
        self._limits = [bound * array.itemsize for bound in bounds]
        self._index = index
        self._segment = segment
        self._size = len(bounds) - 1
        self._order = list(pipeline(num_segments(self._limits, segment), steps))
        self._done = Gate()
        self._missing: dict[int, int] = {}
        self._buffers = [
            [np.empty(segment, np.uint8) for _ in range(LAG)] for _ in range(self._size)
        ]

    def outgoing(self, index: int) -> Iterator[Piece]:
        """Yield what is sent to a peer."""
        for number, step in self._order:
            if step:
                sum_of = self._view[self._segment_of(self._index, number)]
                yield Piece(sum_of, self._done, number + 1)
            else:
                yield Piece(self._first[self._segment_of(index, number)])

    def incoming(self, index: int) -> Iterator[Piece]:
        """Yield where what a peer sends is received."""
        for number, step in self._order:
            if step:
                yield Piece(self._view[self._segment_of(index, number)])
            else:
                yield self._addend(index, number)

    def _segment_of(self, part: int, number: int) -> slice:
        return segment_of(self._limits, part, number, self._segment)

    def _addend(self, index: int, number: int) -> Piece:
        """A segment of the own part, received once its buffer is free."""
        where = self._segment_of(self._index, number)
        buffer = self._buffers[index][number % LAG]
        return Piece(
            buffer.data[: where.stop - where.start],
            self._done,
            number - LAG + 1,
            functools.partial(self._arrived, number),
        )

    def _arrived(self, number: int) -> None:
        missing = self._missing.pop(number, self._size - 1) - 1
        if missing:
            self._missing[number] = missing
            return
        where = self._segment_of(self._index, number)
        target = elements(self._total, where)
        own = target if self._total is self._array else elements(self._array, where)
        length = where.stop - where.start
        addends = [
            own
            if index == self._index
            else buffers[number % LAG][:length].view(target.dtype)
            for index, buffers in enumerate(self._buffers)
        ]
        if length:
            sum_into(target, addends)
        self._done.pass_one()
