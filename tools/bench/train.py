"""Weak and strong scaling of training steps: `train`."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from tfdp.ground.text import pluralize
from tfdp.launch.bench import output
from tfdp.launch.bench.machine import num_cores
from tfdp.launch.bench.models import ModelSettings
from tfdp.launch.bench.sides import Ratio, Side, alternate_for, started
from tfdp.launch.cli import bench as options
from tfdp.launch.cli import parameter_types as types
from tools.bench.report import PROGRAM, SCALINGS, batch_of, efficiency, speedup

PLACEMENTS = ("processes", "devices")
_WORKER = "tfdp.launch.bench.training"
_BLOCK_SECONDS = 0.3


@dataclasses.dataclass(frozen=True)
class Settings(ModelSettings):
    """Settings of the measurement.

    Args:
        family: String, of `tfdp.launch.bench.models.FAMILIES`.
        millions: Sequence of floats, sizes of the models in million parameters.
        replicas: Sequence of ints, numbers of replicas.
        scalings: Sequence of strings, of `tools.bench.report.SCALINGS`.
        batch_size: Int, samples of each replica; see `batch_of`.
        blocks: Int, turns of each number of replicas.
        placement: String, `"processes"`, one for each replica, or `"devices"`,
            logical CPUs of one process.
    """

    family: str
    millions: Sequence[float]
    replicas: Sequence[int]
    scalings: Sequence[str]
    batch_size: int
    blocks: int
    placement: str

    @property
    def counts(self) -> list[int]:
        """Numbers of replicas; one is what the others are compared with."""
        return sorted({1, *self.replicas})

    def batch(self, scaling: str, count: int) -> int:
        """The batch of each of so many replicas."""
        return batch_of(scaling, self.batch_size, count, self.counts[-1])

    def check(self) -> None:
        """Check that all that is asked for can be run, before anything is started.

        Raises:
            ValueError: If not.
        """
        for scaling in self.scalings:
            for count in self.counts:
                self.batch(scaling, count)
        if self.counts == [1]:
            raise ValueError(
                "Scaling needs a number of replicas above 1. "
                f"Received: {' '.join(map(str, self.replicas))}"
            )


Times = dict[str, list[float]]


def run(settings: Settings, files: output.Files) -> None:
    """Measure, print the table and write the files.

    Args:
        settings: `Settings`.
        files: `Files` to write.

    Raises:
        ValueError: If what is asked for cannot be run.
        RuntimeError: If a worker fails.
    """
    settings.check()
    content = output.about("train", dataclasses.asdict(settings), PROGRAM)
    content["models"] = {name: str(model) for name, model in settings.models.items()}
    num_tables = len(settings.models) * len(settings.scalings)
    num_blocks = num_tables * len(settings.counts) * settings.blocks
    sides = {count: _side(settings, count) for count in settings.counts}
    with (
        output.progress_bar("training steps", num_blocks) as on_block,
        started(*sides.values()),
    ):
        rows, content["seconds_per_step"] = _measure(settings, sides, on_block)
    output.report(
        content,
        files,
        rows,
        COLUMNS,
        functools.partial(plot, settings.family),
        notes=[*content["models"].values(), *_notes(settings)],
    )


def _side(settings: Settings, count: int) -> Side:
    """The workers of a number of replicas: for one, plain Keras with no strategy."""
    variants = {
        _variant(name, settings.batch(scaling, count)): {
            "model": dataclasses.asdict(model),
            "batch_size": settings.batch(scaling, count),
        }
        for name, model in settings.models.items()
        for scaling in settings.scalings
    }
    setup: dict[str, Any] = {"variants": variants, "strategy": "alone", "threads": 1}
    if count == 1:
        return Side("1", _WORKER, setup)
    if settings.placement == "devices":
        return Side(
            str(count), _WORKER, {**setup, "strategy": "auto", "devices": count}
        )
    return Side(str(count), _WORKER, {**setup, "strategy": "tfdp"}, num_workers=count)


def _measure(
    settings: Settings, sides: dict[int, Side], on_block: Callable[[], Any]
) -> tuple[list[Row], Times]:
    rows: list[Row] = []
    all_times: Times = {}
    for name in settings.models:
        for scaling in settings.scalings:
            batches = {count: settings.batch(scaling, count) for count in sides}
            variants = [(sides[n], _variant(name, batches[n])) for n in sides]
            times = alternate_for(
                _BLOCK_SECONDS, variants, blocks=settings.blocks, on_block=on_block
            )
            of_count = {n: times[f"{n}/{_variant(name, batches[n])}"] for n in sides}
            for count, seconds in of_count.items():
                all_times[f"{name}, {scaling}, {count}"] = seconds
                ratio = efficiency(scaling, of_count[1], seconds, count)
                rows.append(
                    row_of((name, scaling), count, batches[count], seconds, ratio)
                )
    return rows, all_times


def _variant(name: str, batch_size: int) -> str:
    return f"{name}, batch {batch_size}"


def _notes(settings: Settings) -> list[str]:
    """Note below the table."""
    notes = [
        "One replica is plain Keras without a strategy; every replica has one thread. "
        "Batch: of each replica.",
        "Efficiency: weak T(1) / T(N), strong T(1) / (N T(N)); speedup: N times that.",
    ]
    cores, most = num_cores(), settings.counts[-1]
    if most > cores:
        notes.append(
            f"{most} replicas share {pluralize(cores, 'core')}: their efficiency "
            f"cannot exceed {cores / most:g}."
        )
    return notes


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table.

    Args:
        model: String.
        scaling: String.
        num_replicas: Int.
        batch_size: Int, of each replica.
        step_seconds: Float, the median.
        samples_per_second: Float, of all replicas together.
        speedup: `Ratio` to one replica.
        efficiency: `Ratio`.
    """

    model: str
    scaling: str
    num_replicas: int
    batch_size: int
    step_seconds: float
    samples_per_second: float
    speedup: Ratio
    efficiency: Ratio


