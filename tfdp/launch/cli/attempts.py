"""Attempts to run a job: its workers are started again after one has failed."""

from __future__ import annotations

import abc
import math
import time
from collections.abc import Callable, Sequence

import click

from tfdp.communication.cluster import Cluster
from tfdp.communication.coordination.preemption import PREEMPTED
from tfdp.launch.cli.job import TIMED_OUT, Job, JobContext
from tfdp.launch.cli.launch import Slot
from tfdp.launch.cli.log_file import LogFile
from tfdp.launch.cli.worker import shell_code, signal_name
from tfdp.launch.rendezvous.failure import Failure
from tfdp.launch.rendezvous.restarts import Restarts


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

        Raises:
            click.ClickException: If a worker cannot be started.
        """
        code = None
        while code is None:
            job = self._next_job()
            if isinstance(job, int):
                return job
            began_at = time.monotonic()
            code = self._after(job, run_job(job), time.monotonic() - began_at)
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
        make_clusters: Function that makes the clusters of so many workers.
        logs: List of `LogFile`, one for each worker.
        history: List of `LogFile`, for the history of restarts.
        restarts: `Restarts`.
    """

    def __init__(
        self,
        context: JobContext,
        make_clusters: Callable[[int], list[Cluster]],
        logs: list[LogFile],
        history: list[LogFile],
        restarts: Restarts,
    ) -> None:
        super().__init__(context)
        self.history = history
        self._make_clusters, self._logs = make_clusters, logs
        self._restarts = restarts

    def _next_job(self) -> Job:
        slots = [Slot(index, len(self._logs)) for index in self._restarts.slots]
        return Job(
            self._context,
            self._make_clusters(len(slots)),
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


def run_job(job: Job) -> int:
    """Run the workers of a job once.

    Args:
        job: `Job`.

    Returns:
        Int, the exit code.

    Raises:
        click.ClickException: If a worker cannot be started.
    """
    try:
        with job:
            return job.run()
    except OSError as error:
        raise click.ClickException(f"A worker could not be started: {error}") from error


def _failure_of(job: Job, code: int) -> Failure | None:
    failed, lost = job.failed, job.lost
    # One that failed while the job was being stopped is no reason.
    if failed is None or code != shell_code(failed.exit_code or 0):
        return None
    if lost is not None:
        return Failure(lost.rank, code, f"was lost, as worker {failed.rank} says,")
    return failed.failure
