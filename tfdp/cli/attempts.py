"""Attempts to run a job: its workers are started again after one has failed."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

import click

from tfdp.cli.job import TIMED_OUT, Job, JobOptions
from tfdp.cli.launch import Slot
from tfdp.cli.log_file import LogFile
from tfdp.cli.restarts import JobEnd, Restarts, note
from tfdp.cli.screen import Screen
from tfdp.cli.signals import SignalPipe
from tfdp.cli.start import Starter
from tfdp.cli.worker import shell_code, signal_name
from tfdp.cluster import Cluster
from tfdp.coordination.preemption import PREEMPTED


@dataclasses.dataclass(frozen=True)
class Attempts:
    """All attempts to run a job.

    Args:
        starter: `Starter` of what every worker runs.
        make_clusters: Function that makes the clusters of so many workers.
        logs: List of `LogFile`, one for each worker.
        screen: The `Screen` that shows the output.
        signals: The `SignalPipe`.
        grace_seconds: Float, between asking the workers to stop and killing them.
        until: Float, by `time.monotonic()`, when all is stopped, or `None`.
    """

    starter: Starter
    make_clusters: Callable[[int], list[Cluster]]
    logs: list[LogFile]
    screen: Screen
    signals: SignalPipe
    grace_seconds: float
    until: float | None

    def run(self, restarts: Restarts, history: list[LogFile]) -> int:
        """Run the workers until they are done, or not to be started again."""
        while True:
            end = self._attempt(restarts)
            following = restarts.after(end)
            if following is None or self.signals.received:
                return end.code
            for log in history:
                note(log, following.line)
            self.screen.message(f"tfdp: {following.line}", "warning")
            code = self.pause(following.pause_seconds)
            if code is not None:
                return code

    def _attempt(self, restarts: Restarts) -> JobEnd:
        """Run the workers once."""
        begin = time.monotonic()
        options = JobOptions(
            until=self.until,
            grace_seconds=self.grace_seconds,
            save_after_seconds=restarts.grow_after_seconds,
            slots=[Slot(index, len(self.logs)) for index in restarts.slots],
        )
        clusters = self.make_clusters(len(restarts.slots))
        job = Job(self.starter, clusters, self.logs, self.screen, self.signals, options)
        code = run_job(job)
        # Also one that came while the job was ending for another reason.
        if self.signals.received and code not in (0, PREEMPTED):
            code = 128 + self.signals.received[0]
        return _describe_end(job, code, time.monotonic() - begin)

    def pause(self, seconds: float) -> int | None:
        """Wait between two attempts.

        Args:
            seconds: Float, for how long.

        Returns:
            Int, the exit code if no other attempt is to follow, or else `None`.
        """
        left = math.inf if self.until is None else self.until - time.monotonic()
        self.signals.wait(min(seconds, left))
        if self.signals.received:
            signum = self.signals.received[0]
            name = signal_name(signum)
            self.screen.message(f"tfdp: {name} received, the job does not start again")
            return 128 + signum
        if left <= seconds:
            self.screen.message("tfdp: --timeout is over, the job does not start again")
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


def _describe_end(job: Job, code: int, seconds: float) -> JobEnd:
    failed, lost = job.failed, job.lost
    # One that failed while the job was being stopped is no reason.
    if failed is None or code != shell_code(failed.exit_code or 0):
        return JobEnd(code, None, "", seconds)
    if lost is not None:
        reason = f"was lost, as worker {failed.rank} says,"
        return JobEnd(code, lost.rank, reason, seconds)
    return JobEnd(code, failed.rank, failed.describe_end(), seconds, job.has_saved)
