"""Confidence intervals of a median, for any distribution of the values."""

from __future__ import annotations

import math
from collections.abc import Sequence

CONFIDENCE = 0.95


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the order statistics that enclose the median with 95 % probability.

    The number of values below the median has a binomial distribution, whatever the
    distribution of the values is.

    Args:
        values: Sequence of floats, with at least one value. With fewer than six values,
            the interval has a lower probability.

    Returns:
        Tuple of two of the values, the ends of the interval.

    Example: with nine values, one on each side may be far off.

    >>> median_interval([1.0, 2.0, 2.0, 3.0, 3.0, 3.0, 4.0, 5.0, 90.0])
    (2.0, 5.0)

    Source: David and Nagaraja 2003, "Order Statistics", section 7.1.
    """
    ordered = sorted(values)
    count = len(ordered)
    tail, skipped = 0.0, 0
    while skipped < (count - 1) // 2:
        tail += math.comb(count, skipped) / 2**count
        if tail > (1 - CONFIDENCE) / 2:
            break
        skipped += 1
    skipped = max(0, skipped - 1)
    return ordered[skipped], ordered[count - 1 - skipped]
