"""`tfdp run`: starts the workers of a job, on this machine or on several."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import click

from tfdp.bench.machine import num_cores
from tfdp.cli import parameter_types as types
from tfdp.cli.attempts import Attempts
from tfdp.cli.hosts import Host
from tfdp.cli.launch import (
    check_num_workers,
    make_clusters,
    make_log_dir,
)
from tfdp.cli.log_file import LogFile
from tfdp.cli.node import JobSecret, announcement, make_hello, membership
from tfdp.cli.node_attempts import Logs, NodeAttempts
from tfdp.cli.node_options import NodeOptions, node_options
from tfdp.cli.other_nodes import OtherNodes
from tfdp.cli.program import check_platform, check_program
from tfdp.cli.remote_orders import make_orders
from tfdp.cli.restarts import RestartOptions, Restarts
from tfdp.cli.run_settings import AutoCount, RunSettings
from tfdp.cli.screen import Screen
from tfdp.cli.showing import showing
from tfdp.cli.signals import SignalPipe
from tfdp.cli.ssh_job import SshJob
from tfdp.cluster import counted
from tfdp.cluster.gpus import visible_gpus
from tfdp.rendezvous.errors import RendezvousError

# Options of `mpirun`, `torchrun` and `horovodrun`, and what to give here.
_COUNT = "Give the number of workers with -n"
_ELSEWHERE = {
    r"-np\d*|--np|--num-proc|--nproc-per-node|-N|--gpus": _COUNT,
    r"-H.*|--host": "Give the machines with --hosts HOST:N,HOST:N",
    r"--nnodes": "Give the number of machines with --nodes",
    r"--master-.*|--rdzv-.*": "Give the machines' meeting point with --rendezvous",
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
            return AutoCount(len(visible_gpus()) or num_cores())
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
  tfdp run --hosts a:4,b:4 train.py          on two machines, by ssh
  tfdp run -n 4 --nodes 2 --rendezvous a:29400 train.py
                                             the same, on each of the two

Options stand before SCRIPT; all that follows it is the script's own. Under Slurm and
under Kubernetes run the script itself.
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
@node_options
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
@click.pass_context
def run(
    context: click.Context,
    num_workers: int | None,
    where: NodeOptions,
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
    if where.hosts is not None:
        settings = RunSettings(num_workers=num_workers or AutoCount(1), **arguments)
        sys.exit(_run_on_hosts(where.hosts, where, settings))
    if num_workers is None:
        raise click.MissingParameter(
            ctx=context,
            param=next(p for p in context.command.params if p.name == "num_workers"),
        )
    settings = RunSettings(num_workers=num_workers, **arguments)
    check_program(settings.script, settings.is_module)
    again = _restart_options(
        num_workers, settings.max_restarts, min_workers, grow_after
    )
    try:
        check_num_workers(num_workers)
        make_clusters(num_workers, settings.devices_per_worker)
        folder = make_log_dir(settings.log_dir)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    timeout = settings.timeout
    until = None if timeout is None else time.monotonic() + timeout
    with (
        contextlib.closing(SignalPipe()) as signals,
        showing(signals, until) as screen,
    ):
        if where.is_one_machine:
            code = _run_here(settings, again, folder, screen, signals, until)
        else:
            secret = context.find_object(JobSecret)
            code = _run_as_node(settings, where, secret, folder, screen, signals, until)
    sys.exit(code)


def _run_here(
    settings: RunSettings,
    again: RestartOptions,
    folder: pathlib.Path,
    screen: Screen,
    signals: SignalPipe,
    until: float | None,
) -> int:
    """Run all workers on this machine and return the exit code."""
    num_workers = settings.num_workers
    names = [f"worker-{rank}.log" for rank in range(num_workers)]
    logs = _open_logs(folder, names, screen)
    history = _open_logs(
        folder, ["restarts.log"] if settings.max_restarts else [], screen
    )
    _announce(screen, num_workers, settings.devices_per_worker, folder)
    if settings.rebalance and num_workers == 1:
        screen.message("tfdp: warning: --rebalance has no effect with one worker")
    attempts = Attempts(
        settings.command,
        functools.partial(
            make_clusters,
            devices_per_worker=settings.devices_per_worker,
            rebalance=settings.rebalance,
        ),
        logs,
        screen,
        signals,
        settings.grace,
        until,
    )
    return attempts.run(Restarts(num_workers, again), history)


def _run_as_node(
    settings: RunSettings,
    where: NodeOptions,
    secret: JobSecret | None,
    folder: pathlib.Path,
    screen: Screen,
    signals: SignalPipe,
    until: float | None,
) -> int:
    """Run the workers of this node, together with the other nodes."""
    nodes = where.nodes or 1
    hello = make_hello(where, settings)

    def open_logs(node_rank: int, first_rank: int, num_workers: int) -> Logs:
        ranks = range(first_rank, first_rank + settings.num_workers)
        kept = ["restarts.log"] if settings.max_restarts and node_rank == 0 else []
        logs = Logs(
            _open_logs(folder, [f"worker-{rank}.log" for rank in ranks], screen),
            _open_logs(folder, kept, screen),
        )
        told = announcement(
            node_rank, nodes, first_rank, settings.num_workers, num_workers, folder
        )
        screen.message(f"tfdp: {told}")
        _warn(screen, settings.num_workers, settings.devices_per_worker)
        return logs

    def say(text: str) -> None:
        screen.message(f"tfdp: {text}")

    try:
        with membership(where, hello, settings.max_restarts, secret, say) as member:
            attempts = NodeAttempts(
                settings.command,
                settings.num_workers,
                {
                    "devices_per_worker": settings.devices_per_worker,
                    "rebalance": settings.rebalance,
                },
                OtherNodes(member, screen),
                open_logs,
                screen,
                signals,
                settings.grace,
                until,
            )
            return attempts.run()
    except RendezvousError as error:
        raise click.UsageError(str(error)) from error


def _run_on_hosts(
    hosts: Sequence[Host], where: NodeOptions, settings: RunSettings
) -> int:
    """Start the launchers of all hosts and return the exit code."""
    python = where.remote_python or sys.executable
    orders = make_orders(hosts, where, settings)
    with (
        contextlib.closing(SignalPipe()) as signals,
        showing(signals, until=None) as screen,
        SshJob(
            hosts,
            orders,
            python,
            screen,
            signals,
            settings.grace,
            starts_again=settings.max_restarts > 0,
        ) as job,
    ):
        screen.message(f"tfdp: starting by ssh on {', '.join(h.name for h in hosts)}")
        return job.run()


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
    _warn(screen, num_workers, devices)


def _warn(screen: Screen, num_workers: int, devices: int | None) -> None:
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
