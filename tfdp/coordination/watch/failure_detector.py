"""When each worker was last heard of, and what follows from that."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence

from tfdp.coordination.progress import WorkerProgress

# After so long without a sign of life a worker's port is tried.
SUSPECT_SECONDS = 2.5
# So many times in a row the port of a process that has ended refuses.
_REFUSALS = 2


@dataclasses.dataclass
class WorkerStatus:
    """What is known of one worker.

    Args:
        heard: Float, when it last gave a sign of life, seconds of `time.monotonic`.
        place: `WorkerProgress` where it was then, or `None`.
        has_left: Bool, whether it has said that its script is through.
        words: String, the last error that left a loop of Keras there, or `""`.
        refusals: Int, how often in a row its port has refused a connection.
        answers: Bool, whether its port accepted the last connection.
    """

    heard: float
    place: WorkerProgress | None = None
    has_left: bool = False
    words: str = ""
    refusals: int = 0
    answers: bool = True


class FailureDetector:
    """What this worker knows of the others; threads share it.

    Args:
        ranks: Sequence of int, the others.
        limit_seconds: Float, after which one that gives no sign of life is lost.
    """

    def __init__(self, ranks: Sequence[int], limit_seconds: float) -> None:
        now = time.monotonic()
        self.limit_seconds = limit_seconds
        self._known = {rank: WorkerStatus(now) for rank in ranks}
        self._lock = threading.Lock()

    def heard(
        self, rank: int, age_seconds: float = 0.0, place: WorkerProgress | None = None
    ) -> None:
        """Notes a sign of life.

        Args:
            rank: Int.
            age_seconds: Float, how old it is.
            place: `WorkerProgress` or `None`.
        """
        with self._lock:
            known = self._known[rank]
            known.heard = max(known.heard, time.monotonic() - age_seconds)
            known.place = place or known.place

    def told(self, rank: int, *, has_left: bool, words: str) -> None:
        """Notes that a worker ends, or an error that may end it."""
        with self._lock:
            self._known[rank].has_left = has_left
            self._known[rank].words = words

    def tried(self, rank: int, *, refused: bool, answers: bool) -> None:
        """Notes what a worker's port did."""
        with self._lock:
            known = self._known[rank]
            known.refusals = known.refusals + 1 if refused else 0
            known.answers = answers

    def forgive(self) -> None:
        """All were heard of just now: this worker itself was asleep."""
        now = time.monotonic()
        with self._lock:
            for known in self._known.values():
                known.heard = now

    def of(self, rank: int) -> WorkerStatus:
        """A copy of what is known of a worker."""
        with self._lock:
            return dataclasses.replace(self._known[rank])

    def suspects(self) -> list[int]:
        """The workers that were not heard of for a while."""
        now = time.monotonic()
        with self._lock:
            return [
                rank
                for rank, known in self._known.items()
                if now - known.heard > SUSPECT_SECONDS
            ]

    def ranks(self) -> list[int]:
        """All the others."""
        return list(self._known)

    def cause(self, rank: int) -> str:
        """Why a worker is lost, or `""` as long as it is not.

        Who has left in good order is lost to nobody but those who wait for it.
        """
        known = self.of(rank)
        if known.has_left:
            return ""
        if known.refusals >= _REFUSALS:
            return self.cause_of_end(rank)
        if time.monotonic() - known.heard < self.limit_seconds:
            return ""
        return self.cause_of_silence(rank)

    def cause_of_silence(self, rank: int) -> str:
        """Why a worker is lost if it has been silent for too long."""
        known = self.of(rank)
        silent = time.monotonic() - known.heard
        at = f" at {known.place.name}" if known.place and known.place.name else ""
        what = (
            f"its process is there, but stands still{at}"
            if known.answers
            else "its host does not answer: it is off, or cut off from the network"
        )
        return f"no sign of life for {silent:.0f} s; {what}"

    def cause_of_end(self, rank: int) -> str:
        """Why a worker is lost if it has ended, or `""`."""
        known = self.of(rank)
        if not known.has_left and known.refusals < _REFUSALS:
            return ""
        after = f", after {known.words}" if known.words else ""
        if known.has_left:
            return f"its script has ended{after}"
        return f"its process has ended{after} (its port refuses connections)"

    def behind(self, place: WorkerProgress) -> dict[int, WorkerProgress]:
        """The workers that have not come to a place yet, and where they are."""
        found = {}
        for rank in self.ranks():
            other = self.of(rank).place
            if other is not None and other.count < place.count:
                found[rank] = other
        return found
