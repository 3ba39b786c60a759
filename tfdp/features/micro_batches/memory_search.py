"""Search for the fewest micro-batches that a known memory limit allows.

The kernel kills a process that exceeds the limit of its container, and TensorFlow ends
one in which a small allocation fails, such as that of a thread: no error can be caught.
So the first step computes rows one by one. As long as the measured memory lets expect
that twice the rows fit, too, the next step has half the micro-batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import psutil

from tfdp.ground.base.memory import (
    free_in_container,
    free_of_process,
    peak_bytes,
    reset_peak,
)

# Part of the free memory that a step may use. The rest is for allocations outside of
# steps, for memory that the allocator does not give back, and for replicas of one
# process whose peaks coincide in some steps only.
_USABLE = 0.5


class MemoryPredictor:
    """Predicts whether a step with twice the rows stays below one memory limit.

    Args:
        peak: Callable that returns the most bytes in use since a step began.
        used: Int, bytes in use now.
        free: Float, bytes below the limit now.

    Example:

    >>> peaks = iter((110, 115, 145))
    >>> predictor = MemoryPredictor(lambda: next(peaks), used=100, free=160)
    >>> [predictor.can_double() for _ in range(3)]
    [True, True, False]
    """

    def __init__(self, peak: Callable[[], int], used: int, free: float) -> None:
        self._peak, self._base, self._usable = peak, used, _USABLE * free
        self._growth: int | None = None

    def can_double(self) -> bool:
        """Return whether a step with twice the rows of the last one is likely to fit.

        It is called after each step, which has twice the rows of the step before. The
        difference between the two is the memory that depends on rows; after the first
        step, all memory of the step counts as dependent on rows.
        """
        before, growth = self._growth, max(self._peak() - self._base, 0)
        self._growth = growth
        more = growth if before is None else 2 * max(growth - before, 0)
        return growth + more <= self._usable


class MemorySearch:
    """Prediction of whether fewer micro-batches fit into the memory of this process.

    `can_halve` is called after each step of a search. Without a limit every step fits.

    Args:
        num_processes: Int, number of processes that share the memory of the container.

    Attributes:
        predictors: List of `MemoryPredictor`, one for each memory limit that exists:
            that of the container, and that of the process.
    """

    # Number of micro-batches with which a search begins: more than any batch has rows,
    # so that replicas compute their rows one by one.
    START = 2**30

    def __init__(self, num_processes: int) -> None:
        self.predictors: list[MemoryPredictor] = []
        used = psutil.Process().memory_info()
        if (free := free_in_container()) < float("inf") and reset_peak():
            self.predictors.append(
                MemoryPredictor(peak_bytes, used.rss, free / num_processes)
            )
        if (free := free_of_process()) < float("inf") and reset_peak():
            peak = functools.partial(peak_bytes, is_virtual=True)
            self.predictors.append(MemoryPredictor(peak, used.vms, free))

    def can_halve(self) -> bool:
        """Return whether a step with half the micro-batches is likely to fit.

        It also resets the peak of memory, so that the next step is measured anew.
        """
        answers = [predictor.can_double() for predictor in self.predictors]
        reset_peak()
        return all(answers)
