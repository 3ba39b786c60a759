"""When a job that failed is started again, and with how many workers."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time

from tfdp.preemption import PREEMPTED

# Who trained for so long was well: what failed then has nothing to do with the start.
_STABLE_SECONDS = 60.0
# So often in a row one worker may be the first to fail before it is left out.
_TOLERATED = 2
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0


@dataclasses.dataclass(frozen=True)
class RestartOptions:
    """How often a job is started again.

    Args:
        max_restarts: Int. Defaults to 0, never.
        min_workers: Int, with how many workers it still makes sense, or `None` for
            all of them. Defaults to `None`.
    """

    max_restarts: int = 0
    min_workers: int | None = None


@dataclasses.dataclass(frozen=True)
class JobEnd:
    """How an attempt ended.

    Args:
        code: Int, the exit code.
        failed_rank: Int, the worker that failed first, or `None` if the job was
            stopped or is done.
        reason: String, how that worker ended.
        seconds: Float, how long the attempt lasted.
    """

    code: int
    failed_rank: int | None
    reason: str
    seconds: float


class Restarts:
    """Decides what follows the end of an attempt.

    The batch size of Keras is that of all replicas, so that with fewer workers each
    one's share grows and the training stays the same.

    Args:
        num_workers: Int, that were asked for.
        options: `RestartOptions`.

    Example:

    >>> restarts = Restarts(4, RestartOptions(max_restarts=5, min_workers=2))
    >>> killed = JobEnd(137, failed_rank=3, reason="was killed", seconds=5.0)
    >>> restarts.pause_after(killed), restarts.num_workers
    (1.0, 4)
    >>> restarts.pause_after(killed), restarts.num_workers  # again, and at once
    (2.0, 3)
    """

    def __init__(self, num_workers: int, options: RestartOptions) -> None:
        self.count = 0
        self.num_workers = num_workers
        self._asked_for = num_workers
        self._options = options
        self._failed_rank: int | None = None
        self._in_a_row = 0
        self._pause = _FIRST_PAUSE_SECONDS

    def pause_after(self, end: JobEnd) -> float | None:
        """How long to wait before the next attempt; sets `num_workers` for it.

        Args:
            end: `JobEnd`.

        Returns:
            Float, seconds, or `None` if there is none: the job is done, was stopped
            or preempted, or has failed too often.
        """
        is_over = end.failed_rank is None or end.code in (0, PREEMPTED)
        if is_over or self.count >= self._options.max_restarts:
            return None
        self.count += 1
        if end.seconds >= _STABLE_SECONDS:
            # What was left out may be well again.
            self.num_workers = self._asked_for
            self._failed_rank, self._pause = None, _FIRST_PAUSE_SECONDS
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
        is_same = end.failed_rank == self._failed_rank
        self._in_a_row = self._in_a_row + 1 if is_same else 1
        self._failed_rank = end.failed_rank
        least = self._options.min_workers or self._asked_for
        if self._in_a_row >= _TOLERATED and self.num_workers > least:
            self.num_workers -= 1
            self._failed_rank, self._in_a_row = None, 0
        return pause

    def describe(self, end: JobEnd, pause: float) -> str:
        """The line for the screen and for the history.

        Args:
            end: `JobEnd`.
            pause: Float, what `pause_after` returned.
        """
        fewer = self._asked_for - self.num_workers
        left_out = f" ({fewer} left out)" if fewer else ""
        return (
            f"restart {self.count} of {self._options.max_restarts}: worker "
            f"{end.failed_rank} {end.reason} after {end.seconds:.0f} s; "
            f"{self.num_workers} workers{left_out} start again in {pause:g} s"
        )


def note(folder: pathlib.Path, line: str) -> None:
    """Adds a line to the history of restarts beside the logs of the workers."""
    moment = time.strftime("%Y-%m-%d %H:%M:%S")
    # A full disk ends the history, not the training.
    with contextlib.suppress(OSError), open(folder / "restarts.log", "a") as file:
        file.write(f"{moment} {line}\n")
