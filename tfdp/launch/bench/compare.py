"""`tfdp bench compare`: Keras `fit` with tfdp, plain Keras, and loops of its rivals."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from tfdp.ground.onednn import is_left_off
from tfdp.ground.text import pluralize
from tfdp.launch.bench import output
from tfdp.launch.bench.compare_report import COLUMNS, Times, cells, plot, rows_of
from tfdp.launch.bench.compare_sides import DEFAULTS, TUNED, SetUp, set_ups
from tfdp.launch.bench.machine import HOW_TO_GET_TORCH, num_cores, torch_version
from tfdp.launch.bench.models import ModelSettings
from tfdp.launch.bench.sides import alternate_for, started

_BLOCK_SECONDS = 0.4


@dataclasses.dataclass(frozen=True)
class Settings(ModelSettings):
    """Settings of the measurement.

    Args:
        num_workers: Int, replicas of each side: processes, or devices of one.
        family: String, of `tfdp.launch.bench.models.FAMILIES`.
        millions: Sequence of floats, sizes of the models in million parameters.
        batch_size: Int, samples of each replica.
        blocks: Int, turns of each side, at least 2.
        torch_python: String, an interpreter that may have PyTorch.
    """

    num_workers: int
    family: str
    millions: Sequence[float]
    batch_size: int
    blocks: int
    torch_python: str

    @property
    def num_threads(self) -> int:
        """Int, threads of a replica: the cores are divided, as `tfdp run` does."""
        return max(1, num_cores() // self.num_workers)


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
    has_torch = content["torch"] is not None
    if not has_torch:
        console.print(_without_torch(settings), soft_wrap=True)
    measured = set_ups(settings.num_workers, has_torch=has_torch)
    num_arms = sum(len(set_up.arms) for set_up in measured)
    num_turns = len(settings.models) * settings.blocks * num_arms
    times: Times = {}
    with output.progress_bar("training steps", num_turns) as on_turn:
        # Nothing is compared with what has other settings: half of the processes.
        for tuning in (DEFAULTS, TUNED):
            together = [set_up for set_up in measured if set_up.tuning == tuning]
            times |= _measure(settings, together, on_turn)
    content["seconds_per_step"] = times
    global_batch_size = settings.batch_size * settings.num_workers
    rows = [
        row
        for model in settings.models
        for row in rows_of(model, measured, times, global_batch_size)
    ]
    content["rows"] = [dataclasses.asdict(row) for row in rows]
    output.report(
        console,
        content,
        files,
        table=output.Table(COLUMNS, [cells(row) for row in rows]),
        notes=[*content["models"].values(), *_notes(settings, has_torch=has_torch)],
        draw=functools.partial(plot, rows, _title(settings)),
    )


def _measure(
    settings: Settings, together: Sequence[SetUp], on_turn: Callable[[], Any]
) -> Times:
    sides = {
        set_up: set_up.side(
            settings.models,
            settings.batch_size,
            settings.num_threads,
            settings.torch_python,
        )
        for set_up in together
    }
    times: Times = {}
    with started(*sides.values()):
        for model in settings.models:
            arms = [
                (side, f"{model}{arm}")
                for set_up, side in sides.items()
                for arm in set_up.arms
            ]
            times |= alternate_for(
                _BLOCK_SECONDS, arms, blocks=settings.blocks, on_turn=on_turn
            )
    return times


def _without_torch(settings: Settings) -> str:
    return (
        f"Without PyTorch, which {settings.torch_python} does not have: "
        f"{HOW_TO_GET_TORCH}."
    )


def _title(settings: Settings) -> str:
    return (
        f"Training step of {pluralize(settings.num_workers, 'replica')} on one "
        f"machine, {settings.family}, batch {settings.batch_size} each"
    )


def _notes(settings: Settings, *, has_torch: bool) -> list[str]:
    """Notes below the table."""
    threads = pluralize(settings.num_threads, "thread")
    notes = [
        f"A step with SGD, {pluralize(settings.batch_size, 'sample')} for each of "
        f"{pluralize(settings.num_workers, 'replica')} of {threads}; plain Keras has "
        f"all of them in one batch and {pluralize(num_cores(), 'core')}. "
        f"{pluralize(settings.blocks, 'alternating block')}.",
        "tfdp and plain Keras run fit; stock, which cannot, and DDP run a loop on a "
        "fixed batch, with no input pipeline and no metrics.",
        "Own step: without communication, in all processes at once; that of devices "
        "is that of processes. Communication: what it adds to a step.",
        "Speed: of defaults relative to defaults and of tuned relative to tuned; the "
        "tuned choice is made in every other block and compared in the rest.",
        "Tuned: MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ of 1 GiB for all; "
        "fit with or without jit_compile=True; stock's pack size"
        + ("; DDP's gradient_as_bucket_view, SGD with foreach." if has_torch else "."),
    ]
    if is_left_off():
        notes.append(
            "oneDNN: on with tfdp, which turns it on, and for all that is tuned; off "
            "with the defaults of plain Keras and stock, as TensorFlow leaves it here."
        )
    return notes
