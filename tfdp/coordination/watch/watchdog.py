"""Looks after the other workers, and ends this one when it cannot go on."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdp import _compat
from tfdp.cluster import Answer, knock
from tfdp.coordination.preemption import PREEMPTED
from tfdp.coordination.progress import WorkerProgress, progress
from tfdp.coordination.watch.errors import (
    EXIT_CODE,
    Verdict,
    WorkerLost,
    bucket_in,
    message_of,
)
from tfdp.coordination.watch.failure_detector import FailureDetector
from tfdp.coordination.watch.heartbeat import Heartbeat
from tfdp.coordination.worker_group import WorkerGroup

DEFAULT_LIMIT_SECONDS = 60.0
_LOOK_SECONDS, _HURRY_SECONDS, _KNOCK_SECONDS = 1.0, 0.2, 2.0
# How long an error of TensorFlow waits for the name of the worker behind it.
_PATIENCE_SECONDS = 8.0
# How long the main thread has to come out of what it does.
_GRACE_SECONDS = 4.0
# To look, and to come out of it: what is left of a limit when a worker is given up.
_LAST_SECONDS = _LOOK_SECONDS + _GRACE_SECONDS + 1.0
_WARN_AFTER_SECONDS = 10.0
_PARTING_SECONDS = 1.2
# Who looks again only after so long was stopped, and has heard of nobody.
_ASLEEP_SECONDS = 10.0
# What TensorFlow raises when another worker is gone.
_ERRORS_OF_OTHERS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.UnknownError,
)


class Watchdog(threading.Thread):
    """Finds out which worker is lost, and lets this one stop with its name.

    The first worker looks after all others, and these after the first one. Who is
    waiting in a collective gets an error; a process that does not come out of what it
    does is ended, with exit code 69.

    Args:
        worker_group: `WorkerGroup` between the workers.
        addresses: Sequence of strings, `"host:port"` by rank.
        limit_seconds: Float or `None`, after which all have ended if a worker gives
            no sign of life. Defaults to `None`, 60 seconds.
    """

    def __init__(
        self,
        worker_group: WorkerGroup,
        addresses: Sequence[str],
        limit_seconds: float | None = None,
    ) -> None:
        super().__init__(name="tfdp watchdog", daemon=True)
        limit = limit_seconds or DEFAULT_LIMIT_SECONDS
        self._patience_seconds = limit_seconds
        others = [r for r in range(len(addresses)) if r != worker_group.rank]
        self._addresses = addresses
        self._rank = worker_group.rank
        self._sightings = FailureDetector(others, limit - min(_LAST_SECONDS, limit / 4))
        self._pulse = Heartbeat(worker_group, self._sightings)
        self._verdict: Verdict | None = None
        # Set while an error of TensorFlow waits for the name of who is lost.
        self._is_hurried = threading.Event()
        self._is_decided = threading.Event()
        # Set when the main thread has come out with the error.
        self._is_heard = threading.Event()
        self._warned_at = -1

    def start(self) -> None:
        """Begins to look, and to give signs of life."""
        self._pulse.start()
        super().start()

    def run(self) -> None:
        """Looks every second until somebody is lost."""
        while self._verdict is None:
            before = time.monotonic()
            if self._is_hurried.wait(_LOOK_SECONDS):
                time.sleep(_HURRY_SECONDS)
            if time.monotonic() - before > _ASLEEP_SECONDS:
                self._sightings.forgive()  # this worker was stopped itself
                continue
            self._look()
            self._wait()
        self._act(self._verdict)

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Turns an error of TensorFlow inside into one that names the lost worker.

        Raises:
            WorkerLost: If another worker is lost.
        """
        try:
            yield
        except _ERRORS_OF_OTHERS as error:
            place = progress.place.name
            if self._is_told():
                raise self._error(place, bucket_in(str(error))) from error
            self._pulse.words = _in_short(error)
            raise
        except WorkerLost:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if isinstance(error, SystemExit) and error.code == PREEMPTED:
                raise  # as all do
            # If it ends the script, the others hear of it.
            self._pulse.words = _in_short(error)
            self._pulse.tell_now(_HURRY_SECONDS)
            raise

    def explain_end(self, error: BaseException) -> None:
        """Says which worker is lost, if an error that nobody has caught is due to it.

        Args:
            error: What ends the script: in a loop of the user's own, TensorFlow's.
        """
        is_own = isinstance(error, Exception) and not isinstance(error, WorkerLost)
        words = _in_short(error)
        if not is_own or words == self._pulse.words:
            return  # `explaining` has looked at it: the others hear of it now
        if isinstance(error, _ERRORS_OF_OTHERS) and self._is_told():
            text = self._error(progress.place.name, bucket_in(str(error)))
            print(f"tfdp: {text}", file=sys.stderr, flush=True)
        else:
            self._pulse.words = words

    def check(self, rank: int, is_over: bool) -> None:
        """Raises if another worker is lost.

        Args:
            rank: Int, the worker that this one waits for.
            is_over: Bool, whether it has waited for as long as it would.

        Raises:
            WorkerLost: Naming it.
        """
        known = self._sightings
        if self._pulse.verdict is not None:
            self._decide(self._pulse.verdict)
        elif known.of(rank).has_left:
            self._decide(Verdict(rank, known.cause_of_end(rank)))
        elif is_over and rank in known.suspects():
            self._decide(Verdict(rank, known.cause_of_silence(rank)))
        if self._verdict is not None:
            raise self._error(progress.place.name)

    def leave(self) -> None:
        """Says that this worker's script is through, and is silent from now on."""
        self._pulse.has_left = True
        self._pulse.tell_now(_PARTING_SECONDS)
        if self._rank == 0 and (self._pulse.words or self._verdict):
            # The store ends with this process: the others read it every second.
            time.sleep(_PARTING_SECONDS)

    def _is_told(self) -> bool:
        """Waits for a verdict: an error comes faster than who is behind it."""
        self._is_hurried.set()
        self._pulse.tell_now(_HURRY_SECONDS)
        told = self._is_decided.wait(_PATIENCE_SECONDS)
        self._is_hurried.clear()
        return told

    def _error(self, place: str, bucket: str = "") -> WorkerLost:
        verdict = self._verdict
        assert verdict is not None
        self._is_heard.set()
        return WorkerLost(self._message(verdict, place, bucket))

    def _message(self, verdict: Verdict, place: str, bucket: str = "") -> str:
        if verdict.rank == self._rank:
            return f"The other workers have given this one up: {verdict.cause}."
        return message_of(verdict, self._addresses[verdict.rank], place, bucket)

    def _look(self) -> None:
        """Knocks where it is silent, and decides."""
        is_hurried = self._is_hurried.is_set()
        watched = self._sightings.ranks() if self._rank == 0 or is_hurried else [0]
        silent = watched if is_hurried else self._sightings.suspects()
        self._knock([rank for rank in watched if rank in silent])
        if self._pulse.verdict is not None:
            self._decide(self._pulse.verdict)
        for rank in watched:
            cause = self._sightings.cause(rank)
            if is_hurried or self._sightings.of(rank).words:
                cause = cause or self._sightings.cause_of_end(rank)
            if cause:
                self._decide(Verdict(rank, cause))

    def _knock(self, ranks: list[int]) -> None:
        if not ranks:
            return
        with concurrent.futures.ThreadPoolExecutor(len(ranks)) as pool:
            addresses = [self._addresses[rank] for rank in ranks]
            answers = pool.map(lambda a: knock(a, _KNOCK_SECONDS), addresses)
            for rank, answer in zip(ranks, answers, strict=True):
                self._sightings.tried(
                    rank,
                    refused=answer is Answer.REFUSED,
                    answers=answer is Answer.ACCEPTED,
                )

    def _decide(self, verdict: Verdict) -> None:
        if self._verdict is None:
            self._verdict = self._pulse.verdict = verdict
            self._is_decided.set()

    def _act(self, verdict: Verdict) -> None:
        """Lets the others know, and the main thread come out."""
        if self._rank == 0:
            self._pulse.tell_now(_GRACE_SECONDS / 2)
        _compat.abort_collectives(f"worker {verdict.rank} is lost")
        # A loop of the user's own gets TensorFlow's error in its next collective, and
        # a script that has none may come to its end.
        while not (place := progress.place.name):
            time.sleep(_HURRY_SECONDS)
        if not self._is_heard.wait(_GRACE_SECONDS):
            sys.stdout.flush()
            text = self._message(verdict, place)
            print(f"tfdp: {text}", file=sys.stderr, flush=True)
            _compat.remove_generated_files()
            os._exit(EXIT_CODE)

    def _wait(self) -> None:
        """Says who has not come to where this worker waits, before it is an error."""
        place = progress.place
        # Who waits for other workers says so itself.
        if place.seconds < _WARN_AFTER_SECONDS or not place.name or place.exchanges:
            return
        behind = self._sightings.behind(place)
        limit = self._patience_seconds
        if behind and limit is not None and place.seconds > limit:
            rank, other = next(iter(behind.items()))
            self._decide(Verdict(rank, _cause_of_delay(place, other)))
        elif behind and self._warned_at != place.count:
            self._say_who_is_behind(place, behind)

    def _say_who_is_behind(
        self, place: WorkerProgress, behind: dict[int, WorkerProgress]
    ) -> None:
        self._warned_at = place.count
        names = ", ".join(
            f"worker {rank} ({self._addresses[rank]}), which is at "
            f"{other.name or 'no call of Keras or tfdp'}"
            for rank, other in behind.items()
        )
        # No warning: as an error it would end this thread.
        print(
            f"tfdp: waiting at {place.name} for {place.seconds:.0f} s for {names}.",
            file=sys.stderr,
            flush=True,
        )


def _cause_of_delay(place: WorkerProgress, other: WorkerProgress) -> str:
    where = other.name or "no call of Keras or tfdp"
    return (
        f"it has not come in {place.seconds:.0f} s, and is at {where}; a longer "
        "`timeout_seconds` in `CommunicationOptions` waits longer"
    )


def _in_short(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
