"""Tuner: a trial of plans over the steps of a loop, by successive halving.

The tuner does not depend on Keras or a clock: it receives the time of each step, and
switches plans. A round has one block of steps for the default and for each candidate,
and compares blocks of the same round, since a slower machine affects all of them. The
first stages drop the slower half of the candidates until one is left. The last stage
compares it with the default in new rounds, since the best of several noisy times is
biased.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Protocol

from tfdp.features.tuning.proposals import MAX_PROPOSALS, Proposal
from tfdp.ground.base.intervals import median_interval
from tfdp.ground.text import pluralize

# A trial identifies plans by numbers. The default, with which all others are compared,
# is 0; the others, the candidates, are numbered from 1.
DEFAULT = 0
# Number of rounds before each halving of the candidates, and in the last comparison.
# That comparison leaves out the lowest and the highest of its nine ratios: the interval
# of the others contains the median with a probability of 96 %.
_ROUNDS, _LAST_ROUNDS = 2, 9
# A block times at least this many steps, so that its median is not noise. With gradient
# accumulation only updates communicate, so a block has at least 5 of them.
BLOCK_STEPS, _MIN_UPDATES = 20, 5
# Number of updates at the start of a block that are not timed, since caches still hold
# data of the previous plan. The second number is for the first block of a plan, in
# which the plan is also traced, and its memory allocated.
_SKIPPED, _SKIPPED_AT_FIRST = 1, 3


@dataclasses.dataclass(frozen=True)
class Gain:
    """Speedup of a plan over the default, as a fraction of the default's speed.

    Args:
        median: Float, median over rounds: 0.1 for 10 % more steps in the same time.
        low: Float, lower end of the median's confidence interval.
        high: Float, upper end of the interval.
        num_rounds: Int, number of rounds in which it was measured.

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
    """Trial of several plans, the candidates, against the default.

    In a round, each remaining candidate and the default run for one block of steps,
    whose times `add` receives. After every two rounds the slower half of the candidates
    is dropped. Nine rounds with the last candidate decide whether it wins.

    Args:
        num_candidates: Int, at least 1. Candidates are numbered from 1; the default is
            0.

    Attributes:
        round: Tuple of ints, the plans to time next in this order; empty at the end.
        winner: Int, number of the winning plan; the default until the end.
        gain: `Gain` of the candidate in the last comparison, or `None` without one.

    Example: the second of two candidates is twice as fast as the default.

    >>> trial = Trial(num_candidates=2)
    >>> while trial.round:
    ...     trial.add([{0: 2.0, 1: 2.0, 2: 1.0}[plan] for plan in trial.round])
    >>> trial.winner, trial.gain.median
    (2, 1.0)

    Source: Jamieson and Talwalkar 2016, "Non-stochastic Best Arm Identification and
    Hyperparameter Optimization", https://arxiv.org/abs/1502.07943, for successive
    halving.
    """

    def __init__(self, num_candidates: int) -> None:
        self._candidates = list(range(1, num_candidates + 1))
        # For each candidate, one ratio for each round since candidates were last
        # dropped: its speed divided by that of the default in the same round, since a
        # slower machine affects both.
        self._ratios: dict[int, list[float]] = {}
        self._num_rounds = 0
        self._is_last = num_candidates == 1
        self.gain: Gain | None = None
        self.winner = DEFAULT
        self.round: tuple[int, ...] = self._next_round()

    def add(self, seconds: Sequence[float]) -> None:
        """Add the times of a round, and choose the plans of the next one.

        Args:
            seconds: Sequence of floats, time of a step with each plan in `round`, in
                that order.
        """
        times = dict(zip(self.round, seconds, strict=True))
        for candidate in self._candidates:
            ratios = self._ratios.setdefault(candidate, [])
            ratios.append(times[DEFAULT] / times[candidate])
        self._num_rounds += 1
        rounds = len(self._ratios[self._candidates[0]])
        if self._is_last and rounds == _LAST_ROUNDS:
            self._decide()
        elif not self._is_last and rounds == _ROUNDS:
            self._halve()
        self.round = self._next_round()

    def _next_round(self) -> tuple[int, ...]:
        """Return the plans of the next round, by number, in the order of their blocks.

        Every second round has the reverse order. The tuple is empty at the end of the
        trial.
        """
        if not self._candidates:
            return ()
        plans = (DEFAULT, *self._candidates)
        return plans[::-1] if self._num_rounds % 2 else plans

    def _halve(self) -> None:
        """Drop the slower half of the candidates; all if none beats the default."""
        medians = {r: statistics.median(ratios) for r, ratios in self._ratios.items()}
        ranked = sorted(self._candidates, key=lambda candidate: -medians[candidate])
        kept = ranked[: max(1, len(ranked) // 2)]
        self._candidates = [] if medians[kept[0]] <= 1 else sorted(kept)
        self._ratios = {}
        self._is_last = len(self._candidates) == 1

    def _decide(self) -> None:
        """End the trial: the last candidate wins if it is significantly faster.

        Its gain is the default's time divided by its own, minus 1. It wins if the
        interval of 95 % probability around the median gain is above zero; otherwise the
        default wins.
        """
        (candidate,) = self._candidates
        gains = [ratio - 1 for ratio in self._ratios[candidate]]
        low, high = median_interval(gains)
        self.gain = Gain(statistics.median(gains), low, high, len(gains))
        self.winner = candidate if low > 0 else DEFAULT
        self._candidates = []


def max_blocks(num_candidates: int) -> int:
    """Return the largest number of blocks of steps that a trial takes.

    A block is a number of consecutive steps with one plan.

    Args:
        num_candidates: Int, number of plans that are compared with the default, at
            least 1.

    Example:

    >>> max_blocks(1), max_blocks(5)
    (18, 36)
    """
    count = 0
    while num_candidates > 1:
        count += _ROUNDS * (1 + num_candidates)
        num_candidates //= 2
    return count + 2 * _LAST_ROUNDS


class Loop(Protocol):
    """Interface of the training loop in which a `Tuner` tries bucket plans."""

    def propose(self, step_seconds: float) -> list[Proposal]:
        """Propose plans, the same on all workers.

        Args:
            step_seconds: Float, measured time of a step with the default plan.
        """

    def switch(self, proposal: Proposal | None) -> None:
        """Use the plan of a proposal from the next step on; `None` is the default."""

    def agree(self, seconds: list[float]) -> list[float]:
        """Return for each plan of a round the longest time of all workers.

        Args:
            seconds: List of floats, this worker's time of a step with each plan.
        """


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """Result of a trial.

    Args:
        winner: `Proposal` that is faster than the default, or `None` if there is none.
        gain: `Gain` of the candidate in the last comparison, or `None` if all
            candidates were dropped before.
        num_proposals: Int, number of plans that were tried.
    """

    winner: Proposal | None
    gain: Gain | None
    num_proposals: int

    def describe(self, steps: str) -> str:
        """Describe the result in a message to the user.

        Args:
            steps: String, the number of timed steps of a block, such as `"20 steps"`.

        Example:

        >>> print(TrialResult(None, Gain(0.02, -0.01, 0.05, 9), 5).describe("20 steps"))
        keeps the default buckets: of 5 other plans the best was 2 % faster than the \
default [-1, 5] in 9 rounds of 20 steps
        """
        gain = self.gain
        if not self.num_proposals:
            return "keeps the default buckets: there is no other plan for this model"
        others = pluralize(self.num_proposals, "other plan")
        if gain is None:
            return f"keeps the default buckets: none of {others} was faster"
        measured = f"{gain} in {pluralize(gain.num_rounds, 'round')} of {steps}"
        if self.winner is not None:
            return f"took {self.winner}: {measured}"
        return f"keeps the default buckets: of {others} the best was {measured}"


class Tuner:
    """Driver of a trial: times blocks of steps, and switches the plans of a loop.

    A block is a number of consecutive steps with one plan.

    Args:
        loop: `Loop` whose plans are tried.
        update_steps: Int, steps from one update of the weights to the next; only
            updates communicate.

    Attributes:
        outcome: `TrialResult`, or `None` until the trial has ended.
    """

    def __init__(self, loop: Loop, update_steps: int) -> None:
        self.outcome: TrialResult | None = None
        self._loop = loop
        self._update_steps = update_steps
        self._proposals: list[Proposal] = []
        self._trial: Trial | None = None
        self._seen = {DEFAULT}
        self._medians: list[float] = []
        self._block = self._new_block(_SKIPPED_AT_FIRST)

    def step_ends(self, seconds: float, num_steps: int = 1) -> None:
        """Handle the end of an execution: add its time, and switch plans after a block.

        An execution is one call of the traced function. A block is a number of
        consecutive steps with one plan.

        Args:
            seconds: Float, time of all steps of the execution.
            num_steps: Int, steps of the execution. Defaults to 1.
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
        """Agree on the times of a round; begin the next one, or end the trial."""
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
        """Switch to a plan, and start to time a block of steps with it.

        `plan` is the plan's number in the trial, 0 for the default.
        """
        self._loop.switch(self._proposal(plan))
        self._block = self._new_block(
            _SKIPPED if plan in self._seen else _SKIPPED_AT_FIRST
        )
        self._seen.add(plan)

    def _end(self) -> None:
        """End the trial: switch to the winning plan, and set `outcome`."""
        winner = gain = None
        if self._trial is not None:
            winner, gain = self._proposal(self._trial.winner), self._trial.gain
        self._loop.switch(winner)
        self.outcome = TrialResult(winner, gain, len(self._proposals))

    def _proposal(self, plan: int) -> Proposal | None:
        """Return the proposal with this number in the trial; `None` for the default."""
        return None if plan == DEFAULT else self._proposals[plan - 1]

    def _new_block(self, num_skipped: int) -> _Block:
        """Return an empty block, whose first `num_skipped` updates are not timed."""
        num_updates = _updates_of_block(self._update_steps)
        return _Block(self._update_steps, num_skipped, num_updates)


class _Block:
    """Times of one block: a number of consecutive steps with one plan.

    Args:
        update_steps: Int, steps from one update of the weights to the next.
        num_skipped: Int, updates at the start that are not timed.
        num_updates: Int, timed updates.
    """

    def __init__(self, update_steps: int, num_skipped: int, num_updates: int) -> None:
        self._update_steps = update_steps
        self._num_skipped = num_skipped
        self._num_updates = num_skipped + num_updates
        self._steps, self._seconds = 0, 0.0
        self._times: list[float] = []

    def add(self, seconds: float, num_steps: int) -> bool:
        """Add the time of an execution, and return whether the block is over.

        An execution is one call of the traced function, of one or several steps.

        Args:
            seconds: Float, time of all steps of the execution.
            num_steps: Int, steps of the execution.
        """
        self._steps += num_steps
        self._seconds += seconds
        if self._steps >= self._update_steps:
            self._times.append(self._seconds / self._steps)
            self._steps, self._seconds = 0, 0.0
        return len(self._times) == self._num_updates

    @property
    def median(self) -> float:
        """Float, median of the seconds of a step over the timed updates of the block.

        A mean would count evaluations between steps, which are outliers.
        """
        return statistics.median(self._times[self._num_skipped :])


def max_trial_steps(update_steps: int) -> int:
    """Return the largest number of steps that a trial takes.

    Args:
        update_steps: Int, steps from one update of the weights to the next.

    Example:

    >>> max_trial_steps(1), max_trial_steps(4)
    (789, 936)
    """
    each = _updates_of_block(update_steps) + _SKIPPED
    # The default plan is measured in one block before the first round, so there is one
    # block more. The first block of each plan skips more updates than its later ones,
    # which adds steps.
    blocks = 1 + max_blocks(MAX_PROPOSALS)
    more = (_SKIPPED_AT_FIRST - _SKIPPED) * (1 + MAX_PROPOSALS)
    return update_steps * (blocks * each + more)


def block_steps(update_steps: int) -> int:
    """Return the number of timed steps of a block, in which a trial runs one plan.

    Args:
        update_steps: Int, steps from one update of the weights to the next.

    Example:

    >>> block_steps(1), block_steps(3), block_steps(8)
    (20, 21, 40)
    """
    return update_steps * _updates_of_block(update_steps)


def _updates_of_block(update_steps: int) -> int:
    """Return the number of timed updates in a block, in which a trial runs one plan.

    They have at least `BLOCK_STEPS` (20) steps together, and are at least 5.

    Args:
        update_steps: Int, steps from one update of the weights to the next.
    """
    return max(-(-BLOCK_STEPS // update_steps), _MIN_UPDATES)


def longest(of_workers: Sequence[Sequence[float]]) -> list[float]:
    """Return the longest time of each plan, since a step ends with the slowest worker.

    Args:
        of_workers: Sequence with a sequence of floats for each worker: its time of a
            step with each plan, in seconds.

    Example:

    >>> longest([[1.0, 5.0], [2.0, 4.0]])
    [2.0, 5.0]
    """
    return [max(times) for times in zip(*of_workers, strict=True)]
