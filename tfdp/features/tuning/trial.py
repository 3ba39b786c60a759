"""Trial of plans: successive halving by paired blocks, and an interval of the gain.

Blocks of the default and of its rivals take turns, and what counts is the ratio of two
blocks of the same round: a machine that slows down hurts both. First rounds drop the
slower half of the rivals again and again. The last rounds compare the one that is left
with the default anew, for the best of several noisy numbers looks better than it is.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from tfdp.ground.base.intervals import median_interval

# The default, among the plans of a trial.
DEFAULT = 0
# Rounds before each halving, and of the last comparison. Of nine pairs the interval
# leaves out one on either side, and holds the median with 96 %.
_ROUNDS, _LAST_ROUNDS = 2, 9


@dataclasses.dataclass(frozen=True)
class Gain:
    """How much faster than the default a plan is, in fractions of its speed.

    Args:
        median: Float, 0.1 for 10 % more steps in the same time.
        low: Float, the lower end of its interval.
        high: Float, the upper end.
        num_rounds: Int, pairs of blocks that it was measured in.

    Example:

    >>> print(Gain(0.12, 0.09, 0.14, 9))
    12 % faster than the default [9, 14]
    """

    median: float
    low: float
    high: float
    num_rounds: int

    def __str__(self) -> str:
        percent, low, high = (
            f"{round(100 * part, 1):g}" for part in (self.median, self.low, self.high)
        )
        return f"{percent} % faster than the default [{low}, {high}]"


class Trial:
    """Trial of some rivals against the default.

    Args:
        num_rivals: Int, at least 1. They are numbered from 1 on; the default is 0.

    Example: the second of two rivals is twice as fast as the default.

    >>> trial = Trial(num_rivals=2)
    >>> while trial.round:
    ...     trial.add([{0: 2.0, 1: 2.0, 2: 1.0}[plan] for plan in trial.round])
    >>> trial.winner, trial.gain.median
    (2, 1.0)

    Source: Jamieson and Talwalkar 2016, "Non-stochastic Best Arm Identification and
    Hyperparameter Optimization", https://arxiv.org/abs/1502.07943, for successive
    halving.
    """

    def __init__(self, num_rivals: int) -> None:
        self._rivals = list(range(1, num_rivals + 1))
        # By rival, its speed relative to the default in each round of this stage.
        self._ratios: dict[int, list[float]] = {}
        self._num_rounds = 0
        self._is_last = num_rivals == 1
        self.gain: Gain | None = None
        self.winner = DEFAULT
        self.round: tuple[int, ...] = self._next()

    def add(self, seconds: Sequence[float]) -> None:
        """Take in the times of a round.

        Args:
            seconds: Sequence of floats, of the plans of `round`, in this order.
        """
        times = dict(zip(self.round, seconds, strict=True))
        for rival in self._rivals:
            found = self._ratios.setdefault(rival, [])
            found.append(times[DEFAULT] / times[rival])
        self._num_rounds += 1
        rounds = len(self._ratios[self._rivals[0]])
        if self._is_last and rounds == _LAST_ROUNDS:
            self._decide()
        elif not self._is_last and rounds == _ROUNDS:
            self._halve()
        self.round = self._next()

    def _next(self) -> tuple[int, ...]:
        """Plans of the next round in their order, which every second one reverses."""
        if not self._rivals:
            return ()
        plans = (DEFAULT, *self._rivals)
        return plans[::-1] if self._num_rounds % 2 else plans

    def _halve(self) -> None:
        """Keep the faster half of the rivals, or none where none is faster."""
        medians = {r: statistics.median(found) for r, found in self._ratios.items()}
        ranked = sorted(self._rivals, key=lambda rival: -medians[rival])
        kept = ranked[: max(1, len(ranked) // 2)]
        self._rivals = [] if medians[kept[0]] <= 1 else sorted(kept)
        self._ratios = {}
        self._is_last = len(self._rivals) == 1

    def _decide(self) -> None:
        (rival,) = self._rivals
        gains = [ratio - 1 for ratio in self._ratios[rival]]
        low, high = median_interval(gains)
        self.gain = Gain(statistics.median(gains), low, high, len(gains))
        self.winner = rival if low > 0 else DEFAULT
        self._rivals = []


def most_blocks(num_rivals: int) -> int:
    """Return the most blocks that a trial takes.

    Args:
        num_rivals: Int, at least 1.

    Example:

    >>> most_blocks(1), most_blocks(5)
    (18, 36)
    """
    count = 0
    while num_rivals > 1:
        count += _ROUNDS * (1 + num_rivals)
        num_rivals //= 2
    return count + 2 * _LAST_ROUNDS
