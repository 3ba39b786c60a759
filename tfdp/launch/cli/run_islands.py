"""`tfdp run --islands`: the islands of this machine, and their hub."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from tfdp.communication.cluster import split_address
from tfdp.communication.cluster.islands import Island
from tfdp.ground.text import pluralize
from tfdp.launch.cli.attempts import run_job
from tfdp.launch.cli.island_job import IslandJob
from tfdp.launch.cli.island_options import IslandOptions
from tfdp.launch.cli.job import TIMED_OUT, JobContext
from tfdp.launch.cli.launch import RunSettings, make_clusters
from tfdp.launch.cli.run_where import open_logs, warn_of_surroundings
from tfdp.launch.cli.screen import Screen
from tfdp.launch.rendezvous.address import listen
from tfdp.launch.rendezvous.failure import RendezvousError
from tfdp.launch.rendezvous.secret import VARIABLE, new_secret, read_secret

if TYPE_CHECKING:
    from tfdp.features.islands.hub import Hub
    from tfdp.features.islands.member import LauncherLink

_TURN_SECONDS = 0.2


def run_islands(
    context: JobContext,
    settings: RunSettings,
    options: IslandOptions,
    folder: pathlib.Path,
) -> int:
    """Run the islands of this machine, and the hub if it is here.

    Args:
        context: `JobContext`.
        settings: `RunSettings`.
        options: `IslandOptions`.
        folder: Path of the logs.

    Returns:
        Int, the exit code: `0` if all islands have ended well, or that of the first
        one that was given up.

    Raises:
        click.ClickException: If the hub cannot listen, or an island not be started.
    """
    count, total = settings.num_workers, options.total or settings.num_workers
    secret, screen = _secret(options), context.screen
    indices = range(options.first, options.first + count)
    logs = open_logs(folder, [f"island-{i}.log" for i in indices], screen)
    with _hub(options, secret, total, indices) as (address, hub):
        screen.message(
            f"tfdp: starting {pluralize(count, 'island')} of {total}, which meet at "
            f"{address}; logs in {folder}"
        )
        warn_of_surroundings(screen, count, settings.devices_per_worker)
        # Each the only worker of a cluster of its own.
        clusters = [
            dataclasses.replace(each, workers=(each.workers[each.rank],), task_index=0)
            for each in make_clusters(
                count, devices_per_worker=settings.devices_per_worker or 1
            )
        ]
        islands = [Island(index, total, address, secret) for index in indices]
        with _link(islands, hub) as link:
            job = IslandJob(
                islands,
                settings.max_restarts,
                link.ended,
                functools.partial(_forget_lost, hub, screen),
                context=context,
                clusters=clusters,
                logs=logs,
            )
            code = run_job(job)
        if hub is not None:
            code = _wait_for_others(hub, context) or code
        return code


@contextlib.contextmanager
def _hub(
    options: IslandOptions, secret: str, total: int, indices: Sequence[int]
) -> Iterator[tuple[str, Hub | None]]:
    """Run the hub inside if it is on this machine; yields its address and it."""
    if options.first > 0:
        assert options.hub is not None
        yield options.hub, None
        return
    # NumPy takes a moment, which no other command should wait for.
    from tfdp.features.islands.hub import Hub

    host, port = split_address(options.hub) if options.hub else ("127.0.0.1", 0)
    try:
        server = listen(host, port, is_node_0=True)
    except RendezvousError as error:
        raise click.ClickException(
            f"The hub of the islands cannot listen at {host}, port {port}: "
            f"{getattr(error.__cause__, 'strerror', error)}. Give --hub an address of "
            "the machine with --first-island 0, and a port that is free there"
        ) from error
    assert server is not None
    with Hub(server, secret, total, own=indices) as hub:
        yield options.hub or f"127.0.0.1:{hub.port}", hub


@contextlib.contextmanager
def _link(islands: list[Island], hub: Hub | None) -> Iterator[Hub | LauncherLink]:
    """Report the ends of this machine's islands to the hub, wherever it is."""
    if hub is not None:
        yield hub
        return
    from tfdp.features.islands.member import LauncherLink

    with contextlib.closing(
        LauncherLink(islands[0], [island.index for island in islands])
    ) as link:
        yield link


def _forget_lost(hub: Hub | None, screen: Screen) -> None:
    """Say which islands the hub has stopped waiting for."""
    for index in hub.forget_lost() if hub is not None else []:
        screen.message(
            f"tfdp: island {index} is lost: neither it nor its launcher has given a "
            "sign of life for a minute. The others go on without it; the same line on "
            "its machine brings it back",
            "warning",
        )


def _wait_for_others(hub: Hub, context: JobContext) -> int | None:
    """Wait until the islands of other machines are through, which need the hub.

    Returns:
        Int, the exit code where the wait was ended by a signal or by `--timeout`.
    """
    signals, until = context.signals, context.until
    if signals.received or not hub.is_needed:
        return None
    context.screen.message(
        "tfdp: waiting for islands of other machines, which need the hub"
    )
    while hub.is_needed:
        if signals.received:
            return 128 + signals.received[0]
        if until is not None and time.monotonic() >= until:
            return TIMED_OUT
        _forget_lost(hub, context.screen)
        signals.wait(_TURN_SECONDS)
    return None


def _secret(options: IslandOptions) -> str:
    try:
        given = read_secret()
    except RendezvousError as error:
        raise click.UsageError(str(error)) from error
    if given is None and options.hub is not None:
        raise click.UsageError(
            f"--hub needs {VARIABLE}, the name of a file with one secret on all "
            "machines, which only you can read"
        )
    return given or new_secret()
