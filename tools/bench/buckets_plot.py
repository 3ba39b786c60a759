"""Plots of a bucket-size study, in one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tfdp.launch.bench.output import COLOURS, MARKERS, new_panels, save
from tools.bench.buckets import Run
from tools.bench.buckets_report import (
    TOLERANCE,
    SizeResult,
    diminishing_size,
    timed_epochs,
)

if TYPE_CHECKING:  # it is an extra
    from matplotlib.axes import Axes


def plot(
    results: Sequence[SizeResult], runs: Sequence[Run], caption: str, path: Path
) -> None:
    """Draw throughput and s against bucket size, and s against validation loss.

    Args:
        results: Sequence of `SizeResult`.
        runs: Sequence of `Run`, for the validation loss of each epoch.
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
