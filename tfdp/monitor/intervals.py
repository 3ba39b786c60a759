"""Sums over intervals of time that may overlap."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def seconds_covered(intervals: Iterable[Interval]) -> float:
    """How long at least one of several intervals lasts.

    Args:
        intervals: Iterable of begin and end, in seconds.

    Returns:
        Float, seconds.

    Example:

    >>> seconds_covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    return sum(end - begin for begin, end in merged(intervals))


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as intervals that do not overlap, in order.

    Example:

    >>> merged([(1.0, 3.0), (0.0, 2.0), (5.0, 6.0)])
    [(0.0, 3.0), (5.0, 6.0)]
    """
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def clipped(intervals: Iterable[Interval], begin: float, end: float) -> list[Interval]:
    """What of the intervals lies between two moments.

    Example:

    >>> clipped([(0.0, 2.0), (3.0, 4.0)], 1.0, 3.5)
    [(1.0, 2.0), (3.0, 3.5)]
    """
    cut = [(max(b, begin), min(e, end)) for b, e in intervals]
    return [(b, e) for b, e in cut if e > b]
