"""`tfdp run`: starts the workers of a job on this machine."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pathlib
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import click

from tfdp.bench.machine import num_cores
from tfdp.cli import parameter_types as types
from tfdp.cli.attempts import Attempts
from tfdp.cli.launch import (
    check_num_workers,
    make_clusters,
    make_log_dir,
)
from tfdp.cli.log_file import LogFile
from tfdp.cli.program import check_platform, check_program
from tfdp.cli.restarts import RestartOptions, Restarts
from tfdp.cli.screen import Screen
from tfdp.cli.signals import SignalPipe
from tfdp.cluster import counted
from tfdp.cluster.gpus import visible_gpus

# For who reads the output, once the job was told to end.
_LAST_LINES_SECONDS = 2.0


# Options of `mpirun`, `torchrun` and `horovodrun`, and what to give here.
_COUNT = "Give the number of workers with -n"
_MACHINES = (
    "`tfdp run` starts the workers of one machine; on several, run the script under "
    "Slurm or Kubernetes, or with TF_CONFIG on each"
)
_ELSEWHERE = {
    r"-np\d*|--np|--num-proc|--nproc-per-node|-N|--gpus": _COUNT,
    r"-H.*|--hosts?|--hostfile|--nnodes|--node-rank|--master-.*|--rdzv-.*": _MACHINES,
    r"--standalone": "Leave it out: `tfdp run` needs no other service",
}


def _hint(option: str) -> str | None:
    """Return what to give instead of an option of another launcher."""
    name = option.replace("_", "-")
    found = [hint for names, hint in _ELSEWHERE.items() if re.fullmatch(names, name)]
    return found[0] if found else None


class _NumWorkers(types.WholeNumber):
    """A number of workers, or `auto`: one for each GPU, or else for each CPU core."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        if value == "auto":
            return len(visible_gpus()) or num_cores()
        return super().convert(value, param, ctx)


class _Run(click.Command):
    """The command, which knows the options of other launchers."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Say what to give instead of an option of another launcher."""
        options = [p for p in self.params if isinstance(p, click.Option)]
        with_value = {name for o in options if not o.is_flag for name in o.opts}
        before = ""
        for word in args:
            name = word.partition("=")[0]
            if (hint := _hint(name)) and not ctx.resilient_parsing:
                raise click.UsageError(f"{hint}. Received: {name}")
            if not word.startswith("-") and before not in with_value:
                break  # the script, and its own options
            before = word
        return super().parse_args(ctx, args)


_EXAMPLES = """\b
Examples:
  tfdp run -n 2 train.py                     two workers
  tfdp run -n auto train.py --epochs 3       one for each GPU, or CPU core
  tfdp run -n 2 -D 2 train.py                two CPU devices in each worker
  tfdp run -n 4 -m my_package.train          a module, as in `python -m`
  tfdp run -n 4 --max-restarts 3 train.py    all again after a failure

Options stand before SCRIPT; all that follows it is the script's own. On several
machines run the script itself, under Slurm, under Kubernetes or with TF_CONFIG on each.
"""


