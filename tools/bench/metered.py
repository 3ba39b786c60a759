"""Wall time and CPU time of a step; needs nothing but Python."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from tfdp.launch.bench.channel import Arm

Times = dict[str, float]


def metered(
    step: Callable[[], Any],
    finish: Callable[[Any], Any] = lambda result: None,
    meet: Callable[[], Any] | None = None,
) -> Arm:
    """Seconds and CPU seconds per step, of all threads of this process.

    A step before the first is not timed, as in `tfdp.launch.bench.training.timed`.

    Args:
        step: Callable that starts a step and returns what `finish` is given.
        finish: Callable that returns when the step has ended. Defaults to nothing.
        meet: Callable that returns when all workers have called it, in the place of
            the step that is not timed, or `None`. Defaults to `None`.

    Returns:
        Callable that takes a number of steps and returns a dict.
    """

    def run(steps: int) -> Times:
        if meet is None:
            finish(step())
        else:
            meet()
        begin, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            result = step()
        finish(result)
        cpu_seconds = time.process_time() - cpu
        seconds = time.perf_counter() - begin
        return {"seconds": seconds / steps, "cpu_seconds": cpu_seconds / steps}

    return run


def of_all(workers: Sequence[Times]) -> Times:
    """The time of the slowest worker, and the CPU time of each in the mean."""
    return {
        "seconds": max(found["seconds"] for found in workers),
        "cpu_seconds": statistics.mean(found["cpu_seconds"] for found in workers),
    }
