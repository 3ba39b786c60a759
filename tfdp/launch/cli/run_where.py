"""Where a job runs: on this machine, here as one of several nodes, or on hosts."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import sys
from collections.abc import Sequence

import click

from tfdp.communication.cluster.gpus import visible_gpus
from tfdp.ground.text import pluralize
from tfdp.launch.bench.machine import num_cores
from tfdp.launch.cli.attempts import LocalAttempts
from tfdp.launch.cli.hosts import Host
from tfdp.launch.cli.job import JobContext
from tfdp.launch.cli.json_screen import showing
from tfdp.launch.cli.launch import RunSettings, make_clusters
from tfdp.launch.cli.log_file import LogFile
from tfdp.launch.cli.node import JobSecret, announcement, make_hello, membership
from tfdp.launch.cli.node_attempts import NodeAttempts
from tfdp.launch.cli.node_options import NodeOptions
from tfdp.launch.cli.other_nodes import OtherNodes
from tfdp.launch.cli.remote_line import make_orders
from tfdp.launch.cli.screen import Screen
from tfdp.launch.cli.signals import SignalPipe
from tfdp.launch.cli.ssh_job import SshJob
from tfdp.launch.rendezvous.failure import RendezvousError
from tfdp.launch.rendezvous.restarts import Restarts


def run_here(
    context: JobContext,
    settings: RunSettings,
    restarts: Restarts,
    folder: pathlib.Path,
) -> int:
    """Run all workers on this machine.

    Args:
        context: `JobContext`.
        settings: `RunSettings`.
        restarts: `Restarts`.
        folder: Path of the logs.

    Returns:
        Int, the exit code.

    Raises:
        click.ClickException: If a log cannot be written, or a worker be started.
    """
    screen, num_workers = context.screen, settings.num_workers
    screen.node = 0
    names = [f"worker-{rank}.log" for rank in range(num_workers)]
    logs = open_logs(folder, names, screen)
    history = open_logs(
        folder, ["restarts.log"] if settings.max_restarts else [], screen
    )
    _announce(screen, num_workers, settings.devices_per_worker, folder)
    if settings.rebalance and num_workers == 1:
        screen.warn("tfdp: warning: --rebalance has no effect with one worker")
    clusters_of = functools.partial(make_clusters, **settings.of_cluster)
    return LocalAttempts(context, clusters_of, logs, history, restarts).run()


def run_as_node(
    context: JobContext,
    settings: RunSettings,
    where: NodeOptions,
    secret: JobSecret | None,
    folder: pathlib.Path,
) -> int:
    """Run the workers of this node, together with the other nodes.

    Args:
        context: `JobContext`.
        settings: `RunSettings`.
        where: `NodeOptions`.
        secret: `JobSecret`, or `None` to read the file or to make one.
        folder: Path of the logs.

    Returns:
        Int, the exit code.

    Raises:
        click.ClickException: If this node cannot take part, a log cannot be written, or
            a worker be started.
    """
    nodes, screen = where.nodes or 1, context.screen
    screen.node = where.node_rank
    hello = make_hello(where, settings)

    def logs_of_node(
        node_rank: int, first_rank: int, num_workers: int
    ) -> tuple[list[LogFile], list[LogFile]]:
        ranks = range(first_rank, first_rank + settings.num_workers)
        kept = ["restarts.log"] if settings.max_restarts and node_rank == 0 else []
        logs = open_logs(folder, [f"worker-{rank}.log" for rank in ranks], screen)
        history = open_logs(folder, kept, screen)
        screen.node = node_rank
        told = announcement(
            node_rank, nodes, first_rank, settings.num_workers, num_workers, folder
        )
        screen.message(f"tfdp: {told}")
        warn_of_surroundings(screen, settings.num_workers, settings.devices_per_worker)
        return logs, history

    def say(text: str) -> None:
        screen.message(f"tfdp: {text}")

    try:
        with membership(where, hello, settings.max_restarts, secret, say) as member:
            return NodeAttempts(
                context,
                settings.num_workers,
                settings.of_cluster,
                OtherNodes(member, screen),
                logs_of_node,
            ).run()
    except RendezvousError as error:
        raise click.UsageError(str(error)) from error


def run_on_hosts(
    hosts: Sequence[Host], where: NodeOptions, settings: RunSettings
) -> int:
    """Start the launchers of all hosts.

    Args:
        hosts: Sequence of `Host`.
        where: `NodeOptions`.
        settings: `RunSettings`.

    Returns:
        Int, the exit code.

    Raises:
        click.UsageError: If this machine has no ssh.
    """
    python = where.remote_python or sys.executable
    orders = make_orders(hosts, where, settings)
    with (
        contextlib.closing(SignalPipe()) as signals,
        showing(signals, None, settings.log_format) as screen,
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


def open_logs(folder: pathlib.Path, names: list[str], screen: Screen) -> list[LogFile]:
    """Open logs of workers.

    Args:
        folder: Path.
        names: List of strings, of the files.
        screen: The `Screen` that is told where one cannot be written later.

    Raises:
        click.UsageError: If one cannot be opened.
    """
    try:
        return [LogFile(folder / name, screen.warn) for name in names]
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _announce(
    screen: Screen, num_workers: int, devices: int | None, folder: pathlib.Path
) -> None:
    threads = max(1, num_cores() // num_workers)
    each = " each" if num_workers > 1 else ""
    screen.message(
        f"tfdp: starting {pluralize(num_workers, 'worker')}, {threads} of "
        f"{pluralize(num_cores(), 'CPU core')}{each}; logs in {folder}"
    )
    warn_of_surroundings(screen, num_workers, devices)


def warn_of_surroundings(screen: Screen, num_workers: int, devices: int | None) -> None:
    """Warn of a `TF_CONFIG` that is set, and of fewer GPUs than workers."""
    if os.environ.get("TF_CONFIG"):
        screen.warn(
            "tfdp: warning: TF_CONFIG was set already; the workers get another. Under "
            "a cluster manager, run the script without `tfdp run`"
        )
    num_gpus = len(visible_gpus())
    if devices is None and 0 < num_gpus < num_workers:
        screen.warn(
            f"tfdp: warning: there are {num_workers} workers but "
            f"{pluralize(num_gpus, 'GPU')}, and NCCL wants one for each; set "
            "CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
