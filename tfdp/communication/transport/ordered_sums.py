"""What all members send each other at once, added in the order of the members."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from tfdp.communication.transport.arithmetic import sum_into
from tfdp.communication.transport.flows import Gate, Piece
from tfdp.communication.transport.schedules import LAG, Segments


class OrderedSums:
    """Sums of the segments of the own part, added in the order of the members.

    In step 0 each member sends each other its part of the array; in step 1 it sends
    all the sum of its own part, where they gather the sums. Each peer has two buffers,
    so that one segment arrives while another waits for those of the other peers.

    Args:
        segments: `Segments`.
        index: Int, the own place among the members.
    """

    def __init__(self, segments: Segments, index: int) -> None:
        self._segments = segments
        self._index = index
        self._done = Gate()
        self._missing: dict[int, int] = {}
        self._buffers = [
            [np.empty(segments.num_bytes, np.uint8) for _ in range(LAG)]
            for _ in range(segments.size)
        ]

    def outgoing(self, index: int) -> Iterator[Piece]:
        """Yield what is sent to a peer."""
        segments = self._segments
        for number, step in segments.order:
            if step:
                own_sum = segments.summed[segments.where(self._index, number)]
                yield Piece(own_sum, self._done, number + 1)
            else:
                yield Piece(segments.sent[segments.where(index, number)])

    def incoming(self, index: int) -> Iterator[Piece]:
        """Yield where what a peer sends is received."""
        segments = self._segments
        for number, step in segments.order:
            if step:
                yield Piece(segments.summed[segments.where(index, number)])
            else:
                yield self._addend(index, number)

    def _addend(self, index: int, number: int) -> Piece:
        """A segment of the own part, received once its buffer is free."""
        where = self._segments.where(self._index, number)
        buffer = self._buffers[index][number % LAG]
        return Piece(
            buffer.data[: where.stop - where.start],
            self._done,
            number - LAG + 1,
            functools.partial(self._arrived, number),
        )

    def _arrived(self, number: int) -> None:
        missing = self._missing.pop(number, self._segments.size - 1) - 1
        if missing:
            self._missing[number] = missing
            return
        where = self._segments.where(self._index, number)
        target = self._segments.target(where)
        length = where.stop - where.start
        addends = [
            self._segments.addend(where)
            if index == self._index
            else buffers[number % LAG][:length].view(target.dtype)
            for index, buffers in enumerate(self._buffers)
        ]
        if length:
            sum_into(target, addends)
        self._done.pass_one()
