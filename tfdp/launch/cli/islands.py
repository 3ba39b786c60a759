"""`tfdp run --islands`: the options, the islands of this machine, and their hub.

An island is a job of one worker. Islands exchange parameters in the outer steps of
DiLoCo only, through the hub: a server that does not train itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from tfdp.communication.cluster import Cluster, free_ports, split_address
from tfdp.communication.connection.secret import VARIABLE, new_secret, read_secret
from tfdp.features.islands.island import Island
from tfdp.ground.text import pluralize
from tfdp.launch.cli import parameter_types as types
from tfdp.launch.cli.errors import usage_errors
from tfdp.launch.cli.job import JobContext
from tfdp.launch.cli.launch import RunSettings, warn_of_environment
from tfdp.launch.cli.node_options import NodeOptions
from tfdp.launch.cli.screen import Screen
from tfdp.launch.cli.separate_workers import SeparateWorkersJob
from tfdp.launch.cli.worker import Worker, open_logs, shell_code
from tfdp.launch.rendezvous.address import listen
from tfdp.launch.rendezvous.failure import RendezvousError

if TYPE_CHECKING:
    from tfdp.features.islands.hub import Hub

# Islands of other machines may still need the hub after this machine's islands have
# ended. Whether they do is checked at this interval in seconds.
_POLL_SECONDS = 0.2
# An island that fails at each start must not use up all restarts at once, so a failed
# one starts again after this many seconds.
_PAUSE_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class IslandOptions:
    """Options of `tfdp run` for islands: jobs of one worker that exchange weights.

    Args:
        is_used: Bool, whether each worker is an island.
        hub: String, address `"host:port"` of the server through which they exchange
            weights, or `None` for a server of this machine's islands only.
        total: Int, number of islands on all machines, or `None` for those of this
            machine only.
        first: Int, index of the first island on this machine.
    """

    is_used: bool
    hub: str | None
    total: int | None
    first: int

    def check(self, num_workers: int, where: NodeOptions, others: list[str]) -> None:
        """Check the combination of options.

        Args:
            num_workers: Int, number of islands on this machine.
            where: `NodeOptions` of the same command line.
            others: List of strings, used options that do not work with islands.

        Raises:
            click.UsageError: If options cannot be combined.
        """
        if not self.is_used:
            given = {
                "--hub": self.hub,
                "--num-islands": self.total,
                "--first-island": self.first,
            }
            for name in filter(given.get, given):
                raise click.UsageError(f"{name} requires --islands. Add it.")
            return
        if not where.is_one_machine:
            others = [*others, "--hosts, --nodes and --rendezvous"]
        if others:
            raise click.UsageError(
                f"--islands cannot be combined with {others[0]}: remove it. On several "
                "machines, run the same command on each, with --hub"
            )
        last = self.first + num_workers
        if last > (self.total or num_workers):
            raise click.UsageError(
                "--num-islands must be at least --first-island plus -n. Received: "
                f"--num-islands {self.total or num_workers}, --first-island "
                f"{self.first}, -n {num_workers}"
            )
        if self.total not in (None, num_workers) and self.hub is None:
            raise click.UsageError(
                "Islands of several machines need --hub HOST:PORT, a port on the "
                "machine with --first-island 0"
            )


def _address(text: str) -> str:
    """Return the value of `--hub`; raise `ValueError` unless it is `HOST:PORT`."""
    try:
        split_address(text)
    except ValueError:
        raise ValueError("it must be HOST:PORT") from None
    return text


# The names of these options are the fields of `IslandOptions`, which `pop_fields`
# creates from their values.
island_options = types.with_options(
    types.option(
        "--islands",
        "Each worker is a separate job, an island, and synchronizes with the others "
        "in the outer steps of DiLoCo only: a failure of one does not stop the others.",
        name="is_used",
    ),
    types.option(
        "--hub HOST:PORT",
        "Address at which islands of several machines synchronize; the machine with "
        "the first one listens there.",
        types.Checked("address", _address),
    ),
    types.count_option(
        "--num-islands T", "Islands of all machines. Default: -n.", name="total"
    ),
    types.option(
        "--first-island I",
        "Index of this machine's first island.",
        types.NUMBER_OF_TIMES,
        name="first",
        default=0,
    ),
)


def run_islands(
    context: JobContext,
    settings: RunSettings,
    options: IslandOptions,
    folder: pathlib.Path,
) -> int:
    """Run the islands of this machine, and the hub if it is on this machine.

    Args:
        context: `JobContext` of the islands.
        settings: `RunSettings` of the islands.
        options: `IslandOptions` of the command line.
        folder: Path of the folder of logs.

    Returns:
        Int, the exit code: `0` if all islands have succeeded, or that of the first
        island that failed for the last time.

    Raises:
        click.ClickException: If the hub cannot listen, or an island cannot be started.
    """
    count, total = settings.num_workers, options.total or settings.num_workers
    screen = context.screen
    with usage_errors():
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
            f"tfdp: starting {pluralize(count, 'island')} of {total}, which "
            f"synchronize at {address}; logs in {folder}"
        )
        warn_of_environment(screen, count, settings.devices_per_worker)
        # Islands exchange weights only through the hub, so each is the only worker of a
        # separate cluster.
        devices = settings.devices_per_worker or 1
        clusters = [
            Cluster((f"127.0.0.1:{port}",), devices_per_worker=devices)
            for port in free_ports(count)
        ]
        job = IslandJob(
            [Island(index, total, address, secret) for index in indices],
            settings.max_restarts,
            ended,
            functools.partial(_drop_lost, hub, screen),
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
    """Run the islands' hub if it is on this machine, or else connect to it.

    Args:
        options: `IslandOptions` of the command line.
        secret: String, the secret of all islands.
        total: Int, number of islands on all machines.
        indices: Sequence of ints, indices of the islands of this machine.

    Yields:
        Tuple of the hub's address; the `Hub`, or `None` if it is on another machine;
        and a function that reports to the hub that an island of this machine has ended,
        by its index.
    """
    if options.first > 0:
        from tfdp.features.islands.hub_clients import LauncherLink

        assert options.hub is not None
        island = Island(indices[0], total, options.hub, secret)
        with contextlib.closing(LauncherLink(island, indices)) as link:
            yield options.hub, None, link.ended
        return
    # `hub` is imported late, since it imports NumPy, which would delay other commands.
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


def _drop_lost(hub: Hub | None, screen: Screen) -> None:
    """Make the hub, if it is on this machine, drop lost islands, and print which."""
    for index in hub.forget_lost() if hub is not None else []:
        screen.message(
            f"tfdp: island {index} is lost: neither it nor its launcher has given a "
            "sign of life for a minute. The others continue; run the same command on "
            "its machine to start it again",
            "warning",
        )


def _wait_for_others(hub: Hub, context: JobContext) -> int | None:
    """Keep the hub until the islands of other machines have ended.

    Returns:
        Int, the exit code if a signal or `--timeout` has ended the wait, else `None`.
    """
    signals = context.signals
    if signals.received or not hub.is_needed:
        return None
    context.screen.message(
        "tfdp: waiting for islands of other machines, which need the hub"
    )
    while hub.is_needed:
        if (reason := signals.end_reason) is not None:
            return reason.code
        _drop_lost(hub, context.screen)
        signals.wait(_POLL_SECONDS)
    return None


class IslandJob(SeparateWorkersJob):
    """Job whose workers are this machine's islands; a failure of one stops no other.

    Args:
        islands: List of `Island`, one for each worker.
        max_restarts: Int, most restarts of all islands of this machine together.
        ended: Callable that is called with the index of an island that has succeeded,
            or has failed for the last time.
        each_turn: Callable without arguments that is called several times a second.
        **options: Arguments of `Job`.
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

    def _environment(self, index: int) -> dict[str, str]:
        """Return the environment variables of an island, which include its hub."""
        environment = super()._environment(index)
        config = json.loads(environment["TF_CONFIG"])
        self._islands[index].add_to(config)
        return {**environment, "TF_CONFIG": json.dumps(config)}

    def _is_over(self) -> bool:
        """Report successful islands to the hub; return whether all have ended.

        It also calls `each_turn`, and starts failed islands whose pause is over.
        """
        self._each_turn()
        for worker in self._workers:
            # A successful island leaves the hub, so the others do not wait for it.
            if worker.exit_code == 0 and worker.pid not in self._handled_pids:
                self._handled_pids.add(worker.pid)
                self._ended(worker.rank)
        return super()._is_over()

    def _handle_failure(self, index: int, worker: Worker) -> None:
        """Schedule the restart of a failed island, or report its end to the hub.

        Its end is reported once all of the restarts are used. The job then exits with
        the exit code of the first such island.
        """
        who = f"island {worker.rank} {worker.describe_end()}"
        if self._num_restarts < self._max_restarts:
            self._num_restarts += 1
            self._start_after(_PAUSE_SECONDS, index)
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
            f"tfdp: {who}; {follows}, and the others continue. Full output of island "
            f"{worker.rank}: {worker.log.path}",
            "warning",
            rank=worker.rank,
        )
