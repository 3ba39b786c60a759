"""Attempts to run a job: all workers start again after one has failed."""

from __future__ import annotations

import math
import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import click

from tfdp.communication.cluster import Cluster, free_ports
from tfdp.communication.coordination.preemption import PREEMPTED
from tfdp.launch.cli.job import Job, JobContext
from tfdp.launch.cli.launch import RunSettings, make_clusters
from tfdp.launch.cli.other_nodes import OtherNodes
from tfdp.launch.cli.signals import TIMED_OUT
from tfdp.launch.cli.worker import LogFile, shell_code, signal_name
from tfdp.launch.rendezvous.coordinator import Places
from tfdp.launch.rendezvous.failure import NODE_LOST, Failure
from tfdp.launch.rendezvous.job_probe import cluster_of_places
from tfdp.launch.rendezvous.restarts import Restarts

# Seconds between checks for signals and `--timeout` while no worker runs.
_POLL_SECONDS = 0.2
# Seconds for which a node that leaves the job waits for node 0's answer, in addition to
# the grace period in which the node's workers exit.
_GOODBYE_SECONDS = 2.0


def run_attempts(
    context: JobContext,
    settings: RunSettings,
    logs: list[LogFile],
    history: list[LogFile],
    restarts: Restarts,
) -> int:
    """Run attempts on this machine until the workers are done, or must not restart.

    Args:
        context: `JobContext` of all attempts.
        settings: `RunSettings` of the job.
        logs: List of `LogFile`, one for each worker.
        history: List of `LogFile` that record the restarts.
        restarts: `Restarts`, the restart policy.

    Returns:
        Int, the exit code of the job.
    """
    exit_code = None
    while exit_code is None:
        # The workers of this attempt are those whose slots are not left out by the
        # policy.
        job = Job(
            context,
            make_clusters(len(restarts.slots), **settings.cluster_options),
            logs,
            slots=restarts.slots,
            save_after_seconds=restarts.grow_after_seconds,
        )
        began_at = time.monotonic()
        code, received = job.run(), context.signals.received
        # A signal determines the exit code also where the job was already ending for
        # another reason.
        if received and code not in (0, PREEMPTED):
            code = 128 + received[0]
        decision = restarts.after(
            _failure_of(job, code),
            time.monotonic() - began_at,
            saved_to_grow=job.has_saved and code == PREEMPTED,
        )
        if decision is None or received:
            return code
        _announce_restart(context, history, decision.line)
        exit_code = pause(context, decision.pause_seconds)
    return exit_code


def _announce_restart(
    context: JobContext, history: Sequence[LogFile], line: str
) -> None:
    """Print a line about a restart, and add it to the logs that record restarts."""
    for log in history:
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
    context.screen.message(f"tfdp: {line}", "warning")


def pause(context: JobContext, seconds: float) -> int | None:
    """Wait between two attempts.

    Args:
        context: `JobContext` of the attempts.
        seconds: Float, duration of the pause.

    Returns:
        Int, the exit code if a signal or `--timeout` ends the job, or else `None`.
    """
    signals = context.signals
    signals.wait(min(seconds, signals.until - time.monotonic()))
    code = signals.exit_code
    if code is not None:
        received = [f"{signal_name(signum)} received" for signum in signals.received]
        why = received[0] if received else "--timeout is over"
        context.screen.message(f"tfdp: {why}, the job does not start again")
    return code


def _failure_of(job: Job, code: int) -> Failure | None:
    """Return the worker's failure that caused a job's exit code `code`, or `None`."""
    failed, lost = job.failed, job.lost
    # A worker that failed while the job was being stopped is not the cause.
    if failed is None or code != shell_code(failed.exit_code or 0):
        return None
    if lost is not None:
        return Failure(lost.rank, code, f"was lost, as worker {failed.rank} reports,")
    return failed.failure


