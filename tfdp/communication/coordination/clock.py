"""Clock of this process, which stops while the process is suspended."""

from __future__ import annotations

import threading
import time

from tfdp.ground.forks import in_forks

# The watchdog reads the clock every second. During a longer gap between two readings,
# this process was suspended, or its machine was too busy to run it, so the gap does not
# count.
_MAX_GAP_SECONDS = 2.5
_USUAL_GAP_SECONDS = 1.0


class ProcessClock:
    """Clock that leaves out the time of suspensions of this process; thread-safe.

    A suspended process receives no heartbeats although the other workers send them. So
    waits, and times without a heartbeat, are measured with this clock.

    Example:

    >>> process_clock = ProcessClock()
    >>> process_clock.now() <= process_clock.now()
    True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read_at = time.monotonic()
        self._is_watched = False
        self._suspended = 0.0
        self._last_pause = (float("-inf"), 0.0)

    def watch(self) -> None:
        """Detect suspensions from now on. A thread must then call `now` each second."""
        self.now()
        self._is_watched = True

    def now(self) -> float:
        """Return the seconds that this process could run, from an arbitrary start."""
        with self._lock:
            real = time.monotonic()
            gap, self._read_at = real - self._read_at, real
            if self._is_watched and gap > _MAX_GAP_SECONDS:
                self._suspended += gap - _USUAL_GAP_SECONDS
                self._last_pause = (real - self._suspended, gap)
            return real - self._suspended

    def recent_pause_seconds(self, seconds: float) -> float:
        """Return the length of the last suspension if it ended recently, else 0.0.

        Args:
            seconds: Float, longest time since its end that is recent, by this clock.
        """
        now = self.now()
        ended_at, length = self._last_pause
        return length if now - ended_at <= seconds else 0.0

    def reset_in_fork(self) -> None:
        """Replace the lock in a forked process, and detect no suspensions there.

        Another thread may have held the lock at the fork.
        """
        self._lock = threading.Lock()
        self._is_watched = False


clock = ProcessClock()
in_forks(clock.reset_in_fork)
