"""`python -m tools.bench buckets`: train a script with several bucket sizes."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import click

from tfdp.launch.bench import output
from tfdp.launch.cli import parameter_types as types
from tfdp.launch.cli.bench import errors_in_one_sentence
from tools.bench.buckets import Run, Study, order_of_runs, run_all
from tools.bench.buckets_report import (
    TOLERANCE,
    best_over_worst,
    columns_of,
    content_of,
    diminishing_size,
    summarize,
    write_csv,
)
from tools.bench.report import PROGRAM

DEFAULT_SIZES = (0.5, 1, 2, 4, 8, 16, 25)
_MEGABYTES = types.Number("a size in megabytes, above 0", min=0, min_open=True)
_OWN = ("--bucket-mb", "--output")


def _command(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"it must be a command as in a shell ({error})") from error


def _once(
    context: click.Context, parameter: click.Parameter, value: tuple[float, ...]
) -> tuple[float, ...]:
    if len(set(value)) < len(value):
        given = " ".join(f"{size:g}" for size in value)
        raise click.BadParameter(f"each size is given once. Received: {given}")
    return value


# What follows the script's name is the script's own, options too.
@click.command(
    cls=types.ManyValues, context_settings={"allow_interspersed_args": False}
)
@click.option(
    "-n",
    "--num-workers",
    metavar="N",
    type=types.COUNT,
    help="Number of worker processes on this machine. Default: 2.",
)
@click.option(
    "--sizes",
    metavar="MB...",
    multiple=True,
    default=DEFAULT_SIZES,
    show_default=True,
    type=_MEGABYTES,
    callback=_once,
    help="Bucket sizes in megabytes (2**20 bytes).",
)
@click.option(
    "--repeats",
    metavar="R",
    default=1,
    show_default=True,
    type=types.COUNT,
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
    type=types.Checked("command", _command),
    help="What starts the workers in place of `tfdp run`: it is followed by the "
    "interpreter, the script and its arguments.",
)
@click.option("--no-plot", is_flag=True, help="Draw no plot.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def buckets(
    num_workers: int | None,
    sizes: tuple[float, ...],
    repeats: int,
    out: str | None,
    launcher: list[str] | None,
    no_plot: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Train SCRIPT once for each bucket size.

    Any script will do that takes --bucket-mb X and --output DIR, and writes
    DIR/statistics.csv, a row for each epoch with the columns step_seconds,
    samples_per_second and communication_fraction (and num_buckets, val_loss and
    val_accuracy), as examples/cifar_resnet.py does. Writes buckets.csv, buckets.json
    and buckets.png, and marks where returns diminish: the smallest size within 3 % of
    the best throughput.
    """
    _check(script, args, launcher, num_workers, plots=not no_plot)
    folder = _new_folder(out)
    study = Study(script, args, launcher or [], num_workers or 2, folder / "runs")
    content = {
        **output.about("buckets", {"sizes": sizes}, PROGRAM),
        "script_command": shlex.join(study.command(sizes[0], Path("DIR"))),
        "repeats": repeats,
    }
    order = order_of_runs(sizes, repeats)
    with (
        errors_in_one_sentence(),
        _leaving_at_sigterm(),
        output.progress_bar("training runs", len(order)) as on_run,
    ):
        runs = run_all(study, order, on_run)
    _finish(runs, content, folder, plots=not no_plot)


def _check(
    script: str,
    args: Sequence[str],
    launcher: list[str] | None,
    num_workers: int | None,
    *,
    plots: bool,
) -> None:
    """Check now what would otherwise fail after minutes."""
    if not os.path.isfile(script):
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
        with errors_in_one_sentence():
            output.check_available()


def _new_folder(out: str | None) -> Path:
    folder = Path(out or Path("tfdp-bench") / time.strftime("buckets-%Y%m%d-%H%M%S"))
    if os.path.exists(folder / "runs"):
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


def _finish(runs: list[Run], content: dict, folder: Path, *, plots: bool) -> None:
    from tools.bench.buckets_report import plot

    results = summarize(runs)
    picture = folder / "buckets.png" if plots else None
    write_csv(results, folder / "buckets.csv")
    output.report(
        {**content, **content_of(results, runs)},
        output.Files(folder / "buckets.json", picture),
        results,
        columns_of(results),
        functools.partial(plot, runs),
        notes=[
            f"The best size has {best_over_worst(results):.2f} times the throughput of "
            f"the worst. Returns diminish at {diminishing_size(results):g} MB, the "
            f"smallest size within {100 * TOLERANCE:.0f} % of the best.",
            f"Results, and the output of each run: {folder}",
        ],
    )
