"""Watchdog thread: detect lost workers, raise in the main thread, end the process."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator

# `ThreadPoolExecutor` is imported with this module: at its first use the interpreter
# may be shutting down, and an import would then fail.
from concurrent.futures import ThreadPoolExecutor

import tensorflow as tf

from tfdp.communication.cluster import ProbeResult, probe_port
from tfdp.communication.coordination.clock import clock
from tfdp.communication.coordination.preemption import PREEMPTED
from tfdp.communication.coordination.progress import WorkerProgress, progress
from tfdp.communication.coordination.watch.data_watch import DataWatch, end_process
from tfdp.communication.coordination.watch.errors import (
    COLLECTIVE_FAILED,
    ClusterChanges,
    NotConnected,
    WorkerFailure,
    WorkerLost,
    bucket_of_error,
    failure_message,
)
from tfdp.communication.coordination.watch.failure_detector import FailureDetector
from tfdp.communication.coordination.watch.heartbeat import Heartbeat
from tfdp.communication.coordination.watch.recorder import FlightRecorder
from tfdp.communication.coordination.watch.stragglers import StragglerCheck
from tfdp.communication.store import HostLost, Membership
from tfdp.ground.forks import Owner
from tfdp.ground.text import say

DEFAULT_LIMIT_SECONDS = 60.0
_CHECK_SECONDS, _URGENT_CHECK_SECONDS, _PROBE_SECONDS = 1.0, 0.1, 2.0
# Longest wait in seconds for a heartbeat to be published, which must not delay an
# error. It is also the pause between two checks of whether the main thread has raised
# the error of a lost worker.
_BEAT_SECONDS = _POLL_SECONDS = 0.2
# An error of TensorFlow may precede the detection of the loss that has caused it, so
# the main thread waits at most this long for the name of the lost worker.
_DIAGNOSIS_SECONDS = 8.0
# The wait for the lost worker's name is short after `NotConnected`: that error comes
# after long attempts to connect, during which a dead or hanging worker was found.
_SHORT_DIAGNOSIS_SECONDS = 2.0
# Seconds that the main thread has to raise the error after a worker was declared lost.
# A main thread that needs longer is assumed to hang, and the process is ended.
_GRACE_SECONDS = 4.0
# Seconds that this process needs to exit after another worker was declared lost. The
# rest of `limit_seconds` is for the detection of the loss.
_EXIT_SECONDS = _CHECK_SECONDS + _GRACE_SECONDS + 1.0
# A worker that ends its script waits at most this long for the store to receive the
# announcement, a little more than one interval of heartbeats.
_LEAVE_SECONDS = 1.2
# Errors that the store and TensorFlow raise in this worker if another one is lost. The
# main thread waits for the name of a lost worker only after one of these.
_ERRORS_OF_OTHERS = (
    HostLost,
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.UnknownError,
)


class Watchdog(threading.Thread):
    """Thread that detects a lost worker, and ends this worker with an error about it.

    Each worker watches all others. Waiting collectives are aborted with an error; a
    process whose main thread hangs is ended with exit code 69.

    Args:
        membership: `Membership` of this process.
        limit_seconds: Float or `None`. The other workers end at most this long after
            the last heartbeat of a lost one; `None` means 60 seconds. It also limits
            the waits for a straggler and for a batch; `None` means that they have no
            limit. Defaults to `None`.
    """

    def __init__(
        self,
        membership: Membership,
        limit_seconds: float | None = None,
    ) -> None:
        super().__init__(name="tfdp watchdog", daemon=True)
        self.owner = Owner()
        self.membership = membership
        limit = limit_seconds or DEFAULT_LIMIT_SECONDS
        self._addresses = membership.cluster.workers
        self._rank = membership.cluster.rank
        others = [r for r in range(len(self._addresses)) if r != self._rank]
        self._detector = FailureDetector(
            others, limit - min(_EXIT_SECONDS, limit / 4), membership.store.host
        )
        # Event that ends the watchdog's pause between two checks, such as when a
        # heartbeat reports a loss, which must be handled at once.
        self._wakes = threading.Event()
        self._heartbeat = Heartbeat(
            self._rank,
            membership.store,
            self._detector,
            self._wakes.set,
        )
        self._recorder = FlightRecorder(self._heartbeat, self._detector)
        self._heartbeat.record_requested = self._record_for
        self._stragglers = StragglerCheck(
            self._heartbeat,
            self._detector,
            self._addresses,
            limit_seconds,
            self._declare_lost,
        )
        self._data = DataWatch(limit_seconds)
        self._failure: WorkerFailure | None = None
        # Event that is set while the main thread waits, after an error of TensorFlow,
        # for the name of the lost worker: then all watched workers are probed right
        # away, not only suspects.
        self._is_urgent = threading.Event()
        self._has_failed = threading.Event()
        self._has_left = False
        # Whether the last probes found a worker whose port refuses connections although
        # it has not announced its end. The next check then comes sooner.
        self._may_have_ended = False
        # Event that is set once the main thread has raised the error of a loss: then
        # the watchdog need not end the process.
        self._is_raised = threading.Event()
        # Whether training continues after the loss of a worker. If so, the main thread
        # may take long to raise the error: the process is ended only after the time
        # limit of the detector.
        self.outlives_losses = False
        # Callables that close connections of tfdp after a loss, so that collectives
        # over these connections fail; the argument is the reason, a string.
        self.closers: list[Callable[[str], None]] = []
        # TensorFlow's error may lack the reason that a collective over tfdp's
        # connections has failed. This hook returns the reason, or `""`.
        self.reason_of_failure: Callable[[], str] = str

    def start(self) -> None:
        """Start this thread and the heartbeat thread."""
        clock.watch()
        self._heartbeat.start()
        super().start()

    def run(self) -> None:
        """Check the other workers and this worker's data source, about each second.

        After a failure, collectives are aborted, and the process is ended if it hangs.
        """
        while self._failure is None and not self._has_left:
            pause = _URGENT_CHECK_SECONDS if self._may_have_ended else _CHECK_SECONDS
            self._wakes.wait(pause)
            self._wakes.clear()
            is_urgent = self._is_urgent.is_set()
            if is_urgent or self._may_have_ended:
                # A worker announces the end of its script before its port refuses
                # connections, so read its heartbeat first.
                self._heartbeat.beat_now(_BEAT_SECONDS)
            self._check_data()
            self._check_workers()
            self._stragglers.check()
            if is_urgent and self._failure is None:
                time.sleep(_URGENT_CHECK_SECONDS)
        if self._failure is not None:
            self._abort(self._failure)

    @contextlib.contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Replace TensorFlow's error in the block by one that names the lost worker.

        Errors with other causes are raised as they are, and most are published to the
        other workers.

        Raises:
            WorkerLost: If the loss of another worker has caused the error.
        """
        try:
            yield
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if self.owner.is_current:
                self._raise_or_publish(error)
            raise

    def _raise_or_publish(self, error: BaseException) -> None:
        """Raise `WorkerLost` if a lost worker caused an error; else publish the error.

        A published error is sent to the other workers with the heartbeat, and they name
        it if this worker ends. A `ClusterChanges`, and the exit on a preemption notice,
        are not published.
        """
        if isinstance(error, _ERRORS_OF_OTHERS):
            place = progress.current.name
            has_tried = isinstance(error, NotConnected)
            seconds = _SHORT_DIAGNOSIS_SECONDS if has_tried else _DIAGNOSIS_SECONDS
            if self._await_failure(seconds):
                raise self._error(place, bucket_of_error(str(error))) from error
            self._heartbeat.last_error = _describe(error)
            return
        if isinstance(error, ClusterChanges):
            # All workers raise `ClusterChanges`, so it need not be published. The main
            # thread has raised it, so the watchdog need not end this process.
            self._is_raised.set()
            return
        if isinstance(error, SystemExit) and error.code == PREEMPTED:
            return
        # The error is published, so that the other workers name it in their messages if
        # this worker ends.
        self._heartbeat.last_error = _describe(error)
        self._heartbeat.beat_now(_BEAT_SECONDS)

    def explain_uncaught(self, error: BaseException) -> None:
        """Print which worker is lost if its loss has caused an uncaught error.

        An error with another cause is published to the other workers. An `Exception`
        is also recorded as the end of the script in this worker's flight record.

        Args:
            error: The exception that ends the script, such as TensorFlow's in a custom
                training loop.
        """
        if not self.owner.is_current:
            return
        self._explain(error)
        if isinstance(error, Exception):
            cause = f"its script has ended with {_describe(error)}"
            self._recorder.record_failure(cause, self._rank)

    def _explain(self, error: BaseException) -> None:
        """Print which lost worker has caused an uncaught error; else publish the error.

        A published error is sent to the other workers with the heartbeat, and they name
        it if this worker ends.
        """
        is_own = isinstance(error, Exception) and not isinstance(error, WorkerLost)
        text = _describe(error)
        if not is_own or text == self._heartbeat.last_error:
            # There is nothing to report: the exception is no failure of this worker, or
            # `translate_errors` has published its text already.
            return
        is_collective = COLLECTIVE_FAILED in str(error)
        may_be_lost = isinstance(error, _ERRORS_OF_OTHERS) or is_collective
        if may_be_lost and self._await_failure():
            bucket = bucket_of_error(f"{error} {self.reason_of_failure()}")
            lost = self._error(progress.current.name, bucket)
            say(lost)
            return
        reason = self.reason_of_failure()
        if is_collective and reason and reason not in str(error):
            say(reason)
            text = reason
        self._heartbeat.last_error = text

    def check(self, rank: int, is_over: bool, call: str) -> None:
        """Raise if a worker is lost: the one that this worker waits for, or another.

        Args:
            rank: Int, the worker that this worker waits for.
            is_over: Bool, whether the wait has reached its limit. Then that worker also
                counts as lost if the detector suspects it.
            call: String, the call in which this worker waits.

        Raises:
            WorkerLost: If one is lost; the message names the lost worker.
        """
        self._look_for_failure(rank, is_over)
        if self._failure is not None:
            raise self._error(progress.current.name, call=call)

    def check_on_thread(self, rank: int, is_over: bool, call: str) -> None:
        """Raise as `check` does, on a thread other than the main one.

        The main thread still has to raise an error of its own.

        Args:
            rank: Int, the worker that this worker waits for.
            is_over: Bool, whether the wait has reached its limit.
            call: String, the call in which this worker waits.

        Raises:
            WorkerLost: If that worker, or another one, is lost.
        """
        self._look_for_failure(rank, is_over)
        if self._failure is not None:
            message = self._message(self._failure, "", call=call)
            raise WorkerLost(message, self._failure.rank)

    def _look_for_failure(self, rank: int, is_over: bool) -> None:
        """Set the failure if a worker has published one, or the worker `rank` is lost.

        The failure is the first loss of a worker, for which this worker ends.

        Args:
            rank: Int, the worker that this worker waits for.
            is_over: Bool, whether the wait has reached its limit. Then that worker also
                counts as lost if the detector suspects it.
        """
        detector = self._detector
        if self._heartbeat.failure is not None:
            self._set_failure(self._heartbeat.failure)
        elif detector.status(rank).has_left:
            self._declare_lost(rank, detector.cause_of_exit(rank))
        elif is_over and rank in detector.suspects():
            self._declare_lost(rank, detector.cause_of_timeout(rank))

    def progress_of(self, rank: int) -> WorkerProgress | None:
        """Return the progress of another worker, or `None` if unknown.

        Args:
            rank: Int, rank of the worker.
        """
        return self._detector.status(rank).progress

    def record_on_signal(self) -> None:
        """Write this worker's flight record, and have the other workers write theirs.

        Called when this process receives a signal that requests records.
        """
        reason = "this worker has received a signal for it"
        self._recorder.record_request(reason, is_own=True)
        self._heartbeat.num_record_requests += 1
        self._heartbeat.beat_now(_BEAT_SECONDS)

    def _record_for(self, rank: int) -> None:
        """Write this worker's flight record, since worker `rank` received a signal."""
        self._recorder.record_request(f"worker {rank} has received a signal for it")

    def leave(self) -> None:
        """Announce that this worker leaves the cluster; stop watching other workers.

        The threads of the watchdog and of the heartbeat end. No announcement is needed
        if the next cluster of the job replaces this one.
        """
        self._recorder.wait()
        self._heartbeat.has_left = self._has_left = True
        self._wakes.set()
        if not self.membership.is_replaced:
            self._heartbeat.beat_now(_LEAVE_SECONDS)

    def _await_failure(self, seconds: float = _DIAGNOSIS_SECONDS) -> bool:
        """Wait until the watchdog has found a lost worker; return whether it has.

        TensorFlow's error about a lost worker may come before the detection of the
        loss.

        Args:
            seconds: Float, the longest wait.
        """
        self._is_urgent.set()
        self._wakes.set()
        has_failed = self._has_failed.wait(seconds)
        self._is_urgent.clear()
        return has_failed

    def _error(self, place: str, bucket: str = "", call: str = "") -> WorkerLost:
        """Return the error of the lost worker, for the main thread to raise.

        It counts as raised, so the watchdog does not end the process.

        Args:
            place: String, step, epoch and loop of this worker, or `""`.
            bucket: String, name of the bucket that was being reduced, or `""`.
            call: String, the call in which this worker waits for the lost one, or `""`.
        """
        failure = self._failure
        assert failure is not None
        self._is_raised.set()
        message = self._message(failure, place, bucket, call)
        return WorkerLost(message, failure.rank)

    def _message(
        self, failure: WorkerFailure, place: str, bucket: str = "", call: str = ""
    ) -> str:
        """Format the message of a failure, of another worker or of this worker.

        Args:
            failure: `WorkerFailure`.
            place: String, step, epoch and loop of this worker, or `""`.
            bucket: String, name of the bucket that was being reduced, or `""`.
            call: String, the call in which this worker waits for the lost one, or `""`.
        """
        if failure.rank == self._rank and failure.own:
            return failure.own
        if failure.rank == self._rank:
            cause = failure.cause
            return f"The other workers have declared this worker lost: {cause}."
        address, command = self._addresses[failure.rank], self._recorder.command
        return failure_message(failure, address, place, bucket, call, command)

    def _check_workers(self) -> None:
        """Probe the ports of suspects, and set the failure if a worker is lost.

        The failure is the first loss of a worker, for which this worker ends.
        """
        is_urgent = self._is_urgent.is_set()
        self._detector.host = self.membership.store.host
        watched = self._detector.ranks()
        self._probe(watched if is_urgent else self._detector.suspects())
        if self._heartbeat.failure is not None:
            self._set_failure(self._heartbeat.failure)
        for rank in watched:
            cause = self._detector.cause(rank)
            if is_urgent or self._detector.status(rank).last_error:
                cause = cause or self._detector.cause_of_exit(rank)
            if cause:
                self._declare_lost(rank, cause)

    def _probe(self, ranks: list[int]) -> None:
        """Probe the ports of workers, and record the results in the detector.

        If a worker may have ended without announcing it, the next check comes sooner.
        """
        self._may_have_ended = False
        if not ranks:
            return
        results = _probe_ports([self._addresses[rank] for rank in ranks])
        for rank, result in zip(ranks, results, strict=True):
            self._detector.record_probe(
                rank,
                refused=result is ProbeResult.REFUSED,
                accepted=result is ProbeResult.ACCEPTED,
            )
            status = self._detector.status(rank)
            self._may_have_ended |= status.refusals > 0 and not status.has_left

    def _declare_lost(self, rank: int, cause: str) -> None:
        """Set the failure, for which this worker ends: the loss of another worker.

        If this worker was suspended for longer than the time limit, the others have
        declared it lost, and the failure is its own.

        Args:
            rank: Int, rank of the other worker.
            cause: String, a clause such as `"its process has ended"`.
        """
        limit = self._detector.limit_seconds
        pause = clock.recent_pause_seconds(limit)
        if pause > limit:
            # This worker was suspended for longer than the limit, so the other workers
            # have declared it lost.
            rank, cause = self._rank, f"it was suspended for {pause:.0f} s"
        self._set_failure(WorkerFailure(rank, cause))

    def _set_failure(self, failure: WorkerFailure) -> None:
        """Set the failure that ends this worker, unless there is one already.

        The heartbeat publishes it, the flight record is written, and calls that wait
        for texts in the store return.
        """
        if self._failure is None:
            # The flight record must have the main thread's stack before that thread
            # raises an error, which it does once `_failure` is set. So the record is
            # taken first.
            self._recorder.record_failure(failure.cause, failure.rank)
            self._failure = self._heartbeat.failure = failure
            self._has_failed.set()
            self.membership.store.wake()

    def _abort(self, failure: WorkerFailure) -> None:
        """Publish the failure, abort collectives, and end the process if it hangs.

        Outside of Keras's loops, the process is ended only for a failure of its own.

        Args:
            failure: `WorkerFailure` for which this worker ends.
        """
        reason = f"worker {failure.rank} is lost"
        store = self.membership.store
        # A lost worker that no standby has replaced is still the host of the store,
        # which then cannot publish the failure.
        is_host = self._rank != failure.rank == store.host
        # A host that has left its cluster has closed its connections to the other
        # workers. They then connect to the standby by themselves, so the store is not
        # given up.
        if is_host and not self._detector.status(failure.rank).has_left:
            store.give_up(failure.rank, f"The store of the job is lost: {reason}.")
        else:
            self._heartbeat.beat_now(_GRACE_SECONDS / 2)
        if self._has_left:
            # This worker has left its cluster. The connections that are open belong to
            # the next cluster, and must stay open.
            return
        for close in self.closers:
            close(reason)
        # A process outside of Keras's loops is not killed: its next collective raises
        # TensorFlow's error, and without another collective it may exit normally.
        is_own = failure.rank == self._rank and failure.own
        while not (place := progress.current.name) and not is_own:
            if self._is_raised.wait(_POLL_SECONDS):
                return
        limit = self._detector.limit_seconds
        grace = max(limit, _GRACE_SECONDS) if self.outlives_losses else _GRACE_SECONDS
        if not self._is_raised.wait(grace):
            self._recorder.wait()
            end_process(self._message(failure, place))

    def _check_data(self) -> None:
        """Publish a wait for data; set this worker's failure if the source hangs."""
        waited = self._data.update()
        self._heartbeat.source = progress.source if waited else ""
        failure = self._data.failure(self._rank)
        if failure is not None:
            self._set_failure(failure)


def _probe_ports(addresses: list[str]) -> list[ProbeResult]:
    """Probe ports concurrently, given as `"host:port"`; return the results in order."""
    probe = functools.partial(probe_port, timeout_seconds=_PROBE_SECONDS)
    try:
        with ThreadPoolExecutor(len(addresses)) as pool:
            return list(pool.map(probe, addresses))
    except RuntimeError:  # the interpreter is shutting down and starts no thread
        return [probe(address) for address in addresses]


def _describe(error: BaseException) -> str:
    """Format an error's type and first line, such as `"ValueError: bad shape"`."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
