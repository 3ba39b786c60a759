"""Which faults a campaign injects: a pure function of its seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.faults.damage import WAYS
from tests.faults.plan import (
    BY_HAND,
    CHANGES,
    CUTS,
    END,
    KINDS,
    LOOPS,
    METHODS,
    POINTS,
    STEPS_PER_EPOCH,
    Fault,
    JobPlan,
)
from tests.faults.worker import SAVE_FREQ

_WHERE = ("training", "evaluation", "saving", "backup", "callback")
_FROM_THE_STRATEGY_ON = ("made", "compiled", "between", "begin", "tracing", *_WHERE)
# Which kinds make sense in which phase. A disk is full when something is written.
PAIRS = [
    *[("kill", phase) for phase in ("start", *_WHERE)],
    *[("stop", phase) for phase in ("start", *_WHERE)],
    *[("cut", phase) for phase in ("start", *_WHERE)],
    *[(kind, "collective") for kind in ("kill", "stop", "cut")],
    *[("raise", phase) for phase in _WHERE],
    *[("exit", phase) for phase in _WHERE],
    *[("sleep", phase) for phase in ("start", "training", "evaluation")],
    *[("sleep", phase) for phase in ("saving", "backup")],
    *[("full", phase) for phase in ("start", "saving", "backup")],
    *[("crash", phase) for phase in ("saving", "backup")],
    *[("damage", phase) for phase in ("newest", "every")],
    *[("sigterm", phase) for phase in _FROM_THE_STRATEGY_ON],
    *[("sigterm", "any")] * 7,
    *[("pause", phase) for phase in ("training", "evaluation", "callback", "any")],
    *[("differ", phase) for phase in ("loops", "mixed", "by hand", "end")],
    *[("arrays", phase) for phase in METHODS],
]
EPOCHS = 3
_NUM_STEPS = EPOCHS * STEPS_PER_EPOCH
TIMEOUT_SECONDS = 8.0
# From before the strategy is made to the end of training, on a busy machine.
_SOME_SECONDS = 6.0
# How often a worker comes to each phase.
_TIMES = {
    "start": 1,
    "made": 1,
    "compiled": 1,
    "between": 2,
    "begin": 1,
    "tracing": 1,
    "any": 1,
    "training": _NUM_STEPS,
    # Of the pieces of data: header, reduce-scatter and all-gather of some steps.
    "collective": 60,
    "evaluation": 4 * EPOCHS,
    "saving": EPOCHS,
    "backup": _NUM_STEPS // SAVE_FREQ,
    "callback": EPOCHS,
}


def plans(count: int, seed: int, kinds: Sequence[str] = KINDS) -> list[JobPlan]:
    """The jobs of a campaign: all pairs of kind and phase in turn, else by chance.

    Args:
        count: Int.
        seed: Int.
        kinds: Sequence of strings of `KINDS`. Defaults to all.

    Returns:
        List of `JobPlan`; the first ones are the same for any `count`.
    """
    pairs = [pair for pair in PAIRS if pair[0] in kinds]
    return [_plan(number, seed, pairs) for number in range(count)]


def _plan(number: int, seed: int, pairs: Sequence[tuple[str, str]]) -> JobPlan:
    draw = random.Random(f"{seed} {number}")
    turn, index = divmod(number, len(pairs))
    kind, phase = pairs[index]
    if kind in _OF_NEW_KINDS:
        return _OF_NEW_KINDS[kind](kind, phase, turn, draw)
    num_workers = draw.choice([2, 2, 3])
    if phase == "collective":
        num_workers = 2  # the order of a sum is that of the pieces
    fault = _fault(kind, phase, draw.randrange(num_workers), turn, draw)
    waits = kind in ("stop", "cut") or (kind, phase) == ("kill", "start")
    return JobPlan(
        num_workers,
        fault,
        timeout_seconds=TIMEOUT_SECONDS if waits else None,
        epochs=EPOCHS,
        hosts=_hosts(num_workers, draw) if _is_on_hosts(kind, phase, turn) else (),
    )


def _fault(kind: str, phase: str, rank: int, turn: int, draw: random.Random) -> Fault:
    if kind == "damage":
        # Two backups or one are there before it happens.
        first = (2 if phase == "newest" else 1) * SAVE_FREQ + 1
        step = draw.randint(first, _NUM_STEPS)
        return Fault(kind, phase, rank, step, way=WAYS[turn % len(WAYS)])
    step = _step(phase, draw)
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


def _is_on_hosts(kind: str, phase: str, turn: int) -> bool:
    """A collective is one by shared memory and one by TCP in turn."""
    return kind == "cut" or (phase == "collective" and turn % 2 == 1)


def _hosts(num_workers: int, draw: random.Random) -> tuple[int, ...]:
    """Each worker by itself, or two of three beside each other."""
    return (0, 1) if num_workers == 2 else draw.choice([(0, 0, 1), (0, 1, 1)])


def _step(phase: str, draw: random.Random) -> int:
    return draw.randint(1, _TIMES[phase])


def _delay(phase: str, draw: random.Random) -> float:
    return draw.uniform(0.0, _SOME_SECONDS) if phase == "any" else 0.0


def _asked_to_end(kind: str, phase: str, turn: int, draw: random.Random) -> JobPlan:
    """SIGTERM to one worker or, every other time, to all."""
    fault = Fault(
        kind,
        phase,
        draw.randrange(2),
        _step(phase, draw),
        point=draw.choice(POINTS[:2]),
        hits_all=turn % 2 == 1,
        after=_delay(phase, draw),
    )
    return JobPlan(2, fault, TIMEOUT_SECONDS, EPOCHS, script="evaluate and fit")


def _pausing(kind: str, phase: str, turn: int, draw: random.Random) -> JobPlan:
    """Pauses around the timeout, of one worker or of both."""
    fault = Fault(
        kind,
        phase,
        draw.randrange(2),
        _step(phase, draw),
        seconds=draw.uniform(4.0, 9.0),
        hits_all=turn % 3 == 2,
        after=_delay(phase, draw),
    )
    return JobPlan(2, fault, draw.choice([8.0, 10.0]), EPOCHS)


def _differing(kind: str, phase: str, turn: int, draw: random.Random) -> JobPlan:
    """Two workers that make different calls."""
    del turn
    pairs = {
        "loops": [(a, b) for a in LOOPS for b in LOOPS if a != b],
        "mixed": [(a, b) for a in LOOPS for b in BY_HAND],
        "by hand": [(a, b) for a in BY_HAND for b in BY_HAND if a != b],
        "end": [(a, END) for a in (*LOOPS, *BY_HAND)],
    }[phase]
    calls = draw.choice(pairs)
    if phase in ("mixed", "end") and draw.random() < 0.5:
        calls = calls[::-1]
    return _calling(Fault(kind, phase, 0, hits_all=True), calls)


def _of_other_arrays(kind: str, phase: str, turn: int, draw: random.Random) -> JobPlan:
    """Two workers that make the same call with different arrays."""
    changes = CHANGES[:-1] if phase == "train_on_batch" else CHANGES
    calls = (phase, f"{phase}, {changes[turn % len(changes)]}")
    fault = Fault(kind, phase, draw.randrange(2), hits_all=True)
    return _calling(fault, calls if fault.rank else calls[::-1])


def _calling(fault: Fault, calls: tuple[str, ...]) -> JobPlan:
    return JobPlan(2, fault, TIMEOUT_SECONDS, script="calls", calls=calls)


_OF_NEW_KINDS = {
    "sigterm": _asked_to_end,
    "pause": _pausing,
    "differ": _differing,
    "arrays": _of_other_arrays,
}
