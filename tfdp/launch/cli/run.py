"""`tfdp run`: start the workers of a job on this machine or on several."""

from __future__ import annotations

import contextlib
import math
import pathlib
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import click
from click.core import ParameterSource

from tfdp.communication.cluster.gpus import visible_gpus
from tfdp.communication.connection.secret import SecretError
from tfdp.features.goodput.ledger import Launch
from tfdp.ground.text import pluralize
from tfdp.launch.bench.machine import num_cores
from tfdp.launch.cli import parameter_types as types
from tfdp.launch.cli.attempts import LocalAttempts, NodeAttempts
from tfdp.launch.cli.coordinator_connection import join_nodes
from tfdp.launch.cli.elastic import (
    DEFAULT_REPLACEMENTS,
    ElasticJob,
    check_elastic,
    elastic_option,
)
from tfdp.launch.cli.elastic_nodes import ElasticAttempts
from tfdp.launch.cli.errors import usage_errors
from tfdp.launch.cli.goodput import goodput_of
from tfdp.launch.cli.hosts import Host
from tfdp.launch.cli.islands import IslandOptions, island_options, run_islands
from tfdp.launch.cli.job import JobContext
from tfdp.launch.cli.launch import (
    AutoCount,
    RunSettings,
    check_num_workers,
    make_clusters,
    make_log_dir,
    warn_of_environment,
)
from tfdp.launch.cli.node_options import NodeOptions, node_options
from tfdp.launch.cli.program import check_platform, check_program
from tfdp.launch.cli.remote_line import make_orders
from tfdp.launch.cli.screen import Screen, open_screen
from tfdp.launch.cli.signals import SignalPipe
from tfdp.launch.cli.ssh_job import SshJob
from tfdp.launch.cli.start import Starter, imports_before_forks
from tfdp.launch.cli.worker import open_worker_logs
from tfdp.launch.rendezvous.failure import RendezvousError
from tfdp.launch.rendezvous.restarts import Restarts

_BY_DEFAULT = ParameterSource.DEFAULT


class _NumWorkers(types.WholeNumber):
    """Type of a number of workers; `auto` is one for each GPU, or else CPU core."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the number of workers as an int, or an `AutoCount` for `auto`."""
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
  tfdp run --elastic 2:4 train.py            without stops at a failure
  tfdp run --hosts a:4,b:4 train.py          on two machines, by ssh
  tfdp run -n 4 --nodes 2 --rendezvous a:29400 train.py
                                             the same, on each of the two
  tfdp run -n 4 --nodes 1:4 --rendezvous a:29400 train.py
                                             on one to four, which come and go

