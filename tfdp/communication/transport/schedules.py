"""Segments of an array, the order in which members exchange them, and their sums."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from tfdp.communication.transport.arithmetic import sum_into
from tfdp.communication.transport.communicator import Array
from tfdp.communication.transport.flows import Piece, SegmentCounter

# A segment of this size stays in the L2 cache while it is received, added and sent.
# With segments of 64 KB, Python took a third more CPU time; from 256 KB to 1 MB there
# was no difference.
SEGMENT_BYTES = 512 << 10
# A segment must arrive before its next step can send it, so `pipeline` puts this many
# slots between two steps of a segment.
LAG = 2


def equal_bounds(length: int, num_parts: int) -> list[int]:
    """Return the bounds that divide a length into parts of equal size, to within 1.

    Args:
        length: Int, number of elements.
        num_parts: Int, number of parts.

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
        bounds: Sequence of int, the bounds of the parts, in bytes.
        segment: Int, size of a segment, in bytes.

    Example:
    >>> num_segments([0, 300, 1300], segment=400)
    3
    """
    longest = max(end - begin for begin, end in itertools.pairwise(bounds))
    return -(-longest // segment)


def segment_of(bounds: Sequence[int], part: int, number: int, segment: int) -> slice:
    """Return the slice of a segment of a part, empty beyond the part's end.

    Args:
        bounds: Sequence of int, the bounds of the parts, in bytes.
        part: Int, index of the part.
        number: Int, index of the segment in the part.
        segment: Int, size of a segment, in bytes.

    Example:
    >>> segment_of([0, 300, 1300], part=1, number=2, segment=400)
    slice(1100, 1300, None)
    """
    begin = min(bounds[part] + number * segment, bounds[part + 1])
    return slice(begin, min(begin + segment, bounds[part + 1]))


class Segments:
    """Array divided into a part for each member, and each part into segments.

    Args:
        array: Flat array.
        total: Flat array of the same length for the sum; it may be `array`.
        bounds: Sequence of int, the bounds of the parts, in elements.
        steps: Range of int, the steps of each segment; in a step, a member sends it to
            another one.
        num_bytes: Int, size of a segment; the last one of a part may be smaller.

    Attributes:
        size: Int, number of members.
        order: List of pairs of a segment and a step, in the order of `pipeline`.
        sent, summed: `memoryview`s of the bytes of `array` and `total`.
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
        """Return the slice of a segment, in bytes.

        Args:
            part: Int, index of the part, taken modulo `size`.
            number: Int, index of the segment in the part.
        """
        return segment_of(self._limits, part % self.size, number, self.num_bytes)

    def addend(self, where: slice) -> Array:
        """Return the elements of the array at `where`, a slice in bytes."""
        return _elements(self._array, where)

    def target(self, where: slice) -> Array:
        """Return the elements of the sum at `where`, a slice in bytes."""
        return _elements(self._total, where)


