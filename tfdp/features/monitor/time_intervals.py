"""Intervals of time: what they cover, merged and clipped."""

from __future__ import annotations

from collections.abc import Iterable

# Start and end of an interval of time, in seconds: a tuple, so that intervals sort by
# their start.
Interval = tuple[float, float]


def seconds_covered(intervals: Iterable[Interval]) -> float:
    """Return the seconds covered by at least one of several intervals.

    Args:
        intervals: Iterable of pairs of start and end, in seconds.

    Returns:
        Float, seconds.

    Example:

    >>> seconds_covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    return sum(end - begin for begin, end in merged(intervals))


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge overlapping intervals, and return them in order.

    Example:

    >>> merged([(1.0, 3.0), (0.0, 2.0), (5.0, 6.0)])
    [(0.0, 3.0), (5.0, 6.0)]
    """
    disjoint: list[Interval] = []
    for begin, end in sorted(intervals):
        if disjoint and begin <= disjoint[-1][1]:
            disjoint[-1] = disjoint[-1][0], max(disjoint[-1][1], end)
        else:
            disjoint.append((begin, end))
    return disjoint


def clipped(intervals: Iterable[Interval], begin: float, end: float) -> list[Interval]:
    """Cut intervals to their parts between two times.

    Args:
        intervals: Iterable of pairs of start and end, in seconds.
        begin: Float, the earlier time.
        end: Float, the later time.

    Example:

    >>> clipped([(0.0, 2.0), (3.0, 4.0)], 1.0, 3.5)
    [(1.0, 2.0), (3.0, 3.5)]
    """
    cut = [(max(b, begin), min(e, end)) for b, e in intervals]
    return [(b, e) for b, e in cut if e > b]
