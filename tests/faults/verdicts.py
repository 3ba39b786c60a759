"""Whether workers that were asked to end, paused or differed ended as promised."""

from __future__ import annotations

import signal

from tests.faults.ends import (
    DEATH_SECONDS,
    is_right,
    seconds_of,
    sentence_of,
    told,
)
from tests.faults.job import End, Life
from tests.faults.plan import END, JobPlan
from tfdp.communication.coordination.preemption import PREEMPTED

_ASKED = -signal.SIGTERM
_BEFORE_FIT = ("made", "compiled", "between")
# After so long without a word a worker says what it waits for.
_WARNING_SECONDS = 10.0
_WARNINGS = ("aiting for worker", "tfdp: waiting at ", "tfdp: all workers wait at ")
# These run the same collectives, so that they may meet.
_ALIKE = ({"steps", "sum"}, {"steps that gather", "gather"})
# The last sign of life may be so old when a pause begins, on a busy machine.
_BEAT_SECONDS = 2.0
_OWN_ERRORS = (
    *("ValueError", "RuntimeError", "TimeoutError", "WorkerLost"),
    "UnavailableError: The workers run different collectives",
)


def of_sigterm(plan: JobPlan, life: Life, undisturbed: dict) -> str:
    """What is wrong with a job of which some workers were sent SIGTERM, or `""`."""
    assert plan.fault is not None
    codes = [end.code for end in life.ends]
    asked = [rank for rank, end in enumerate(life.ends) if _time(end, "fault")]
    is_saved = PREEMPTED in codes
    if plan.fault.phase != "any" and is_saved is (plan.fault.phase in _BEFORE_FIT):
        return f"codes {codes}: {[told(end) for end in life.ends]}"
    problems = []
    for rank, end in enumerate(life.ends):
        ways = [end.code == PREEMPTED] if is_saved else []
        ways.append(rank in asked and end.code == _ASKED)
        if not is_saved:
            ways.append(_finished_before(end) and is_right(end, undisturbed))
            ways.append(_names(life, rank, asked))
        if not any(ways):
            problems.append(f"worker {rank}, of {asked} asked: {told(end)}")
    return "; ".join(problems)


def of_pause(plan: JobPlan, life: Life, undisturbed: dict) -> str:
    """What is wrong with a job of which some workers stood still, or `""`."""
    fault, timeout = plan.fault, plan.timeout_seconds
    assert fault is not None
    assert timeout is not None
    if all(is_right(end, undisturbed) for end in life.ends):
        return ""
    all_told = "; ".join(f"worker {r}: {told(e)}" for r, e in enumerate(life.ends))
    # A worker is given up before the timeout, so that all have ended by then.
    if fault.hits_all or fault.seconds < 0.75 * timeout - _BEAT_SECONDS:
        return all_told
    own = sentence_of(life, fault.rank)
    is_known = "declared this worker lost" in own or "its script has ended" in own
    others = [rank for rank in range(plan.num_workers) if rank != fault.rank]
    if is_known and all(_names(life, rank, [fault.rank]) for rank in others):
        return ""
    return all_told


def of_calls(plan: JobPlan, life: Life, undisturbed: dict) -> str:
    """What is wrong with how workers that make different calls ended, or `""`."""
    del undisturbed
    problems = []
    if set(plan.calls) in _ALIKE and all(end.result for end in life.ends):
        return ""
    limit = (plan.timeout_seconds or 0.0) + _WARNING_SECONDS + DEATH_SECONDS
    for rank, end in enumerate(life.ends):
        seconds = seconds_of(life, rank)
        is_told = any(text in other.log for other in life.ends for text in _WARNINGS)
        problem = "" if end.code == 0 and plan.calls[rank] == END else told(end)
        if problem and _is_one_sentence(life, rank):
            problem = ""
        if not problem and seconds > limit:
            problem = f"{seconds:.1f} s"
        if not problem and seconds > _WARNING_SECONDS + DEATH_SECONDS and not is_told:
            problem = f"no warning in {seconds:.1f} s"
        if problem:
            problems.append(f"worker {rank} at {plan.calls[rank]!r}: {problem}")
    return "; ".join(problems)


def of_arrays(plan: JobPlan, life: Life, undisturbed: dict) -> str:
    """What is wrong with the end of workers that were given other arrays, or `""`."""
    del undisturbed
    assert plan.fault is not None
    wanted = f"ValueError: Workers give `{plan.fault.phase}` different arrays. "
    errors = {end.error for end in life.ends}
    if len(errors) == 1 and errors.pop().startswith(wanted):
        return ""
    return f"{plan.calls}: {[told(end) for end in life.ends]}"


OF_KIND = {
    "sigterm": of_sigterm,
    "pause": of_pause,
    "differ": of_calls,
    "arrays": of_arrays,
}


def _time(end: End, event: str) -> float | None:
    return next((at for at, name, _ in end.events if name == event), None)


def _finished_before(end: End) -> bool:
    """Whether a worker had finished when it was asked to end, if it was."""
    finished, asked = _time(end, "finished"), _time(end, "fault")
    return finished is not None and (asked is None or finished <= asked)


def _names(life: Life, rank: int, culprits: list[int]) -> bool:
    """Whether a worker has ended in time with an error that names another one."""
    said = sentence_of(life, rank)
    names = [f"orker {r} ({life.addresses[r]})" for r in culprits if r != rank]
    return any(name in said for name in names)


def _is_one_sentence(life: Life, rank: int) -> bool:
    """Whether a worker has an error of tfdp's, or TensorFlow's with tfdp's below it."""
    end, said = life.ends[rank], sentence_of(life, rank)
    is_own = end.error.startswith(_OWN_ERRORS)
    return bool(said) and (is_own or said not in end.error)
