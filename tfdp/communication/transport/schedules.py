"""The segments of an array, the order in which they travel, and what adds them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from tfdp.communication.transport.arithmetic import sum_into
from tfdp.communication.transport.communicator import Array
from tfdp.communication.transport.flows import Gate, Piece

# A segment that is received, added and sent on stays in the second-level cache. With
# 64 KB a third more of the processor's time went into Python; from 256 KB to 1 MB there
# was no difference.
SEGMENT_BYTES = 512 << 10
# Slots between two steps of one segment: enough that it has arrived meanwhile.
LAG = 2


def equal_bounds(length: int, num_parts: int) -> list[int]:
    """Cut a length into parts that differ by one at the most.

    Args:
        length: Int, elements.
        num_parts: Int.

    Returns:
        List of `num_parts + 1` ints.

    Example:
    >>> equal_bounds(10, 4)
    [0, 2, 5, 7, 10]
    """
    return [length * part // num_parts for part in range(num_parts + 1)]


def num_segments(bounds: Sequence[int], segment: int) -> int:
    """Return the number of segments of the largest part.

    Args:
        bounds: Sequence of int, of the parts, in bytes.
        segment: Int, the bytes of a segment.

    Example:
    >>> num_segments([0, 300, 1300], segment=400)
    3
    """
    longest = max(end - begin for begin, end in itertools.pairwise(bounds))
    return -(-longest // segment)


def segment_of(bounds: Sequence[int], part: int, number: int, segment: int) -> slice:
    """Return where a segment of a part is; it is empty beyond the part's end.

    Args:
        bounds: Sequence of int, of the parts, in bytes.
        part: Int.
        number: Int, counted from the part's begin.
        segment: Int, the bytes of a segment.

    Example:
    >>> segment_of([0, 300, 1300], part=1, number=2, segment=400)
    slice(1100, 1300, None)
    """
    begin = min(bounds[part] + number * segment, bounds[part + 1])
    return slice(begin, min(begin + segment, bounds[part + 1]))


class Segments:
    """An array, cut into a part for each member, and each part into segments.

    Args:
        array: Flat array.
        total: Flat array of its length, which becomes the sum; it may be `array`.
        bounds: Sequence of int, where the parts begin and end.
        steps: Range of int, the steps that each segment makes.
        num_bytes: Int, bytes of a segment; the last one of a part may have fewer.

    Attributes:
        size: Int, number of members.
        order: List of segments and steps, in the order of `pipeline`.
        sent, summed: `memoryview`s of the bytes of both arrays.
    """

    def __init__(
        self,
        array: Array,
        total: Array,
        bounds: Sequence[int],
        *,
        steps: range,
        num_bytes: int,
    ) -> None:
        self._array, self._total = array, total
        self._limits = [bound * array.itemsize for bound in bounds]
        self.num_bytes = num_bytes
        self.size = len(bounds) - 1
        self.order = list(pipeline(num_segments(self._limits, num_bytes), steps))
        self.sent, self.summed = bytes_of(array), bytes_of(total)

    def where(self, part: int, number: int) -> slice:
        """Return the bytes of a segment; parts are counted round."""
        return segment_of(self._limits, part % self.size, number, self.num_bytes)

    def addend(self, where: slice) -> Array:
        """Return the elements at a slice in bytes of the array."""
        return _elements(self._array, where)

    def target(self, where: slice) -> Array:
        """Return the elements at a slice in bytes of the sum."""
        return _elements(self._total, where)


def _elements(array: Array, where: slice) -> Array:
    return array[where.start // array.itemsize : where.stop // array.itemsize]


def bytes_of(array: Array) -> memoryview:
    """Return the memory of a flat array, as bytes."""
    return array.view(np.uint8).data


def pipeline(num_segments: int, steps: range, lag: int = LAG) -> Iterator[tuple]:
    """Order the steps of all segments so that each follows `lag` slots after the last.

    What a member sends in a step it has received in the one before. In this order,
    which all members keep, it has arrived by then, and is still in the cache.

    Args:
        num_segments: Int.
        steps: Range, which steps each segment makes.
        lag: Int.

    Returns:
        Iterator of segment and step.

    Example:
    >>> list(pipeline(3, range(2), lag=2))
    [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    >>> list(pipeline(3, range(2), lag=1))
    [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (2, 1)]
    """
    for slot in range(num_segments + (len(steps) - 1) * lag):
        first = max(0, -(-(slot - num_segments + 1) // lag))
        for place in range(first, min(len(steps) - 1, slot // lag) + 1):
            yield slot - place * lag, steps[place]


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
