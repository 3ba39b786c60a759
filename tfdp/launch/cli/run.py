"""`tfdp run`: starts the workers of a job, on this machine or on several."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

import click

from tfdp.communication.cluster.gpus import visible_gpus
from tfdp.launch.bench.machine import num_cores
from tfdp.launch.cli import parameter_types as types
from tfdp.launch.cli.island_options import IslandOptions, island_options
from tfdp.launch.cli.job import JobContext
from tfdp.launch.cli.json_screen import showing
from tfdp.launch.cli.launch import (
    AutoCount,
    RunSettings,
    check_num_workers,
    make_clusters,
    make_log_dir,
)
from tfdp.launch.cli.node import JobSecret
from tfdp.launch.cli.node_options import NodeOptions, node_options
from tfdp.launch.cli.program import check_platform, check_program
from tfdp.launch.cli.run_islands import run_islands
from tfdp.launch.cli.run_where import run_as_node, run_here, run_on_hosts
from tfdp.launch.cli.signals import SignalPipe
from tfdp.launch.cli.start import new_starter
from tfdp.launch.rendezvous.restarts import Restarts


class _NumWorkers(types.WholeNumber):
    """A number of workers, or `auto`: one for each GPU, or else for each CPU core."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        if value == "auto":
            return AutoCount(len(visible_gpus()) or num_cores())
        return super().convert(value, param, ctx)


_EXAMPLES = """\b
Examples:
  tfdp run -n 2 train.py                     two workers
  tfdp run -n auto train.py --epochs 3       one for each GPU, or CPU core
  tfdp run -n 2 -D 2 train.py                two CPU devices in each worker
  tfdp run -n 4 -m my_package.train          a module, as in `python -m`
  tfdp run -n 4 --max-restarts 3 train.py    all again after a failure
  tfdp run --hosts a:4,b:4 train.py          on two machines, by ssh
  tfdp run -n 4 --nodes 2 --rendezvous a:29400 train.py
                                             the same, on each of the two

Options stand before SCRIPT; all that follows it is the script's own. Under Slurm and
under Kubernetes run the script itself.
"""


# What follows the script's name is the script's own, options too.
@click.command(
    cls=types.HintingCommand,
    epilog=_EXAMPLES,
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "-n",
    "--num-workers",
    metavar="N",
    type=_NumWorkers(min=1),
    help="Number of worker processes of a machine; auto: one for each GPU, or else CPU "
    "core.",
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
    type=types.FILE,
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
    "--fork/--no-fork",
    "forks",
    default=True,
    show_default=True,
    help="Import TensorFlow once and fork the workers, where the script allows it.",
)
@click.option(
    "--log-format",
    metavar="FORMAT",
    default="text",
    show_default=True,
    type=click.Choice(("text", "json")),
    help="text, or json: each line of the output is a JSON object.",
)
@island_options
@node_options
@click.option(
    "-m",
    "is_module",
    is_flag=True,
    help="SCRIPT is the name of a module, as in `python -m`.",
)
@click.argument("script", type=types.FILE)
@click.argument("args", nargs=-1, type=types.FILE)
@click.pass_context
def run(
    context: click.Context,
    num_workers: int | None,
    where: NodeOptions,
    islands: IslandOptions,
    min_workers: int | None,
    grow_after: float | None,
    **arguments: Any,
) -> None:
    """Run SCRIPT in N worker processes, on this machine or on several.

    Sets TF_CONFIG for each, puts the name of the worker in front of each line of its
    output, and stops all when one fails. With --max-restarts it then starts all again:
    let the script save as it goes, by `tfdp.callbacks.BackupAndRestore`.
    """
    check_platform("tfdp run")
    where.check(min_workers)
    if num_workers is None and where.hosts is None:
        raise click.MissingParameter(
            ctx=context,
            param=next(p for p in context.command.params if p.name == "num_workers"),
        )
    settings = RunSettings(num_workers=num_workers or AutoCount(1), **arguments)
    others = {
        "--min-workers": min_workers is not None,
        "--grow-after": grow_after is not None,
        "--rebalance": settings.rebalance,
    }
    given = [name for name, is_given in others.items() if is_given]
    islands.check(settings.num_workers, where, given)
    if where.hosts is not None:
        sys.exit(run_on_hosts(where.hosts, where, settings))
    check_program(settings.script, settings.is_module)
    restarts = _restarts(settings, min_workers, grow_after)
    try:
        check_num_workers(settings.num_workers)
        make_clusters(settings.num_workers, **settings.of_cluster)
        folder = make_log_dir(settings.log_dir)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    timeout = settings.timeout
    until = None if timeout is None else time.monotonic() + timeout
    with (
        contextlib.closing(SignalPipe()) as signals,
        showing(signals, until, settings.log_format) as screen,
        new_starter(settings, signals, until) as starter,
    ):
        job = JobContext(starter, screen, signals, settings.grace, until)
        if islands.is_used:
            code = run_islands(job, settings, islands, folder)
        elif where.is_one_machine:
            code = run_here(job, settings, restarts, folder)
        else:
            secret = context.find_object(JobSecret)
            code = run_as_node(job, settings, where, secret, folder)
    sys.exit(code)


def _restarts(
    settings: RunSettings, min_workers: int | None, grow_after: float | None
) -> Restarts:
    num_workers, max_restarts = settings.num_workers, settings.max_restarts
    if min_workers is not None and min_workers > num_workers:
        raise click.UsageError(
            "--min-workers must not be above -n. "
            f"Received: --min-workers {min_workers}, -n {num_workers}"
        )
    if grow_after is None:
        return Restarts(num_workers, max_restarts, min_workers)
    if min_workers in (None, num_workers) or not max_restarts:
        raise click.UsageError(
            "--grow-after needs --max-restarts, and --min-workers below -n: there are "
            f"never fewer workers. Received: --max-restarts {max_restarts}, "
            f"--min-workers {min_workers}, -n {num_workers}"
        )
    return Restarts(num_workers, max_restarts, min_workers, grow_after)
