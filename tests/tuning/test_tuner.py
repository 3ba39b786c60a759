"""A tuner that is told of made-up steps: blocks, switches, and what they lead to."""

from __future__ import annotations

import json
import threading

import pytest

from tfdp.features.tuning.plan_cache import PlanChoice
from tfdp.features.tuning.proposals import Proposal
from tfdp.features.tuning.tuner import Tuner, longest, max_trial_steps
from tfdp.ground.plans.buckets import BucketPlan


def proposal(size: int) -> Proposal:
    return Proposal(PlanChoice(size, size), BucketPlan(()), ())


class FakeLoop:
    """A loop whose steps take as long as their plan says.

    Args:
        seconds: Seconds of a step by bucket size, of the default under 0.
        first_seconds: What the first step after a switch takes more.
    """

    def __init__(self, seconds: dict[int, float], first_seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.first_seconds = first_seconds
        self.size = 0
        self.sizes: list[int] = []
        self.proposed_after = 0.0
        self._is_first = True

    def propose(self, step_seconds: float) -> list[Proposal]:
        self.proposed_after = step_seconds
        return [proposal(size) for size in self.seconds if size]

    def switch(self, proposal: Proposal | None) -> None:
        size = 0 if proposal is None else proposal.choice.bucket_bytes
        self._is_first = self._is_first or size != self.size
        self.size = size

    def agree(self, seconds: list[float]) -> list[float]:
        return seconds

    def step(self) -> float:
        self.sizes.append(self.size)
        extra, self._is_first = self.first_seconds * self._is_first, False
        return self.seconds[self.size] + extra


def run(loop: FakeLoop, tuner: Tuner, limit: int = 10_000) -> int:
    """Run steps until the tuner is through; returns how many."""
    for step in range(limit):
        if tuner.outcome is not None:
            return step
        tuner.step_ends(loop.step())
    raise AssertionError("the trial does not end")


def test_the_fastest_plan_is_in_force_at_the_end():
    loop = FakeLoop({0: 0.1, 10: 0.12, 20: 0.08, 30: 0.09, 40: 0.1, 50: 0.2})
    tuner = Tuner(loop, 1)
    assert run(loop, tuner) == max_trial_steps(1)
    assert tuner.outcome is not None
    assert tuner.outcome.winner == proposal(20)
    assert loop.size == 20
    assert tuner.outcome.gain is not None
    assert tuner.outcome.gain.median == pytest.approx(0.25)
    assert loop.proposed_after == pytest.approx(0.1)


def test_the_first_step_of_a_plan_does_not_count():
    loop = FakeLoop({0: 0.1, 10: 0.08}, first_seconds=30.0)
    tuner = Tuner(loop, 1)
    run(loop, tuner)
    assert tuner.outcome is not None
    assert tuner.outcome.gain is not None
    assert tuner.outcome.gain.median == pytest.approx(0.25)


def test_blocks_have_twenty_steps_and_the_default_comes_before_the_rivals():
    loop = FakeLoop({0: 0.1, 10: 0.08})
    run(loop, Tuner(loop, 1))
    # Of the first block three are left out; then pairs, every second one reversed.
    assert loop.sizes[:23] == [0] * 23
    assert loop.sizes[23 : 23 + 21] == [0] * 21
    assert loop.sizes[44 : 44 + 23] == [10] * 23
    assert loop.sizes[67 : 67 + 21] == [10] * 21
    assert loop.sizes[88 : 88 + 21] == [0] * 21


def test_with_accumulation_the_steps_that_communicate_count():
    # Three of four steps cost nothing to communicate, so that their median is blind.
    loop = FakeLoop({0: 0.1, 10: 0.1})
    tuner = Tuner(loop, 4)
    step = 0
    while tuner.outcome is None:
        communicates = step % 4 == 3
        extra = {0: 0.4, 10: 0.2}[loop.size] * communicates
        tuner.step_ends(loop.step() + extra)
        step += 1
    assert tuner.outcome.winner == proposal(10)
    assert tuner.outcome.gain is not None
    assert tuner.outcome.gain.median == pytest.approx(0.8 / 0.6 - 1)


def test_an_execution_of_several_steps_counts_by_the_step():
    loop = FakeLoop({0: 0.1, 10: 0.05})
    tuner = Tuner(loop, 5)
    while tuner.outcome is None:
        tuner.step_ends(5 * loop.step(), 5)
    assert loop.proposed_after == pytest.approx(0.1)
    assert tuner.outcome.winner == proposal(10)


def test_without_another_plan_the_default_stays_after_one_block():
    loop = FakeLoop({0: 0.1})
    tuner = Tuner(loop, 1)
    assert run(loop, tuner) == 23
    assert tuner.outcome is not None
    assert (tuner.outcome.winner, tuner.outcome.num_proposals) == (None, 0)


def test_where_nothing_is_faster_the_default_is_in_force_again():
    loop = FakeLoop({0: 0.1, 10: 0.2, 20: 0.3})
    tuner = Tuner(loop, 1)
    run(loop, tuner)
    assert tuner.outcome is not None
    assert (tuner.outcome.winner, tuner.outcome.gain) == (None, None)
    assert loop.size == 0


class Together:
    """What workers say to each other, as texts, all at once."""

    def __init__(self, num_workers: int) -> None:
        self._barrier = threading.Barrier(num_workers, timeout=20)
        self._texts = [""] * num_workers

    def agree(self, rank: int, seconds: list[float]) -> list[float]:
        self._texts[rank] = json.dumps(seconds)
        self._barrier.wait()
        found = longest([json.loads(text) for text in self._texts])
        self._barrier.wait()
        return found


def test_all_workers_switch_before_the_same_step_and_take_the_same_plan():
    # One of them sees no difference between plans, and one would take another.
    speeds = [
        {0: 0.1, 10: 0.1, 20: 0.1},
        {0: 0.1, 10: 0.05, 20: 0.06},
        {0: 0.2, 10: 0.3, 20: 0.15},
    ]
    together = Together(len(speeds))
    loops = [FakeLoop(seconds) for seconds in speeds]
    found = [None] * len(speeds)

    def work(rank: int) -> None:
        loop = loops[rank]
        loop.agree = lambda seconds: together.agree(rank, seconds)  # type: ignore[method-assign]
        tuner = Tuner(loop, 1)
        run(loop, tuner)
        found[rank] = tuner.outcome

    threads = [threading.Thread(target=work, args=(r,)) for r in range(len(speeds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is not None
    assert found[0].winner == proposal(20)
    assert found[0] == found[1] == found[2]
    assert loops[0].sizes == loops[1].sizes == loops[2].sizes
