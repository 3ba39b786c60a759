"""A job in which something fails ends with its name, and goes on as if it had not."""

from __future__ import annotations

import collections
import dataclasses
import re

import pytest

from tests.faults import campaign, lives, verdicts
from tests.faults.beds import why_not
from tests.faults.damage import WAYS
from tests.faults.ends import (
    DEATH_SECONDS,
    EXIT_KILLED,
    EXIT_LOST,
    seconds_of,
    sentence_of,
)
from tests.faults.job import End, Life
from tests.faults.judge import problem_of
from tests.faults.lives import Outcome
from tests.faults.plan import CUTS, POINTS, Fault, JobPlan
from tests.harness.tiers import full
from tfdp.communication.coordination.preemption import PREEMPTED

PROCESS_GROUP = "hosts"
pytestmark = [pytest.mark.slow, pytest.mark.processes]

# Two to three tenths, also where six processes want each core.
CLOSED_SECONDS = 1.0


@pytest.fixture(scope="module")
def undisturbed() -> dict:
    """The result of two workers to which nothing happens, on one host or two."""
    outcome = lives.run(JobPlan(2))
    assert outcome.left == outcome.first.left == ""
    for end in outcome.first.ends:
        assert end.code == 0, end.log
        assert "tfdp:" not in end.log
    # Worker 0 completes a backup, by its index.
    saved = [
        text for _, event, text in outcome.first.ends[0].events if event == "backup"
    ]
    assert saved == ["7", "14", "21", "28"]
    return outcome.first.ends[0].result


@pytest.fixture(scope="module")
def damaged(undisturbed: dict) -> tuple[JobPlan, Outcome]:
    """A job that was killed, whose newest backup was damaged, and that went on."""
    plan = JobPlan(2, Fault("damage", "newest", 1, step=17, way="flip"))
    return plan, lives.run(plan)


def check(plan: JobPlan, undisturbed: dict | None = None) -> Outcome:
    """Runs a job whose fault all other workers have to name in time.

    Given what it would have come to without, it is also run again.
    """
    outcome = lives.run(plan, goes_on=undisturbed is not None)
    assert problem_of(plan, outcome, undisturbed or {}) == ""
    return outcome


def needs(kind: str) -> None:
    if reason := why_not(kind):
        pytest.skip(reason)


@pytest.mark.parametrize("rank", [0, full(2)])
def test_the_death_of_a_worker_in_training_is_named_on_all_others(rank: int):
    fault = Fault("kill", "training", rank, step=5, leaves_child=rank == 0)
    outcome = check(JobPlan(3, fault))
    assert outcome.first.ends[rank].code == EXIT_KILLED
    for other in {0, 1, 2} - {rank}:
        said = sentence_of(outcome.first, other)
        assert "its process has ended" in said
        # By the connections that close, not by heartbeats that fail to come.
        seconds = seconds_of(outcome.first, other)
        print(f"worker {other} knew after {seconds:.2f} s")
        assert seconds < CLOSED_SECONDS
        # Those who saw it may have been at the agreement that ends the step before.
        assert re.search("step [45] of epoch 1 of fit", said)


@pytest.mark.full
def test_a_worker_that_dies_before_it_joins_is_named():
    check(JobPlan(2, Fault("kill", "start", 1, step=1), timeout_seconds=5.0))


@pytest.mark.full
def test_the_death_of_a_worker_that_saves_is_named():
    check(JobPlan(2, Fault("kill", "saving", 1, step=2)))


@pytest.mark.full
def test_the_death_of_a_worker_that_evaluates_is_named():
    check(JobPlan(2, Fault("kill", "evaluation", 1, step=2)))


@pytest.mark.full
def test_a_worker_in_its_own_callback_hears_of_a_death():
    outcome = check(JobPlan(2, Fault("kill", "callback", 1, step=1), busy_rank=0))
    assert outcome.first.ends[0].code == EXIT_LOST
    assert "epoch 1 of fit" in sentence_of(outcome.first, 0)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["exit", full("raise")])
