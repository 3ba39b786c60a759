"""Attempts to run a job on several nodes: the part of one node in all of them."""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Callable
from typing import Any

import click

from tfdp.communication.cluster import Cluster, free_ports
from tfdp.communication.cluster.address import join_address
from tfdp.communication.coordination.preemption import PREEMPTED
from tfdp.launch.cli.attempts import Attempts
from tfdp.launch.cli.job import TIMED_OUT, Job, JobContext
from tfdp.launch.cli.launch import Slot
from tfdp.launch.cli.log_file import LogFile
from tfdp.launch.cli.other_nodes import OtherNodes
from tfdp.launch.cli.worker import signal_name
from tfdp.launch.rendezvous.failure import NODE_LOST

_TURN_SECONDS = 0.2
# For node 0 to answer a node that leaves, beside the grace of workers that end first.
_GOODBYE_SECONDS = 2.0


class NodeAttempts(Attempts):
    """All attempts of a job on several nodes, on this node.

    Node 0 decides when all start, stop and start again; this node obeys.

    Args:
        context: `JobContext`.
        num_workers: Int, workers of this node.
        settings: Dict of further arguments of each worker's `Cluster`.
        others: `OtherNodes`.
        open_logs: Function of this node's rank, the rank of its first worker and the
            number of all workers, which returns the logs of this node's workers, and
            those for the history of restarts.
    """

    def __init__(
        self,
        context: JobContext,
        num_workers: int,
        settings: dict[str, Any],
        others: OtherNodes,
        open_logs: Callable[[int, int, int], tuple[list[LogFile], list[LogFile]]],
    ) -> None:
        super().__init__(context)
        self._num_workers, self._settings = num_workers, settings
        self._others, self._open_logs = others, open_logs
        self._logs: list[LogFile] = []
        self._node_rank = self._first_rank = 0
        # Signals that were handled; the code of the first, and till when node 0 may
        # answer.
        self._num_heeded = 0
        self._code_of_end: int | None = None
        self._answer_until: float | None = None

    def _next_job(self) -> Job | int:
        following: Job | int | None = None
        while following is None:
            message = self._others.take()
            if message is not None:
                following = self._act(message)
            else:
                fds = [self._context.signals.fileno(), self._others.fileno()]
                select.select(fds, [], [], _TURN_SECONDS)
                following = self._look_for_an_end()
        return following

    def _act(self, message: dict[str, Any]) -> Job | int | None:
        text = str(message.get("text") or "")
        match message.get("type"):
            case "prepare":
                self._prepare(message)
            case "start":
                return self._job(message["nodes"])
            case "stop":
                self._stop(message)
            case "restart":
                self._announce_restart(text)
            case "end":
                return self._end(text, int(message["code"]))
            case "refused":
                raise click.ClickException(text)
            case "unreachable":
                return self._lose_node_0(text)
            case "lost":
                text += "; the workers of this node were stopped"
                return self._lose_node_0(text)
        return None

    def _prepare(self, message: dict[str, Any]) -> None:
        self._node_rank = int(message["node_rank"])
        self._first_rank = int(message["first_rank"])
        if not self._logs:
            self._logs, self.history = self._open_logs(
                self._node_rank, self._first_rank, int(message["num_workers"])
            )
        self._others.attempt = int(message["attempt"])
        try:
            self._others.offer(free_ports(self._num_workers))
        except ValueError as error:
            raise click.ClickException(str(error)) from error

    def _job(self, nodes: list[tuple[str, list[int]]]) -> Job:
        workers = tuple(
            join_address(host, port) for host, ports in nodes for port in ports
        )
        local = range(self._num_workers)
        clusters = [
            Cluster(workers, task_index=self._first_rank + i, **self._settings)
            for i in local
        ]
        slots = [Slot(i, self._num_workers) for i in local]
        logs, others = self._logs, self._others
        return Job(self._context, clusters, logs, slots=slots, others=others)

    def _after(self, job: Job, code: int, seconds: float) -> None:
        code = PREEMPTED if job.is_preempted else code
        self._others.tell_end(code, has_saved=job.is_preempted)
        if self._others.has_left:
            self._num_heeded = len(self._context.signals.received)
            self._code_of_end = code

    def _stop(self, message: dict[str, Any]) -> None:
        """Say why all stop; workers of this node have ended before."""
        if message.get("by") != self._node_rank and not self._others.has_left:
            rank, text = message.get("rank"), f"tfdp: {message.get('text')}"
            self._context.screen.message(text, "error", rank=rank)
        if message.get("attempt") == self._others.attempt:
            self._others.tell_end(int(message["code"]), has_saved=False)

    def _end(self, text: str, code: int) -> int:
        if text and not self._others.has_left:
            self._context.screen.message(f"tfdp: {text}", "error")
        return code

    def _lose_node_0(self, text: str) -> int:
        if self._code_of_end is not None:
            return self._code_of_end
        return self._end(text, NODE_LOST)

    def _look_for_an_end(self) -> int | None:
        """Heed signals and `--timeout` while no worker runs here.

        Returns:
            Int, the exit code if nobody is to be waited for any more, or else `None`.
        """
        self._context.signals.read()
        now, until = time.monotonic(), self._context.until
        received = self._context.signals.received
        if self._code_of_end is not None:
            is_late = self._answer_until is not None and now >= self._answer_until
            is_again = len(received) > max(1, self._num_heeded)
            return self._code_of_end if is_late or is_again else None
        if received:
            name = signal_name(received[0])
            self._leave(f"{name} received", 128 + received[0], received[0])
        elif until is not None and now >= until:
            self._leave("--timeout is over", TIMED_OUT, signal.SIGTERM)
        return None

    def _leave(self, why: str, code: int, signum: int) -> None:
        self._context.screen.message(f"tfdp: {why}, the job ends")
        self._others.leave(why, code, signum)
        self._num_heeded = len(self._context.signals.received)
        self._code_of_end = code
        wait = _GOODBYE_SECONDS + (self._context.grace_seconds if self._logs else 0.0)
        self._answer_until = time.monotonic() + wait
