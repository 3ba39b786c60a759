"""Data watch: detect a data source that yields no batch, and end the process."""

from __future__ import annotations

import os
import sys
import threading
import time

from tfdp.communication.coordination.clock import clock
from tfdp.communication.coordination.data_wait import data_wait, used_processor_seconds
from tfdp.communication.coordination.progress import progress
from tfdp.communication.coordination.watch.errors import EXIT_CODE, WorkerFailure
from tfdp.ground._compat import runtime
from tfdp.ground.text import say

_CHECK_SECONDS = 1.0
# Fraction of one CPU core below which processes are idle: a process that polls uses
# less, and one that prepares data uses more.
_IDLE_FRACTION = 0.2


class DataWatch:
    """Timer of this process's wait for a batch while no process prepares the batch.

    CPU use of this process or of its descendants restarts the timer: the data source is
    then slow, but does not hang.

    Args:
        limit_seconds: Float or `None`, wait after which the data source has failed.
            Defaults to `None`, no limit.
    """

    def __init__(self, limit_seconds: float | None = None) -> None:
        self._limit_seconds = limit_seconds
        self.seconds = 0.0
        # CPU use is the difference between two readings, so the last reading of the CPU
        # time of this process and its descendants is kept with its time; `None` while
        # this process does not wait for a batch.
        self._last: tuple[float, float] | None = None

    def update(self) -> float:
        """Update the timer; called about every second.

        Returns:
            Float, time of the present wait for a batch in seconds, also if the source
            is slow.
        """
        waited, now = data_wait.seconds, clock.now()
        if not waited:
            self.seconds = 0.0
            self._last = None
            return 0.0
        used = used_processor_seconds()
        before, then = self._last or (used, now)
        self._last = used, now
        is_idle = used - before <= _IDLE_FRACTION * (now - then)
        self.seconds = min(waited, self.seconds + now - then) if is_idle else 0.0
        return waited

    def failure(self, rank: int) -> WorkerFailure | None:
        """Return the failure of a data source that has yielded no batch for too long.

        It is `None` within the time limit of `DataWatch`, and without a limit.

        Args:
            rank: Int, rank of this worker.
        """
        if self._limit_seconds is None or self.seconds <= self._limit_seconds:
            return None
        source = progress.source
        what = f"has yielded no batch and used no CPU for {self.seconds:.0f} s"
        place = progress.current.name
        at = f" at {place}" if place else ""
        return WorkerFailure(
            rank,
            f"its data source, {source}, {what}",
            own=f"{source[0].upper()}{source[1:]} {what}{at}. Check what it waits for, "
            "or set a longer `timeout_seconds` in `CommunicationOptions`.",
        )


class DataWatchdog(threading.Thread):
    """Thread that ends a single-worker process whose data source hangs.

    Args:
        limit_seconds: Float, longest wait for a batch.
    """

    def __init__(self, limit_seconds: float) -> None:
        super().__init__(name="tfdp data watchdog", daemon=True)
        self._watch = DataWatch(limit_seconds)

    def run(self) -> None:
        """Check the data source every second, and end the process if it fails."""
        clock.watch()
        while (failure := self._watch.failure(0)) is None:
            time.sleep(_CHECK_SECONDS)
            self._watch.update()
        end_process(failure.own)


def end_process(text: str) -> None:
    """Print a message, and end this process with exit code 69, even if it hangs.

    Args:
        text: String, the message.
    """
    sys.stdout.flush()
    say(text)
    runtime.remove_generated_files()
    os._exit(EXIT_CODE)
