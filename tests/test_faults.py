"""A worker that is lost ends the job with its name, on every other worker."""

from __future__ import annotations

import re

import pytest

from faults import job
from faults.judge import EXIT_KILLED, EXIT_LOST, problem_of, sentence_of
from faults.plan import Fault, JobPlan

# From the fault to the end of the other processes; the error itself comes sooner.
DEADLINE_SECONDS = 40.0


def check(plan: JobPlan, undisturbed: list[float] = ()) -> job.Outcome:
    """Runs a job whose fault all other workers have to name in time."""
    outcome = job.run(plan, DEADLINE_SECONDS)
    assert problem_of(plan, outcome, undisturbed) == ""
    return outcome


@pytest.mark.parametrize("rank", [0, 2])
def test_the_death_of_a_worker_in_training_is_named_on_all_others(rank: int):
    outcome = check(JobPlan(3, Fault("kill", "training", rank, step=5)))
    assert outcome.ends[rank].code == EXIT_KILLED
    for other in {0, 1, 2} - {rank}:
        said = sentence_of(outcome, other)
        assert "its process has ended" in said
        # Those who saw it may have been at the agreement that ends the step before.
        assert re.search("step [45] of epoch 1 of fit", said)


def test_a_worker_that_dies_before_it_joins_is_named():
    check(JobPlan(2, Fault("kill", "start", 1, step=1), timeout_seconds=5.0))


def test_the_death_of_a_worker_that_saves_is_named():
    check(JobPlan(2, Fault("kill", "saving", 1, step=2)))


def test_the_death_of_a_worker_that_evaluates_is_named(full):
    check(JobPlan(2, Fault("kill", "evaluation", 1, step=2)))


def test_a_worker_in_its_own_callback_hears_of_a_death():
    outcome = check(JobPlan(2, Fault("kill", "callback", 1, step=1), busy_rank=0))
    assert outcome.ends[0].code == EXIT_LOST
    assert "epoch 1 of fit" in sentence_of(outcome, 0)


def check_standing_still(rank: int) -> None:
    fault = Fault("stop", "training", rank, step=5)
    outcome = check(JobPlan(2, fault, timeout_seconds=6.0))
    said = sentence_of(outcome, 1 - rank)
    assert "no sign of life for" in said
    assert "stands still" in said


def test_a_first_worker_that_stands_still_is_named_within_the_timeout():
    check_standing_still(0)


def test_another_worker_that_stands_still_is_named_within_the_timeout(full):
    check_standing_still(1)


def test_an_error_in_one_script_is_told_by_the_others():
    outcome = check(JobPlan(2, Fault("raise", "training", 1, step=5)))
    assert outcome.ends[1].error == "ArithmeticError: the script's own error"
    assert "ArithmeticError: the script's own error" in sentence_of(outcome, 0)


def test_a_slow_worker_is_waited_for_and_named():
    undisturbed = job.run(JobPlan(2), 60.0)
    for end in undisturbed.ends:
        assert end.code == 0
        assert end.num_saved == JobPlan(2).epochs
        assert "tfdp:" not in end.log
    fault = Fault("sleep", "training", 1, step=5, seconds=12.0)
    outcome = check(JobPlan(2, fault), undisturbed.ends[0].result)
    said = outcome.ends[0].log
    assert "tfdp: waiting at step 5 of epoch 1 of fit" in said
    assert "for worker 1 (127.0.0.1:" in said
    assert "which is at the callbacks of step 5" in said
