"""How far the workers' clocks are apart, from collectives that all took part in."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tfdp.monitor.intervals import Interval


def clock_offset(first: Sequence[Interval], other: Sequence[Interval]) -> float:
    """By how much another worker's clock is ahead of the first one's.

    A collective ends on all workers at nearly the same time, the shorter it is the
    more so; and on none before it has begun on all, which bounds the error however
    unequal they are.

    Args:
        first: Sequence of begin and end of each collective by the first worker's
            clock, in seconds.
        other: The same collectives by the other worker's clock.

    Returns:
        Float, seconds; 0 where there are no collectives.

    Example:

    >>> clock_offset([(0.0, 1.0), (2.0, 2.5)], [(100.9, 101.0), (102.0, 102.5)])
    100.0

    Source: Mills 1991, "Internet time synchronization: the network time protocol",
    for the bounds.
    """
    pairs = list(zip(first, other, strict=True))
    if not pairs:
        return 0.0
    pairs.sort(key=lambda pair: max(pair[0][1] - pair[0][0], pair[1][1] - pair[1][0]))
    short = pairs[: max(1, len(pairs) // 4)]
    estimate = statistics.median(b[1] - a[1] for a, b in short)
    least = max(b[0] - a[1] for a, b in pairs)
    most = min(b[1] - a[0] for a, b in pairs)
    if least > most:  # a clock was set, or drifts, while they ran
        return estimate
    return min(max(estimate, least), most)