# What follows the script's name is the script's own, options too.
@click.command(
    cls=_Run,
    epilog=_EXAMPLES,
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "-n",
    "--num-workers",
    metavar="N",
    required=True,
    type=_NumWorkers(min=1),
    help="Number of worker processes; auto: one for each GPU, or else CPU core.",
)
@click.option(
    "-D",
    "--devices-per-worker",
    metavar="D",
    type=types.COUNT,
    help="Logical CPU devices in each worker.",
)
@click.option(
    "--log-dir",
    metavar="DIR",
    shell_complete=types.complete_files,
    help="Folder for a log per worker. Default: a new one in ./tfdp-logs.",
)
@click.option(
    "--timeout",
    metavar="S",
    type=types.SECONDS,
    help="Seconds after which the whole job is stopped, with exit code 124.",
)
@click.option(
    "--grace",
    metavar="S",
    default=5,
    show_default=True,
    type=types.SECONDS,
    help="Seconds between asking workers to stop and killing them.",
)
@click.option(
    "--max-restarts",
    metavar="R",
    default=0,
    show_default=True,
    type=types.NUMBER_OF_TIMES,
    help="How often the job is started again after a worker has failed.",
)
@click.option(
    "--min-workers",
    metavar="M",
    type=types.COUNT,
    help="Go on with as few workers, if one fails again and again. Default: all.",
)
@click.option(
    "--rebalance",
    is_flag=True,
    help="Workers get rows of each batch by their measured speed.",
)
@click.option(
    "--grow-after",
    metavar="S",
    type=types.SECONDS,
    help="Seconds with fewer workers after which all are tried again, where the script "
    "saves when asked; 0: never. Default: 600.",
)
@click.option(
    "-m",
    "is_module",
    is_flag=True,
    help="SCRIPT is the name of a module, as in `python -m`.",
)
@click.argument("script", shell_complete=types.complete_files)
@click.argument(
    "args", nargs=-1, type=click.UNPROCESSED, shell_complete=types.complete_files
)
def run(
    num_workers: int,
    devices_per_worker: int | None,
    log_dir: str | None,
    timeout: float | None,
    grace: float,
    max_restarts: int,
    min_workers: int | None,
    rebalance: bool,
    grow_after: float | None,
    is_module: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Run SCRIPT in N worker processes on this machine.

    Sets TF_CONFIG for each, puts the name of the worker in front of each line of its
    output, and stops all when one fails. With --max-restarts it then starts all again:
    let the script save as it goes, by `tfdp.callbacks.BackupAndRestore`.
    """
    check_platform("tfdp run")
    check_program(script, is_module)
    again = _restart_options(num_workers, max_restarts, min_workers, grow_after)
    try:
        check_num_workers(num_workers)
        make_clusters(num_workers, devices_per_worker)
        folder = make_log_dir(log_dir)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    until = None if timeout is None else time.monotonic() + timeout
    with (
        contextlib.closing(SignalPipe()) as signals,
        showing(signals, until) as screen,
    ):
        names = [f"worker-{rank}.log" for rank in range(num_workers)]
        logs = _open_logs(folder, names, screen)
        history = _open_logs(folder, ["restarts.log"] if max_restarts else [], screen)
        _announce(screen, num_workers, devices_per_worker, folder)
        if rebalance and num_workers == 1:
            screen.message("tfdp: warning: --rebalance has no effect with one worker")
        attempts = Attempts(
            [sys.executable, *(["-m"] if is_module else []), script, *args],
            functools.partial(
                make_clusters,
                devices_per_worker=devices_per_worker,
                rebalance=rebalance,
            ),
            logs,
            screen,
            signals,
            grace,
            until,
        )
        code = attempts.run(Restarts(num_workers, again), history)
    sys.exit(code)


@contextlib.contextmanager
def showing(signals: SignalPipe, until: float | None) -> Iterator[Screen]:
    """Make a screen; in the end wait for its reader, unless the job is to end."""
    screen = Screen()
    try:
        yield screen
    finally:
        end = math.inf
        while not screen.close(timeout_seconds=0.1) and time.monotonic() < end:
            signals.read()
            if signals.received or (until and time.monotonic() > until):
                end = min(end, time.monotonic() + _LAST_LINES_SECONDS)


def _open_logs(folder: pathlib.Path, names: list[str], screen: Screen) -> list[LogFile]:
    try:
        return [LogFile(folder / name, screen.message) for name in names]
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _restart_options(
    num_workers: int,
    max_restarts: int,
    min_workers: int | None,
    grow_after: float | None,
) -> RestartOptions:
    if min_workers is not None and min_workers > num_workers:
        raise click.UsageError(
            "--min-workers must not be above -n. "
            f"Received: --min-workers {min_workers}, -n {num_workers}"
        )
    if grow_after is None:
        return RestartOptions(max_restarts, min_workers)
    if min_workers in (None, num_workers) or not max_restarts:
        raise click.UsageError(
            "--grow-after needs --max-restarts, and --min-workers below -n: there are "
            f"never fewer workers. Received: --max-restarts {max_restarts}, "
            f"--min-workers {min_workers}, -n {num_workers}"
        )
    return RestartOptions(max_restarts, min_workers, grow_after)


def _announce(
    screen: Screen, num_workers: int, devices: int | None, folder: pathlib.Path
) -> None:
    threads = max(1, num_cores() // num_workers)
    each = " each" if num_workers > 1 else ""
    screen.message(
        f"tfdp: starting {counted(num_workers, 'worker')}, {threads} of "
        f"{counted(num_cores(), 'CPU core')}{each}; logs in {folder}"
    )
    if os.environ.get("TF_CONFIG"):
        screen.message(
            "tfdp: warning: TF_CONFIG was set already; the workers get another. Under "
            "a cluster manager, run the script without `tfdp run`"
        )
    num_gpus = len(visible_gpus())
    if devices is None and 0 < num_gpus < num_workers:
        screen.message(
            f"tfdp: warning: there are {num_workers} workers but "
            f"{counted(num_gpus, 'GPU')}, and NCCL wants one for each; set "
            "CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
