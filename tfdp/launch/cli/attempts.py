"""Attempts to run a job, whose workers are started again after one has failed."""

from __future__ import annotations

import abc
import math
import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import click

from tfdp.communication.cluster import Cluster, free_ports
from tfdp.communication.cluster.address import join_address
from tfdp.communication.coordination.preemption import PREEMPTED
from tfdp.launch.cli.job import TIMED_OUT, Job, JobContext
from tfdp.launch.cli.launch import RunSettings, make_clusters
from tfdp.launch.cli.other_nodes import OtherNodes
from tfdp.launch.cli.worker import LogFile, shell_code, signal_name
from tfdp.launch.rendezvous.failure import NODE_LOST, Failure
from tfdp.launch.rendezvous.restarts import Restarts

_TURN_SECONDS = 0.2
# For node 0 to answer a node that leaves, beside the grace of workers that end first.
_GOODBYE_SECONDS = 2.0


class Attempts(abc.ABC):
    """All attempts to run a job, one after another.

    A subclass knows who decides: this launcher alone, or node 0 of several.

    Args:
        context: `JobContext`.

    Attributes:
        history: Sequence of `LogFile`, for the history of restarts.
    """

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self.history: Sequence[LogFile] = ()

    def run(self) -> int:
        """Run the workers until they are done, or not to be started again.

        Returns:
            Int, the exit code.
        """
        code = None
        while code is None:
            job = self._next_job()
            if isinstance(job, int):
                return job
            began_at = time.monotonic()
            code = self._after(job, job.run(), time.monotonic() - began_at)
        return code

    @abc.abstractmethod
    def _next_job(self) -> Job | int:
        """Wait until workers are to start; return the exit code if none are."""

    @abc.abstractmethod
    def _after(self, job: Job, code: int, seconds: float) -> int | None:
        """Decide what follows a job; return the exit code if nothing does."""

    def _announce_restart(self, line: str) -> None:
        for log in self.history:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
        self._context.screen.message(f"tfdp: {line}", "warning")


class LocalAttempts(Attempts):
    """All attempts to run a job on this machine.

    Args:
        context: `JobContext`.
        settings: `RunSettings`.
        logs: List of `LogFile`, one for each worker.
        history: List of `LogFile`, for the history of restarts.
        restarts: `Restarts`.
    """

    def __init__(
        self,
        context: JobContext,
        settings: RunSettings,
        logs: list[LogFile],
        history: list[LogFile],
        restarts: Restarts,
    ) -> None:
        super().__init__(context)
        self.history = history
        self._settings, self._logs, self._restarts = settings, logs, restarts

    def _next_job(self) -> Job:
        slots = self._restarts.slots
        return Job(
            self._context,
            make_clusters(len(slots), **self._settings.of_cluster),
            self._logs,
            slots=slots,
            save_after_seconds=self._restarts.grow_after_seconds,
        )

    def _after(self, job: Job, code: int, seconds: float) -> int | None:
        received = self._context.signals.received
        # Also one that came while the job was ending for another reason.
        if received and code not in (0, PREEMPTED):
            code = 128 + received[0]
        has_saved = job.has_saved and code == PREEMPTED
        failure = _failure_of(job, code)
        decision = self._restarts.after(failure, seconds, saved_to_grow=has_saved)
        if decision is None or received:
            return code
        self._announce_restart(decision.line)
        return pause(self._context, decision.pause_seconds)


def pause(context: JobContext, seconds: float) -> int | None:
    """Wait between two attempts.

    Args:
        context: `JobContext`.
        seconds: Float, for how long.

    Returns:
        Int, the exit code if no other attempt is to follow, or else `None`.
    """
    received, until = context.signals.received, context.until
    left = math.inf if until is None else until - time.monotonic()
    context.signals.wait(min(seconds, left))
    say = context.screen.message
    if received:
        name = signal_name(received[0])
        say(f"tfdp: {name} received, the job does not start again")
        return 128 + received[0]
    if left <= seconds:
        say("tfdp: --timeout is over, the job does not start again")
        return TIMED_OUT
    return None


def _failure_of(job: Job, code: int) -> Failure | None:
    failed, lost = job.failed, job.lost
    # One that failed while the job was being stopped is no reason.
    if failed is None or code != shell_code(failed.exit_code or 0):
        return None
    if lost is not None:
        return Failure(lost.rank, code, f"was lost, as worker {failed.rank} says,")
    return failed.failure


class NodeAttempts(Attempts):
    """All attempts of a job on several nodes, on this node.

    Node 0 decides when all start, stop and start again; this node obeys.

    Args:
        context: `JobContext`.
        settings: `RunSettings`.
        others: `OtherNodes`.
        open_logs: Function of this node's rank, the rank of its first worker and the
            number of all workers, which returns the logs of this node's workers, and
            those for the history of restarts.
    """

    def __init__(
        self,
        context: JobContext,
        settings: RunSettings,
        others: OtherNodes,
        open_logs: Callable[[int, int, int], tuple[list[LogFile], list[LogFile]]],
    ) -> None:
        super().__init__(context)
        self._settings = settings
        self._others, self._open_logs = others, open_logs
        self._logs: list[LogFile] = []
        self._node_rank = self._first_rank = 0
        # Signals that were handled; the code of the first, and till when node 0 may
        # answer.
        self._num_heeded = 0
        self._code_of_end: int | None = None
        self._answer_until = float("inf")

    def _next_job(self) -> Job | int:
        following: Job | int | None = None
        while following is None:
            if (message := self._others.take()) is not None:
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
            case "unreachable" | "lost" as kind:
                if self._code_of_end is not None:
                    return self._code_of_end
                also = "; the workers of this node were stopped"
                return self._end(text + (also if kind == "lost" else ""), NODE_LOST)
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
            self._others.tell("ports", ports=free_ports(self._settings.num_workers))
        except ValueError as error:
            raise click.ClickException(str(error)) from error

    def _job(self, nodes: list[tuple[str, list[int]]]) -> Job:
        workers = tuple(
            join_address(host, port) for host, ports in nodes for port in ports
        )
        clusters = [
            Cluster(
                workers, task_index=self._first_rank + i, **self._settings.of_cluster
            )
            for i in range(self._settings.num_workers)
        ]
        return Job(self._context, clusters, self._logs, others=self._others)

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

    def _look_for_an_end(self) -> int | None:
        """Heed signals and `--timeout` while no worker runs here.

        Returns:
            Int, the exit code if nobody is to be waited for any more, or else `None`.
        """
        self._context.signals.read()
        now, until = time.monotonic(), self._context.until
        received = self._context.signals.received
        if self._code_of_end is not None:
            is_again = len(received) > max(1, self._num_heeded)
            is_over = is_again or now >= self._answer_until
            return self._code_of_end if is_over else None
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