def test_who_comes_to_a_collective_after_another_script_has_ended_hears_of_it(
    kind: str,
):
    outcome = check(JobPlan(2, Fault(kind, "evaluation", 1, step=1), busy_rank=0))
    assert "its script has ended, after " in sentence_of(outcome.first, 0)


def check_standing_still(rank: int) -> None:
    fault = Fault("stop", "training", rank, step=5)
    outcome = check(JobPlan(2, fault, timeout_seconds=6.0))
    said = sentence_of(outcome.first, 1 - rank)
    assert "no sign of life for" in said
    assert "its process exists but hangs" in said


def test_a_first_worker_that_stands_still_is_named_within_the_timeout():
    check_standing_still(0)


@pytest.mark.full
def test_another_worker_that_stands_still_is_named_within_the_timeout():
    check_standing_still(1)


@pytest.mark.full
@pytest.mark.parametrize("piece", [1, 6, 18])
@pytest.mark.parametrize("hosts", [(), (0, 1)], ids=["shared memory", "TCP"])
@pytest.mark.parametrize("kind", ["kill", "stop", "cut"])
def test_what_happens_within_a_collective_is_named_and_leaves_nothing(
    kind: str, hosts: tuple, piece: int
):
    if kind == "cut" and not hosts:
        pytest.skip("there is no network to be cut")
    if hosts:
        needs("cut")
    way = "silent" if kind == "cut" else ""
    fault = Fault(kind, "collective", 1, step=piece, way=way)
    timeout = None if kind == "kill" else 6.0
    outcome = check(JobPlan(2, fault, timeout_seconds=timeout, hosts=hosts))
    for rank in range(1 if kind != "cut" else 2):
        end = outcome.first.ends[rank]
        print(f"{kind} at piece {piece}: {seconds_of(outcome.first, rank):.2f} s")
        # A process that had to be ended took everything with it; a heartbeat to a
        # host that is cut off waits in TensorFlow.
        left = [text for _, event, text in end.events if event == "left"]
        waits = ["tfdp heartbeat"] if kind == "cut" else [""]
        assert left in ([[]] if end.code == EXIT_LOST else [[""], waits])
    if kind == "kill":
        assert seconds_of(outcome.first, 0) < CLOSED_SECONDS


@pytest.mark.full
def test_an_error_in_one_script_is_told_by_the_others():
    outcome = check(JobPlan(2, Fault("raise", "training", 1, step=5)))
    assert outcome.first.ends[1].error == "ArithmeticError: the script's own error"
    said = sentence_of(outcome.first, 0)
    assert "ArithmeticError: the script's own error" in said


@pytest.mark.full
@pytest.mark.parametrize("kind", ["kill", full("stop"), full("raise")])
def test_in_a_loop_of_the_users_own_the_last_line_names_the_lost_worker(kind: str):
    timeout = 6.0 if kind == "stop" else None
    fault = Fault(kind, "training", 1, step=5)
    plan = JobPlan(2, fault, timeout_seconds=timeout, script="by hand")
    life = lives.run(plan, goes_on=False).first
    end = life.ends[0]
    said = [line for line in end.log.splitlines() if line.startswith("tfdp: Worker 1 ")]
    assert len(said) == 1, end.log
    assert "while bucket 0 was reduced: " in said[0]
    assert {
        "kill": "its process has ended (its port refuses connections)",
        "stop": "its process exists but hangs",
        "raise": "its script has ended, after ArithmeticError: the script's own error",
    }[kind] in said[0]
    # A worker that hangs keeps its connections open, until the other one closes them.
    ending = {"stop": "This worker has closed its connections: worker 1 is lost"}.get(
        kind, "Worker 1 has left its collectives: "
    )
    assert end.error.startswith(f"UnavailableError: {ending}")
    assert seconds_of(life, 0) <= DEATH_SECONDS + (timeout or 0.0)


