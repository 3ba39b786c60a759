"""Attempts to run a job: all workers start again after one has failed."""

from __future__ import annotations

import math
import pathlib
import select
import time
from collections.abc import Sequence
from typing import Any

import click

from tfdp.communication.cluster import Cluster, free_ports
from tfdp.communication.coordination.preemption import PREEMPTED
from tfdp.launch.cli.coordinator_connection import CoordinatorConnection
from tfdp.launch.cli.job import Job, JobContext
from tfdp.launch.cli.launch import RunSettings, make_clusters, warn_of_environment
from tfdp.launch.cli.signals import EndReason
from tfdp.launch.cli.worker import LogFile, open_worker_logs, shell_code
from tfdp.launch.rendezvous.coordinator import NodeAddresses
from tfdp.launch.rendezvous.failure import NODE_LOST, Failure
from tfdp.launch.rendezvous.job_probe import cluster_of_places
from tfdp.launch.rendezvous.restarts import Restarts

# While no worker runs, the launcher waits for descriptors at most this many seconds,
# since no descriptor becomes readable when `--timeout` is over.
_POLL_SECONDS = 0.2
# Node 0 may not answer a node that leaves the job, so the node waits at most this many
# seconds, in addition to the grace period in which its workers exit.
_GOODBYE_SECONDS = 2.0


class Attempts:
    """Loop over the attempts to run a job; subclasses decide what follows each of them.

    Args:
        context: `JobContext` of all attempts.
        settings: `RunSettings` of this machine.
        logs: Sequence of `LogFile`, one for each worker of this machine.
        history: Sequence of `LogFile` that record the restarts.
    """

    def __init__(
        self,
        context: JobContext,
        settings: RunSettings,
        logs: Sequence[LogFile] = (),
        history: Sequence[LogFile] = (),
    ) -> None:
        self._context, self._settings = context, settings
        self._logs, self._history = logs, history

    def run(self) -> int:
        """Run attempts until none follows, and return the exit code of the job."""
        while not isinstance(job := self._next_job(), int):
            self._handle_end(job, job.run())
        return job

    def _next_job(self) -> Job | int:
        """Return the `Job` of the next attempt, or an int, the exit code of the job."""
        raise NotImplementedError

    def _handle_end(self, job: Job, code: int) -> None:
        """Decide what follows the attempt `job`, which has ended with the exit code."""
        raise NotImplementedError

    def _announce_restart(self, line: str) -> None:
        """Print a line about a restart, and add it to the logs that record restarts."""
        for log in self._history:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
        self._context.screen.message(f"tfdp: {line}", "warning")


class LocalAttempts(Attempts):
    """Attempts of a job on this machine only; a policy decides about restarts.

    Args:
        restarts: `Restarts`, the restart policy.
        *options: Arguments of `Attempts`.
    """

    def __init__(self, restarts: Restarts, *options: Any) -> None:
        super().__init__(*options)
        self._restarts = restarts
        self._began_at = 0.0
        self._exit_code: int | None = None

    def _next_job(self) -> Job | int:
        """Return a job with a worker for each slot of the policy, or the exit code.

        A slot is a share of this machine; the policy leaves out a slot whose worker
        fails repeatedly. The exit code is returned once `_handle_end` has ended the
        job.
        """
        if self._exit_code is not None:
            return self._exit_code
        slots = self._restarts.slots
        clusters = make_clusters(len(slots), **self._settings.cluster_options)
        self._began_at = time.monotonic()
        return Job(
            self._context,
            clusters,
            self._logs,
            slots=slots,
            save_after_seconds=self._restarts.grow_after_seconds,
        )

    def _handle_end(self, job: Job, code: int) -> None:
        """Pause if the policy decides that another attempt follows, or end the job.

        The decision to restart is printed and logged. To end the job, its exit code is
        stored, and `_next_job` returns it.
        """
        received = self._context.signals.received
        # A caller that sends a signal expects the exit code 128 plus the signal's
        # number, even if the job was already ending for another reason.
        if received and code not in (0, PREEMPTED):
            code = 128 + received[0]
        decision = self._restarts.decide(
            _failure_of(job, code),
            time.monotonic() - self._began_at,
            saved_to_grow=job.has_saved and code == PREEMPTED,
        )
        if decision is None or received:
            self._exit_code = code
        else:
            self._announce_restart(decision.line)
            self._exit_code = pause(self._context, decision.pause_seconds)


