"""Attempts to run a job on several nodes: the part of one node in all of them."""

from __future__ import annotations

import dataclasses
import select
import signal
import time
from collections.abc import Callable
from typing import Any

import click

from tfdp.cli.attempts import run_job
from tfdp.cli.job import TIMED_OUT, Job, JobOptions
from tfdp.cli.launch import Slot
from tfdp.cli.log_file import LogFile
from tfdp.cli.other_nodes import OtherNodes
from tfdp.cli.restarts import note
from tfdp.cli.screen import Screen
from tfdp.cli.signals import SignalPipe
from tfdp.cli.start import Starter
from tfdp.cli.worker import signal_name
from tfdp.cluster import Cluster, free_ports
from tfdp.coordination.preemption import PREEMPTED
from tfdp.rendezvous.failure import NODE_LOST

_TURN_SECONDS = 0.2
# For node 0 to answer a node that leaves, beside the grace of workers that end first.
_GOODBYE_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class Logs:
    """Logs of a node.

    Args:
        workers: List of `LogFile`, one for each worker of this node.
        history: List of `LogFile`, for the history of restarts.
    """

    workers: list[LogFile]
    history: list[LogFile]


class NodeAttempts:
    """All attempts of a job on several nodes, on this node.

    Node 0 decides when all start, stop and start again; this node does what it says.

    Args:
        starter: `Starter` of what every worker runs.
        num_workers: Int, workers of this node.
        settings: Dict of further arguments of each worker's `Cluster`.
        others: `OtherNodes`.
        open_logs: Function of this node's rank, the rank of its first worker and the
            number of all workers, which returns `Logs`.
        screen: The `Screen` that shows the output.
        signals: The `SignalPipe`.
        grace_seconds: Float, between asking the workers to stop and killing them.
        until: Float, by `time.monotonic()`, when all is stopped, or `None`.
    """

    def __init__(
        self,
        starter: Starter,
        num_workers: int,
        settings: dict[str, Any],
        others: OtherNodes,
        open_logs: Callable[[int, int, int], Logs],
        screen: Screen,
        signals: SignalPipe,
        grace_seconds: float,
        until: float | None,
    ) -> None:
        self._starter = starter
        self._num_workers = num_workers
        self._settings = settings
        self._others = others
        self._open_logs = open_logs
        self._screen = screen
        self._signals = signals
        self._grace_seconds = grace_seconds
        self._until = until
        self._logs: Logs | None = None
        self._node_rank = self._first_rank = 0
        # Signals to which something was done; the code of the first, and till when
        # node 0 may answer.
        self._num_heeded = 0
        self._code_of_end: int | None = None
        self._answer_until: float | None = None
        self._acts: dict[str, Callable[[dict[str, Any]], int | None]] = {
            "prepare": self._prepare,
            "start": self._start,
            "stop": self._stop,
            "restart": self._restart,
            "end": self._end,
            "refused": self._refused,
            "unreachable": self._unreachable,
            "lost": self._lost,
        }

    def run(self) -> int:
        """Do what node 0 says until the job is over.

        Returns:
            Int, the exit code.

        Raises:
            click.ClickException: If this node cannot be one of the job's, or cannot
                start its workers.
        """
        while True:
            message = self._others.take()
            if message is not None:
                act = self._acts.get(str(message.get("type")))
                code = act(message) if act else None
            else:
                fds = [self._signals.fileno(), self._others.fileno()]
                select.select(fds, [], [], _TURN_SECONDS)
                code = self._look_for_an_end()
            if code is not None:
                return code

    def _prepare(self, message: dict[str, Any]) -> None:
        self._node_rank = int(message["node_rank"])
        self._first_rank = int(message["first_rank"])
        if self._logs is None:
            self._logs = self._open_logs(
                self._node_rank, self._first_rank, int(message["num_workers"])
            )
        self._others.attempt = int(message["attempt"])
        try:
            self._others.offer(free_ports(self._num_workers))
        except ValueError as error:
            raise click.ClickException(str(error)) from error

    def _start(self, message: dict[str, Any]) -> None:
        assert self._logs is not None
        clusters = self._clusters(message["nodes"])
        options = JobOptions(
            until=self._until,
            grace_seconds=self._grace_seconds,
            slots=[Slot(i, self._num_workers) for i in range(self._num_workers)],
            others=self._others,
        )
        logs = self._logs.workers
        job = Job(self._starter, clusters, logs, self._screen, self._signals, options)
        code = run_job(job)
        code = PREEMPTED if job.is_preempted else code
        self._others.tell_end(code, has_saved=job.is_preempted)
        if self._others.has_left:
            self._num_heeded = len(self._signals.received)
            self._code_of_end = code

    def _clusters(self, nodes: list[tuple[str, list[int]]]) -> list[Cluster]:
        workers = tuple(
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            for host, ports in nodes
            for port in ports
        )
        ranks = range(self._first_rank, self._first_rank + self._num_workers)
        return [Cluster(workers, task_index=rank, **self._settings) for rank in ranks]

    def _stop(self, message: dict[str, Any]) -> None:
        """Say why all stop; workers of this node have ended before."""
        if message.get("by") != self._node_rank and not self._others.has_left:
            rank = message.get("rank")
            self._screen.message(f"tfdp: {message.get('text')}", "error", rank=rank)
        if message.get("attempt") == self._others.attempt:
            self._others.tell_end(int(message["code"]), has_saved=False)

    def _restart(self, message: dict[str, Any]) -> None:
        line = str(message.get("text"))
        for log in self._logs.history if self._logs else []:
            note(log, line)
        self._screen.message(f"tfdp: {line}", "warning")

    def _end(self, message: dict[str, Any]) -> int:
        if message.get("text") and not self._others.has_left:
            self._screen.message(f"tfdp: {message['text']}", "error")
        return int(message["code"])

    def _refused(self, message: dict[str, Any]) -> int:
        raise click.ClickException(str(message.get("text")))

    def _unreachable(self, message: dict[str, Any]) -> int:
        self._screen.message(f"tfdp: {message.get('text')}", "error")
        return NODE_LOST

    def _lost(self, message: dict[str, Any]) -> int:
        if self._code_of_end is not None:
            return self._code_of_end
        self._screen.message(
            f"tfdp: {message.get('text')}; the workers of this node were stopped",
            "error",
        )
        return NODE_LOST

    def _look_for_an_end(self) -> int | None:
        """Heed signals and `--timeout` while no worker runs here.

        Returns:
            Int, the exit code if nobody is to be waited for any more, or else `None`.
        """
        self._signals.read()
        now, received = time.monotonic(), self._signals.received
        if self._code_of_end is not None:
            is_late = self._answer_until is not None and now >= self._answer_until
            is_again = len(received) > max(1, self._num_heeded)
            return self._code_of_end if is_late or is_again else None
        if received:
            name = signal_name(received[0])
            self._leave(f"{name} received", 128 + received[0], received[0])
        elif self._until is not None and now >= self._until:
            self._leave("--timeout is over", TIMED_OUT, signal.SIGTERM)
        return None

    def _leave(self, why: str, code: int, signum: int) -> None:
        self._screen.message(f"tfdp: {why}, the job ends")
        self._others.leave(why, code, signum)
        self._num_heeded, self._code_of_end = len(self._signals.received), code
        has_joined = self._logs is not None
        wait = _GOODBYE_SECONDS + (self._grace_seconds if has_joined else 0.0)
        self._answer_until = time.monotonic() + wait