class NodeAttempts:
    """Loop over this node's part of the attempts to run a job on several nodes.

    Node 0 decides when all nodes start, stop and restart their workers.

    Args:
        context: `JobContext` of all attempts.
        settings: `RunSettings` of this node.
        others: `OtherNodes`, the connection to node 0.
        open_logs: Function of this node's rank, the rank of its first worker and the
            number of all workers. It returns the logs of this node's workers, and the
            logs that record restarts.
    """

    def __init__(
        self,
        context: JobContext,
        settings: RunSettings,
        others: OtherNodes,
        open_logs: Callable[[int, int, int], tuple[list[LogFile], list[LogFile]]],
    ) -> None:
        self._context, self._settings = context, settings
        self._others, self._open_logs = others, open_logs
        self._logs: list[LogFile] = []
        self._history: list[LogFile] = []
        self._node_rank = self._first_rank = 0
        self._attempt_id = ""
        # Number of signals that this node had received when it left the job.
        self._num_handled = 0
        # Exit code of this node once it has left the job, and the time until which it
        # waits for node 0's answer.
        self._exit_code: int | None = None
        self._answer_until = math.inf

    def run(self) -> int:
        """Run attempts until node 0 ends the job.

        Returns:
            Int, the exit code of the job.
        """
        while not isinstance(job := self._next_job(), int):
            self._after(job, job.run())
        return job

    def _next_job(self) -> Job | int:
        """Handle messages of node 0 until one gives the next job, or an exit code."""
        job_or_code: Job | int | None = None
        while job_or_code is None:
            if (message := self._others.take()) is not None:
                job_or_code = self._handle(message)
            else:
                fds = [self._context.signals.fileno(), self._others.fileno()]
                select.select(fds, [], [], _POLL_SECONDS)
                job_or_code = self._check_end()
        return job_or_code

    def _handle(self, message: dict[str, Any]) -> Job | int | None:
        """Handle a message of node 0, which may start or end the job.

        Returns:
            `Job` to run, int, the exit code of this node, or `None` to wait for a
            message.

        Raises:
            click.ClickException: If node 0 has refused this node.
        """
        text = str(message.get("text") or "")
        match message.get("type"):
            case "prepare":
                self._prepare(message)
            case "start":
                self._attempt_id = str(message["id"])
                clusters = self._clusters(message["nodes"])
                return self._job(clusters, is_late=bool(message["is_late"]))
            case "stop":
                self._stop(message)
            case "restart":
                _announce_restart(self._context, self._history, text)
            case "end":
                return self._end(text, int(message["code"]))
            case "refused":
                raise click.ClickException(text)
            case "unreachable" | "lost" as kind:
                if self._exit_code is not None:
                    return self._exit_code
                also = "; the workers of this node were stopped"
                return self._end(text + (also if kind == "lost" else ""), NODE_LOST)
        return None

    def _prepare(self, message: dict[str, Any]) -> None:
        """Take this node's ranks, open the logs, and report free ports to node 0.

        Args:
            message: Dict, message of node 0 of type `"prepare"`.
        """
        self._node_rank = int(message["node_rank"])
        former, self._first_rank = self._first_rank, int(message["first_rank"])
        if not self._logs or former != self._first_rank:
            self._logs, self._history = self._open_logs(
                self._node_rank, self._first_rank, int(message["num_workers"])
            )
        self._others.attempt = int(message["attempt"])
        try:
            self._others.report("ports", ports=free_ports(self._settings.num_workers))
        except ValueError as error:
            raise click.ClickException(str(error)) from error

    def _clusters(self, places: Places) -> list[Cluster]:
        """Return the clusters of this node's workers, given all nodes' addresses."""
        return [
            cluster_of_places(
                places,
                self._others.secret,
                self._attempt_id,
                self._first_rank + i,
                **self._settings.cluster_options,
            )
            for i in range(self._settings.num_workers)
        ]

    def _job(self, clusters: list[Cluster], *, is_late: bool) -> Job:
        """Return the job of this node.

        Args:
            clusters: List of `Cluster`, one for each worker of this node.
            is_late: Bool, whether the workers of other nodes train already. It has no
                effect here: only `ElasticAttempts` admits nodes to a running job.
        """
        del is_late  # nodes join late only in elastic jobs
        return Job(self._context, clusters, self._logs, others=self._others)

    def _after(self, job: Job, code: int) -> None:
        """Report the end of an attempt to node 0, which decides what follows."""
        code = PREEMPTED if code and job.is_preempted else code
        self._others.report_end(code, has_saved=job.is_preempted)
        if self._others.has_left:
            self._num_handled = len(self._context.signals.received)
            self._exit_code = code

    def _stop(self, message: dict[str, Any]) -> None:
        """Print why all nodes stop, and report that this node's workers have ended.

        The workers do not run: `Job` has stopped them by the same message.

        Args:
            message: Dict, message of node 0 of type `"stop"`.
        """
        if message.get("by") != self._node_rank and not self._others.has_left:
            rank, text = message.get("rank"), f"tfdp: {message.get('text')}"
            self._context.screen.message(text, "error", rank=rank)
        if message.get("attempt") == self._others.attempt:
            self._others.report_end(int(message["code"]), has_saved=False)

    def _end(self, text: str, code: int) -> int:
        """Print why the job ends, and return its exit code."""
        if text and not self._others.has_left:
            self._context.screen.message(f"tfdp: {text}", "error")
        return code

    def _check_end(self) -> int | None:
        """Handle signals and `--timeout` while no worker runs on this node.

        Returns:
            Int, the exit code if this node must not wait any longer, or else `None`.
        """
        signals, now = self._context.signals, time.monotonic()
        signals.read()
        received = signals.received
        if self._exit_code is not None:
            is_again = len(received) > max(1, self._num_handled)
            is_over = is_again or now >= self._answer_until
            return self._exit_code if is_over else None
        if received:
            name = signal_name(received[0])
            self._leave(f"{name} received", 128 + received[0], received[0])
        elif now >= signals.until:
            self._leave("--timeout is over", TIMED_OUT, signal.SIGTERM)
        return None

    def _leave(self, why: str, code: int, signum: int) -> None:
        """Notify node 0 that this node leaves, and limit the wait for its answer.

        Args:
            why: String, the reason, such as `"SIGINT received"`.
            code: Int, exit code of the job.
            signum: Int, signal that the workers of all nodes receive.
        """
        self._context.screen.message(f"tfdp: {why}, the job ends")
        self._others.leave(why, code, signum)
        self._num_handled = len(self._context.signals.received)
        self._exit_code = code
        wait = _GOODBYE_SECONDS + (self._context.grace_seconds if self._logs else 0.0)
        self._answer_until = time.monotonic() + wait