def _elements(array: Array, where: slice) -> Array:
    """Return the elements of an array at `where`, a slice in bytes."""
    return array[where.start // array.itemsize : where.stop // array.itemsize]


def bytes_of(array: Array) -> memoryview:
    """Return a view of a flat array's memory, as bytes."""
    return array.view(np.uint8).data


def pipeline(num_segments: int, steps: range, lag: int = LAG) -> Iterator[tuple]:
    """Order the steps of all segments, with `lag` slots between steps of a segment.

    A slot runs each step for at most one segment. A member sends a segment that it has
    received in the previous step. In this order, the same on all members, the segment
    has arrived by then, and is still in the cache.

    Args:
        num_segments: Int, number of segments.
        steps: Range, the steps of each segment.
        lag: Int, number of slots between two steps of a segment. Defaults to `LAG`.

    Returns:
        Iterator of pairs of a segment and a step.

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
    """Pieces of a ring all-reduce: members add in `size - 1` steps, then copy.

    In step `s`, member `i` sends its segments of part `i - s - 1`, which it received in
    the previous step, and receives segments of part `i - s - 2`. So its own part is
    complete after `size - 1` steps. Only step 0 sends from the array rather than from
    the sum, and each part is added once, so a separate array for the sum needs no copy.

    Args:
        segments: `Segments`.
        index: Int, index of this member.
        scratch: Array of at least the bytes of a segment, to receive addends into.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for
    clusters of workstations".
    """

    def __init__(self, segments: Segments, index: int, scratch: Array) -> None:
        self._segments = segments
        self._index = index
        self._scratch = scratch
        self._arrived = {step: SegmentCounter() for _, step in segments.order}

    def outgoing(self) -> Iterator[Piece]:
        """Yield the pieces to send to the next member, in order.

        The sender waits for the arrival that a piece names, if any, before it sends.
        """
        segments = self._segments
        for number, step in segments.order:
            where = segments.where(self._index - step - 1, number)
            sent = segments.summed if step else segments.sent
            yield Piece(sent[where], self._arrived.get(step - 1), number + 1)

    def incoming(self) -> Iterator[Piece]:
        """Yield the pieces to receive from the previous member."""
        segments = self._segments
        for number, step in segments.order:
            where = segments.where(self._index - step - 2, number)
            counter = self._arrived[step]
            if step < segments.size - 1:
                into = self._scratch.data[: where.stop - where.start]
                yield Piece(into, then=functools.partial(self._add, where, counter))
            else:
                yield Piece(segments.summed[where], then=counter.increment)

    def _add(self, where: slice, counter: SegmentCounter) -> None:
        """Add a received segment to the sum, and increment the counter of its step.

        Args:
            where: Slice of the segment in bytes.
            counter: `SegmentCounter` of the step, which counts segments.
        """
        target = self._segments.target(where)
        received = self._scratch[: target.nbytes].view(target.dtype)
        sum_into(target, (self._segments.addend(where), received))
        counter.increment()


class OrderedSums:
    """Pieces of an exchange in which each member sums its part of all arrays.

    The addends of a part are added in the order of the members that send them.
    In step 0, each member sends every other member the part that the other one will
    sum; in step 1, if there is one, it sends the sum of its own part to all. Each peer
    has two buffers, so that one segment arrives while another waits for those of other
    peers.

    Args:
        segments: `Segments`.
        index: Int, index of this member.
    """

    def __init__(self, segments: Segments, index: int) -> None:
        self._segments = segments
        self._index = index
        self._done = SegmentCounter()
        self._missing: dict[int, int] = {}
        self._buffers = [
            [np.empty(segments.num_bytes, np.uint8) for _ in range(LAG)]
            for _ in range(segments.size)
        ]

    def outgoing(self, index: int) -> Iterator[Piece]:
        """Yield the pieces to send to the member with this index."""
        segments = self._segments
        for number, step in segments.order:
            if step:
                own_sum = segments.summed[segments.where(self._index, number)]
                yield Piece(own_sum, self._done, number + 1)
            else:
                yield Piece(segments.sent[segments.where(index, number)])

    def incoming(self, index: int) -> Iterator[Piece]:
        """Yield the pieces to receive from the member with this index."""
        segments = self._segments
        for number, step in segments.order:
            if step:
                yield Piece(segments.summed[segments.where(index, number)])
            else:
                yield self._addend(index, number)

    def _addend(self, index: int, number: int) -> Piece:
        """Return the piece that receives an addend, once its buffer is free.

        Args:
            index: Int, index of the member that sends it.
            number: Int, index of the segment in this member's part.
        """
        where = self._segments.where(self._index, number)
        buffer = self._buffers[index][number % LAG]
        return Piece(
            buffer.data[: where.stop - where.start],
            self._done,
            number - LAG + 1,
            functools.partial(self._arrived, number),
        )

    def _arrived(self, number: int) -> None:
        """Count a received addend of a segment; after the last, sum all addends.

        Args:
            number: Int, index of the segment in this member's part.
        """
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
        self._done.increment()
