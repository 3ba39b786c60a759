"""Weak and strong scaling of training steps: `train`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from tfdp.ground.text import pluralize
from tfdp.launch.bench import output
from tfdp.launch.bench.machine import num_cores
from tfdp.launch.bench.models import ModelSettings
from tfdp.launch.bench.sides import Side, alternate_for, started
from tools.bench.report import PROGRAM
from tools.bench.stats import batch_of, efficiency
from tools.bench.train_report import COLUMNS, Row, cells, plot, row_of

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
        scalings: Sequence of strings, of `tools.bench.stats.SCALINGS`.
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
    num_turns = num_tables * len(settings.counts) * settings.blocks
    sides = {count: _side(settings, count) for count in settings.counts}
    with (
        output.progress_bar("training steps", num_turns) as on_turn,
        started(*sides.values()),
    ):
        rows, content["seconds_per_step"] = _measure(settings, sides, on_turn)
    content["rows"] = [dataclasses.asdict(row) for row in rows]
    output.report(
        output.new_console(),
        content,
        files,
        table=output.Table(COLUMNS, [cells(row) for row in rows]),
        notes=[*content["models"].values(), *_notes(settings)],
        draw=functools.partial(plot, rows, settings.family),
    )


def _side(settings: Settings, count: int) -> Side:
    """The workers of a number of replicas: for one, plain Keras with no strategy."""
    arms = {
        _arm(name, settings.batch(scaling, count)): {
            "model": dataclasses.asdict(model),
            "batch_size": settings.batch(scaling, count),
        }
        for name, model in settings.models.items()
        for scaling in settings.scalings
    }
    setup: dict[str, Any] = {"arms": arms, "strategy": "alone", "threads": 1}
    if count == 1:
        return Side("1", _WORKER, setup)
    if settings.placement == "devices":
        return Side(
            str(count), _WORKER, {**setup, "strategy": "auto", "devices": count}
        )
    return Side(str(count), _WORKER, {**setup, "strategy": "tfdp"}, num_workers=count)


def _measure(
    settings: Settings, sides: dict[int, Side], on_turn: Callable[[], Any]
) -> tuple[list[Row], Times]:
    rows: list[Row] = []
    all_times: Times = {}
    for name in settings.models:
        for scaling in settings.scalings:
            batches = {count: settings.batch(scaling, count) for count in sides}
            arms = [(sides[n], _arm(name, batches[n])) for n in sides]
            times = alternate_for(
                _BLOCK_SECONDS, arms, blocks=settings.blocks, on_turn=on_turn
            )
            of_count = {n: times[f"{n}/{_arm(name, batches[n])}"] for n in sides}
            for count, seconds in of_count.items():
                all_times[f"{name}, {scaling}, {count}"] = seconds
                ratio = efficiency(scaling, of_count[1], seconds, count)
                rows.append(
                    row_of((name, scaling), count, batches[count], seconds, ratio)
                )
    return rows, all_times


def _arm(name: str, batch_size: int) -> str:
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
