"""Which faults a campaign injects: a pure function of its seed."""

from __future__ import annotations

import random

from tests.faults.damage import WAYS
from tests.faults.plan import CUTS, POINTS, STEPS_PER_EPOCH, Fault, JobPlan
from tests.faults.worker import SAVE_FREQ

_WHERE = ("training", "evaluation", "saving", "backup", "callback")
# Which kinds make sense in which phase. A disk is full when something is written.
PAIRS = [
    *[("kill", phase) for phase in ("start", *_WHERE)],
    *[("stop", phase) for phase in ("start", *_WHERE)],
    *[("cut", phase) for phase in ("start", *_WHERE)],
    *[("raise", phase) for phase in _WHERE],
    *[("exit", phase) for phase in _WHERE],
    *[("sleep", phase) for phase in ("start", "training", "evaluation")],
    *[("sleep", phase) for phase in ("saving", "backup")],
    *[("full", phase) for phase in ("start", "saving", "backup")],
    *[("crash", phase) for phase in ("saving", "backup")],
    *[("damage", phase) for phase in ("newest", "every")],
]
EPOCHS = 3
_NUM_STEPS = EPOCHS * STEPS_PER_EPOCH
TIMEOUT_SECONDS = 8.0
# How often a worker comes to each phase.
_TIMES = {
    "start": 1,
    "training": _NUM_STEPS,
    "evaluation": 4 * EPOCHS,
    "saving": EPOCHS,
    "backup": _NUM_STEPS // SAVE_FREQ,
    "callback": EPOCHS,
}


def plans(count: int, seed: int) -> list[JobPlan]:
    """The jobs of a campaign: all pairs of kind and phase in turn, else by chance.

    Args:
        count: Int.
        seed: Int.

    Returns:
        List of `JobPlan`; the first ones are the same for any `count`.
    """
    return [plan(number, seed) for number in range(count)]


def plan(number: int, seed: int) -> JobPlan:
    """One job of a campaign."""
    draw = random.Random(f"{seed} {number}")
    turn, index = divmod(number, len(PAIRS))
    kind, phase = PAIRS[index]
    num_workers = draw.choice([2, 2, 3])
    fault = _fault(kind, phase, draw.randrange(num_workers), turn, draw)
    waits = kind in ("stop", "cut") or (kind, phase) == ("kill", "start")
    return JobPlan(
        num_workers,
        fault,
        timeout_seconds=TIMEOUT_SECONDS if waits else None,
        epochs=EPOCHS,
        hosts=_hosts(num_workers, draw) if kind == "cut" else (),
    )


def _fault(kind: str, phase: str, rank: int, turn: int, draw: random.Random) -> Fault:
    if kind == "damage":
        # Two backups or one are there before it happens.
        first = (2 if phase == "newest" else 1) * SAVE_FREQ + 1
        step = draw.randint(first, _NUM_STEPS)
        return Fault(kind, phase, rank, step, way=WAYS[turn % len(WAYS)])
    step = draw.randint(1, _TIMES[phase])
    if kind == "crash":
        # Only the first worker writes the index.
        return Fault(kind, phase, 0, step, point=POINTS[2:][turn % 3])
    if kind == "full" and phase != "start" and turn % 3 == 2:
        return Fault(kind, phase, 0, step, point="listed")
    return Fault(
        kind,
        phase,
        rank,
        step,
        seconds=draw.uniform(1.0, 6.0) if kind == "sleep" else 0.0,
        point="files" if kind == "full" else draw.choice(POINTS[:2]),
        way=CUTS[turn % 2] if kind == "cut" else "",
        num_pages=draw.randint(0, 2) if kind == "full" and phase != "start" else 0,
    )


def _hosts(num_workers: int, draw: random.Random) -> tuple[int, ...]:
    """Each worker by itself, or two of three beside each other."""
    return (0, 1) if num_workers == 2 else draw.choice([(0, 0, 1), (0, 1, 1)])