Options stand before SCRIPT; all that follows it is the script's own. Under Slurm and
under Kubernetes run the script itself.
"""


# Interspersed arguments are off, so that options after the script belong to the script.
@click.command(
    cls=types.HintingCommand,
    epilog=_EXAMPLES,
    context_settings={"allow_interspersed_args": False},
)
@types.option(
    "-n --num-workers N",
    "Number of worker processes of a machine; auto: one for each GPU, or else CPU "
    "core.",
    _NumWorkers("a whole number of at least 1", min=1),
)
@types.count_option("-D --devices-per-worker D", "Logical CPU devices in each worker.")
@types.file_option(
    "--log-dir DIR", "Folder for a log per worker. Default: a new one in ./tfdp-logs."
)
@types.seconds_option(
    "--timeout S", "Seconds after which the whole job is stopped, with exit code 124."
)
@types.seconds_option(
    "--grace S", "Seconds between asking workers to stop and killing them.", default=5
)
@types.option(
    "--max-restarts R",
    "How often the job is started again after a worker has failed.",
    types.NUMBER_OF_TIMES,
    default=0,
)
@elastic_option
@types.count_option(
    "--min-workers M",
    "Continue with as few workers, if one fails repeatedly. Default: all.",
)
@types.option("--rebalance", "Workers get rows of each batch by their measured speed.")
@types.seconds_option(
    "--grow-after S",
    "Seconds with fewer workers after which all are tried again, where the script "
    "saves when asked; 0: never. Default: 600.",
)
@types.option(
    "--fork/--no-fork",
    "Import TensorFlow once and fork the workers, where the script allows it.",
    name="forks",
    default=True,
)
@types.option(
    "--log-format FORMAT",
    "text, or json: each line of the output is a JSON object.",
    click.Choice(("text", "json")),
    default="text",
)
@island_options
@node_options
@types.option(
    "-m", "SCRIPT is the name of a module, as in `python -m`.", name="is_module"
)
@click.argument("script", type=types.FILE)
@click.argument("args", nargs=-1, type=types.FILE)
@click.pass_context
def run(
    context: click.Context,
    num_workers: int | None,
    min_workers: int | None,
    grow_after: float | None,
    elastic_bounds: tuple[int, int] | None,
    **arguments: Any,
) -> None:
    """Run SCRIPT in N worker processes, on this machine or on several.

    Sets TF_CONFIG for each, puts the name of the worker in front of each line of its
    output, and stops all when one fails. With --max-restarts it then starts all again:
    the script must save and restore training by `tfdp.callbacks.BackupAndRestore`.
    """
    check_platform("tfdp run")
    where = types.pop_fields(NodeOptions, arguments)
    islands = types.pop_fields(IslandOptions, arguments)
    where.check(min_workers)
    others = {
        "--min-workers": min_workers is not None,
        "--grow-after": grow_after is not None,
        "--rebalance": arguments["rebalance"],
    }
    excluded = list(filter(others.get, others))
    elastic = ["--elastic"] if elastic_bounds is not None else []
    if elastic_bounds is not None:
        several = [] if where.is_one_machine else ["--hosts, --nodes and --rendezvous"]
        both = [] if num_workers is None else ["-n, since it starts MAX workers"]
        check_elastic("--elastic", both + several + excluded)
        arguments["elastic"], num_workers = elastic_bounds
    elif where.is_elastic:
        elastic = ["--nodes MIN:MAX"]
        check_elastic(elastic[0], excluded)
    if elastic and context.get_parameter_source("max_restarts") is _BY_DEFAULT:
        arguments["max_restarts"] = DEFAULT_REPLACEMENTS
    if num_workers is None and where.hosts is None:
        raise _missing_number(context, arguments["args"])
    if where.nodes is not None and where.nodes.least is not None:
        arguments["elastic"] = where.nodes.least * (num_workers or 1)
    arguments.setdefault("elastic", None)
    settings = RunSettings(num_workers=num_workers or AutoCount(1), **arguments)
    islands.check(settings.num_workers, where, elastic + excluded)
    if where.hosts is not None:
        sys.exit(_run_on_hosts(where.hosts, where, settings))
    check_program(settings.script, settings.is_module)
    restarts = _restart_policy(settings, min_workers, grow_after)
    with usage_errors():
        check_num_workers(settings.num_workers)
        make_clusters(settings.num_workers, **settings.cluster_options)
        folder = make_log_dir(settings.log_dir)
    timeout = math.inf if settings.timeout is None else settings.timeout
    with (
        contextlib.closing(SignalPipe(time.monotonic() + timeout)) as signals,
        open_screen(signals, settings.log_format) as screen,
        contextlib.closing(
            Starter(settings.command, imports_before_forks(settings), signals)
        ) as starter,
    ):
        launch = None if islands.is_used else Launch.new(folder)
        job = JobContext(starter, screen, signals, settings.grace, launch)
        if islands.is_used:
            code = run_islands(job, settings, islands, folder)
        elif where.is_one_machine:
            code = _run_here(job, settings, restarts, folder)
        else:
            code = _run_as_node(job, settings, where, context.obj, folder)
        if launch is not None and (line := goodput_of(launch)):
            screen.message(f"tfdp: {line}")
    sys.exit(code)


def _missing_number(context: click.Context, args: Sequence[str]) -> click.UsageError:
    """Return the error of a command without a number of workers before the script."""
    late = next((a for a in args if re.match(r"(-n\d*|--num-workers)(=|$)", a)), None)
    if late is not None:
        return click.UsageError(
            f"Options of tfdp come before the script. Received: {late} after it",
            ctx=context,
        )
    (parameter,) = (p for p in context.command.params if p.name == "num_workers")
    return click.MissingParameter(ctx=context, param=parameter)


def _restart_policy(
    settings: RunSettings, min_workers: int | None, grow_after: float | None
) -> Restarts:
    """Create the restart policy; raise a usage error if its options conflict.

    Args:
        settings: `RunSettings`, with the number of workers and of restarts.
        min_workers: Int, value of the option `--min-workers`, or `None`.
        grow_after: Float, value of the option `--grow-after` in seconds, or `None`.
    """
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
            "--grow-after needs --max-restarts, and --min-workers below -n: otherwise "
            "all workers always run. "
            f"Received: --max-restarts {max_restarts}, "
            f"--min-workers {min_workers}, -n {num_workers}"
        )
    return Restarts(num_workers, max_restarts, min_workers, grow_after)


def _run_here(
    context: JobContext, settings: RunSettings, restarts: Restarts, folder: pathlib.Path
) -> int:
    """Run all workers on this machine, and return the exit code.

    Args:
        context: `JobContext` of all attempts.
        settings: `RunSettings` of this machine. With `elastic`, failed workers are
            replaced in a single attempt.
        restarts: `Restarts`, the restart policy of a job that is not elastic.
        folder: Path of the folder of logs.
    """
    screen, num_workers = context.screen, settings.num_workers
    screen.node = 0
    logs, history = open_worker_logs(
        folder, range(num_workers), screen, has_history=settings.max_restarts > 0
    )
    _announce(screen, num_workers, settings.devices_per_worker, folder)
    if settings.rebalance and num_workers == 1:
        screen.warn("tfdp: warning: --rebalance has no effect with one worker")
    if settings.elastic is not None:
        clusters = make_clusters(num_workers, **settings.cluster_options)
        options = {"context": context, "clusters": clusters, "logs": logs}
        most, least = settings.max_restarts, settings.elastic
        return ElasticJob(most, history, least, **options).run()
    return LocalAttempts(restarts, context, settings, logs, history).run()


def _run_as_node(
    context: JobContext,
    settings: RunSettings,
    where: NodeOptions,
    secret: str | None,
    folder: pathlib.Path,
) -> int:
    """Run the workers of this node, together with the other nodes.

    Args:
        context: `JobContext` of all attempts.
        settings: `RunSettings` of this node.
        where: `NodeOptions` of the command line.
        secret: String, the job's secret, or `None` if ssh has not sent one.
        folder: Path of the folder of logs.

    Returns:
        Int, the exit code.
    """
    context.screen.node = where.node_rank
    assert where.nodes is not None
    with (
        usage_errors(RendezvousError, SecretError),
        join_nodes(where, settings, secret, context.screen) as others,
    ):
        attempts = ElasticAttempts if where.is_elastic else NodeAttempts
        options = (context, settings, folder, others, where.nodes.most)
        return attempts(*options).run()


def _run_on_hosts(
    hosts: Sequence[Host], where: NodeOptions, settings: RunSettings
) -> int:
    """Run the launchers of all hosts by ssh, and return the exit code."""
    orders = make_orders(hosts, where, settings)
    python = where.remote_python or sys.executable
    with (
        contextlib.closing(SignalPipe()) as signals,
        open_screen(signals, settings.log_format) as screen,
        contextlib.closing(
            SshJob(hosts, orders, settings, python, screen, signals)
        ) as job,
    ):
        screen.message(f"tfdp: starting by ssh on {', '.join(h.name for h in hosts)}")
        return job.run()


def _announce(
    screen: Screen, num_workers: int, devices: int | None, folder: pathlib.Path
) -> None:
    """Print the start of a job on this machine, with warnings.

    Args:
        screen: `Screen` for the messages.
        num_workers: Int, number of workers.
        devices: Int, logical CPU devices of each worker, or `None`.
        folder: Path of the folder of logs.
    """
    threads = max(1, num_cores() // num_workers)
    each = " each" if num_workers > 1 else ""
    screen.message(
        f"tfdp: starting {pluralize(num_workers, 'worker')}, {threads} of "
        f"{pluralize(num_cores(), 'CPU core')}{each}; logs in {folder}"
    )
    warn_of_environment(screen, num_workers, devices)
