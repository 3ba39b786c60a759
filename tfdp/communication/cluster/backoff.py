"""Pauses of a poll loop that leave the cores to those who compute."""

from __future__ import annotations

import time

# The end of a pause takes longer than this.
_SPIN_SECONDS = 30e-6
_SHORTEST_SECONDS = 20e-6
# A pause adds at most this part to what was waited before it.
_PART = 8


class Backoff:
    """Pauses that grow with the time waited, by an eighth of it.

    Never `sched_yield`: where all cores compute it costs a whole time slice, some
    milliseconds, while a thread that slept is run as soon as it wakes.

    Args:
        longest_seconds: Float, the longest pause. Defaults to a millisecond.

    Example:

    >>> backoff = Backoff(longest_seconds=0.01)
    >>> backoff.pause()
    >>> backoff.waited_seconds > 0
    True
    """

    def __init__(self, longest_seconds: float = 1e-3) -> None:
        self._longest_seconds = longest_seconds
        self._start = time.monotonic()

    @property
    def waited_seconds(self) -> float:
        """Float, seconds since the last `reset`."""
        return time.monotonic() - self._start

    def reset(self) -> None:
        """Begin again with short pauses: something has come."""
        self._start = time.monotonic()

    def pause(self) -> None:
        """Give the core to others for a while, unless the wait has just begun."""
        waited = self.waited_seconds
        if waited > _SPIN_SECONDS:
            pause = max(_SHORTEST_SECONDS, waited / _PART)
            time.sleep(min(pause, self._longest_seconds))
