"""`tfdp bench compare`: training steps of tfdp, stock tf.distribute and DDP."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from tfdp.bench import output
from tfdp.bench.compare_report import (
    ALONE,
    COLUMNS,
    DDP,
    PACKS_MB,
    Row,
    Times,
    cells,
    efficiency_notes,
    plot,
    rows_of,
)
from tfdp.bench.machine import HOW_TO_GET_TORCH, torch_version
from tfdp.bench.models import ModelSettings
from tfdp.bench.sides import Side, alternate_for, started
from tfdp.cluster.words import counted

_BLOCK_SECONDS = 0.4


@dataclasses.dataclass(frozen=True)
class Settings(ModelSettings):
    """Settings of the measurement.

    Args:
        num_workers: Int, processes of each side.
        family: String, of `tfdp.bench.models.FAMILIES`.
        millions: Sequence of floats, sizes of the models in million parameters.
        batch_size: Int, samples of each worker.
        blocks: Int, turns of each side, at least 2.
        torch_python: String, an interpreter that may have PyTorch.
    """

    num_workers: int
    family: str
    millions: Sequence[float]
    batch_size: int
    blocks: int
    torch_python: str


def run(settings: Settings, files: output.Files) -> None:
    """Measure, print the table and write the files.

    Args:
        settings: `Settings`.
        files: `Files` to write.

    Raises:
        ValueError: If what is asked for cannot be run.
        RuntimeError: If a worker fails.
    """
    content = output.about("compare", dataclasses.asdict(settings))
    content["models"] = {name: str(model) for name, model in settings.models.items()}
    content["torch"] = torch_version(settings.torch_python)
    console = output.new_console()
    if content["torch"] is None:
        console.print(_without_torch(settings), soft_wrap=True)
    sides = _sides(settings, has_torch=content["torch"] is not None)
    num_turns = len(settings.models) * settings.blocks * len(_arms(sides, ""))
    with (
        output.progress_bar("training steps", num_turns) as on_turn,
        started(*sides.values()),
    ):
        rows, content["seconds_per_step"] = _measure(settings, sides, on_turn)
    content["rows"] = [dataclasses.asdict(row) for row in rows]
    output.report(
        console,
        content,
        files,
        table=output.Table(COLUMNS, [cells(row) for row in rows]),
        notes=[*content["models"].values(), *_notes(settings, rows)],
        draw=functools.partial(plot, rows, _title(settings)),
    )


def _sides(settings: Settings, *, has_torch: bool) -> dict[str, Side]:
    told = {
        name: {
            "model": dataclasses.asdict(model),
            "batch_size": settings.batch_size,
        }
        for name, model in settings.models.items()
    }
    packs = {
        f"{name}, packs of {mb} MB": {**arm, "pack_bytes": mb * 2**20}
        for name, arm in told.items()
        for mb in PACKS_MB
    }
    tuned = {f"{name}, tuned": {**arm, "tuned": True} for name, arm in told.items()}
    alone = {
        f"{name}, {ALONE}": {**arm, "alone": True}
        for name, arm in {**told, **tuned}.items()
    }
    ours, count = "tfdp.bench.training", settings.num_workers
    sides = {
        name: Side(name, ours, {"strategy": name, "arms": arms}, count)
        for name, arms in (("tfdp", {**told, **alone}), ("stock", {**told, **packs}))
    }
    if has_torch:
        setup, python = {"arms": {**told, **tuned, **alone}}, settings.torch_python
        sides["ddp"] = Side("ddp", "tfdp.bench.torch_worker", setup, count, python)
    return sides


def _arms(sides: dict[str, Side], model: str) -> list[tuple[Side, str]]:
    alone = f"{model}, {ALONE}"
    arms = [(sides["tfdp"], model), (sides["tfdp"], alone), (sides["stock"], model)]
    arms += [(sides["stock"], f"{model}, packs of {mb} MB") for mb in PACKS_MB]
    if "ddp" in sides:
        settings = (model, f"{model}, tuned")
        arms += [
            (sides["ddp"], arm)
            for each in settings
            for arm in (each, f"{each}, {ALONE}")
        ]
    return arms


def _measure(
    settings: Settings, sides: dict[str, Side], on_turn: Callable[[], Any]
) -> tuple[list[Row], Times]:
    rows: list[Row] = []
    all_times: Times = {}
    for model in settings.models:
        arms = _arms(sides, model)
        times = alternate_for(
            _BLOCK_SECONDS, arms, blocks=settings.blocks, on_turn=on_turn
        )
        all_times |= times
        global_batch = settings.batch_size * settings.num_workers
        rows += rows_of(model, times, global_batch)
    return rows, all_times


def _without_torch(settings: Settings) -> str:
    return (
        f"Without PyTorch, which {settings.torch_python} does not have: "
        f"{HOW_TO_GET_TORCH}."
    )


def _title(settings: Settings) -> str:
    return (
        f"Training step on {counted(settings.num_workers, 'local worker')}, "
        f"{settings.family}, "
        f"batch {settings.batch_size} each"
    )


def _notes(settings: Settings, rows: Sequence[Row]) -> list[str]:
    """Note below the table."""
    notes = [
        f"A step with SGD on a fixed batch of {settings.batch_size} for each of "
        f"{counted(settings.num_workers, 'worker')} of one thread on this machine, "
        f"{counted(settings.blocks, 'alternating block')}.",
        f"Best pack size: of {', '.join(map(str, PACKS_MB))} MB, chosen in every other "
        "block and compared in the rest.",
        *efficiency_notes(rows),
        "Efficiency: the time of the side's own step without communication, on all "
        "workers at once, relative to its step.",
    ]
    if any(row.side == DDP for row in rows):
        notes.append(
            "DDP: PyTorch's DistributedDataParallel with Gloo; tuned: "
            "gradient_as_bucket_view and SGD with foreach."
        )
    return notes
