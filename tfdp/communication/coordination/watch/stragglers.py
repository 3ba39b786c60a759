"""Workers that are behind this one, and steps in which all workers wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tfdp.communication.coordination.clock import clock
from tfdp.communication.coordination.flight_record import (
    CollectiveIdentity,
    collective_ring,
    tensorflow_calls,
)
from tfdp.communication.coordination.progress import WorkerProgress, progress
from tfdp.communication.coordination.watch.failure_detector import FailureDetector
from tfdp.communication.coordination.watch.heartbeat import Heartbeat
from tfdp.communication.coordination.worker_group import NO_CALL
from tfdp.ground import user_code
from tfdp.ground.text import say

_WARN_AFTER_SECONDS = 10.0
_SAME_CALLS = "every worker has to make the same calls on the same model"


class StragglerCheck:
    """Check whether this worker waits for others, or all workers wait for each other.

    Args:
        heartbeat: `Heartbeat` of this worker.
        detector: `FailureDetector`, with the progress of the other workers.
        addresses: Sequence of strings, `"host:port"` by rank.
        timeout_seconds: Float or `None`, wait after which a worker is declared lost.
        declare_lost: Callable, receives the rank of a worker that is to be declared
            lost, and the cause, a clause.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        detector: FailureDetector,
        addresses: Sequence[str],
        timeout_seconds: float | None,
        declare_lost: Callable[[int, str], None],
    ) -> None:
        self._heartbeat, self._detector = heartbeat, detector
        self._rank, self._addresses = heartbeat.rank, addresses
        self._timeout_seconds, self._declare_lost = timeout_seconds, declare_lost
        # A custom loop does not record when it began to wait. So the wait is measured
        # from the first check that found this worker in the same collective.
        self._awaited: tuple[CollectiveIdentity, int] | None = None
        self._since = 0.0

    def check(self) -> None:
        """Warn of workers that this worker awaits; at the timeout, declare one lost.

        Without such workers, check whether all wait for each other.
        """
        own = self._heartbeat.progress
        measure = self._in_keras_loop if own.name else self._in_custom_loop
        waited, stragglers = measure(own)
        limit = self._timeout_seconds
        # A straggler that waits for data is not declared lost here. If its data source
        # hangs, it reports that itself; if the source is only slow, the others wait.
        late = {rank: its for rank, its in stragglers.items() if not its.source}
        if late and limit is not None and waited > limit:
            rank, other = next(iter(late.items()))
            self._declare_lost(rank, _cause_of_delay(waited, other))
        elif stragglers:
            self._warn_of_stragglers(own, waited, stragglers)
        elif not own.is_all_gathering:
            self._check_deadlock(own)

    def _in_keras_loop(
        self, own: WorkerProgress
    ) -> tuple[float, dict[int, WorkerProgress]]:
        """Return how long this worker waits in a loop of Keras, and for which workers.

        Args:
            own: `WorkerProgress` of this worker.

        Returns:
            Tuple of a float, in seconds, and a dict from the rank of a straggler to its
            progress. The dict is empty during the first 10 seconds, and in an
            all-gather of texts, since `WorkerGroup` warns of waits there.
        """
        if own.seconds < _WARN_AFTER_SECONDS or own.is_all_gathering:
            return own.seconds, {}
        return own.seconds, self._detector.stragglers(own) or self._past_this_step(own)

    def _in_custom_loop(
        self, own: WorkerProgress
    ) -> tuple[float, dict[int, WorkerProgress]]:
        """Return how long this worker waits in a collective of a custom training loop.

        The places of scripts are not comparable there, but the numbers of collectives
        are, or of calls of functions whose collectives TensorFlow runs.

        Args:
            own: `WorkerProgress` of this worker.

        Returns:
            Tuple of a float, in seconds, and a dict from the rank of a straggler to its
            progress, empty during the first 10 seconds.
        """
        awaited = collective_ring.awaited() or tensorflow_calls.awaited()
        if awaited is None or awaited != self._awaited:
            self._awaited, self._since = awaited, clock.now()
        waited = clock.now() - self._since
        if awaited is None or waited < _WARN_AFTER_SECONDS:
            return waited, {}
        return waited, self._detector.not_in_collective(*awaited)

    def _past_this_step(self, own: WorkerProgress) -> dict[int, WorkerProgress]:
        """Return the workers, by rank, that left the step in which this worker waits.

        A worker leaves a step without the others if its script catches an error of the
        step. The result is empty unless this worker computes, waits for no data, and
        has been idle for 10 seconds.
        """
        is_idle = self._heartbeat.idle_seconds >= _WARN_AFTER_SECONDS
        waits = own.is_computing and not own.source and is_idle
        return self._detector.workers_past(own) if waits else {}

    def _check_deadlock(self, own: WorkerProgress) -> None:
        """Warn if all workers wait in one step; declare one lost if reductions differ.

        After the timeout, the first worker that has traced other reductions than this
        one is declared lost. If they agree, there is only a warning, which names the
        workers that wait for data: if a data source hangs, its worker reports that.

        Args:
            own: `WorkerProgress` of this worker.
        """
        limit = self._timeout_seconds
        waited = own.seconds if own.name else self._heartbeat.call_seconds
        idle = min(waited, self._heartbeat.idle_seconds)
        is_deadlocked = self._detector.is_deadlocked(own, _WARN_AFTER_SECONDS)
        if idle < _WARN_AFTER_SECONDS or not is_deadlocked:
            return
        rank = self._detector.first_with_other_reductions(own)
        if rank is not None and limit is not None and idle > limit:
            self._declare_lost(rank, f"its step reduces other tensors; {_SAME_CALLS}")
        elif user_code.record_if_new("deadlock", self):
            # The warning is printed only once, since it may be false: a long step on
            # GPUs also leaves the CPUs idle.
            sources = self._detector.sources()
            if own.source:
                sources[self._rank] = own.source
            waits = "; ".join(
                f"worker {rank} for a batch of {source}"
                for rank, source in sorted(sources.items())
            )
            why = waits or (
                f"for data ({progress.source}) or in different collectives; "
                f"{_SAME_CALLS}"
            )
            self._warn(
                own,
                f"all workers wait at {own.name or 'an operation of TensorFlow'} for "
                f"{waited:.0f} s, {why}.",
            )

    def _warn_of_stragglers(
        self,
        own: WorkerProgress,
        waited: float,
        stragglers: dict[int, WorkerProgress],
    ) -> None:
        """Warn of workers behind this worker, unless a waiting lower rank warns.

        Args:
            own: `WorkerProgress` of this worker.
            waited: Float, seconds of its wait.
            stragglers: Dict from the rank of a worker to its progress.
        """
        if any(
            rank < self._rank
            and rank not in stragglers
            and not self._detector.status(rank).has_left
            for rank in self._detector.ranks()
        ):
            return  # one warning is enough: the lowest waiting rank prints it
        names = ", ".join(
            f"worker {rank} ({self._addresses[rank]}), which is at {_place(other)}"
            for rank, other in stragglers.items()
        )
        self._warn(own, f"waiting at {_place(own)} for {waited:.0f} s for {names}.")

    def _warn(self, own: WorkerProgress, text: str) -> None:
        """Print a text, once for each place in this worker's progress.

        Args:
            own: `WorkerProgress` of this worker.
            text: String, a sentence.
        """
        if user_code.record_if_new(f"place {own.count} {self._awaited}", self):
            # The text is printed, since a Python warning may be turned into an error,
            # which would end this thread.
            say(text)


def _place(its: WorkerProgress) -> str:
    """Describe where a worker is: in a loop of Keras, or at a line of its script."""
    return its.name or its.line or NO_CALL


def _cause_of_delay(waited: float, other: WorkerProgress) -> str:
    """Format the clause that a straggler has not arrived in time.

    Args:
        waited: Float, seconds that this worker has waited for it.
        other: `WorkerProgress` of the straggler.
    """
    return (
        f"it has not arrived within {waited:.0f} s; it is at {_place(other)}; a longer "
        "`timeout_seconds` in `CommunicationOptions` waits longer"
    )