def pause(context: JobContext, seconds: float) -> int | None:
    """Wait between two attempts, unless a signal or `--timeout` ends the job.

    Args:
        context: `JobContext` of all attempts.
        seconds: Float, the pause.

    Returns:
        Int, the exit code of a job that a signal or `--timeout` has ended, after this
        was printed; otherwise `None`.
    """
    context.signals.wait(seconds)
    if (reason := context.signals.end_reason) is None:
        return None
    context.screen.message(f"tfdp: {reason.why}, the job does not start again")
    return reason.code


def _failure_of(job: Job, code: int) -> Failure | None:
    """Return the worker's failure that caused a job's exit code `code`, or `None`.

    The result is `None` if no worker has failed, or if the code has another cause, such
    as a signal to the launcher.
    """
    failed, lost = job.failed, job.lost
    # A worker that failed while the job was being stopped is not the cause of the job's
    # end, and usually has another exit code than the job.
    if failed is None or code != shell_code(failed.exit_code or 0):
        return None
    if lost is not None:
        return Failure(lost.rank, code, f"was lost, as worker {failed.rank} reports,")
    return failed.failure


class NodeAttempts(Attempts):
    """This node's part of the attempts to run a job on several nodes.

    Node 0 decides when all nodes start, stop and restart their workers.

    Args:
        context: `JobContext` of all attempts.
        settings: `RunSettings` of this node.
        folder: Path of the folder of logs.
        coordinator: `CoordinatorConnection`, the connection to node 0.
        num_nodes: Int, largest number of nodes of the job.
    """

    def __init__(
        self,
        context: JobContext,
        settings: RunSettings,
        folder: pathlib.Path,
        coordinator: CoordinatorConnection,
        num_nodes: int,
    ) -> None:
        super().__init__(context, settings)
        self._folder, self._num_nodes = folder, num_nodes
        self._coordinator = coordinator
        self._node_rank, self._ranks = 0, range(0)
        self._attempt_id = ""
        # The launcher exits with `_code` if node 0 does not answer after this node has
        # left the job. A new signal ends the wait for the answer, so `_num_handled`
        # has the number of signals that were received before.
        self._code: int | None = None
        self._num_handled = 0
        # Node 0 may be lost, so after this node has left the job, it waits for node 0's
        # answer only until this time.
        self._answer_until = math.inf

    def _next_job(self) -> Job | int:
        """Handle messages of node 0 until one gives the next job, or an exit code.

        Signals and `--timeout` are also handled, and may give an exit code.
        """
        job_or_code: Job | int | None = None
        while job_or_code is None:
            if (message := self._coordinator.pop_message()) is not None:
                job_or_code = self._handle(message)
            else:
                fds = [self._context.signals.fileno(), self._coordinator.fileno()]
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
                return self._job(message)
            case "stop":
                self._report_stopped(message)
            case "restart":
                self._announce_restart(text)
            case "end":
                return self._end(text, int(message["code"]))
            case "refused":
                raise click.ClickException(text)
            case "unreachable" | "lost" as kind:
                if self._coordinator.has_left:
                    return self._code
                also = "; the workers of this node were stopped"
                return self._end(text + (also if kind == "lost" else ""), NODE_LOST)
        return None

    def _prepare(self, message: dict[str, Any]) -> None:
        """Store this node's ranks, open its logs, and report free ports to node 0.

        The logs are opened only if the ranks of this node's workers have changed.

        Args:
            message: Dict, message of node 0 of type `"prepare"`.
        """
        count, first_rank = self._settings.num_workers, int(message["first_rank"])
        self._node_rank = int(message["node_rank"])
        former, self._ranks = self._ranks, range(first_rank, first_rank + count)
        if self._ranks != former:
            self._open_logs(int(message["num_workers"]))
        self._coordinator.attempt = int(message["attempt"])
        self._coordinator.done_node = None
        try:
            self._coordinator.report("ports", ports=free_ports(count))
        except ValueError as error:
            raise click.ClickException(str(error)) from error

    def _open_logs(self, num_workers: int) -> None:
        """Open this node's logs, and print which workers of the job it starts.

        Args:
            num_workers: Int, number of workers of all nodes.
        """
        screen, ranks = self._context.screen, self._ranks
        has_history = self._settings.max_restarts > 0 and self._node_rank == 0
        self._logs, self._history = open_worker_logs(
            self._folder, ranks, screen, has_history=has_history
        )
        screen.node = self._node_rank
        which = f"worker {ranks[0]}"
        if len(ranks) > 1:
            which = f"workers {ranks[0]} to {ranks[-1]}"
        screen.message(
            f"tfdp: node {self._node_rank} of {self._num_nodes} starts {which} of "
            f"{num_workers}; logs in {self._folder}"
        )
        warn_of_environment(screen, len(ranks), self._settings.devices_per_worker)

    def _clusters(self, places: NodeAddresses) -> list[Cluster]:
        """Return a `Cluster` for each worker of this node, from all addresses."""
        job = places, self._coordinator.secret, self._attempt_id
        options = self._settings.cluster_options
        return [cluster_of_places(*job, rank, **options) for rank in self._ranks]

    def _job(self, message: dict[str, Any]) -> Job:
        """Create this node's `Job` from node 0's message of type `"start"`."""
        clusters = self._clusters(message["nodes"])
        return Job(self._context, clusters, self._logs, coordinator=self._coordinator)

    def _handle_end(self, job: Job, code: int) -> None:
        """Report the end of an attempt to node 0, which decides what follows."""
        self._code = PREEMPTED if code and job.is_preempted else code
        self._num_handled = len(self._context.signals.received)
        self._coordinator.report_end(self._code, has_saved=job.is_preempted)

    def _report_stopped(self, message: dict[str, Any]) -> None:
        """Print why all nodes stop, and report that this node's workers have ended.

        The workers do not run: `Job` has stopped them by the same message.

        Args:
            message: Dict, message of node 0 of type `"stop"`.
        """
        if message.get("by") != self._node_rank and not self._coordinator.has_left:
            rank, text = message.get("rank"), f"tfdp: {message.get('text')}"
            self._context.screen.message(text, "error", rank=rank)
        if message.get("attempt") == self._coordinator.attempt:
            self._coordinator.report_end(int(message["code"]), has_saved=False)

    def _end(self, text: str, code: int) -> int:
        """Print `text`, the reason for the job's end, if any, and return `code`.

        A node that has left the job prints nothing, since it has printed its reason.
        """
        if text and not self._coordinator.has_left:
            self._context.screen.message(f"tfdp: {text}", "error")
        return code

    def _check_end(self) -> int | None:
        """Handle signals and `--timeout` while no worker runs on this node.

        The first signal, or the timeout, makes this node leave the job. This node then
        waits for node 0's answer for a limited time, or until another signal.

        Returns:
            Int, the exit code if this node must not wait any longer, or else `None`.
        """
        signals = self._context.signals
        signals.read()
        if self._coordinator.has_left:
            is_again = len(signals.received) > max(1, self._num_handled)
            is_over = is_again or time.monotonic() >= self._answer_until
            return self._code if is_over else None
        if (reason := signals.end_reason) is not None:
            self._leave(reason)
        return None

    def _leave(self, reason: EndReason) -> None:
        """Notify node 0 that this node leaves, and limit the wait for its answer."""
        self._context.screen.message(f"tfdp: {reason.why}, the job ends")
        self._coordinator.leave(reason)
        self._code = reason.code
        self._num_handled = len(self._context.signals.received)
        wait = _GOODBYE_SECONDS + (self._context.grace_seconds if self._logs else 0.0)
        self._answer_until = time.monotonic() + wait
