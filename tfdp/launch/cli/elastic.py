"""`tfdp run --elastic`: a job that continues without lost workers, or replaces them."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import Any

import click

from tfdp.communication.coordination.preemption import PREEMPTED
from tfdp.ground.text import pluralize
from tfdp.launch.cli import parameter_types as types
from tfdp.launch.cli.job import Job
from tfdp.launch.cli.worker import LogFile, Worker, shell_code

# Pause before a worker that has failed again is replaced.
_PAUSE_SECONDS = 1.0
# Time after which a replacement that still runs, when others have ended without an
# error, is one that has come too late.
_LATE_SECONDS = 30.0
# Most replacements of all workers together, by default.
DEFAULT_REPLACEMENTS = 10


def _bounds(text: str) -> tuple[int, int]:
    """Parse `MIN:MAX`, or one number for both."""
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


class ElasticJob(Job):
    """Job that continues while workers fail, and starts new ones in their places.

    Args:
        most_replacements: Int, most replacements of all workers together.
        history: Sequence of `LogFile` that record the failures.
        **options: Arguments of `Job`.
    """

    def __init__(
        self, most_replacements: int, history: Sequence[LogFile], **options: Any
    ) -> None:
        super().__init__(**options)
        self._history = history
        self._most_replacements = most_replacements
        # Indices of the workers that were replaced, one for each time.
        self._replaced: list[int] = []
        # Times at which failed workers are replaced, by their index.
        self._starts_at: dict[int, float] = {}
        # Time at which a worker was first seen to have ended without an error.
        self._done_at = 0.0
        # Ids of processes whose end has been handled.
        self._handled_pids: set[int] = set()

    def _is_over(self) -> bool:
        """Replace failed workers when it is time; return whether all have ended."""
        now = time.monotonic()
        if any(worker.exit_code == 0 for worker in self._workers):
            self._end_late_ones(now)
        for index in [i for i, at in self._starts_at.items() if at <= now]:
            del self._starts_at[index]
            self._start(index)
        return not self._running() and not self._starts_at

    def _end_late_ones(self, now: float) -> None:
        """Start no replacement any more, and stop those that wait for an ended job.

        Args:
            now: Float, the present time.
        """
        self._starts_at.clear()
        self._done_at = self._done_at or now
        late = [w for i, w in enumerate(self._workers) if i in self._replaced]
        running = self._running()
        if now - self._done_at > _LATE_SECONDS and all(w in late for w in running):
            for worker in running:
                if worker.pid not in self._handled_pids:
                    self._handled_pids.add(worker.pid)
                    worker.send(signal.SIGTERM)

    def _after_failure(self, failed: Worker) -> None:
        """Replace all workers that have failed, or continue without them."""
        del failed  # all workers are checked: several may have failed at the same time
        self.failed = None
        for index, worker in enumerate(self._workers):
            is_new = (
                worker.pid not in self._handled_pids and index not in self._starts_at
            )
            if worker.exit_code and is_new:
                self._handled_pids.add(worker.pid)
                self._handle_failure(index, worker)

    def _handle_failure(self, index: int, worker: Worker) -> None:
        """Schedule the replacement of a worker that has failed, if there is one."""
        assert worker.exit_code is not None
        if any(other.exit_code == 0 for other in self._workers):
            # A replacement that comes too late to take part exits with this code.
            if worker.exit_code != PREEMPTED:
                self._code = self._code or shell_code(worker.exit_code)
                self._report(worker, "others have ended without an error")
            return
        number = len(self._replaced)
        if number < self._most_replacements:
            pause = _PAUSE_SECONDS if index in self._replaced else 0.0
            self._replaced.append(index)
            self._starts_at[index] = time.monotonic() + pause
            which = f"replacement {number + 1} of {self._most_replacements}"
            self._report(worker, f"a new one takes its place ({which})")
        elif self._running():
            left = pluralize(len(self._running()), "worker")
            self._report(worker, f"it is not replaced, and {left} may continue")
        else:
            self._code = self._code or shell_code(worker.exit_code)
            self._report(worker, "no worker is left")

    def _report(self, worker: Worker, follows: str) -> None:
        """Print how a worker has ended, and what follows."""
        self._recall(worker)
        line = f"worker {worker.rank} {worker.describe_end()}; {follows}"
        for log in self._history:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
        self._screen.message(
            f"tfdp: {line}. Full output: {worker.log.path}",
            "warning",
            rank=worker.rank,
        )


def check_elastic(num_workers: int | None, others: list[str]) -> None:
    """Raise if `--elastic` is combined with options that exclude it.

    Args:
        num_workers: Int, the value of `-n`, or `None`.
        others: List of strings, used options that do not work with it.

    Raises:
        click.UsageError: If so.
    """
    if num_workers is not None:
        others = ["-n, since it starts MAX workers", *others]
    if others:
        raise click.UsageError(
            f"--elastic cannot be combined with {others[0]}: remove it"
        )
