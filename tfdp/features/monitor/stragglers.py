"""Stragglers: detection of the worker that the others wait for."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from tfdp.features.monitor.windows import Row

# A worker is reported from this part of a step on, or at once from the second.
_NOTABLE, _CLEAR = 0.2, 0.5
# As many windows are no accident.
_SEVERAL = 2


@dataclasses.dataclass(frozen=True)
class Straggler:
    """The worker that the others wait for.

    Args:
        rank: Int.
        host: String.
        seconds: Float, by how much it is slower than the others in each step.
        before_data_seconds: Float, how much of that passes before it has its data.
            Defaults to 0.
    """

    rank: int
    host: str
    seconds: float
    before_data_seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"worker {self.rank} on {self.host} takes {1000 * self.seconds:.0f} ms "
            "longer than the others for its own part of each step"
        )

    @property
    def remedy(self) -> str:
        """String, what to do about it."""
        others = (
            "`tfdp run --rebalance` gives it fewer rows; or train without that host"
        )
        if self.before_data_seconds > self.seconds / 2:
            return (
                "it waits for its data, so give its input pipeline more threads, a "
                f"prefetch or a faster disk, and look at its callbacks; {others}"
            )
        return (
            "look at what else runs on its host, at its clock rate and at its "
            f"temperature; {others}"
        )


@dataclasses.dataclass(frozen=True)
class Excess:
    """The slowest worker of a window.

    Args:
        rank: Int.
        seconds: Float, by how much it is slower than the others in each step.
        before_data_seconds: Float, how much of that passes before it has its data.
        step_fraction: Float, the part of a step that this is.
        num_steps: Int, steps of the window.
    """

    rank: int
    seconds: float
    before_data_seconds: float
    step_fraction: float
    num_steps: int


def slowest(compute_seconds: Mapping[int, float]) -> tuple[int, float]:
    """The slowest worker and by how much it is slower than the rest.

    Args:
        compute_seconds: Mapping from rank to what a step takes it without waiting.

    Returns:
        Tuple of its rank and seconds above the median of the others.

    Example:

    >>> slowest({0: 1.0, 1: 1.5, 2: 1.0})
    (1, 0.5)
    """
    rank = max(compute_seconds, key=lambda key: compute_seconds[key])
    return rank, _above_others(compute_seconds, rank)


def excess_of(row: Row) -> Excess | None:
    """The slowest worker of a window, or `None` where only one was heard.

    Args:
        row: `Row`.
    """
    if len(row.workers) < 2:
        return None
    rank, seconds = slowest({r: w.mean.compute_seconds for r, w in row.workers.items()})
    inputs = {r: w.mean.input_seconds for r, w in row.workers.items()}
    step = row.values["step_seconds"]
    fraction = seconds / step if step else 0.0
    return Excess(rank, seconds, _above_others(inputs, rank), fraction, row.num_steps)


def find_straggler(rows: Sequence[Row], hosts: Sequence[str]) -> Straggler | None:
    """The worker that was the slowest in the last windows, if it matters.

    One window is enough where the worker costs half of a step; otherwise the same
    worker has to be the slowest in two in a row.

    Args:
        rows: Sequence of `Row`, the latest last.
        hosts: Sequence of strings, the host of each worker.
    """
    found = [e for e in map(excess_of, rows[-2:]) if e is not None]
    if not found:
        return None
    last = found[-1]
    before = found[0] if len(found) == 2 else None
    again = (
        before is not None
        and before.rank == last.rank
        and before.step_fraction >= _NOTABLE
    )
    if last.step_fraction >= _CLEAR or (last.step_fraction >= _NOTABLE and again):
        return _straggler_of([last], hosts)
    return None


def persistent_straggler(
    windows: Sequence[Excess], hosts: Sequence[str]
) -> Straggler | None:
    """The worker that the others wait for again and again.

    That is one that is the slowest, by a fifth of a step or more, in at least half of
    the steps, and in more than one window.

    Args:
        windows: Sequence of `Excess`.
        hosts: Sequence of strings, the host of each worker.

    Example:

    >>> slow, even = Excess(1, 0.5, 0.0, 0.4, 10), Excess(0, 0.01, 0.0, 0.01, 10)
    >>> persistent_straggler([slow, even, slow, even], ["a", "b"]).rank
    1
    >>> persistent_straggler([slow, even], ["a", "b"]) is None
    True
    """
    num_steps = sum(window.num_steps for window in windows)
    for rank in {window.rank for window in windows}:
        slow = [w for w in windows if w.rank == rank and w.step_fraction >= _NOTABLE]
        slow_steps = sum(window.num_steps for window in slow)
        if len(slow) >= _SEVERAL and 2 * slow_steps >= num_steps:
            return _straggler_of(slow, hosts)
    return None


def _straggler_of(windows: Sequence[Excess], hosts: Sequence[str]) -> Straggler:
    """A straggler as it was on average in some windows, all of which are its own."""
    rank = windows[0].rank
    count = sum(window.num_steps for window in windows)
    seconds = sum(w.seconds * w.num_steps for w in windows) / count
    before_data = sum(w.before_data_seconds * w.num_steps for w in windows) / count
    return Straggler(rank, hosts[rank], seconds, before_data)


def _above_others(seconds: Mapping[int, float], rank: int) -> float:
    others = [value for key, value in seconds.items() if key != rank]
    return seconds[rank] - statistics.median(others)
