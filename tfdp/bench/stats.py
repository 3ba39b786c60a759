"""Ratios of paired measurements: the median and an interval that assumes nothing."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The median of paired ratios with its 95 % interval."""

    median: float
    low: float
    high: float
    num_pairs: int

    def times(self, factor: float) -> Ratio:
        """The ratio times a number, with its interval.

        Args:
            factor: Float.

        Returns:
            A `Ratio`.
        """
        low, high = self.low * factor, self.high * factor
        return Ratio(self.median * factor, low, high, self.num_pairs)

    @property
    def interval(self) -> str:
        """String, the interval in brackets."""
        return f"[{self.low:.3f}, {self.high:.3f}]"

    def __str__(self) -> str:
        return f"{self.median:.3f} {self.interval}, {self.num_pairs} pairs"


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Compares two sides that ran in turn, block by block."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    low, high = median_interval(ratios)
    return Ratio(statistics.median(ratios), low, high, len(ratios))


def ratio_to_best(rivals: Sequence[Sequence[float]], own: Sequence[float]) -> Ratio:
    """Compares with the fastest of several rivals.

    Every other block chooses it and the rest are compared: the best of several
    noisy medians would look faster than it is.
    """
    best = min(rivals, key=lambda times: statistics.median(times[::2]))
    return paired_ratio(best[1::2], own[1::2])


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Order statistics that hold the median with 95 % probability.

    The number of values below the median is binomial, whatever they are
    distributed like.
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
