"""A job meets its fault, and is started again: its two lives."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from tests.faults import job, leftovers
from tests.faults.beds import Bed, bed_for
from tests.faults.damage import backups, damage
from tests.faults.job import Life
from tests.faults.plan import JobPlan

# From the fault to the end of the other processes; the error itself comes sooner.
FAULT_SECONDS = 60.0
WHOLE_SECONDS = 90.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Args:
        first: `Life` in which the fault happened.
        second: `Life`, the same job again without it, or `None`.
        damaged: List of strings, the names of the backups damaged in between.
        left: String, what is lost or left behind, or `""`.
    """

    first: Life
    second: Life | None
    damaged: list[str]
    left: str


def run(plan: JobPlan, *, goes_on: bool = True) -> Outcome:
    """Runs a job that meets its fault, and, where that ended it, runs it again.

    Args:
        plan: `JobPlan`.
        goes_on: Bool, whether it is run again. Defaults to `True`.

    Returns:
        `Outcome`.
    """
    limit = WHOLE_SECONDS if plan.fault is None else FAULT_SECONDS
    with (
        tempfile.TemporaryDirectory(prefix="tfdp-fault-") as folder,
        bed_for(plan, Path(folder)) as bed,
    ):
        setting = bed.setting("first")
        first = job.run(plan, setting, limit)
        bed.mend()
        if plan.script == "calls":
            return Outcome(first, None, [], "")
        is_over = all(end.code == 0 for end in first.ends)
        left = _left(first, bed, is_done=is_over)
        is_fresh = plan.script == "evaluate and fit" and not backups(bed.state)
        if is_over or is_fresh or not goes_on:
            return Outcome(first, None, [], left)
        damaged = _damage(plan, bed)
        setting = bed.setting("second")
        again = dataclasses.replace(plan, fault=None, timeout_seconds=None)
        second = job.run(again, setting, WHOLE_SECONDS)
        is_over = all(end.code == 0 for end in second.ends)
        left = left or _left(second, bed, is_done=is_over)
        return Outcome(first, second, damaged, left)


def _left(life: Life, bed: Bed, *, is_done: bool) -> str:
    events = [end.events for end in life.ends]
    of_saves = "" if is_done else leftovers.problem_of_saves(events, bed.state)
    return of_saves or leftovers.problem_of_files(bed.state, is_done=is_done)


def _damage(plan: JobPlan, bed: Bed) -> list[str]:
    """Damages the newest backup, or all; the names of the damaged ones."""
    assert plan.fault is not None
    if plan.fault.kind != "damage":
        return []
    found = backups(bed.state)
    chosen = found[-1:] if plan.fault.phase == "newest" else found
    for backup in chosen:
        damage(backup, plan.fault.way)
    return [backup.name for backup in chosen]
