"""Runs the workers of a job once, and says how each of them ended."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from pathlib import Path

from tests.faults import leftovers, worker
from tests.faults.leftovers import Event, read_events
from tests.faults.plan import JobPlan, Setting
from tests.harness.fork_server import fork_server

POLL_SECONDS = 0.05
# Workers that were forked start in seconds; a busy machine takes its time.
START_SECONDS = 60.0
# So long a process may take to be gone once its worker has ended.
_GONE_SECONDS = 2.0
_KILLED = (None, -signal.SIGKILL, -signal.SIGTERM)


@dataclasses.dataclass(frozen=True)
class End:
    """How a worker ended.

    Args:
        code: Int, exit code, or `None` if it had to be killed at the deadline.
        seconds: Float, from the fault (without one: from the start) to the end.
        error: String, what its script got, or `""`.
        error_seconds: Float or `None`, from the fault to that.
        result: Dict, its history and a hash of its weights, or `None`.
        events: List of `Event`, what it has noted.
        log: String, what it printed.
    """

    code: int | None
    seconds: float
    error: str
    error_seconds: float | None
    result: dict | None
    events: list[Event]
    log: str


@dataclasses.dataclass(frozen=True)
class Life:
    """How the workers of a job ended, and what they have left running.

    Args:
        ends: List of `End`, by rank.
        addresses: Tuple of strings, by rank.
        left: String, what they have left behind, or `""`.
    """

    ends: list[End]
    addresses: tuple[str, ...]
    left: str


def run(plan: JobPlan, setting: Setting, deadline_seconds: float) -> Life:
    """Runs the workers to their end, and leaves no process of them behind.

    Args:
        plan: `JobPlan`.
        setting: `Setting`.
        deadline_seconds: Float, from the fault on; without one, from the start.

    Returns:
        `Life`.
    """
    processes = [
        fork_server().Process(target=worker.run, args=(plan, rank, setting))
        for rank in range(plan.num_workers)
    ]
    for process in processes:
        process.start()
    sessions = {process.pid for process in processes}
    try:
        ends = _watch(plan, processes, setting.notes, deadline_seconds)
        left = _problem_of_processes(sessions - _still_there(processes))
        left = left or _problem_of_temporary_files(ends, setting.notes)
    finally:
        leftovers.kill_all(sessions)
        for process in processes:
            process.kill()
            process.join()
    left = left or leftovers.problem_of_ports(setting.addresses)
    return Life(ends, setting.addresses, left)


def _watch(plan, processes, notes: str, deadline_seconds: float) -> list[End]:
    begin = time.time()
    ended: dict[int, float] = {}
    fault = None
    while True:
        for rank, process in enumerate(processes):
            if rank not in ended and not process.is_alive():
                ended[rank] = time.time()
        if fault is None:
            fault = _time_of_fault(plan, notes)
        stopped = _stopped_rank(plan) if fault else None
        if all(rank in ended or rank == stopped for rank in range(len(processes))):
            break
        since = fault or begin + START_SECONDS
        if time.time() > since + deadline_seconds:
            break
        time.sleep(POLL_SECONDS)
    return [
        _end(process, notes, rank, fault or begin, ended.get(rank))
        for rank, process in enumerate(processes)
    ]


def _still_there(processes) -> set[int]:
    """The workers that have not ended: one that stands still never does."""
    return {process.pid for process in processes if process.is_alive()}


def _problem_of_processes(sessions: set[int]) -> str:
    deadline = time.monotonic() + _GONE_SECONDS
    while found := leftovers.processes_of(sessions):
        if time.monotonic() > deadline:
            return f"processes are left: {found}"
        time.sleep(POLL_SECONDS)
    return ""


def _problem_of_temporary_files(ends: list[End], notes: str) -> str:
    for rank, end in enumerate(ends):
        folder, was_killed = Path(notes, f"{rank}.tmp"), end.code in _KILLED
        if found := leftovers.problem_of_temporary_files(folder, was_killed=was_killed):
            return f"worker {rank}: {found}"
    return ""


def _stopped_rank(plan: JobPlan) -> int | None:
    """A worker that stands still ends never."""
    fault = plan.fault
    return fault.rank if fault is not None and fault.kind == "stop" else None


def _time_of_fault(plan: JobPlan, notes: str) -> float | None:
    if plan.fault is None:
        return None
    events = read_events(notes, plan.fault.rank)
    return next((at for at, event, _ in events if event == "fault"), None)


def _end(process, notes: str, rank: int, since: float, ended: float | None) -> End:
    events = read_events(notes, rank)
    of = {event: (at, text) for at, event, text in events}
    error_at, error = of.get("error", (None, ""))
    log = Path(notes, f"{rank}.log")
    return End(
        code=process.exitcode,
        seconds=(ended or time.time()) - since,
        error=error,
        error_seconds=None if error_at is None else error_at - since,
        result=json.loads(of["finished"][1]) if "finished" in of else None,
        events=events,
        log=log.read_text(errors="replace") if log.exists() else "",
    )
