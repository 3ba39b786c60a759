"""Data watch: name a data source that gives no batch, and end its process."""

from __future__ import annotations

import os
import sys
import threading
import time

from tfdp.communication.coordination.clock import clock
from tfdp.communication.coordination.data_wait import data_wait, used_processor_seconds
from tfdp.communication.coordination.progress import progress
from tfdp.communication.coordination.watch.errors import EXIT_CODE, WorkerFailure
from tfdp.ground import _compat

_CHECK_SECONDS = 1.0
# Of a processor: polling takes less, preparing data takes more.
_IDLE_FRACTION = 0.2


class DataWatch:
    """How long this process has waited for a batch while nobody prepared it.

    A source whose process, or one that it has started, uses a processor is slow and
    lives; each such second begins the wait anew.

    Args:
        limit_seconds: Float or `None`, after which a wait is a failure. Defaults to
            `None`, never.
    """

    def __init__(self, limit_seconds: float | None = None) -> None:
        self._limit_seconds = limit_seconds
        self.seconds = 0.0
        # Processor time, of the children too, and when it was read; `None` while no
        # batch is waited for.
        self._last: tuple[float, float] | None = None

    def update(self) -> float:
        """Look at the wait of this moment, about every second.

        Returns:
            Float, for how long one batch has been waited for, slow sources included.
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
        """Return the failure of this worker, or `None` while the wait may go on.

        Args:
            rank: Int, this worker's.
        """
        if self._limit_seconds is None or self.seconds <= self._limit_seconds:
            return None
        source = progress.source
        what = f"has given no batch, and computed nothing, for {self.seconds:.0f} s"
        place = progress.current.name
        at = f" at {place}" if place else ""
        return WorkerFailure(
            rank,
            f"its data source, {source}, {what}",
            own=f"{source[0].upper()}{source[1:]} {what}{at}. See what it waits for; a "
            "longer `timeout_seconds` in `CommunicationOptions` waits longer.",
        )


class DataWatchdog(threading.Thread):
    """Thread that ends a process without other workers whose data does not come.

    Args:
        limit_seconds: Float, how long it may wait.
    """

    def __init__(self, limit_seconds: float) -> None:
        super().__init__(name="tfdp data watchdog", daemon=True)
        self._watch = DataWatch(limit_seconds)

    def run(self) -> None:
        """Check every second."""
        clock.watch()
        while (failure := self._watch.failure(0)) is None:
            time.sleep(_CHECK_SECONDS)
            self._watch.update()
        end_process(failure.own)


def end_process(text: str) -> None:
    """End this process, whose main thread does not come out of what it does.

    Args:
        text: String, why.
    """
    sys.stdout.flush()
    print(f"tfdp: {text}", file=sys.stderr, flush=True)
    _compat.remove_generated_files()
    os._exit(EXIT_CODE)
