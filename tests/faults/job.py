"""Starts a job, lets its fault happen, and says how each worker ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path

import psutil

from faults import worker
from faults.plan import JobPlan
from harness.cluster import free_ports
from tfdp import checkpoint_files as files
from tfdp.checkpoint_index_file import load_index

POLL_SECONDS = 0.05


@dataclasses.dataclass(frozen=True)
class End:
    """How a worker ended.

    Args:
        code: Int, exit code, or `None` if it had to be killed at the deadline.
        seconds: Float, from the fault (without one: from the start) to the end.
        error: String, what its script got, or `""`.
        error_seconds: Float or `None`, from the fault to that.
        result: List of float, losses by epoch, or `None`.
        num_saved: Int, checkpoints that its script saw as saved.
        log: String, what it printed.
    """

    code: int | None
    seconds: float
    error: str
    error_seconds: float | None
    result: list[float] | None
    num_saved: int
    log: str


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended, and what it left behind.

    Args:
        ends: List of `End`, by rank.
        ports: List of int, on which its workers listened.
        problem_of_checkpoint: String, what is wrong with what was reported saved, or
            `""`.
    """

    ends: list[End]
    ports: list[int]
    problem_of_checkpoint: str


def context() -> multiprocessing.context.ForkServerContext:
    """Processes that have imported TensorFlow already, which is the slow part."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["faults.preload"])
    return made


def run(plan: JobPlan, deadline_seconds: float) -> Outcome:
    """Runs a job to its end, and leaves no process of it behind.

    Args:
        plan: `JobPlan`.
        deadline_seconds: Float, from the fault on; without one, from the start.

    Returns:
        `Outcome`.
    """
    with tempfile.TemporaryDirectory(prefix="tfdp-fault-") as folder:
        ports = free_ports(plan.num_workers)
        processes = [
            context().Process(target=worker.run, args=(plan, rank, ports, folder))
            for rank in range(plan.num_workers)
        ]
        for process in processes:
            process.start()
        try:
            ends = _watch(plan, processes, folder, deadline_seconds)
        finally:
            for process in processes:
                _kill(process.pid)
                process.join()
        return Outcome(ends, ports, _problem_of_checkpoint(ends, folder))


def _watch(plan, processes, folder: str, deadline_seconds: float) -> list[End]:
    begin = time.time()
    ended: dict[int, float] = {}
    fault = None
    while True:
        for rank, process in enumerate(processes):
            if rank not in ended and not process.is_alive():
                ended[rank] = time.time()
        if fault is None:
            fault = _time_of_fault(plan, folder)
        stopped = _stopped_rank(plan) if fault else None
        if all(rank in ended or rank == stopped for rank in range(len(processes))):
            break
        # Workers that were forked start in seconds; a busy machine takes its time.
        since = fault or begin + 60.0
        if time.time() > since + deadline_seconds:
            break
        time.sleep(POLL_SECONDS)
    return [
        _end(process, folder, rank, fault or begin, ended.get(rank))
        for rank, process in enumerate(processes)
    ]


def _stopped_rank(plan: JobPlan) -> int | None:
    """A worker that stands still ends never."""
    fault = plan.fault
    return fault.rank if fault is not None and fault.kind == "stop" else None


def _time_of_fault(plan: JobPlan, folder: str) -> float | None:
    if plan.fault is None:
        return None
    events = _events(folder, plan.fault.rank)
    return next((at for at, event, _ in events if event == "fault"), None)


def _events(folder: str, rank: int) -> list[tuple[float, str, str]]:
    path = Path(folder, f"{rank}.events")
    lines = path.read_text().splitlines() if path.exists() else []
    return [tuple(json.loads(line)) for line in lines if line.endswith("]")]


def _end(process, folder: str, rank: int, since: float, ended: float | None) -> End:
    events = _events(folder, rank)
    of = {event: (at, text) for at, event, text in events}
    error_at, error = of.get("error", (None, ""))
    log = Path(folder, f"{rank}.log")
    return End(
        code=process.exitcode,
        seconds=(ended or time.time()) - since,
        error=error,
        error_seconds=None if error_at is None else error_at - since,
        result=json.loads(of["finished"][1]) if "finished" in of else None,
        num_saved=sum(event == "saved" for _, event, _ in events),
        log=log.read_text(errors="replace") if log.exists() else "",
    )


def _problem_of_checkpoint(ends: list[End], folder: str) -> str:
    """What was reported saved has to be there, whole."""
    if not any(end.num_saved for end in ends):
        return ""
    directory = Path(folder, "checkpoint")
    try:
        index = load_index(str(directory))
        files.verify(index.parts, str(directory / index.token))
    except (OSError, ValueError) as error:
        return f"what was saved is lost: {error}"
    return ""


def _kill(pid: int | None) -> None:
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        for child in psutil.Process(pid).children(recursive=True):
            child.kill()
        os.kill(pid or 0, signal.SIGKILL)
