"""Waits for data: the time since a batch was requested from a data source."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import psutil

from tfdp.communication.coordination.clock import clock
from tfdp.communication.coordination.progress import progress
from tfdp.ground._compat import runtime


class ReadCounts(NamedTuple):
    """Numbers of batches that steps have requested and received.

    Args:
        requested: Int, number of requested batches.
        received: Int, number of received batches.
    """

    requested: int
    received: int


class BatchWait:
    """Time that this process has waited for one batch; thread-safe.

    `reading` records reads by Python. Steps count the batches that they have requested
    and received in the graph; while the numbers differ, a step waits. At the end of the
    data, a requested batch is never received, so the numbers are compared only while
    TensorFlow runs.

    Example:

    >>> wait = BatchWait()
    >>> wait.seconds
    0.0
    """

    def __init__(self) -> None:
        # This package cannot import `tfdp.training.data`, whose graphs count their
        # batches. So that package sets a function here that reads the counters.
        self.read_counts: Callable[[], ReadCounts] = lambda: ReadCounts(0, 0)
        self._lock = threading.Lock()
        self._num_reads = self._num_reading = 0
        # The counts of batches show that a read is pending, but not since when. So
        # `seconds` keeps the counts that it has seen, with the time when it first saw
        # them: other counts begin a new wait.
        self._seen: tuple[int, ReadCounts] | None = None
        self._since = 0.0

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Record that Python reads data in the block."""
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
        """Float, seconds since this property first saw the pending read, or 0.0."""
        counts = self.read_counts()
        with self._lock:
            runs = progress.current.is_computing or runtime.call_in_progress()
            if not self._num_reading and not (
                runs and counts.requested > counts.received
            ):
                self._seen = None
                return 0.0
            wait, now = (self._num_reads, counts), clock.now()
            if wait != self._seen:
                self._seen, self._since = wait, now
            return now - self._since


def used_processor_seconds() -> float:
    """Return the CPU time of this process and its descendants, in seconds.

    Descendants include processes that prepare data, such as workers of a torch
    `DataLoader`.
    """
    used = time.process_time()
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                times = child.cpu_times()
                used += times.user + times.system
    return used


data_wait = BatchWait()
