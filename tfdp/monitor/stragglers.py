"""Which worker the others wait for."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from tfdp.monitor.windows import Row

# A worker is reported from this part of a step on, or at once from the second.
_NOTABLE, _CLEAR = 0.2, 0.5


@dataclasses.dataclass(frozen=True)
class Straggler:
    """The worker that the others wait for.

    Args:
        rank: Int.
        host: String.
        seconds: Float, by how much it is slower than the others in each step.
    """

    rank: int
    host: str
    seconds: float

    def __str__(self) -> str:
        return (
            f"worker {self.rank} on {self.host} takes {1000 * self.seconds:.0f} ms "
            "longer than the others for its own part of each step"
        )


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
    others = [value for key, value in compute_seconds.items() if key != rank]
    return rank, compute_seconds[rank] - statistics.median(others)


def find_straggler(rows: Sequence[Row], hosts: Sequence[str]) -> Straggler | None:
    """The worker that was the slowest in the last windows, if it matters.

    One window is enough where the worker costs half of a step; otherwise the same
    worker has to be the slowest in two in a row.

    Args:
        rows: Sequence of `Row`, the latest last.
        hosts: Sequence of strings, the host of each worker.
    """
    found = [_of_row(row) for row in rows[-2:] if len(row.workers) > 1]
    if not found:
        return None
    rank, seconds, share = found[-1]
    again = len(found) == 2 and found[0][0] == rank and found[0][2] >= _NOTABLE
    if share >= _CLEAR or (share >= _NOTABLE and again):
        return Straggler(rank, hosts[rank], seconds)
    return None


def _of_row(row: Row) -> tuple[int, float, float]:
    rank, excess = slowest({r: w.mean.compute_seconds for r, w in row.workers.items()})
    step = row.values["step_seconds"]
    return rank, excess, excess / step if step else 0.0
