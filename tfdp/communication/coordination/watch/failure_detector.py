"""Failure detector: decide by heartbeats and port probes which worker is lost."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

from tfdp.communication.coordination.clock import clock
from tfdp.communication.coordination.flight_record import CollectiveIdentity, Peer
from tfdp.communication.coordination.progress import WorkerProgress
from tfdp.communication.coordination.watch.errors import SCRIPT_ENDED
from tfdp.communication.store import beat_seconds
from tfdp.ground.base.process_identity import ProcessIdentity

# A worker is a suspect after `_SUSPECT_BEATS` intervals without a heartbeat. In large
# jobs, whose intervals are long, `_SUSPECT_SECONDS` are enough, but never fewer than
# `_MIN_SUSPECT_BEATS` intervals: the store reports no age of a more recent heartbeat.
_SUSPECT_BEATS, _SUSPECT_SECONDS, _MIN_SUSPECT_BEATS = 2.5, 8.0, 1.5
# After the first refused connection, the watchdog reads the worker's last heartbeat,
# which may announce a normal end. A second refusal in succession shows that the process
# has ended.
_REFUSALS = 2


@dataclasses.dataclass
class WorkerStatus:
    """Status of another worker, by its heartbeats and by probes of its port.

    Args:
        last_heartbeat: Float, time of the last heartbeat, by
            `tfdp.communication.coordination.clock`.
        progress: `WorkerProgress` of the worker at that time, or `None`.
        has_left: Bool, whether it has announced the end of its script.
        last_error: String, the last error that a loop of Keras raised there, or `""`.
        idle_seconds: Float, time for which it has used hardly any CPU.
        refusals: Int, number of successive connections that its port has refused.
        accepted: Bool, whether its port accepted the last connection.
        process: `ProcessIdentity`, or `None` if unknown.
        evidence: String, the last probe's evidence that the process has ended.
        is_disconnected: Bool, whether its connection to the store has ended.
        reported_age: Float, age of its last heartbeat in seconds, by the store's last
            answer; 0 if recent.
    """

    last_heartbeat: float
    progress: WorkerProgress | None = None
    has_left: bool = False
    last_error: str = ""
    idle_seconds: float = 0.0
    refusals: int = 0
    accepted: bool = True
    process: ProcessIdentity | None = None
    evidence: str = ""
    is_disconnected: bool = False
    reported_age: float = 0.0


class FailureDetector:
    """Detector of lost workers, by their heartbeats and probed ports; thread-safe.

    Args:
        ranks: Sequence of int, the other workers.
        limit_seconds: Float, time without a heartbeat after which a worker is lost.
        host: Int, rank of the worker that hosts the store.

    Attributes:
        host: Int, rank of the worker that hosts the store at present.
        beat_seconds: Float, time between two heartbeats of a worker.
    """

    def __init__(self, ranks: Sequence[int], limit_seconds: float, host: int) -> None:
        now = clock.now()
        self.limit_seconds = limit_seconds
        self.beat_seconds = beat_seconds(len(ranks) + 1)
        self.host = host
        self._answered_at = now
        self._status = {rank: WorkerStatus(now) for rank in ranks}
        self._lock = threading.Lock()

    def record_heartbeat(
        self,
        rank: int,
        age_seconds: float = 0.0,
        progress: WorkerProgress | None = None,
    ) -> None:
        """Record a heartbeat of another worker.

        Args:
            rank: Int, rank of the worker.
            age_seconds: Float, age of the heartbeat.
            progress: `WorkerProgress` of the worker, or `None` to keep the last known
                one.
        """
        with self._lock:
            status = self._status[rank]
            heartbeat = clock.now() - age_seconds
            status.last_heartbeat = max(status.last_heartbeat, heartbeat)
            status.progress = progress or status.progress
            status.reported_age = age_seconds

    def record_status(self, rank: int, **fields: Any) -> None:
        """Replace some fields of a worker's `WorkerStatus`."""
        with self._lock:
            self._status[rank] = dataclasses.replace(self._status[rank], **fields)

    def record_probe(self, rank: int, *, refused: bool, accepted: bool) -> None:
        """Record the result of a connection attempt to a worker's port.

        An accepted connection does not prove that the worker runs: a process that it
        has forked may hold the port. So a worker of this machine whose process has
        ended counts like one whose port has refused the connection.

        Args:
            rank: Int, rank of the worker.
            refused: Bool, whether its host has refused the connection.
            accepted: Bool, whether its port has accepted the connection.
        """
        process = self.status(rank).process
        has_ended = not refused and process is not None and process.has_ended()
        with self._lock:
            status = self._status[rank]
            status.refusals = status.refusals + 1 if refused or has_ended else 0
            status.accepted = accepted
            status.evidence = "its port refuses connections"
            if has_ended and process is not None:
                status.evidence = f"process {process.pid} of this machine"

    def status(self, rank: int) -> WorkerStatus:
        """Return a copy of a worker's status."""
        with self._lock:
            return dataclasses.replace(self._status[rank])

    def record_answer(self, dated: set[int]) -> None:
        """Record that the store has answered a heartbeat of this worker.

        Args:
            dated: Set of ints, the ranks whose last heartbeat has an age in the answer.
                Those of all others are recent.
        """
        now = clock.now()
        with self._lock:
            self._answered_at = now
            for rank, status in self._status.items():
                if rank not in dated and not status.is_disconnected:
                    status.last_heartbeat, status.reported_age = now, 0.0

    def suspects(self) -> list[int]:
        """Return the ranks of workers that may be lost.

        These have sent no recent heartbeat, or their connections to the store have
        ended.

        While the store does not answer, only the store's host is a suspect.
        """
        with self._lock:
            return [
                rank
                for rank, status in self._status.items()
                if (status.is_disconnected and not status.has_left)
                or (self._is_silent(status) and self._knows(rank))
            ]

    def _is_silent(self, status: WorkerStatus) -> bool:
        """Return whether a worker is a suspect, since its last heartbeat is too old.

        The older of two ages counts. The age that this worker has measured may be too
        small by one of its heartbeats. The age that the store reports may be too large,
        since it includes times in which this worker was suspended. So a silent worker
        is not yet a lost one.
        """
        silent = max(clock.now() - status.last_heartbeat, status.reported_age)
        return silent > self._suspect_seconds

    @property
    def _suspect_seconds(self) -> float:
        """Float, time without a heartbeat after which a worker may be lost."""
        beat = self.beat_seconds
        return max(
            _MIN_SUSPECT_BEATS * beat, min(_SUSPECT_BEATS * beat, _SUSPECT_SECONDS)
        )

    def _knows(self, rank: int) -> bool:
        """Return whether this worker can judge the age of another's last heartbeat.

        It always can for the store's host. For other workers it needs the answers of
        the store, and the last one must be recent.
        """
        oldest = clock.now() - self._suspect_seconds
        return rank == self.host or self._answered_at > oldest

    def ranks(self) -> list[int]:
        """Return the ranks of the other workers."""
        return list(self._status)

    def cause(self, rank: int) -> str:
        """Return the cause of a worker's loss, a clause, or `""` if it is not lost.

        A worker that has ended its script normally does not count as lost here.
        """
        status = self.status(rank)
        if status.has_left:
            return ""
        if status.refusals >= _REFUSALS:
            return self.cause_of_exit(rank)
        is_recent = clock.now() - status.last_heartbeat < self.limit_seconds
        if is_recent or not self._knows(rank):
            return ""
        return self.cause_of_timeout(rank)

    def cause_of_timeout(self, rank: int) -> str:
        """Describe a worker that has sent no heartbeat for too long, as a clause."""
        status = self.status(rank)
        silent = clock.now() - status.last_heartbeat
        place = status.progress.name if status.progress else ""
        seen = f", last seen at {place}" if place else ""
        what = (
            f"its process exists but hangs{seen}"
            if status.accepted
            else "its host does not answer: it is off, or cut off from the network"
        )
        return f"no sign of life for {silent:.0f} s; {what}"

    def cause_of_exit(self, rank: int) -> str:
        """Return a clause about how a worker's script or process has ended.

        It is `""` if neither has ended, as far as this worker knows.
        """
        status = self.status(rank)
        if not status.has_left and status.refusals < _REFUSALS:
            return ""
        after = f", after {status.last_error}" if status.last_error else ""
        if status.has_left:
            return f"{SCRIPT_ENDED}{after}"
        return f"its process has ended{after} ({status.evidence})"

    def stragglers(self, own: WorkerProgress) -> dict[int, WorkerProgress]:
        """Return the progress of the workers that are behind this worker, by rank.

        Args:
            own: `WorkerProgress` of this worker.
        """
        found = self._progress()
        return {rank: its for rank, its in found.items() if its.count < own.count}

    def not_in_collective(
        self, identity: CollectiveIdentity, number: int
    ) -> dict[int, WorkerProgress]:
        """Return the progress, by rank, of members that have not entered a collective.

        Args:
            identity: `CollectiveIdentity` of the collective.
            number: Int, number of the request in its lane.
        """
        return {
            rank: its
            for rank, its in self._progress().items()
            if rank in identity.ranks
            and its.collectives.get(identity.lane, -1) < number
        }

    def workers_past(self, own: WorkerProgress) -> dict[int, WorkerProgress]:
        """Return the progress, by rank, of workers that have left this worker's step.

        A worker counts if it has reported an error, has made at least as much progress
        as this worker, and is at another place. Workers without an error do not count:
        they may be ahead in a step without collectives.

        Args:
            own: `WorkerProgress` of this worker.
        """
        return {
            rank: its
            for rank, its in self._progress().items()
            if self.status(rank).last_error
            and its.count >= own.count
            and its.name != own.name
        }

    def sources(self) -> dict[int, str]:
        """Return the data sources that other workers wait for, by rank."""
        found = self._progress()
        return {rank: its.source for rank, its in found.items() if its.source}

    def peers(self) -> dict[int, Peer]:
        """Return the other workers' last known states by rank, for a flight record."""
        now, found = clock.now(), {}
        for rank in self.ranks():
            status = self.status(rank)
            its = status.progress
            place, source = (its.name, its.source) if its is not None else ("", "")
            silent = now - status.last_heartbeat
            found[rank] = Peer(place, source, status.last_error, silent)
        return found

    def is_deadlocked(self, own: WorkerProgress, idle_seconds: float) -> bool:
        """Return whether all workers compute the same step, and the others are idle.

        Outside of Keras's loops, steps of different workers are not comparable, so any
        step counts as the same.

        Args:
            own: `WorkerProgress` of this worker.
            idle_seconds: Float, least time for which each other worker must have been
                idle.
        """
        others = [self.status(rank) for rank in self.ranks()]
        # Workers in a custom training loop have no name in their progress, and their
        # counts are not comparable, so only their idle times count.
        return own.is_computing and all(
            status.progress is not None
            and status.progress.is_computing
            and (
                status.progress.count == own.count
                or not own.name
                or not status.progress.name
            )
            and status.idle_seconds >= idle_seconds
            for status in others
        )

    def first_with_other_reductions(self, own: WorkerProgress) -> int | None:
        """Return the first rank whose traced reductions differ from `own`'s, or `None`.

        Args:
            own: `WorkerProgress` of this worker.
        """
        found = self._progress()
        others = (r for r, its in found.items() if its.reductions != own.reductions)
        return next(others, None)

    def _progress(self) -> dict[int, WorkerProgress]:
        """Return the known progress of the other workers, by rank."""
        found = {rank: self.status(rank).progress for rank in self.ranks()}
        return {rank: its for rank, its in found.items() if its is not None}
