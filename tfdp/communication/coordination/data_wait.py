"""Waits for data: since when a data source has been asked for a batch."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import psutil

from tfdp.communication.coordination.clock import clock
from tfdp.communication.coordination.progress import progress
from tfdp.ground import _compat


class ReadCounts(NamedTuple):
    """Batches that steps have asked their data for, and those that they were given.

    Args:
        asked: Int.
        given: Int.
    """

    asked: int
    given: int


class DataWait:
    """Time that this process has waited for one batch; thread-safe.

    Python's own reads are noted by `reading`; those of steps are counted in the graph,
    and only looked at when somebody asks. At the end of the data one that was asked for
    is not given: it counts while TensorFlow runs.

    Example:

    >>> wait = DataWait()
    >>> wait.seconds
    0.0
    """

    def __init__(self) -> None:
        # Counts in the graph, where steps count their reads, see `tfdp.data`.
        self.read_counts: Callable[[], ReadCounts] = lambda: ReadCounts(0, 0)
        self._lock = threading.Lock()
        self._num_reads = self._num_reading = 0
        # The wait that was seen last, and when it was seen first.
        self._seen: tuple[int, ReadCounts] | None = None
        self._since = 0.0

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Record that Python reads data inside."""
        with self._lock:
            self._num_reads += 1
            self._num_reading += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_reading -= 1

    @property
    def seconds(self) -> float:
        """Float, for how long one batch has been waited for, as seen by the callers."""
        counts = self.read_counts()
        with self._lock:
            runs = progress.current.is_computing or _compat.call_in_progress()
            if not self._num_reading and not (runs and counts.asked > counts.given):
                self._seen = None
                return 0.0
            wait, now = (self._num_reads, counts), clock.now()
            if wait != self._seen:
                self._seen, self._since = wait, now
            return now - self._since


def used_processor_seconds() -> float:
    """Time on processors of this process and of those that it has started.

    Those that prepare data, such as the workers of a torch `DataLoader`, count too.
    """
    used = time.process_time()
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                times = child.cpu_times()
                used += times.user + times.system
    return used


data_wait = DataWait()
