"""`tfdp doctor --input`: how long the workers of a script wait for their data."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from tfdp.features.monitor.input_wait import InputWait, Pipeline, advise
from tfdp.ground.base.temporary import TemporaryFolder
from tfdp.ground.text import pluralize
from tfdp.launch.cli.errors import usage_errors
from tfdp.launch.cli.input_worker import result_path
from tfdp.launch.cli.job import Job, JobContext
from tfdp.launch.cli.launch import check_num_workers, make_clusters
from tfdp.launch.cli.program import check_platform, check_program
from tfdp.launch.cli.screen import Screen, new_console
from tfdp.launch.cli.signals import TIMED_OUT, SignalPipe
from tfdp.launch.cli.start import Starter
from tfdp.launch.cli.worker import LogFile

# Fewest measured steps for a result; fewer are too noisy.
_FEWEST_STEPS = 5
# A script that is only measured saves nothing, so its workers have only this many
# seconds to exit before they are killed.
_GRACE_SECONDS = 2.0


def check_input(
    script: str,
    args: Sequence[str],
    num_workers: int,
    num_steps: int,
    timeout_seconds: float,
) -> None:
    """Train for a few steps, and print how long each worker waited for its data.

    Args:
        script: String, path of the script.
        args: Sequence of strings, arguments of the script.
        num_workers: Int, number of local workers.
        num_steps: Int, number of steps to measure.
        timeout_seconds: Float, seconds after which the script is stopped.

    Raises:
        click.ClickException: If too few steps could be measured; the text has the
            reason.
    """
    check_platform("tfdp doctor --input")
    check_program(script, is_module=False)
    with usage_errors():
        check_num_workers(num_workers)
        clusters = make_clusters(num_workers)
    module = [sys.executable, "-m", "tfdp.launch.cli.input_worker"]
    until = time.monotonic() + timeout_seconds
    with (
        TemporaryFolder("input") as name,
        open(os.devnull, "w", encoding="utf-8") as nowhere,
    ):
        folder, ranks = Path(name), range(num_workers)
        starter = Starter([*module, name, str(num_steps), script, *args])
        # The screen is discarded, since the report quotes the workers' logs if they
        # fail.
        screen = Screen(nowhere, nowhere)
        logs = [LogFile(folder / f"worker-{rank}.log", screen.warn) for rank in ranks]
        with contextlib.closing(SignalPipe(until)) as signals:
            context = JobContext(starter, screen, signals, _GRACE_SECONDS)
            job = Job(context, clusters, logs)
            code = job.run()
        screen.close(timeout_seconds=1.0)
        if code > 128:  # the user has sent a signal, and wants no report
            sys.exit(code)
        paths = [result_path(folder, rank) for rank in ranks]
        results = []
        if all(path.is_file() for path in paths):
            results = [json.loads(path.read_text("utf-8")) for path in paths]
        if fault := _fault_of(job, code == TIMED_OUT, results):
            raise click.ClickException(f"{fault}. Received: {script}")
        _show(results, script)


def _fault_of(
    job: Job, has_timed_out: bool, results: Sequence[dict[str, Any]]
) -> str | None:
    """Return why too few steps were measured on a worker, or `None` if all have enough.

    If a worker has failed, its last lines are printed, and its log is copied to a
    folder that remains.

    Args:
        job: `Job`, which has ended.
        has_timed_out: Bool, whether the timeout has ended the job.
        results: Sequence of dicts that `InputProbe` has written, one for each worker;
            an empty sequence if a worker has written none.
    """
    steps = min((each["num_steps"] for each in results), default=0)
    taken = f"after {pluralize(steps, 'step')}" if steps else "before its first step"
    if job.failed is not None:
        failed = job.lost or job.failed
        for line in failed.tail:
            click.echo(line, err=True)
        kept = shutil.copy(failed.log.path, tempfile.mkdtemp(prefix="tfdp-input-"))
        end = failed.describe_end()
        return f"Worker {failed.rank} {end} {taken}. Its full output: {kept}"
    for problem in (each["problem"] for each in results if each["problem"]):
        return f"Its steps cannot be measured: {problem}"
    if steps >= _FEWEST_STEPS:
        return None
    if has_timed_out:
        return f"--timeout ended the script {taken}; give it more time"
    if not results:
        return (
            "The script has ended without a call of `fit`; only steps of `fit` are "
            "measured"
        )
    return (
        f"`fit` has ended too soon: {pluralize(steps, 'step')} could be measured, but "
        f"{_FEWEST_STEPS} are needed; give it more data or epochs"
    )


def _show(results: Sequence[dict[str, Any]], script: str) -> None:
    """Print a table of all workers and one sentence of advice.

    Args:
        results: Sequence of dicts that `InputProbe` has written, one for each worker.
        script: String, path of the script.
    """
    waits = {rank: InputWait(**each["wait"]) for rank, each in enumerate(results)}
    # All workers run the same script with the same pipeline, so the advice is based on
    # the pipeline of the first worker.
    first = results[0]
    steps = pluralize(min(wait.num_steps for wait in waits.values()), "step")
    table = Table(title=f"Waiting for data: {os.path.basename(script)}, {steps}")
    table.add_column("worker")
    for name in ("step", "of it until the data was there", "share"):
        table.add_column(name, justify="right")
    for rank, wait in waits.items():
        times = (wait.step_seconds, wait.input_seconds)
        shown = [f"{1000 * seconds:.2f} ms" for seconds in times]
        table.add_row(str(rank), *shown, f"{wait.share:.0%}")
    console = new_console()
    console.print(table)
    console.print(advise(waits, Pipeline(**first["pipeline"])))
    if first["left_out"]:
        names = ", ".join(first["left_out"])
        console.print(f"Removed from `fit`, since they write files: {names}.")