@pytest.mark.full
def test_a_slow_worker_is_waited_for_and_named(undisturbed: dict):
    fault = Fault("sleep", "training", 1, step=5, seconds=12.0)
    outcome = check(JobPlan(2, fault), undisturbed)
    said = outcome.first.ends[0].log
    assert "tfdp: waiting at step 5 of epoch 1 of fit" in said
    assert "for worker 1 (127.0.0.1:" in said
    assert "which is at the callbacks of step 5" in said


@pytest.mark.full
def test_workers_that_are_cut_off_name_each_other_and_go_on_once_joined(
    undisturbed: dict,
):
    needs("cut")
    fault = Fault("cut", "training", 1, step=12, way="silent")
    plan = JobPlan(2, fault, timeout_seconds=5.0, hosts=(0, 1))
    outcome = check(plan, undisturbed)
    for rank in range(2):
        said = sentence_of(outcome.first, rank)
        assert "its host does not answer: it is off, or cut off from the network" in (
            said
        )


@pytest.mark.full
def test_a_disk_that_is_full_ends_all_with_one_error_and_leaves_the_backup_before(
    undisturbed: dict,
):
    needs("full")
    fault = Fault("full", "backup", 1, step=2, point="files", num_pages=1)
    outcome = check(JobPlan(2, fault), undisturbed)
    assert len({end.error for end in outcome.first.ends}) == 1


@pytest.mark.full
def test_a_run_whose_newest_backup_was_damaged_goes_on_from_the_one_before(
    damaged: tuple[JobPlan, Outcome], undisturbed: dict
):
    plan, outcome = damaged
    assert problem_of(plan, outcome, undisturbed) == ""
    assert outcome.damaged == ["step-14"]


@pytest.mark.full
def test_a_run_of_which_all_backups_were_damaged_says_so(undisturbed: dict):
    fault = Fault("damage", "every", 1, step=17, way="truncate")
    outcome = check(JobPlan(2, fault), undisturbed)
    assert outcome.damaged == ["step-7", "step-14"]


