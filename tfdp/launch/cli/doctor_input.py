"""`tfdp doctor --input`: how long the workers of a script wait for their data."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from tfdp.communication.cluster import Cluster
from tfdp.features.monitor.input_wait import InputWait, Pipeline, advise
from tfdp.ground.base.temporary import TemporaryFolder
from tfdp.ground.text import pluralize
from tfdp.launch.cli.input_worker import result_path
from tfdp.launch.cli.job import TIMED_OUT, Job, JobContext
from tfdp.launch.cli.launch import check_num_workers, make_clusters
from tfdp.launch.cli.log_file import LogFile
from tfdp.launch.cli.program import check_platform, check_program
from tfdp.launch.cli.screen import Screen, new_console
from tfdp.launch.cli.signals import SignalPipe
from tfdp.launch.cli.start import Starter

# Fewer say nothing: the first ones do not count.
_FEWEST_STEPS = 5
_GRACE_SECONDS = 2.0


def check_input(
    script: str,
    args: Sequence[str],
    *,
    num_workers: int,
    num_steps: int,
    timeout_seconds: float,
) -> None:
    """Train for a few steps, and print how long each worker waited for its data.

    Args:
        script: String, path of the script.
        args: Sequence of strings, its arguments.
        num_workers: Int, number of local workers.
        num_steps: Int, steps to be measured.
        timeout_seconds: Float, after which what there is has to do.

    Raises:
        click.ClickException: If nothing could be measured, with the reason.
    """
    check_platform("tfdp doctor --input")
    check_program(script, is_module=False)
    try:
        check_num_workers(num_workers)
        clusters = make_clusters(num_workers)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    with TemporaryFolder("input") as name:
        folder = Path(name)
        words = [name, str(num_steps), script, *args]
        job, code = _run(folder, words, clusters, time.monotonic() + timeout_seconds)
        if code > 128:  # a signal
            sys.exit(code)
        found = _read_results(folder, num_workers)
        if len(found) < num_workers:
            found = {}
        _check(job, code == TIMED_OUT, found, script)
        _show(found, script)


def _run(
    folder: Path, words: list[str], clusters: Sequence[Cluster], until: float
) -> tuple[Job, int]:
    """Run the workers; what they write goes to their logs only."""
    starter = Starter([sys.executable, "-m", "tfdp.launch.cli.input_worker", *words])
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        contextlib.closing(SignalPipe()) as signals,
    ):
        screen = Screen(nowhere, nowhere)
        logs = [
            LogFile(folder / f"worker-{rank}.log", screen.warn)
            for rank in range(len(clusters))
        ]
        context = JobContext(starter, screen, signals, _GRACE_SECONDS, until)
        with Job(context, clusters, logs) as job:
            code = job.run()
        screen.close(timeout_seconds=1.0)
    return job, code


def _read_results(folder: Path, num_workers: int) -> dict[int, dict[str, Any]]:
    """What each worker has written, by rank; those that have not are missing."""
    paths = {rank: result_path(folder, rank) for rank in range(num_workers)}
    return {
        rank: json.loads(path.read_text("utf-8"))
        for rank, path in paths.items()
        if path.is_file()
    }


def _check(
    job: Job, is_over: bool, found: Mapping[int, dict[str, Any]], script: str
) -> None:
    """Raise if not every worker was measured for long enough.

    Args:
        job: `Job`, which has ended.
        is_over: Bool, whether its time was over.
        found: Mapping from rank to what a worker has written; empty if not all have.
        script: String.

    Raises:
        click.ClickException: With the reason.
    """
    steps = min((each["num_steps"] for each in found.values()), default=0)
    taken = f"after {pluralize(steps, 'step')}" if steps else "before its first step"
    problem = next((each["problem"] for each in found.values() if each["problem"]), "")
    if job.failed is not None:
        failed = job.lost or job.failed
        for line in failed.tail:
            click.echo(line, err=True)
        kept = shutil.copy(failed.log.path, tempfile.mkdtemp(prefix="tfdp-input-"))
        raise click.ClickException(
            f"Worker {failed.rank} {failed.describe_end()} {taken}. All that it wrote: "
            f"{kept}. Received: {script}"
        )
    if problem:
        raise click.ClickException(
            f"Its steps cannot be measured: {problem}. Received: {script}"
        )
    if steps >= _FEWEST_STEPS:
        return
    if is_over:
        raise click.ClickException(
            f"Its time was over {taken}; give it more with --timeout. "
            f"Received: {script}"
        )
    if not found:
        raise click.ClickException(
            "The script has ended without a call of `fit`, of which alone steps are "
            f"measured. Received: {script}"
        )
    raise click.ClickException(
        f"`fit` has ended too soon: {pluralize(steps, 'step')} could be measured, and "
        f"{_FEWEST_STEPS} are needed; give it more data or epochs. Received: {script}"
    )


def _show(found: Mapping[int, dict[str, Any]], script: str) -> None:
    """Print a table of all workers and one sentence of advice."""
    waits = {rank: InputWait(**each["wait"]) for rank, each in sorted(found.items())}
    # All workers have the same script.
    first = found[min(found)]
    console = new_console()
    console.print(_table(waits, script))
    console.print(advise(waits, Pipeline(**first["pipeline"])))
    if first["left_out"]:
        names = ", ".join(first["left_out"])
        console.print(f"Left out of `fit`, since they write files: {names}.")


def _table(waits: Mapping[int, InputWait], script: str) -> Table:
    steps = min(wait.num_steps for wait in waits.values())
    title = f"Waiting for data: {os.path.basename(script)}, {pluralize(steps, 'step')}"
    table = Table(title=title)
    table.add_column("worker")
    for name in ("step", "of it until the data was there", "share"):
        table.add_column(name, justify="right")
    for rank, wait in waits.items():
        times = (wait.step_seconds, wait.input_seconds)
        shown = [f"{1000 * seconds:.2f} ms" for seconds in times]
        table.add_row(str(rank), *shown, f"{wait.share:.0%}")
    return table
