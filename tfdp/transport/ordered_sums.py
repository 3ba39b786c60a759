"""Sums of what all members send at once, in the order of the members."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from tfdp.transport.arithmetic import sum_into
from tfdp.transport.communicator import Array
from tfdp.transport.flows import Gate, Piece
from tfdp.transport.schedules import LAG, segment_of


class OrderedSums:
    """Sums of the segments of the own part, added in the order of the members.

    Each peer has two buffers, so that one segment arrives while another waits for
    those of the other peers.

    Args:
        array: Flat array.
        limits: Sequence of int, where the parts begin and end, in bytes.
        index: Int, the own place among the members.
        segment: Int, bytes that travel as one.
        total: Flat array whose own part becomes the sum; it may be `array`.
    """

    def __init__(
        self,
        array: Array,
        limits: Sequence[int],
        index: int,
        segment: int,
        total: Array,
    ) -> None:
        self.done = Gate()
        self._array = array
        self._total = total
        self._limits = limits
        self._index = index
        self._segment = segment
        self._size = len(limits) - 1
        self._missing: dict[int, int] = {}
        self._buffers = [
            [np.empty(segment, np.uint8) for _ in range(LAG)] for _ in range(self._size)
        ]

    def piece(self, index: int, number: int) -> Piece:
        """Return where a peer's segment is received, once the buffer is free."""
        where = segment_of(self._limits, self._index, number, self._segment)
        buffer = self._buffers[index][number % LAG]
        return Piece(
            buffer.data[: where.stop - where.start],
            self.done,
            number - LAG + 1,
            functools.partial(self._arrived, number),
        )

    def _arrived(self, number: int) -> None:
        missing = self._missing.pop(number, self._size - 1) - 1
        if missing:
            self._missing[number] = missing
            return
        where = segment_of(self._limits, self._index, number, self._segment)
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
        self.done.count += 1


def elements(array: Array, where: slice) -> Array:
    """Return the elements at a slice in bytes."""
    return array[where.start // array.itemsize : where.stop // array.itemsize]
