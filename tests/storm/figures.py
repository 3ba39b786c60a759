"""What the stamps of the workers say about restarts and lost work."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Kill:
    """A worker that was killed.

    Args:
        at: Float, seconds since 1970.
        rank: Int.
    """

    at: float
    rank: int


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One start of a job, as its workers have seen it.

    Args:
        num_workers: Int, that have come as far as training.
        start: Float, when the first of their processes was started.
        first: Tuple of an int and a float, the first step that ended and when, or
            `None` if there was none.
        last: Int, the last step that ended on any worker, or 0.
    """

    num_workers: int
    start: float
    first: tuple[int, float] | None
    last: int


@dataclasses.dataclass(frozen=True)
class Figures:
    """What restarts have cost.

    Args:
        restart_seconds: List of floats, from the start of the processes to the end of
            their first step, without attempts that were killed before.
        kill_seconds: List of floats, the same from the kill of the attempt before on.
        repeated: List of ints, steps that an attempt had to make again.
    """

    restart_seconds: list[float]
    kill_seconds: list[float]
    repeated: list[int]


def read_attempts(folder: Path) -> list[Attempt]:
    """Reads what `train.Stamps` has written.

    Args:
        folder: Path.

    Returns:
        List of `Attempt`, in their order.
    """
    by_job: dict[str, list[list[tuple[str, float]]]] = {}
    for path in folder.glob("*.stamps"):
        lines = [line.split(" ") for line in path.read_text().splitlines()]
        stamps = [(line[0], float(line[1])) for line in lines if len(line) == 2]
        if stamps:
            by_job.setdefault(path.name.partition("-")[0], []).append(stamps)
    return sorted(map(_attempt, by_job.values()), key=lambda attempt: attempt.start)


def _attempt(workers: list[list[tuple[str, float]]]) -> Attempt:
    steps = [(int(step), at) for stamps in workers for step, at in stamps[1:]]
    return Attempt(
        len(workers),
        min(stamps[0][1] for stamps in workers),
        min(steps, default=None),
        max(steps, default=(0, 0.0))[0],
    )


def figures_of(attempts: Sequence[Attempt], kills: Sequence[Kill]) -> Figures:
    """What restarts have cost.

    Args:
        attempts: Sequence of `Attempt`, in their order.
        kills: Sequence of `Kill`.

    Returns:
        `Figures`.
    """
    found = Figures([], [], [])
    reached = attempts[0].last if attempts else 0
    for previous, attempt in itertools.pairwise(attempts):
        if attempt.first is None:
            continue
        step, at = attempt.first
        found.restart_seconds.append(at - attempt.start)
        before = [k.at for k in kills if previous.start < k.at < attempt.start]
        if before:
            found.kill_seconds.append(at - max(before))
        found.repeated.append(reached + 1 - step)
        reached = max(reached, attempt.last)
    return found


def largest_difference(losses: Sequence[float], wanted: Sequence[float]) -> float:
    """How far two loss curves are apart: the largest relative difference.

    Args:
        losses: Sequence of floats, by epoch.
        wanted: Sequence of floats.

    Returns:
        Float; infinity where one has more epochs than the other, or none.
    """
    if len(losses) != len(wanted) or not wanted:
        return float("inf")
    pairs = zip(losses, wanted, strict=True)
    return max(abs(loss - other) / abs(other) for loss, other in pairs)


def described(values: Sequence[float], unit: str = "") -> str:
    """Median and range as text."""
    if not values:
        return "none"
    middle = statistics.median(values)
    return f"{middle:.3g}{unit}, {min(values):.3g} to {max(values):.3g}{unit}"
