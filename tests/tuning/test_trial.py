"""Decisions of a trial, from times that are made up: no clock, no device."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from tfdp.features.tuning.tuner import DEFAULT, Trial, max_blocks


def tried(num_candidates: int, seconds: Callable[[int], float]) -> tuple[Trial, int]:
    """A trial that is over, and the number of its blocks."""
    trial, blocks = Trial(num_candidates), 0
    while trial.round:
        blocks += len(trial.round)
        trial.add([seconds(plan) for plan in trial.round])
    return trial, blocks


def noisy(
    speeds: Sequence[float], noise: float, seed: int, drift: float = 0.0
) -> Callable[[int], float]:
    """Times of plans whose blocks are noisy, on a machine that slows down."""
    generator, count = random.Random(seed), 0

    def seconds(plan: int) -> float:
        nonlocal count
        count += 1
        slower = (1 + drift) ** count
        return slower * generator.lognormvariate(0, noise) / speeds[plan]

    return seconds


def wins(
    speeds: Sequence[float], noise: float, count: int = 300, drift: float = 0.0
) -> list[int]:
    """The winners of many trials."""
    return [
        tried(len(speeds) - 1, noisy(speeds, noise, seed, drift))[0].winner
        for seed in range(count)
    ]


def test_of_plans_that_differ_by_noise_only_the_default_stays():
    # The interval errs on the side of a candidate in 10 of 512 comparisons.
    winners = wins([1.0] * 6, noise=0.05)
    assert sum(winner != DEFAULT for winner in winners) <= 12


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_a_plan_that_is_slower_by_more_than_a_percent_does_not_win(noise: float):
    winners = wins([1.0, *[0.98] * 5], noise)
    assert sum(winner != DEFAULT for winner in winners) <= 3


def test_a_faster_plan_wins_over_noise():
    winners = wins([1.0, 0.9, 1.0, 1.15, 1.01, 0.95], noise=0.03)
    assert sum(winner == 3 for winner in winners) >= 290


def test_of_two_fast_plans_one_of_them_wins():
    winners = wins([1.0, 0.9, 1.15, 1.13, 1.0, 0.8], noise=0.02)
    assert sum(winner in (2, 3) for winner in winners) >= 290


def test_a_machine_that_slows_down_favors_no_plan():
    # By 1 % from each block to the next: the later of two is not slower by itself.
    winners = wins([1.0] * 6, noise=0.002, drift=0.01)
    assert sum(winner != DEFAULT for winner in winners) <= 12


def test_a_single_block_that_is_far_off_decides_nothing():
    count = 0

    def seconds(plan: int) -> float:
        nonlocal count
        count += 1
        # The fifth is one of the default's, in the comparison of two.
        return 100.0 if count == 5 else 1.0 / [1.0, 1.05][plan]

    trial, _ = tried(1, seconds)
    assert trial.winner == 1
    assert trial.gain is not None
    assert trial.gain.high == pytest.approx(0.05)


@pytest.mark.parametrize("num_candidates", [1, 2, 3, 4, 5])
def test_candidates_are_halved_and_the_last_one_is_measured_anew(num_candidates: int):
    trial, blocks = tried(num_candidates, lambda plan: 1.0 / (1 + plan / 10))
    assert blocks == max_blocks(num_candidates)
    assert trial.winner == num_candidates
    assert trial.gain is not None
    assert trial.gain.num_rounds == 9
    assert trial.gain.median == pytest.approx(num_candidates / 10)
    assert str(trial.gain) == f"{10 * num_candidates} % faster than the default " + (
        f"[{10 * num_candidates}, {10 * num_candidates}]"
    )


def test_a_trial_ends_early_where_no_rival_is_faster():
    trial, blocks = tried(5, lambda plan: 1.0 + plan / 10)
    assert (trial.winner, trial.gain) == (DEFAULT, None)
    assert blocks == 12


def test_every_second_round_is_reversed():
    trial = Trial(2)
    first = trial.round
    trial.add([1.0] * 3)
    assert (first, trial.round) == ((0, 1, 2), (2, 1, 0))
