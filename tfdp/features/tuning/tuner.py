"""Tuner: a trial over the steps of a loop, block by block, by successive halving.

It knows neither Keras nor a clock: it is told of each step, and switches plans. Blocks
of the default and of its rivals take turns, and what counts is the ratio of two blocks
of the same round: a machine that slows down hurts both. First rounds drop the slower
half of the rivals again and again. The last rounds compare the one that is left with
the default anew, for the best of several noisy numbers looks better than it is.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Protocol

from tfdp.features.tuning.proposals import MOST_PROPOSALS, Proposal
from tfdp.ground.base.intervals import median_interval
from tfdp.ground.text import pluralize

# The default, among the plans of a trial.
DEFAULT = 0
# Rounds before each halving, and of the last comparison. Of nine pairs the interval
# leaves out one on either side, and holds the median with 96 %.
_ROUNDS, _LAST_ROUNDS = 2, 9
# Steps of a block that count. With accumulation so many updates at least.
BLOCK_STEPS, _FEWEST_UPDATES = 20, 5
# Updates of a block that do not count: caches are those of the plan before. The first
# time that a plan is used it is traced, and memory is allocated for it.
_SKIPPED, _SKIPPED_AT_FIRST = 1, 3


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


class Loop(Protocol):
    """What a tuner does to the loop whose steps it is told of."""

    def propose(self, step_seconds: float) -> list[Proposal]:
        """Propose plans, the same on all workers, given what a step takes."""

    def switch(self, proposal: Proposal | None) -> None:
        """Take a plan from the next step on, or with `None` the default."""

    def agree(self, seconds: list[float]) -> list[float]:
        """Return the longest of all workers' times, one for each plan of a round."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a trial has found.

    Args:
        winner: `Proposal` that is faster than the default, or `None`: none is.
        gain: `Gain` of the winner, or of the best that the default was compared with;
            `None` where the first rounds left no rival.
        num_proposals: Int, plans that were tried.
    """

    winner: Proposal | None
    gain: Gain | None
    num_proposals: int

    def describe(self, steps: str) -> str:
        """Describe what was found, for people.

        Args:
            steps: String, the steps of a block that count.

        Example:

        >>> print(Outcome(None, Gain(0.02, -0.01, 0.05, 9), 5).describe("20 steps"))
        keeps the default buckets: of 5 other plans the best was 2 % faster than the \
default [-1, 5] in 9 rounds of 20 steps
        """
        gain = self.gain
        if not self.num_proposals:
            return "keeps the default buckets: there is no other plan for this model"
        others = pluralize(self.num_proposals, "other plan")
        if gain is None:
            return f"keeps the default buckets: none of {others} was faster"
        found = f"{gain} in {pluralize(gain.num_rounds, 'round')} of {steps}"
        if self.winner is not None:
            return f"took {self.winner}: {found}"
        return f"keeps the default buckets: of {others} the best was {found}"


class Tuner:
    """Tuner of a loop.

    Args:
        loop: `Loop`.
        update_steps: Int, steps from one update of the weights to the next: only then
            is there something to communicate.
    """

    def __init__(self, loop: Loop, update_steps: int) -> None:
        self.outcome: Outcome | None = None
        self._loop = loop
        self._update_steps = update_steps
        self._proposals: list[Proposal] = []
        self._trial: Trial | None = None
        self._seen = {DEFAULT}
        self._medians: list[float] = []
        self._block = self._new_block(_SKIPPED_AT_FIRST)

    def step_ends(self, seconds: float, num_steps: int = 1) -> None:
        """Take in the time of some steps; plans may be switched.

        Args:
            seconds: Float, of all of them.
            num_steps: Int, those of one execution. Defaults to 1.
        """
        if self.outcome is not None or not self._block.add(seconds, num_steps):
            return
        self._medians.append(self._block.median)
        plans = self._trial.round if self._trial else (DEFAULT,)
        if len(self._medians) == len(plans):
            self._end_round()
        else:
            self._begin_block(plans[len(self._medians)])

    def _end_round(self) -> None:
        seconds = self._loop.agree(self._medians)
        self._medians = []
        if self._trial is not None:
            self._trial.add(seconds)
        else:
            self._proposals = self._loop.propose(seconds[0])
            if self._proposals:
                self._trial = Trial(len(self._proposals))
        if self._trial is not None and self._trial.round:
            self._begin_block(self._trial.round[0])
        else:
            self._end()

    def _begin_block(self, plan: int) -> None:
        self._loop.switch(self._proposal(plan))
        self._block = self._new_block(
            _SKIPPED if plan in self._seen else _SKIPPED_AT_FIRST
        )
        self._seen.add(plan)

    def _end(self) -> None:
        winner = gain = None
        if self._trial is not None:
            winner, gain = self._proposal(self._trial.winner), self._trial.gain
        self._loop.switch(winner)
        self.outcome = Outcome(winner, gain, len(self._proposals))

    def _proposal(self, plan: int) -> Proposal | None:
        return None if plan == DEFAULT else self._proposals[plan - 1]

    def _new_block(self, num_skipped: int) -> _Block:
        num_updates = _updates_of_block(self._update_steps)
        return _Block(self._update_steps, num_skipped, num_updates)


class _Block:
    """Times of the updates of one block."""

    def __init__(self, update_steps: int, num_skipped: int, num_updates: int) -> None:
        self._update_steps = update_steps
        self._num_skipped = num_skipped
        self._num_updates = num_skipped + num_updates
        self._steps, self._seconds = 0, 0.0
        self._times: list[float] = []

    def add(self, seconds: float, num_steps: int) -> bool:
        """Take in the time of some steps; true when the block is over."""
        self._steps += num_steps
        self._seconds += seconds
        if self._steps >= self._update_steps:
            self._times.append(self._seconds / self._steps)
            self._steps, self._seconds = 0, 0.0
        return len(self._times) == self._num_updates

    @property
    def median(self) -> float:
        """Float, seconds of a step: evaluations and starts of epochs are outliers."""
        return statistics.median(self._times[self._num_skipped :])


def most_steps(update_steps: int) -> int:
    """Return the most steps that a trial takes.

    Args:
        update_steps: Int, see `Tuner`.

    Example:

    >>> most_steps(1), most_steps(4)
    (789, 936)
    """
    each = _updates_of_block(update_steps) + _SKIPPED
    # One block comes before all, and each plan is new once.
    blocks = 1 + most_blocks(MOST_PROPOSALS)
    more = (_SKIPPED_AT_FIRST - _SKIPPED) * (1 + MOST_PROPOSALS)
    return update_steps * (blocks * each + more)


def block_steps(update_steps: int) -> int:
    """Return the steps of a block that count.

    Args:
        update_steps: Int, see `Tuner`.

    Example:

    >>> block_steps(1), block_steps(3), block_steps(8)
    (20, 21, 40)
    """
    return update_steps * _updates_of_block(update_steps)


def _updates_of_block(update_steps: int) -> int:
    return max(-(-BLOCK_STEPS // update_steps), _FEWEST_UPDATES)


def longest(of_workers: Sequence[Sequence[float]]) -> list[float]:
    """Return the longest time of each plan: a step is over when the last worker is.

    Args:
        of_workers: Sequence of the times of each worker.

    Example:

    >>> longest([[1.0, 5.0], [2.0, 4.0]])
    [2.0, 5.0]
    """
    return [max(times) for times in zip(*of_workers, strict=True)]
