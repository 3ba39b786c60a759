"""`tools/storm` kills workers, and counts what that has cost."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.storm.figures import (
    Attempt,
    Kill,
    figures_of,
    largest_difference,
    read_attempts,
)
from tests.storm.job import Plan, run


def test_stamps_of_all_workers_make_an_attempt(tmp_path: Path):
    (tmp_path / "b-0.stamps").write_text("start 30.0\n7 35.0\n8 36.0\n")
    (tmp_path / "b-1.stamps").write_text("start 29.0\n7 35.5\n8 36.5\n9 37.0\n10")
    (tmp_path / "a-0.stamps").write_text("start 10.0\n")
    (tmp_path / "c-0.stamps").write_text("sta")
    assert read_attempts(tmp_path) == [
        Attempt(1, 10.0, None, 0),
        Attempt(2, 29.0, (7, 35.0), 9),
    ]


def test_restarts_and_repeated_steps_are_counted_also_across_an_early_death():
    attempts = [
        Attempt(2, 0.0, (1, 5.0), 57),
        Attempt(2, 20.0, None, 0),
        Attempt(2, 30.0, (51, 38.0), 60),
        Attempt(2, 50.0, (61, 56.0), 90),
        Attempt(3, 80.0, (91, 87.0), 95),  # nobody was killed: it has grown
    ]
    kills = [Kill(18.0, 0), Kill(27.0, 1), Kill(48.0, 0)]
    found = figures_of(attempts, kills)
    assert found.restart_seconds == [8.0, 6.0, 7.0]
    assert found.kill_seconds == [11.0, 8.0]
    assert found.repeated == [7, 0, 0]


def test_loss_curves_of_different_length_are_infinitely_apart():
    assert largest_difference([1.0, 0.5], [1.0, 0.4]) == pytest.approx(0.25)
    assert math.isinf(largest_difference([1.0], [1.0, 0.4]))
    assert math.isinf(largest_difference([], []))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.full
def test_a_job_whose_workers_are_killed_ends_with_the_same_bits(tmp_path: Path):
    length = {"epochs": 8, "steps_per_epoch": 60}
    times = {"every": (25.0, 35.0), "most_kills": 2, "step_seconds": 0.1}
    storm, calm = Plan(2, save_freq=10, **length, **times), Plan(2, **length)
    killed, undisturbed = run(storm, tmp_path / "storm"), run(calm, tmp_path / "calm")
    assert killed.code == undisturbed.code == 0, killed.output + undisturbed.output
    assert killed.kills
    assert len(killed.attempts) > 1
    assert killed.losses == undisturbed.losses
    assert killed.hash == undisturbed.hash
    repeated = figures_of(killed.attempts, killed.kills).repeated
    assert all(0 <= steps <= storm.save_freq for steps in repeated)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.full
def test_a_job_that_goes_on_with_fewer_workers_and_grows_has_the_same_losses(
    tmp_path: Path,
):
    same = {"epochs": 10, "steps_per_epoch": 60, "dropout": 0.0}
    times = {"every": (25.0, 30.0), "most_kills": 3, "step_seconds": 0.1}
    options = ("--min-workers", "2", "--grow-after", "15")
    storm = Plan(3, save_freq=10, options=options, kills_again=True, **same, **times)
    killed = run(storm, tmp_path / "storm")
    undisturbed = run(Plan(1, **same), tmp_path / "calm")
    assert killed.code == undisturbed.code == 0, killed.output + undisturbed.output
    sizes = [attempt.num_workers for attempt in killed.attempts]
    assert " growth: " in killed.history, killed.history
    assert {2, 3} <= set(sizes)
    # Rounding that grows for 300 updates; one device is the judge.
    assert killed.losses == pytest.approx(undisturbed.losses, rel=1e-3)
