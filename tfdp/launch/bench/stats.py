"""Paired ratios with distribution-free intervals."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from tfdp.ground.base.intervals import median_interval
from tfdp.ground.text import pluralize


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
        return f"{self.median:.3f} {self.interval}, {pluralize(self.num_pairs, 'pair')}"


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Compare two sides that ran in turn, block by block."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    low, high = median_interval(ratios)
    return Ratio(statistics.median(ratios), low, high, len(ratios))
