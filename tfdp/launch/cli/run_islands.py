"""`tfdp run --islands`: the islands of this machine, and their hub."""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from tfdp.communication.cluster import Cluster, free_ports, split_address
from tfdp.communication.cluster.islands import Island
from tfdp.ground.text import pluralize
from tfdp.launch.cli.errors import usage_errors
from tfdp.launch.cli.island_options import IslandOptions
from tfdp.launch.cli.job import TIMED_OUT, Job, JobContext
from tfdp.launch.cli.launch import RunSettings, warn_of_surroundings
from tfdp.launch.cli.screen import Screen
from tfdp.launch.cli.worker import Worker, open_logs, shell_code
from tfdp.launch.rendezvous.address import listen
from tfdp.launch.rendezvous.failure import RendezvousError
from tfdp.launch.rendezvous.secret import VARIABLE, new_secret, read_secret

if TYPE_CHECKING:
    from tfdp.features.islands.hub import Hub

_TURN_SECONDS = 0.2
_PAUSE_SECONDS = 1.0


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
    screen = context.screen
    with usage_errors(RendezvousError):
        secret = read_secret()
    if secret is None and options.hub is not None:
        raise click.UsageError(
            f"--hub needs {VARIABLE}, the name of a file with one secret on all "
            "machines, which only you can read"
        )
    secret = secret or new_secret()
    indices = range(options.first, options.first + count)
    logs = open_logs(folder, [f"island-{i}.log" for i in indices], screen)
    with _hub(options, secret, total, indices) as (address, hub, ended):
        screen.message(
            f"tfdp: starting {pluralize(count, 'island')} of {total}, which meet at "
            f"{address}; logs in {folder}"
        )
        warn_of_surroundings(screen, count, settings.devices_per_worker)
        # Each the only worker of a cluster of its own.
        devices = settings.devices_per_worker or 1
        clusters = [
            Cluster((f"127.0.0.1:{port}",), devices_per_worker=devices)
            for port in free_ports(count)
        ]
        job = IslandJob(
            [Island(index, total, address, secret) for index in indices],
            settings.max_restarts,
            ended,
            functools.partial(_forget_lost, hub, screen),
            context=context,
            clusters=clusters,
            logs=logs,
        )
        code = job.run()
        if hub is not None:
            code = _wait_for_others(hub, context) or code
        return code


@contextlib.contextmanager
def _hub(
    options: IslandOptions, secret: str, total: int, indices: Sequence[int]
) -> Iterator[tuple[str, Hub | None, Callable[[int], None]]]:
    """Run the hub inside if it is on this machine, or else a connection to it.

    Yields:
        Its address, the `Hub` or `None`, and the function that reports to it that an
        island of this machine has ended.
    """
    if options.first > 0:
        from tfdp.features.islands.member import LauncherLink

        assert options.hub is not None
        island = Island(indices[0], total, options.hub, secret)
        with contextlib.closing(LauncherLink(island, indices)) as link:
            yield options.hub, None, link.ended
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
        yield options.hub or f"127.0.0.1:{hub.port}", hub, hub.ended


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


class IslandJob(Job):
    """The islands of this machine.

    Args:
        islands: List of `Island`, by worker.
        max_restarts: Int, how often an island is started again after it has failed,
            those of this machine together.
        ended: Callable, which is told the index of an island that has ended for good.
        each_turn: Callable, which is called several times a second.
        **options: As for `Job`.
    """

    def __init__(
        self,
        islands: list[Island],
        max_restarts: int,
        ended: Callable[[int], None],
        each_turn: Callable[[], None],
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._islands = islands
        self._first_rank = islands[0].index
        self._max_restarts = max_restarts
        self._num_restarts = 0
        self._ended = ended
        self._each_turn = each_turn
        # When those that failed are started again, by their place.
        self._starts_at: dict[int, float] = {}
        self._told: set[int] = set()

    def _environment(self, index: int) -> dict[str, str]:
        environment = super()._environment(index)
        config = json.loads(environment["TF_CONFIG"])
        self._islands[index].add_to(config)
        return {**environment, "TF_CONFIG": json.dumps(config)}

    def _is_over(self) -> bool:
        self._each_turn()
        now = time.monotonic()
        for index in [i for i, at in self._starts_at.items() if at <= now]:
            del self._starts_at[index]
            self._start(index)
        for worker in self._workers:
            # One that is through; nobody waits for it.
            if worker.exit_code == 0 and worker.pid not in self._told:
                self._told.add(worker.pid)
                self._ended(worker.rank)
        return not self._running() and not self._starts_at

    def _after_failure(self, failed: Worker) -> None:
        """Start those that have failed again, or leave them out."""
        del failed  # others may have failed at the same time
        self.failed = None
        for index, worker in enumerate(self._workers):
            is_new = worker.pid not in self._told and index not in self._starts_at
            if worker.exit_code and is_new:
                self._told.add(worker.pid)
                self._note_failure(index, worker)

    def _note_failure(self, index: int, worker: Worker) -> None:
        self._recall(worker)
        who = f"island {worker.rank} {worker.describe_end()}"
        if self._num_restarts < self._max_restarts:
            self._num_restarts += 1
            self._starts_at[index] = time.monotonic() + _PAUSE_SECONDS
            follows = (
                f"it starts again in {_PAUSE_SECONDS:g} s "
                f"(restart {self._num_restarts} of {self._max_restarts})"
            )
        else:
            assert worker.exit_code is not None
            self._code = self._code or shell_code(worker.exit_code)
            self._ended(worker.rank)
            follows = "it does not start again"
        self._screen.message(
            f"tfdp: {who}; {follows}, and the others go on. All that it wrote: "
            f"{worker.log.path}",
            "warning",
            rank=worker.rank,
        )
