"""The segments of an array, and the order in which they travel: pure plans."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from tfdp.communication.transport.communicator import Array

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