@pytest.mark.full
@pytest.mark.parametrize("point", [p if p == "index" else full(p) for p in POINTS[2:]])
def test_a_first_worker_that_dies_at_the_index_of_a_backup_loses_nothing(
    point: str, undisturbed: dict
):
    fault = Fault("crash", "backup", 0, step=2, point=point)
    check(JobPlan(2, fault), undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("hits_all", [True, full(False)])
def test_workers_asked_to_end_in_fit_save_and_go_on(hits_all: bool):
    plan = JobPlan(2, script="evaluate and fit")
    undisturbed = lives.run(plan).first.ends[0].result
    fault = Fault("sigterm", "tracing", 1, step=1, hits_all=hits_all)
    outcome = check(dataclasses.replace(plan, fault=fault), undisturbed)
    assert [end.code for end in outcome.first.ends] == [PREEMPTED] * 2


@pytest.mark.full
@pytest.mark.parametrize("phase", ["compiled", full("made"), full("between")])
def test_a_worker_asked_to_end_before_fit_ends(phase: str):
    fault = Fault("sigterm", phase, 1, step=1)
    check(JobPlan(2, fault, script="evaluate and fit"))


@pytest.mark.full
@pytest.mark.parametrize("hits_all", [True, full(False)])
def test_a_pause_shorter_than_the_timeout_changes_nothing(
    hits_all: bool, undisturbed: dict
):
    fault = Fault("pause", "training", 1, step=5, seconds=5.0, hits_all=hits_all)
    check(JobPlan(2, fault, timeout_seconds=12.0), undisturbed)


@pytest.mark.full
@pytest.mark.parametrize(
    "calls",
    [("other steps", "sum"), full(("evaluate", "steps that gather"))],
)
def test_workers_that_make_different_calls_end_after_the_timeout(calls: tuple):
    fault = Fault("differ", "mixed", 0, hits_all=True)
    # Longer than a slow machine takes to trace the first step of a worker.
    plan = JobPlan(2, fault, timeout_seconds=10.0, script="calls", calls=calls)
    outcome = check(plan)
    # `evaluate` meets the other workers before its first step, and says so itself.
    said = "run the same calls" if "evaluate" in calls else "run different collectives"
    assert all(said in end.log + end.error for end in outcome.first.ends)


@pytest.mark.full
def test_other_arrays_on_workers_are_one_error_of_all():
    fault = Fault("arrays", "predict", 0, hits_all=True)
    calls = ("predict", "predict, rows")
    check(JobPlan(2, fault, timeout_seconds=8.0, script="calls", calls=calls))


def test_a_campaign_has_each_kind_in_each_phase_five_times():
    count = 5 * len(campaign.PAIRS)
    faults = [plan.fault for plan in campaign.plans(count, seed=1)]
    counts = collections.Counter((fault.kind, fault.phase) for fault in faults)
    assert set(counts) == set(campaign.PAIRS)
    assert min(counts.values()) >= 5
    assert {f.way for f in faults if f.kind == "cut"} == set(CUTS)
    assert {f.way for f in faults if f.kind == "damage"} == set(WAYS)
    assert {f.point for f in faults if f.kind == "crash"} == set(POINTS[2:])
    pauses = campaign.plans(20, seed=1, kinds=["pause"])
    assert {plan.fault.kind for plan in pauses} == {"pause"}
    assert campaign.plans(40, seed=1) == campaign.plans(200, seed=1)[:40]
    assert campaign.plans(40, seed=2) != campaign.plans(40, seed=1)


@pytest.mark.parametrize(
    ("kind", "codes", "is_right"),
    [
        ("sigterm", (75, 75), True),
        ("sigterm", (-15, 1), True),
        # The notice was lost; the other one has not said a word.
        ("sigterm", (0, 0), False),
        ("sigterm", (-15, 69), False),
        ("sigterm", (75, 0), False),
        ("sigterm", (None, None), False),
        ("differ", (1, 1), True),
        ("differ", (0, 0), False),
        ("differ", (None, None), False),
        ("arrays", (1, 1), False),
        ("pause", (0, 0), True),
        ("pause", (None, 0), False),
    ],
)
def test_the_verdict_on_workers_that_were_asked_to_end_or_differ(
    kind: str, codes: tuple, is_right: bool
):
    fault = Fault(kind, "any", 0, seconds=5.0)
    plan = JobPlan(2, fault, timeout_seconds=8.0, calls=("fit", "evaluate"))
    error = "WorkerLost: Worker 0 (a:1) was lost"
    ends = []
    for rank, code in enumerate(codes):
        events = [(1.0, "fault", "")] if rank == 0 else []
        events += [(2.0, "finished", "{}")] if code == 0 else []
        said = error if code == 1 else ""
        result: dict | None = {} if code == 0 else None
        ends.append(End(code, 1.0, said, 1.0, result, events, ""))
    life = Life(ends, ("a:1", "b:1"), "")
    assert (verdicts.OF_KIND[kind](plan, life, {}) == "") == is_right


@pytest.mark.full
def test_the_judge_wants_bits_names_times_and_codes(
    damaged: tuple[JobPlan, Outcome], undisturbed: dict
):
    plan, outcome = damaged

    def told(part: str, rank: int, **changes: object) -> str:
        life = getattr(outcome, part)
        ends = list(life.ends)
        ends[rank] = dataclasses.replace(ends[rank], **changes)
        life = dataclasses.replace(life, ends=ends)
        changed = dataclasses.replace(outcome, **{part: life})
        return problem_of(plan, changed, undisturbed)

    error = outcome.first.ends[0].error
    assert "said" in told("first", 0, error=error.replace("Worker 1", "Worker 0"))
    assert "took" in told("first", 0, error_seconds=10.1)
    assert "worker 1 itself: code 0" in told("first", 1, code=0)
    assert "started again: worker 1: code 1" in told("second", 1, code=1)
    off = {**undisturbed, "hash": "0"}
    assert "started again: worker 0: code 0" in told("second", 0, result=off)
    assert "does not name" in told("second", 1, log="")
    left = dataclasses.replace(outcome, left="what was saved is lost")
    assert problem_of(plan, left, undisturbed) == "what was saved is lost"
