"""`tfdp bench buckets`: trains a script with several bucket sizes and compares them."""

from __future__ import annotations

import contextlib
import math
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import click
from rich.console import Console
from rich.progress import Progress

from tfdp.bench.arguments import ManyValues
from tfdp.bench.buckets import Run, Study, StudyError, order_of_runs, run_all
from tfdp.bench.buckets_report import (
    TOLERANCE,
    best_over_worst,
    diminishing_size,
    summarize,
    table_of,
    write_csv,
    write_json,
)
from tfdp.bench.machine import caption, describe, load
from tfdp.bench.plots import check_available
from tfdp.cli import values

DEFAULT_SIZES = ("0.5", "1", "2", "4", "8", "16", "25")
_FILE_WIDTH = 110  # characters of the table in a file or pipe
_OWN = ("--bucket-mb", "--output")


def _sizes(
    context: click.Context, parameter: click.Parameter, value: tuple[str, ...]
) -> list[float]:
    sizes = [_megabytes(text) for text in value]
    if len(set(sizes)) < len(sizes):
        raise click.BadParameter(
            f"each size is given once. Received: {' '.join(value)}"
        )
    return sizes


def _megabytes(text: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not (math.isfinite(size) and size > 0):
        raise click.BadParameter(
            f"they must be sizes in megabytes, above 0. Received: {text}"
        )
    return size


# What follows the script's name is the script's own, options too.
@click.command(cls=ManyValues, context_settings={"allow_interspersed_args": False})
@click.option(
    "-n",
    "--num-workers",
    metavar="N",
    callback=values.count,
    help="Number of worker processes on this machine. Default: 2.",
)
@click.option(
    "--sizes",
    metavar="MB...",
    multiple=True,
    default=DEFAULT_SIZES,
    show_default=True,
    callback=_sizes,
    help="Bucket sizes in megabytes (2**20 bytes).",
)
@click.option(
    "--repeats",
    metavar="R",
    default="1",
    show_default=True,
    callback=values.count,
    help="Runs of each size; the medians are compared.",
)
@click.option(
    "--out",
    metavar="DIR",
    help="Folder for the results and the runs. Default: a new one in ./tfdp-bench.",
)
@click.option(
    "--launcher",
    metavar="COMMAND",
    help="What starts the workers in place of `tfdp run`: it is followed by the "
    "interpreter, the script and its arguments.",
)
@click.option("--no-plot", is_flag=True, help="Draw no picture.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def buckets(
    num_workers: int | None,
    sizes: list[float],
    repeats: int,
    out: str | None,
    launcher: str | None,
    no_plot: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Trains SCRIPT once for each bucket size.

    Any script will do that takes --bucket-mb X and --output DIR, and writes
    DIR/statistics.csv, a row for each epoch with the columns step_seconds,
    samples_per_second and communication_fraction (and num_buckets, val_loss and
    val_accuracy), as examples/cifar_resnet.py does. Writes buckets.csv, buckets.json
    and buckets.png, and marks where returns diminish: the smallest size within 3 % of
    the best throughput.
    """
    _check(script, args, launcher, num_workers, plots=not no_plot)
    folder = _new_folder(out)
    study = Study(
        script, args, shlex.split(launcher or ""), num_workers or 2, folder / "runs"
    )
    about = {
        **describe("tfdp"),
        "script_command": shlex.join(study.command(sizes[0], Path("DIR"))),
        "repeats": repeats,
    }
    try:
        with _leaving_at_sigterm():
            runs = _run(study, order_of_runs(sizes, repeats))
    except StudyError as error:
        raise click.ClickException(str(error)) from error
    about["load_average_1_min_at_end"] = load()
    _finish(runs, about, folder, plots=not no_plot)


def _check(
    script: str,
    args: Sequence[str],
    launcher: str | None,
    num_workers: int | None,
    *,
    plots: bool,
) -> None:
    """Finds out now what would otherwise fail after minutes."""
    if not Path(script).is_file():
        raise click.UsageError(
            "The script to train is not there; give the path of a Python file. "
            f"Received: {script}"
        )
    for word in args:
        if word.partition("=")[0] in _OWN:
            raise click.UsageError(
                f"The study sets {' and '.join(_OWN)} itself. Received: {word}"
            )
    if launcher is not None and num_workers is not None:
        raise click.UsageError(
            "The launcher says how many workers there are; give --launcher or -n. "
            f"Received: both, -n {num_workers}"
        )
    if plots:
        try:
            check_available()
        except ValueError as error:
            raise click.UsageError(str(error)) from error


def _new_folder(out: str | None) -> Path:
    folder = Path(out or Path("tfdp-bench") / time.strftime("buckets-%Y%m%d-%H%M%S"))
    if (folder / "runs").exists():
        raise click.UsageError(
            f"The folder holds a study already; give another. Received: --out {folder}"
        )
    try:
        (folder / "runs").mkdir(parents=True)
    except OSError as error:
        raise click.UsageError(
            f"The folder cannot be made ({error.strerror}). Received: --out {folder}"
        ) from error
    return folder


@contextlib.contextmanager
def _leaving_at_sigterm() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does, so that what it started ends too."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(study: Study, order: list[tuple[float, int]]) -> list[Run]:
    """Runs the study behind a bar, where there is a terminal to draw one on."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(order))

        def show(done: int, bucket_mb: float) -> None:
            progress.update(
                task, completed=done, description=f"buckets of {bucket_mb:g} MB"
            )

        runs = run_all(study, order, show)
        progress.update(task, completed=len(order), description="done")
    return runs


def _finish(runs: list[Run], about: dict, folder: Path, *, plots: bool) -> None:
    results = summarize(runs)
    write_csv(results, folder / "buckets.csv")
    write_json(results, runs, about, folder / "buckets.json")
    if plots:
        from tfdp.bench.buckets_plot import plot

        plot(results, runs, caption(about), folder / "buckets.png")
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    console.print(table_of(results))
    console.print(
        f"The best size has {best_over_worst(results):.2f} times the throughput of "
        f"the worst. Returns diminish at {diminishing_size(results):g} MB, the "
        f"smallest size within {100 * TOLERANCE:.0f} % of the best."
    )
    console.print(
        f"{about['machine']}, load {about['load_average_1_min']} at the start"
    )
    console.print(f"Results, and the output of each run: {folder}")
