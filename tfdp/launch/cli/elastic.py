"""`tfdp run --elastic`: a job that continues without lost workers, or replaces them."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import Any

import click

from tfdp.communication.coordination.preemption import PREEMPTED
from tfdp.communication.store import ask_workers
from tfdp.ground.text import pluralize
from tfdp.launch.cli import parameter_types as types
from tfdp.launch.cli.separate_workers import SeparateWorkersJob
from tfdp.launch.cli.worker import LogFile, Worker, shell_code
from tfdp.launch.rendezvous.elastic_coordinator import SILENT_SECONDS
from tfdp.launch.rendezvous.failure import NODE_LOST

# A worker whose replacement has also failed probably fails at each start, so it is
# replaced again only after this many seconds.
_PAUSE_SECONDS = 1.0
# Workers may wait for others that have ended or are lost, and will never join. This is
# checked at this interval in seconds, which leaves new workers time to join.
_CHECK_SECONDS = 15.0
# A job whose workers fail again and again must end: unless `--max-restarts` is given,
# this many replacements of all workers together are started.
DEFAULT_REPLACEMENTS = 10


def _bounds(text: str) -> tuple[int, int]:
    """Parse the value of `--elastic`: `MIN:MAX`, or one number for both.

    Returns:
        Tuple of two ints, the least and the largest number of workers.

    Raises:
        ValueError: If it is neither, or if it is not `1 <= MIN <= MAX`.
    """
    least, _, most = text.partition(":")
    try:
        bounds = int(least), int(most or least)
    except ValueError:
        bounds = 0, 0
    if not 1 <= bounds[0] <= bounds[1]:
        raise ValueError("it must be MIN:MAX, such as 2:4, with MIN at least 1")
    return bounds


elastic_option = types.option(
    "--elastic MIN:MAX",
    "Start MAX workers. If some are lost, the others continue, at least MIN of them, "
    "and new ones take their places; for `tfdp.callbacks.BackupAndRestore`.",
    types.Checked("range", _bounds),
    name="elastic_bounds",
)


class ElasticJob(SeparateWorkersJob):
    """Job that continues while workers fail, and starts new ones in their places.

    Args:
        most_replacements: Int, most replacements of all workers together.
        history: Sequence of `LogFile` that record the failures.
        least: Int, least number of workers of this machine with which the job can
            continue. Defaults to 1, where other machines may have enough.
        **options: Arguments of `Job`.
    """

    def __init__(
        self,
        most_replacements: int,
        history: Sequence[LogFile],
        least: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._history = history
        self._most_replacements, self._least = most_replacements, least
        # The number of replacements is limited, and a second one of the same worker
        # starts later, so the index of each replaced worker is kept.
        self._replaced: list[int] = []
        # Indices of the workers that were started while others were training. Such a
        # worker comes too late if the others end without an error before it has joined
        # them.
        self._late: set[int] = set()
        # Workers may wait for others that will never join, so the job ends if none has
        # trained for 60 s. `_check_at` is the time of the next check, and
        # `_answered_at` that of the last answer, or of the start of the checks.
        self._check_at: float | None = None
        self._answered_at = 0.0

    def _is_over(self) -> bool:
        """Return whether all workers have ended and none is to be started.

        It starts the replacements that are due, and stops workers that wait for others
        that will not join them.
        """
        if has_success := self._has_success():
            self._starts_at.clear()
        if has_success or self._is_incomplete():
            self._check_waits(time.monotonic(), has_success)
        else:
            self._check_at = None
        return super()._is_over()

    def _has_success(self) -> bool:
        """Return whether a worker has ended without an error."""
        return any(worker.exit_code == 0 for worker in self._workers)

    def _is_incomplete(self) -> bool:
        """Return whether a worker has ended, and no replacement runs or is due."""
        return len(self._running()) + len(self._starts_at) < len(self._workers)

    def _waits_for_ended_workers(self) -> bool:
        """Return whether running workers wait for ended ones to join the cluster.

        The result is false once a replacement was started: a replacement may wait for
        workers that have ended after their training, which `_check_waits` handles.
        """
        return not self._late and super()._waits_for_ended_workers()

    def _check_waits(self, now: float, has_success: bool) -> None:
        """Stop this node's workers if no worker of the job trains any more.

        Every 15 s the workers of all nodes are asked whether they train. With
        `has_success`, they are asked only while all running workers are late ones, and
        the late ones are stopped at once if no worker trains. Without it, the job ends
        once no worker has trained for 60 s.

        Args:
            now: Float, the present time by `time.monotonic`.
            has_success: Bool, whether a worker has ended without an error. Late
                workers, which were started during training, may then never join.
        """
        if self._check_at is None:
            self._check_at, self._answered_at = now + _CHECK_SECONDS, now
        running = [i for i, worker in enumerate(self._workers) if worker.is_running]
        is_due = now >= self._check_at and bool(running)
        if not is_due or (has_success and not self._late.issuperset(running)):
            return
        self._check_at = now + _CHECK_SECONDS
        # Each worker that has joined the job answers until its process ends, so a
        # single answer shows that training continues.
        if self.is_job_running():
            self._answered_at = now
        elif has_success:
            self._stop(signal.SIGTERM)
        elif now - self._answered_at >= SILENT_SECONDS:
            self._end_wait(now - self._answered_at)

    def _end_wait(self, seconds: float) -> None:
        """End the job, and print that no worker has trained for `seconds`."""
        self._starts_at.clear()
        self._stop(signal.SIGTERM)
        self._code = NODE_LOST
        self._screen.message(
            f"tfdp: no worker has trained for {seconds:.0f} s: the others are lost, "
            "and those that waited for them here were stopped. Start the job again: "
            "it resumes from its newest backup",
            "error",
        )

    def is_job_running(self) -> bool:
        """Return whether a worker, on this node or another, answers that the job runs.

        The job runs once all workers of its first cluster have joined.
        """
        cluster = self._clusters[0]
        return ask_workers(cluster, cluster.workers) is not None

    def _handle_failure(self, index: int, worker: Worker) -> None:
        """Schedule a replacement of a failed worker, or report why there is none.

        If it is not replaced, and fewer than `least` workers are left, these are
        stopped.
        """
        assert worker.exit_code is not None
        if self._is_stopping:
            return  # the launcher itself has stopped this worker
        if self._has_success():
            # `PREEMPTED` is not a failure here, since it is the exit code of a
            # replacement that has started too late to join the others.
            if worker.exit_code != PREEMPTED:
                self._code = self._code or shell_code(worker.exit_code)
                self._report(worker, "others have ended without an error")
            return
        number = len(self._replaced)
        num_left = len(self._running()) + len(self._starts_at)
        left = pluralize(num_left, "worker")
        if number < self._most_replacements:
            self._start_after(_PAUSE_SECONDS * (index in self._replaced), index)
            self._replaced.append(index)
            self._late.add(index)
            which = f"replacement {number + 1} of {self._most_replacements}"
            self._report(worker, f"a new one takes its place ({which})")
        elif num_left >= self._least:
            self._report(worker, f"it is not replaced, and {left} may continue")
        else:
            self._code = self._code or shell_code(worker.exit_code)
            few = f"it is not replaced, and {left} cannot continue alone"
            self._report(worker, few if num_left else "no worker is left")
            self._starts_at.clear()
            self._stop(signal.SIGTERM)

    def _report(self, worker: Worker, follows: str) -> None:
        """Print and log how a worker ended; `follows`, a clause, says what follows."""
        line = f"worker {worker.rank} {worker.describe_end()}; {follows}"
        for log in self._history:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
        self._screen.message(
            f"tfdp: {line}. Full output: {worker.log.path}",
            "warning",
            rank=worker.rank,
        )


def check_elastic(option: str, others: list[str]) -> None:
    """Raise a usage error if an elastic option is combined with others it excludes.

    Args:
        option: String, such as `"--elastic"`.
        others: List of strings, used options that do not work with it.

    Raises:
        click.UsageError: If `others` is not empty.
    """
    if others:
        raise click.UsageError(
            f"{option} cannot be combined with {others[0]}: remove it"
        )
