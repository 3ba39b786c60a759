"""All-gather of short texts between workers, without collectives and with timeouts.

Collectives wait indefinitely if a worker is missing or sends another shape. So workers
agree beforehand through the job's store.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

from tfdp.communication.coordination.clock import clock
from tfdp.communication.coordination.flight_record import (
    TEXTS,
    CollectiveIdentity,
    CollectiveRing,
    collective_ring,
)
from tfdp.communication.coordination.progress import (
    ProgressRecorder,
    WorkerProgress,
    progress,
)
from tfdp.communication.store import Gathering, Store
from tfdp.ground import forks, user_code
from tfdp.ground.base.feature import job_part
from tfdp.ground.text import list_ranks

_WARN_AFTER_SECONDS = 10.0
# Seconds between two checks of whether an awaited worker is alive. Each check asks the
# store, so the interval grows during a wait, from the first value to the second.
_CHECK_SECONDS, _MAX_CHECK_SECONDS = 0.25, 3.0
# Messages describe the place of a worker by this text if its progress names no call, as
# in the user's own code.
NO_CALL = "no call of Keras or tfdp"
# The latest group of several workers (key `True`), and of one worker. The references
# are strong, since workers must agree on the latest group, but their garbage collectors
# run at different times.
_latest: dict[bool, WorkerGroup] = {}


class WorkerGroup:
    """Group of workers that all-gather texts; all make the same calls in order.

    Args:
        rank: Int, index of this worker.
        num_workers: Int, number of workers.
        timeout_seconds: Float or `None`, the longest wait. Defaults to
            `None`, no limit, with a warning that names the missing worker.
        store: `Store` of the job, or `None` for a single worker, the default.
    """

    def __init__(
        self,
        rank: int,
        num_workers: int,
        timeout_seconds: float | None = None,
        store: Store | None = None,
    ) -> None:
        self.rank = rank
        self.num_workers = num_workers
        self.timeout_seconds = timeout_seconds
        self._store = store
        self._prefix = self.new_prefix()
        self._progress, self._ring = progress, collective_ring
        # Whether this group warns the user of long waits. A group for another thread
        # does not, since the main thread may only be busy.
        self.warns = True
        # Number of all-gathers that this worker has begun. All workers make the same
        # calls in order, so it gives the next all-gather the same key on each of them.
        self.num_calls = 0
        self.owner = forks.Owner()
        # `tfdp.communication.coordination.watch` imports this module, and so sets its
        # hooks here: `check` raises an error if the awaited worker is lost,
        # `check_on_thread` raises it on a thread other than the main one, `progress_of`
        # returns a worker's progress, and `guard` translates errors of the store.
        self.check: Callable[[int, bool, str], None] = lambda rank, is_over, call: None
        self.check_on_thread = self.check
        self.progress_of: Callable[[int], WorkerProgress | None] = lambda rank: None
        self.guard: Callable[[], contextlib.AbstractContextManager]
        self.guard = contextlib.nullcontext

    @property
    def store(self) -> Store:
        """`Store` of the job; a group of one worker has none."""
        assert self._store is not None
        return self._store

    @property
    def is_chief(self) -> bool:
        """Bool, whether this worker writes files and reports for the group."""
        return self.rank == 0

    @property
    def is_job_chief(self) -> bool:
        """Bool, whether this worker is the chief of the whole job.

        In a job of several parts that train separately, it is the first part's chief.
        """
        part = job_part()
        return self.is_chief and (part is None or part.index == 0)

    def for_other_thread(self) -> WorkerGroup:
        """Return a group of the same workers for one thread other than the main thread.

        Its calls have their own order, do not count as this worker's progress, and are
        not in its flight record. It does not warn of long waits, since the main thread
        may be busy, unless the caller sets its attribute `warns`. All workers must call
        this in the same order.
        """
        group = WorkerGroup(
            self.rank, self.num_workers, self.timeout_seconds, self._store
        )
        group._progress, group._ring = ProgressRecorder(), CollectiveRing()
        group.warns = False
        group.check = self.check_on_thread
        return group

    def new_prefix(self) -> str:
        """Return a new prefix for store keys, the same on all workers.

        All workers must call this in the same order. Without a store it is `""`.
        """
        return "" if self._store is None else self._store.new_prefix()

    def all_gather(
        self,
        topic: str,
        value: Any = "",
        timeout_seconds: float | None = None,
        check: Callable[[int], None] = lambda rank: None,
    ) -> list[Any]:
        """Gather the values of all workers on every worker.

        Args:
            topic: String, subject of the values, for error messages.
            value: Value of this worker, which JSON must support. Defaults to `""`.
            timeout_seconds: Float, the longest wait, or `None` for the limit of the
                group. Defaults to `None`.
            check: Callable, called every few seconds with the rank of each missing
                worker. It may raise a `ValueError`, which withdraws this call.
                Defaults to a function that does nothing.

        Returns:
            List of values, ordered by rank.

        Raises:
            TimeoutError: If a worker does not take part in time.
            RuntimeError: If workers are not at the same call.
        """
        if self.num_workers == 1:
            return [json.loads(json.dumps(value))]
        self.owner.check(topic)
        limit = timeout_seconds or self.timeout_seconds
        message = json.dumps({"topic": topic, "value": value})
        with self._progress.all_gathering(topic), self.guard():
            call = f"{self._prefix}/{self.num_calls}"
            ranks = tuple(range(self.num_workers))
            identity = CollectiveIdentity(self._prefix, ranks, TEXTS, "", topic, topic)
            with self._ring.entered(identity, self.num_calls, len(message)):
                gathering = self.store.gather(call, message)
                self.num_calls += 1
                texts = self._wait(gathering, limit, topic, check)
            self._progress.record_texts_gathered()
            return self._values(topic, texts)

    def all_equal(self, topic: str, value: Any) -> bool:
        """Return whether the values of all workers are equal.

        Args:
            topic: String, subject of the values, for error messages.
            value: Value of this worker, which JSON must support.
        """
        first, *others = self.all_gather(topic, value)
        return all(other == first for other in others)

    def any(self, topic: str, value: bool) -> bool:
        """Return whether the value is true on any worker.

        Args:
            topic: String, subject of the values, for error messages.
            value: Bool of this worker.
        """
        return any(self.all_gather(topic, bool(value)))

    def _wait(
        self,
        gathering: Gathering,
        limit: float | None,
        topic: str,
        check: Callable[[int], None],
    ) -> list[str]:
        """Wait for the texts of all workers, with warnings and checks of missing ones.

        Args:
            gathering: `Gathering`, in which this worker has sent its own text.
            limit: Float or `None`, longest wait in seconds.
            topic: String, subject of the values, for messages.
            check: Callable, called every few seconds with the rank of each missing
                worker. It may raise a `ValueError`, which withdraws this call.

        Returns:
            List of strings, by rank.

        Raises:
            TimeoutError: If a text does not arrive in time.
        """
        begin = clock.now()
        while True:
            waited = clock.now() - begin
            step = min(_CHECK_SECONDS + waited / 5, _MAX_CHECK_SECONDS)
            left = step if limit is None else limit - waited
            texts = gathering.texts(max(min(step, left), 0.01))
            if texts is not None:
                return texts
            missing = [rank for rank in gathering.missing() if rank != self.rank]
            is_over = limit is not None and clock.now() - begin >= limit
            for rank in missing:
                self.check(rank, is_over, topic)
            if is_over and missing:
                gathering.abandon()
                raise TimeoutError(self._timeout_message(topic, missing, limit))
            if self.warns and waited >= _WARN_AFTER_SECONDS and missing:
                self._warn_of_wait(gathering.key, missing, topic)
            try:
                for rank in missing:
                    check(rank)
            except ValueError:
                # This worker withdraws its text, and raises the error of `check`,
                # unless all texts have arrived before: the other workers then use them,
                # and this one continues.
                if gathering.withdraw():
                    self.num_calls -= 1
                    raise

    def _warn_of_wait(self, key: str, ranks: list[int], topic: str) -> None:
        """Warn, once for each call, of the workers that this worker waits for.

        Args:
            key: String, key of the all-gather, which identifies the call.
            ranks: List of ints, the workers whose texts are missing.
            topic: String, subject of the values, for the warning.
        """
        user_code.warn(
            f"Waiting for {list_ranks(ranks)} at {topic!r} for "
            f"{_WARN_AFTER_SECONDS:.0f} s. Every worker has to run the same calls of "
            "Keras and tfdp.",
            once_for=self,
            topic=key,
        )

    def _values(self, topic: str, texts: list[str]) -> list[Any]:
        """Return the values of all workers; check that all topics are equal.

        Raises `RuntimeError` if they differ: the workers are not at the same call.

        Args:
            topic: String, subject of the values, for messages.
            texts: List of strings, JSON of a topic and a value, by rank.
        """
        parsed = [json.loads(text) for text in texts]
        topics = [entry["topic"] for entry in parsed]
        if len(set(topics)) > 1:
            at = ", ".join(f"worker {r} at {t!r}" for r, t in enumerate(topics))
            raise RuntimeError(
                "Workers are at different calls: every worker has to run the "
                f"same calls of Keras and tfdp. Received: {at}"
            )
        return [entry["value"] for entry in parsed]

    def _timeout_message(
        self, topic: str, ranks: list[int], limit: float | None
    ) -> str:
        """Format the error of workers that did not take part in time.

        Args:
            topic: String, subject of the values.
            ranks: List of ints, the missing workers.
            limit: Float, the time limit in seconds.
        """
        names = ", ".join(self._describe(rank) for rank in ranks)
        return (
            f"Waited {limit:.0f} s for {names} at {topic!r}. Start every worker and "
            "let all of them run the same calls."
        )

    def _describe(self, rank: int) -> str:
        """Format a worker, and its present call if known: `"worker 1 (at 'fit')"`."""
        known = self.progress_of(rank)
        if known is None:
            return f"worker {rank}"
        unnamed = "an operation of TensorFlow" if known.is_computing else NO_CALL
        return f"worker {rank} (at {known.name or unnamed})"


class Mailbox:
    """Mailbox on worker 0, to which the other workers send numbered texts.

    Worker 0 receives a text by its number and its sender's rank, which removes it. All
    workers must create their mailboxes in the same order.

    Args:
        worker_group: `WorkerGroup` between the workers.
    """

    def __init__(self, worker_group: WorkerGroup) -> None:
        self.rank = worker_group.rank
        self.num_workers = worker_group.num_workers
        self._worker_group = worker_group
        self._prefix = worker_group.new_prefix()

    def send(self, number: int, text: str) -> None:
        """Send a text to worker 0.

        Args:
            number: Int, unique for each text of this worker.
            text: String, the text.
        """
        self._worker_group.store.put(f"{self._prefix}/{number}/{self.rank}", text)

    def receive(self, number: int, rank: int, timeout_seconds: float) -> str | None:
        """Receive a text of another worker, and remove it from the mailbox.

        Args:
            number: Int, number of the text.
            rank: Int, rank of the sender.
            timeout_seconds: Float, the longest wait.

        Returns:
            String, or `None` if no text arrived in time.
        """
        key = f"{self._prefix}/{number}/{rank}"
        try:
            text = self._worker_group.store.get(key, timeout_seconds)
        except TimeoutError:
            return None
        self._worker_group.store.delete(key)
        return text


def remember_group(group: WorkerGroup) -> WorkerGroup:
    """Record a group as that of the latest strategy, and return the group."""
    _latest[group.num_workers > 1] = group
    return group


def forget_groups() -> None:
    """Make `latest_group` return `None` until the next strategy has a group.

    Called when another cluster replaces that of the present groups.
    """
    _latest.clear()


def latest_group() -> WorkerGroup | None:
    """Return the latest strategy's group; one of several workers takes precedence.

    Returns:
        `WorkerGroup`, or `None` before a strategy is created.
    """
    return _latest.get(True) or _latest.get(False)
