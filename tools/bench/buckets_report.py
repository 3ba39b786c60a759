"""Results of a bucket-size study: medians by size, CSV, JSON, a table and plots."""

from __future__ import annotations

import csv
import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdp.launch.bench.output import COLOURS, MARKERS, new_panels, save
from tools.bench.buckets import Epoch, Run

if TYPE_CHECKING:  # it is an extra
    from matplotlib.axes import Axes

# A larger bucket that gains less than this is not worth its memory, nor the wait
# for the gradients that fill it.
TOLERANCE = 0.03


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
        "runs": [dataclasses.asdict(run) for run in runs],
    }


def columns_of(
    results: Sequence[SizeResult],
) -> dict[str, Callable[[SizeResult], str]]:
    """The columns on the screen, with the best size and where returns diminish.

    Args:
        results: Sequence of `SizeResult`.
    """
    best = max(result.samples_per_second for result in results)
    enough = diminishing_size(results)

    def marks(result: SizeResult) -> str:
        found = ["best"] if result.samples_per_second == best else []
        found += ["returns diminish"] if result.bucket_mb == enough else []
        return ", ".join(found)

    return {
        "bucket MB": lambda r: f"{r.bucket_mb:g}",
        "buckets": lambda r: _shown(r.num_buckets, "d"),
        "ms per step": lambda r: f"{1000 * r.step_seconds:.1f}",
        "images/s": lambda r: f"{r.samples_per_second:.1f}",
        "of the best": lambda r: f"{100 * r.samples_per_second / best:.0f} %",
        "s": lambda r: f"{100 * r.communication_fraction:.1f} %",
        "val loss": lambda r: _shown(r.val_loss, ".4f"),
        "val accuracy": lambda r: _shown(r.val_accuracy, ".4f"),
        "": marks,
    }


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def plot(
    runs: Sequence[Run], results: Sequence[SizeResult], caption: str, path: Path
) -> None:
    """Draw throughput and s against bucket size, and s against validation loss.

    Args:
        runs: Sequence of `Run`, for the validation loss of each epoch.
        results: Sequence of `SizeResult`.
        caption: String, the machine and the versions.
        path: Path of the PNG file.
    """
    with_loss = any(result.val_loss is not None for result in results)
    title = "What the bucket size is worth"
    figure, panels = new_panels(title, 3 if with_loss else 2, caption)
    _throughput(panels[0], results)
    _fraction(panels[1], results)
    if with_loss:
        _fraction_and_loss(panels[2], runs)
    save(figure, path)


def _size_axis(axes: Axes, results: Sequence[SizeResult]) -> None:
    sizes = [result.bucket_mb for result in results]
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes], rotation=45)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("bucket size in MB (log scale)")
    axes.axvline(
        diminishing_size(results),
        color="0.4",
        linestyle="--",
        linewidth=1.2,
        marker="",
        label=f"smallest within {100 * TOLERANCE:.0f} % of the best",
    )


def _throughput(axes: Axes, results: Sequence[SizeResult]) -> None:
    speeds = [result.samples_per_second for result in results]
    below = [r.samples_per_second - r.lowest_samples_per_second for r in results]
    above = [r.highest_samples_per_second - r.samples_per_second for r in results]
    axes.errorbar(
        [result.bucket_mb for result in results],
        speeds,
        yerr=(below, above),
        capsize=3,
        label="median; slowest and fastest run",
    )
    _size_axis(axes, results)
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.set_ylabel("images per second, all workers")
    axes.set_title("Throughput")
    axes.legend(loc="lower center", fontsize=8)


def _fraction(axes: Axes, results: Sequence[SizeResult]) -> None:
    axes.plot(
        [result.bucket_mb for result in results],
        [100 * result.communication_fraction for result in results],
        color=COLOURS[1],
        marker=MARKERS[1],
        label="median",
    )
    _size_axis(axes, results)
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.set_ylabel("s, in %")
    axes.set_title("s = T_comm / (T_comp + T_comm)")
    axes.legend(loc="lower center", fontsize=8)


def _fraction_and_loss(axes: Axes, runs: Sequence[Run]) -> None:
    """A point for each epoch of each run, in the colour of its bucket size."""
    sizes = sorted({run.bucket_mb for run in runs})
    for index, size in enumerate(sizes):
        points = [
            (epoch.val_loss, 100 * epoch.communication_fraction)
            for run in runs
            if run.bucket_mb == size
            for epoch in timed_epochs(run)
            if epoch.val_loss is not None
        ]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                linestyle="",
                color=COLOURS[index % len(COLOURS)],
                marker=MARKERS[index // len(COLOURS) % len(MARKERS)],
                label=f"{size:g} MB",
            )
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.set_xlabel("validation loss after an epoch")
    axes.set_ylabel("s, in %")
    axes.set_title("s against validation loss")
    axes.legend(fontsize=8, ncols=2)
