"""Restart policy: when a failed job starts again, and with which workers."""

from __future__ import annotations

import dataclasses

from tfdp.communication.coordination.preemption import PREEMPTED
from tfdp.ground.text import pluralize
from tfdp.launch.rendezvous.failure import Failure

# The failure of an attempt that has lasted this many seconds was not caused by its
# start, so the attempt counts as stable.
_STABLE_SECONDS = 60.0
# One failure of a worker may be chance, so a worker is left out only after it has
# failed in this many consecutive attempts.
_TOLERATED = 2
# One failure should cost little time, and a job that keeps failing must not start again
# at once, so pauses before restarts grow by this factor from the first to the longest.
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS, _GROWTH = 0.1, 30.0, 4


@dataclasses.dataclass(frozen=True)
class RestartDecision:
    """Decision to start another attempt.

    Args:
        pause_seconds: Float, pause before the attempt.
        line: String, line about the restart for the screen and the logs.
    """

    pause_seconds: float
    line: str


class Restarts:
    """Policy that decides whether and how a job starts again after an attempt.

    A slot is a share of the machine that one worker uses. A slot whose worker fails
    repeatedly is left out. The remaining workers divide the same global batch, so the
    training stays the same.

    Args:
        num_workers: Int, number of workers that the user asked for.
        max_restarts: Int, most restarts. Defaults to 0.
        min_workers: Int, least number of workers, or `None` for `num_workers`. Defaults
            to `None`.
        grow_after_seconds: Float, seconds of training with fewer workers before all
            slots are tried again; 0: never. Doubled each time that this fails. Defaults
            to 600.0.

    Attributes:
        slots: Tuple of ints, the slot of each worker of the next attempt, by rank.
        count: Int, restarts that count towards `max_restarts`.

    Example:

    >>> restarts = Restarts(4, max_restarts=5, min_workers=2)
    >>> killed = Failure(rank=2, code=137, reason="was killed")
    >>> restarts.decide(killed, 5.0).pause_seconds, restarts.slots
    (0.1, (0, 1, 2, 3))
    >>> restarts.decide(killed, 5.0).pause_seconds, restarts.slots  # again, at once
    (0.4, (0, 1, 3))
    """

    def __init__(
        self,
        num_workers: int,
        max_restarts: int = 0,
        min_workers: int | None = None,
        grow_after_seconds: float = 600.0,
    ) -> None:
        self.count = 0
        self.slots = tuple(range(num_workers))
        self._all = self.slots
        self._max_restarts = max_restarts
        self._least = min_workers or num_workers
        self._failed_slot: int | None = None
        self._consecutive_failures = 0
        self._pause = _FIRST_PAUSE_SECONDS
        self._wait = self._first_wait = grow_after_seconds
        # These slots were left out, and are tried again in this attempt. If one fails
        # soon, it is left out again without counting a restart.
        self._on_trial: frozenset[int] = frozenset()

    @property
    def grow_after_seconds(self) -> float | None:
        """Float, seconds of an attempt after which all slots are tried again.

        It is `None` if no slot is left out, or if slots are never tried again.
        """
        return self._wait if self._wait and self.slots != self._all else None

    def decide(
        self, failure: Failure | None, seconds: float, *, saved_to_grow: bool = False
    ) -> RestartDecision | None:
        """Decide whether another attempt follows, and set `slots` for it.

        Args:
            failure: `Failure` of the worker that failed first, or `None` if the job is
                done or was stopped.
            seconds: Float, duration of the attempt.
            saved_to_grow: Bool, whether the workers have saved and exited so that the
                job continues with more workers: all slots are then used again. Defaults
                to `False`.

        Returns:
            `RestartDecision`, or `None` for no further attempt: the job is done, was
            stopped or preempted, or has failed too often.
        """
        if saved_to_grow:
            return self._grow(seconds)
        if failure is None or failure.code in (0, PREEMPTED):
            return None
        failed = self.slots[failure.rank]
        cause = f"worker {failure.rank} {failure.reason} after {seconds:.0f} s"
        is_stable = seconds >= _STABLE_SECONDS
        can_lose_one = len(self.slots) > self._least
        if failed in self._on_trial and not is_stable and can_lose_one:
            return self._end_trial(cause, failed)
        if self.count >= self._max_restarts:
            return None
        self.count += 1
        if is_stable:
            self._begin_afresh()
        pause = self._pause
        self._pause = min(_GROWTH * pause, _MAX_PAUSE_SECONDS)
        self._count_failure(failed)
        return RestartDecision(
            pause,
            f"restart {self.count} of {self._max_restarts}: {cause}; "
            f"{self._describe_start()} again in {pause:g} s",
        )

    def _grow(self, seconds: float) -> RestartDecision:
        """Use all slots in the next attempt, without counting it as a restart.

        Args:
            seconds: Float, duration of the attempt with fewer workers.
        """
        fewer = pluralize(len(self.slots), "worker")
        self._bring_back()
        return RestartDecision(
            0.0,
            f"growth: training is saved after {seconds:.0f} s with {fewer}; "
            f"{self._describe_start()} again",
        )

    def _end_trial(self, cause: str, slot: int) -> RestartDecision:
        """Leave out a slot again that failed soon after it was brought back.

        The job starts again without it. The next trial comes after twice the time.
        Trials are not counted: a device that stays broken would use up all restarts.

        Args:
            cause: String, such as `"worker 2 was killed after 5 s"`.
            slot: Int, the slot that failed.
        """
        self._leave_out(slot)
        self._wait *= 2
        return RestartDecision(
            _FIRST_PAUSE_SECONDS,
            f"trial failed: {cause}; {self._describe_start()} again in "
            f"{_FIRST_PAUSE_SECONDS:g} s",
        )

    def _begin_afresh(self) -> None:
        """Reset failures and pause after a long attempt; use all slots again."""
        if self._on_trial:
            self._wait = self._first_wait
        self._failed_slot, self._pause = None, _FIRST_PAUSE_SECONDS
        self._bring_back()

    def _bring_back(self) -> None:
        """Use all slots in the next attempt; those that were left out are on trial.

        If the worker of a slot on trial fails early, and enough workers remain,
        `decide` leaves the slot out again without counting a restart.
        """
        self._on_trial = frozenset(self._all) - frozenset(self.slots)
        self.slots = self._all

    def _count_failure(self, slot: int) -> None:
        """Count a failure of a slot, and leave the slot out if it fails repeatedly."""
        self._consecutive_failures = (
            self._consecutive_failures + 1 if slot == self._failed_slot else 1
        )
        self._failed_slot = slot
        if self._consecutive_failures >= _TOLERATED and len(self.slots) > self._least:
            self._leave_out(slot)
            self._failed_slot, self._consecutive_failures = None, 0

    def _leave_out(self, slot: int) -> None:
        """Remove a slot from the next attempts."""
        self.slots = tuple(other for other in self.slots if other != slot)
        self._on_trial -= {slot}

    def _describe_start(self) -> str:
        """Return a clause such as "3 workers (without slot 2) start"."""
        left_out = sorted(set(self._all) - set(self.slots))
        names = ", ".join(map(str, left_out))
        without = f" (without slot {names})" if left_out else ""
        start = "starts" if len(self.slots) == 1 else "start"
        return f"{pluralize(len(self.slots), 'worker')}{without} {start}"