def row_of(
    what: tuple[str, str],
    count: int,
    batch_size: int,
    times: Sequence[float],
    ratio: Ratio,
) -> Row:
    """The line of one number of replicas.

    Args:
        what: Tuple of strings, the model and the scaling.
        count: Int, number of replicas.
        batch_size: Int, of each.
        times: Sequence of floats, seconds of a step, block by block.
        ratio: `Ratio`, the efficiency.

    Returns:
        A `Row`.
    """
    seconds = statistics.median(times)
    return Row(
        *what,
        num_replicas=count,
        batch_size=batch_size,
        step_seconds=seconds,
        samples_per_second=batch_size * count / seconds,
        speedup=speedup(ratio, count),
        efficiency=ratio,
    )


COLUMNS: dict[str, Callable[[Row], str]] = {
    "model": lambda row: row.model,
    "scaling": lambda row: row.scaling,
    "replicas": lambda row: str(row.num_replicas),
    "batch": lambda row: str(row.batch_size),
    "step\n(ms)": lambda row: f"{1e3 * row.step_seconds:.2f}",
    "samples/s": lambda row: f"{row.samples_per_second:.0f}",
    "speedup": lambda row: f"{row.speedup.median:.2f}",
    "efficiency": lambda row: f"{row.efficiency.median:.3f}",
    "95 %\ninterval": lambda row: row.efficiency.interval,
}


def plot(family: str, rows: Sequence[Row], caption: str, path: Path) -> None:
    """Draw the table, a panel for each scaling.

    Args:
        family: String, of the models.
        rows: Sequence of `Row`.
        caption: String, the machine and the versions.
        path: Path of the PNG file.
    """
    scalings = list(dict.fromkeys(row.scaling for row in rows))
    title = f"Scaling of a training step, {family}"
    figure, panels = output.new_panels(title, len(scalings), caption)
    highest = max(row.efficiency.high for row in rows)
    for scaling, axes in zip(scalings, panels, strict=True):
        of_scaling = [row for row in rows if row.scaling == scaling]
        for model in dict.fromkeys(row.model for row in rows):
            points = [row for row in of_scaling if row.model == model]
            middle = [row.efficiency.median for row in points]
            axes.errorbar(
                [row.num_replicas for row in points],
                middle,
                yerr=[
                    [row.efficiency.median - row.efficiency.low for row in points],
                    [row.efficiency.high - row.efficiency.median for row in points],
                ],
                capsize=3,
                label=f"{model} parameters",
            )
        counts = sorted({row.num_replicas for row in of_scaling})
        axes.axhline(1.0, color="0.4", linestyle="--", linewidth=1, marker="")
        axes.set_xticks(counts)
        axes.set_ylim(0, 1.1 * max(1.0, highest))
        axes.set_title(f"{scaling} scaling", fontsize=10)
        axes.set_xlabel("replicas")
        axes.set_ylabel("efficiency")
    panels[0].legend(frameon=False)
    output.save(figure, path)


@click.command(cls=types.ManyValues)
@options.models
@click.option(
    "--replicas",
    metavar="N...",
    multiple=True,
    default=(1, 2, 4),
    show_default=True,
    type=types.COUNT,
    help="Numbers of replicas; one is always measured, to compare with.",
)
@click.option(
    "--scaling",
    "scalings",
    multiple=True,
    type=click.Choice(SCALINGS),
    default=SCALINGS,
    show_default=True,
    help="weak: every replica keeps its batch. strong: all share one global batch.",
)
@options.batch("each replica; in strong scaling of each of the most replicas")
@click.option(
    "--placement",
    type=click.Choice(PLACEMENTS),
    default="processes",
    show_default=True,
    help="A process for each replica, or logical CPU devices of one process.",
)
@options.blocks(10)
@options.files
def train(**given: Any) -> None:
    """Time training steps on 1, 2, ... replicas: speedup and efficiency.

    The numbers of replicas take turns, block by block, on this machine's CPU.
    """
    options.run_benchmark("train", sys.modules[__name__], given)
