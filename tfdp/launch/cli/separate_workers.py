"""Jobs whose workers fail, and start again, one by one: islands, elastic jobs."""

from __future__ import annotations

import time
from typing import Any

from tfdp.launch.cli.job import Job
from tfdp.launch.cli.worker import Worker


class SeparateWorkersJob(Job):
    """Job that continues while workers fail; subclasses define what follows a failure.

    Args:
        **options: Arguments of `Job`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Failed workers start again after a pause, at these times by index, while the
        # loop serves the other workers.
        self._starts_at: dict[int, float] = {}
        # A worker that has ended stays in the list of workers, so the ids of handled
        # processes are kept, to handle each end once.
        self._handled_pids: set[int] = set()

    def _is_over(self) -> bool:
        """Start failed workers whose pause is over; return whether the job is over.

        It is over once all workers have ended and none is to be started again.
        """
        now = time.monotonic()
        for index in [i for i, at in self._starts_at.items() if at <= now]:
            del self._starts_at[index]
            self._start(index)
        return not self._running() and not self._starts_at

    def _after_failure(self, failed: Worker) -> int | None:
        """Handle all worker failures that have not been handled yet.

        The last lines of each failed worker are printed again if they are not visible,
        and `_handle_failure` starts the worker again or continues without it.

        Args:
            failed: `Worker` that failed first. It is ignored, since several may have
                failed at the same time.

        Returns:
            `None`: the job continues.
        """
        del failed  # all workers are checked: several may have failed at the same time
        self.failed = None
        for index, worker in enumerate(self._workers):
            if worker.exit_code and worker.pid not in self._handled_pids:
                self._handled_pids.add(worker.pid)
                self._output.repeat_last_lines(worker)
                self._handle_failure(index, worker)
        return None

    def _handle_failure(self, index: int, worker: Worker) -> None:
        """Start a failed worker again, with `_start_after`, or continue without it.

        Each subclass decides between the two.

        Args:
            index: Int, index of the worker among those of this machine.
            worker: `Worker` that has failed.
        """
        raise NotImplementedError

    def _start_after(self, seconds: float, index: int) -> None:
        """Schedule the new start of a failed worker after a pause, without waiting.

        Args:
            seconds: Float, the pause.
            index: Int, index of the worker among those of this machine.
        """
        self._starts_at[index] = time.monotonic() + seconds
