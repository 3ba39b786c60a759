"""Whether a job that met a fault ended as promised, and went on as promised."""

from __future__ import annotations

from tests.faults import verdicts
from tests.faults.ends import (
    DEATH_SECONDS,
    EXIT_KILLED,
    is_right,
    seconds_of,
    sentence_of,
    told,
)
from tests.faults.job import Life
from tests.faults.lives import Outcome
from tests.faults.plan import Fault, JobPlan

# A disk that is full before training is found when `fit` begins.
_BEGIN_SECONDS = 30.0
# How the worker itself ends that meets a fault: its exit code.
_OWN_CODES = {
    "kill": EXIT_KILLED,
    "crash": EXIT_KILLED,
    "damage": EXIT_KILLED,
    "stop": None,
    "raise": 1,
    "exit": 7,
}


def problem_of(plan: JobPlan, outcome: Outcome, undisturbed: dict) -> str:
    """What is wrong with the end of a job, or `""`.

    Args:
        plan: `JobPlan` with a fault.
        outcome: `Outcome`.
        undisturbed: Dict, the result of a worker of a job without a fault.
    """
    fault = plan.fault
    assert fault is not None
    if fault.kind in verdicts.OF_KIND:
        problems = [verdicts.OF_KIND[fault.kind](plan, outcome.first, undisturbed)]
    else:
        problems = [
            _problem_of_worker(plan, fault, outcome.first, rank, undisturbed)
            for rank in range(plan.num_workers)
        ]
    problems += [outcome.first.left, outcome.left]
    if outcome.second is not None:
        again = problem_of_second(fault, outcome, undisturbed)
        problems += [outcome.second.left, again and f"started again: {again}"]
    return "; ".join(problem for problem in problems if problem)


def problem_of_second(fault: Fault, outcome: Outcome, undisturbed: dict) -> str:
    """What is wrong with how a job went on once it was started again, or `""`."""
    assert outcome.second is not None
    if fault.kind == "damage" and fault.phase == "every":
        return _problem_of_refusal(outcome)
    for rank, end in enumerate(outcome.second.ends):
        if not is_right(end, undisturbed):
            return f"worker {rank}: {told(end)}"
        wanted = [f"{name}: " for name in outcome.damaged]
        if wanted and not all(
            text in end.log for text in ["newer backups are damaged", *wanted]
        ):
            return f"worker {rank} does not name {wanted}"
    return ""


def judged_ranks(plan: JobPlan) -> list[int]:
    """The workers that have to end with an error because of the fault."""
    fault = plan.fault
    assert fault is not None
    hits_all = fault.hits_all or fault.kind in ("cut", "full")
    return [r for r in range(plan.num_workers) if hits_all or r != fault.rank]


def limit_of(plan: JobPlan) -> float:
    """Within how many seconds of the fault the others have to have their error."""
    fault = plan.fault
    assert fault is not None
    if fault.kind == "full" and fault.phase == "start":
        return _BEGIN_SECONDS
    waits = fault.kind in ("stop", "cut") or fault.phase == "start"
    return DEATH_SECONDS + (plan.timeout_seconds or 60.0 if waits else 0.0)


def _problem_of_worker(
    plan: JobPlan, fault: Fault, life: Life, rank: int, undisturbed: dict
) -> str:
    end = life.ends[rank]
    if fault.kind == "sleep":
        return "" if is_right(end, undisturbed) else f"worker {rank}: {told(end)}"
    if rank not in judged_ranks(plan):
        wanted = _OWN_CODES[fault.kind]
        return "" if end.code == wanted else f"worker {rank} itself: {told(end)}"
    said = sentence_of(life, rank)
    if not any(name in said for name in _names(plan, fault, life, rank)):
        return f"worker {rank} with code {end.code} said {said or end.error!r}"
    seconds = seconds_of(life, rank)
    return "" if seconds <= limit_of(plan) else f"worker {rank} took {seconds:.1f} s"


def _names(plan: JobPlan, fault: Fault, life: Life, rank: int) -> list[str]:
    """What an error has to say, one of it."""
    if fault.kind == "full":
        is_clear = life.ends[rank].error.startswith("OSError: ")
        return ["No space left on device"] if is_clear else []
    culprits = [fault.rank]
    if fault.kind == "cut":
        own = plan.hosts[rank]
        culprits = [r for r, host in enumerate(plan.hosts) if host != own]
    names = [f"orker {r} ({life.addresses[r]})" for r in culprits]
    return names + [f": worker {r}: " for r in culprits]


def _problem_of_refusal(outcome: Outcome) -> str:
    """Where no backup is whole every worker says so, and goes on from none."""
    assert outcome.second is not None
    for rank, end in enumerate(outcome.second.ends):
        wanted = ["ValueError: All backups in ", *(f"{n}: " for n in outcome.damaged)]
        if end.code != 1 or not all(text in end.error for text in wanted):
            return f"worker {rank}: {told(end)}"
    return ""
