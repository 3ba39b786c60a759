"""Tuner: a trial over the steps of a loop, block by block.

It knows neither Keras nor a clock: it is told of each step, and switches plans.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Protocol

from tfdp.features.tuning.proposals import MOST_PROPOSALS, Proposal
from tfdp.features.tuning.trial import DEFAULT, Gain, Trial, most_blocks
from tfdp.ground.text import pluralize

# Steps of a block that count. With accumulation so many updates at least.
BLOCK_STEPS, _FEWEST_UPDATES = 20, 5
# Updates of a block that do not count: caches are those of the plan before. The first
# time that a plan is used it is traced, and memory is allocated for it.
_SKIPPED, _SKIPPED_AT_FIRST = 1, 3


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
