"""Results of a bucket-size study: medians by size, CSV, JSON and a table."""

from __future__ import annotations

import csv
import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tfdp.launch.bench.output import Table
from tools.bench.buckets import Epoch, Run

# A larger bucket that gains less than this is not worth its memory, nor the wait
# for the gradients that fill it.
TOLERANCE = 0.03
_COLUMNS = (
    *("bucket MB", "buckets", "ms per step", "images/s", "of the best"),
    *("s", "val loss", "val accuracy", ""),
)


@dataclasses.dataclass(frozen=True)
class SizeResult:
    """Result of one bucket size: medians over its runs.

    Args:
        bucket_mb: Float, the size in megabytes.
        num_runs: Int.
        step_seconds: Float.
        samples_per_second: Float.
        lowest_samples_per_second: Float, of the slowest run.
        highest_samples_per_second: Float, of the fastest run.
        communication_fraction: Float, s = T_comm / (T_comp + T_comm).
        val_loss: Float or `None`, after the last epoch.
        val_accuracy: Float or `None`, after the last epoch.
        num_buckets: Int or `None`.
    """

    bucket_mb: float
    num_runs: int
    step_seconds: float
    samples_per_second: float
    lowest_samples_per_second: float
    highest_samples_per_second: float
    communication_fraction: float
    val_loss: float | None
    val_accuracy: float | None
    num_buckets: int | None


def summarize(runs: Sequence[Run]) -> list[SizeResult]:
    """Take the medians of each size.

    The first epoch counts only where there is no other: it traces the step.

    Args:
        runs: Sequence of `Run`, in any order.

    Returns:
        List of `SizeResult`, smallest size first.
    """
    sizes = sorted({run.bucket_mb for run in runs})
    return [_of_size(size, [r for r in runs if r.bucket_mb == size]) for size in sizes]


def _of_size(bucket_mb: float, runs: list[Run]) -> SizeResult:
    def median_of(name: str) -> list[float]:
        """The median over the epochs of each run."""
        return [
            statistics.median(getattr(epoch, name) for epoch in timed_epochs(run))
            for run in runs
        ]

    last = [run.epochs[-1] for run in runs]
    speeds = median_of("samples_per_second")
    num_buckets = _median(epoch.num_buckets for epoch in last)
    return SizeResult(
        bucket_mb=bucket_mb,
        num_runs=len(runs),
        step_seconds=statistics.median(median_of("step_seconds")),
        samples_per_second=statistics.median(speeds),
        lowest_samples_per_second=min(speeds),
        highest_samples_per_second=max(speeds),
        communication_fraction=statistics.median(median_of("communication_fraction")),
        val_loss=_median(epoch.val_loss for epoch in last),
        val_accuracy=_median(epoch.val_accuracy for epoch in last),
        num_buckets=None if num_buckets is None else round(num_buckets),
    )


def timed_epochs(run: Run) -> tuple[Epoch, ...]:
    """The epochs of a run whose times count.

    Args:
        run: `Run`.

    Returns:
        Tuple of `Epoch`: all but the first, where there are more.
    """
    return run.epochs[1:] or run.epochs


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def diminishing_returns(
    sizes: Sequence[float], speeds: Sequence[float], tolerance: float = TOLERANCE
) -> float:
    """Smallest size from which on larger buckets stop to pay.

    The smallest size whose throughput is within `tolerance` of the best one: all
    that any larger bucket could still gain is less than that.

    Args:
        sizes: Sequence of floats, bucket sizes in any order.
        speeds: Sequence of floats, the throughput at each.
        tolerance: Float, a share of the best throughput. Defaults to `0.03`.

    Returns:
        Float, one of `sizes`.

    Raises:
        ValueError: If there are no sizes, or not as many speeds.

    Example:

    >>> diminishing_returns([0.5, 1, 2, 4, 8], [50, 80, 98, 100, 100])
    2
    """
    if not sizes or len(sizes) != len(speeds):
        raise ValueError(
            "There must be a throughput for each size, and at least one. "
            f"Received: {len(sizes)} sizes and {len(speeds)} throughputs"
        )
    enough = (1 - tolerance) * max(speeds)
    return min(s for s, speed in zip(sizes, speeds, strict=True) if speed >= enough)


def diminishing_size(results: Sequence[SizeResult]) -> float:
    """The size of a study from which on larger buckets stop to pay.

    Args:
        results: Sequence of `SizeResult`.

    Returns:
        Float, megabytes.
    """
    return diminishing_returns(
        [result.bucket_mb for result in results],
        [result.samples_per_second for result in results],
    )


def best_over_worst(results: Sequence[SizeResult]) -> float:
    """The throughput of the best size over that of the worst.

    Args:
        results: Sequence of `SizeResult`.

    Returns:
        Float.
    """
    speeds = [result.samples_per_second for result in results]
    return max(speeds) / min(speeds)


def write_csv(results: Sequence[SizeResult], path: Path) -> None:
    """Write a row for each size.

    Args:
        results: Sequence of `SizeResult`.
        path: Path of the file.
    """
    names = [field.name for field in dataclasses.fields(SizeResult)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(dataclasses.asdict(result) for result in results)


def content_of(results: Sequence[SizeResult], runs: Sequence[Run]) -> dict[str, Any]:
    """Results and every single run, for the JSON file.

    Args:
        results: Sequence of `SizeResult`.
        runs: Sequence of `Run`, in the order in which they ran.

    Returns:
        Dict.
    """
    return {
        "diminishing_returns_mb": diminishing_size(results),
        "tolerance": TOLERANCE,
        "best_over_worst": best_over_worst(results),
        "sizes": [dataclasses.asdict(result) for result in results],
        "runs": [dataclasses.asdict(run) for run in runs],
    }


def table_of(results: Sequence[SizeResult]) -> Table:
    """The results for the screen, with the best size and where returns diminish.

    Args:
        results: Sequence of `SizeResult`.

    Returns:
        `Table`.
    """
    best = max(result.samples_per_second for result in results)
    enough = diminishing_size(results)
    rows = []
    for result in results:
        marks = ["best"] if result.samples_per_second == best else []
        marks += ["returns diminish"] if result.bucket_mb == enough else []
        rows.append(
            [
                f"{result.bucket_mb:g}",
                _shown(result.num_buckets, "d"),
                f"{1000 * result.step_seconds:.1f}",
                f"{result.samples_per_second:.1f}",
                f"{100 * result.samples_per_second / best:.0f} %",
                f"{100 * result.communication_fraction:.1f} %",
                _shown(result.val_loss, ".4f"),
                _shown(result.val_accuracy, ".4f"),
                ", ".join(marks),
            ]
        )
    return Table(_COLUMNS, rows)


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
