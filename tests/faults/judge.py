"""Whether a job that met a fault ended as promised."""

from __future__ import annotations

import socket

from faults.job import Outcome
from faults.plan import Fault, JobPlan

EXIT_LOST, EXIT_KILLED = 69, -9
DEATH_SECONDS = 10.0


def problem_of(plan: JobPlan, outcome: Outcome, undisturbed: list[float]) -> str:
    """What is wrong with the end of a job, or `""`.

    Args:
        plan: `JobPlan` with a fault.
        outcome: `Outcome`.
        undisturbed: List of float, losses by epoch of a job without a fault.
    """
    fault = plan.fault
    assert fault is not None
    problems = [
        _problem_of_worker(plan, fault, outcome, rank, undisturbed)
        for rank in range(plan.num_workers)
    ]
    problems += [_problem_of_ports(outcome), outcome.problem_of_checkpoint]
    return "; ".join(problem for problem in problems if problem)


def sentence_of(outcome: Outcome, rank: int) -> str:
    """The one sentence with which a worker that could not go on has ended."""
    end = outcome.ends[rank]
    if end.code == EXIT_LOST:
        said = [x[6:] for x in end.log.splitlines() if x.startswith("tfdp: Worker ")]
        return said[0] if len(said) == 1 else ""
    return end.error.partition(": ")[2] if end.code == 1 else ""


def seconds_of(outcome: Outcome, rank: int) -> float:
    """From the fault to the error, or to the end where the process was ended."""
    end = outcome.ends[rank]
    return end.seconds if end.error_seconds is None else end.error_seconds


def limit_of(plan: JobPlan) -> float:
    """Within how many seconds of the fault the others have to have their error."""
    assert plan.fault is not None
    waits = plan.fault.kind == "stop" or plan.fault.phase == "start"
    return DEATH_SECONDS + (plan.timeout_seconds or 60.0 if waits else 0.0)


def _problem_of_worker(
    plan: JobPlan, fault: Fault, outcome: Outcome, rank: int, undisturbed: list[float]
) -> str:
    end = outcome.ends[rank]
    if fault.kind == "sleep":
        is_right = end.code == 0 and end.result == undisturbed
        return "" if is_right else f"worker {rank}: {end.code}, {end.result}"
    if rank == fault.rank:
        return ""
    said = sentence_of(outcome, rank)
    names = f"orker {fault.rank} (127.0.0.1:", f": worker {fault.rank}: "
    if not any(name in said for name in names):
        return f"worker {rank} with code {end.code} said {said or end.error!r}"
    seconds = seconds_of(outcome, rank)
    return "" if seconds <= limit_of(plan) else f"worker {rank} took {seconds:.1f} s"


def _problem_of_ports(outcome: Outcome) -> str:
    for port in outcome.ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                return f"port {port} is still taken: {error}"
    return ""
