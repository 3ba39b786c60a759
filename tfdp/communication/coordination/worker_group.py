"""All-gather of short texts between workers, without collectives and with timeouts.

Collectives wait indefinitely if a worker is missing or sends another shape. So workers
agree beforehand through the key-value store of TensorFlow's coordination service, which
worker 0 hosts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf

from tfdp.communication.cluster.islands import Island
from tfdp.communication.coordination.clock import clock
from tfdp.communication.coordination.progress import WorkerProgress, progress
from tfdp.ground import _compat, forks, user_code

_WARN_AFTER_SECONDS = 10.0
# Interval at which a wait checks whether the other worker is alive: at first, and the
# longest.
_CHECK_SECONDS, _LONGEST_CHECK_SECONDS = 1.0, 3.0
# Longest wait for the other workers before an error is raised.
_LEAVE_SECONDS = 5.0
# Longest wait of worker 0 at exit until the others, on busy machines too, have read the
# last answer.
_READING_SECONDS = 30.0
# Added to the limit of a wait for worker 0's answer. Worker 0 may have begun its own
# wait later; its answer names the missing worker, so it must not look missing itself.
_ANSWER_SECONDS = 5.0
_instances = itertools.count()
# Description of the place of a worker whose progress has no name.
NO_CALL = "no call of Keras or tfdp"
# The latest group, by whether it has several workers. Strong references, because
# workers must agree on the latest group whenever their garbage collectors run.
_latest: dict[bool, WorkerGroup] = {}

# Waits for the value of a key; takes the key, its worker's rank and a limit in seconds.
_Wait: TypeAlias = Callable[[str, int, float | None], str]


class WorkerGroup:
    """Group of workers that all-gather texts; all make the same calls in order.

    Args:
        rank: Int, index of this worker.
        num_workers: Int, number of workers.
        timeout_seconds: Float or `None`, the longest wait. Defaults to
            `None`, no limit, with a warning that names the missing worker.
    """

    def __init__(
        self, rank: int, num_workers: int, timeout_seconds: float | None = None
    ) -> None:
        self.rank = rank
        self.num_workers = num_workers
        self.timeout_seconds = timeout_seconds
        # Groups of a single worker are not numbered, so that the numbers of the others
        # are the same on all workers.
        self._prefix = f"tfdp/{next(_instances)}" if num_workers > 1 else "tfdp"
        # Number of all-gathers that this worker has begun.
        self.num_calls = 0
        self._prefixes = itertools.count()
        self._last_call: str | None = None
        self.owner = forks.Owner()
        # Hooks of the failure detector, see `tfdp.communication.coordination.watch`:
        # check the worker that this one waits for, return a worker's progress, and
        # translate errors of the store.
        self.check: Callable[[int, bool, str], None] = lambda rank, is_over, call: None
        self.progress_of: Callable[[int], WorkerProgress | None] = lambda rank: None
        self.guard: Callable[[], contextlib.AbstractContextManager]
        self.guard = contextlib.nullcontext
        if rank == 0 and num_workers > 1:
            forks.at_exit(self._wait_for_readers)

    @property
    def is_chief(self) -> bool:
        """Bool, whether this worker writes files and reports for the group."""
        return self.rank == 0

    @property
    def is_job_chief(self) -> bool:
        """Bool, whether this worker is the chief of the whole job with all islands."""
        island = Island.from_environment()
        return self.is_chief and (island is None or island.index == 0)

    def new_prefix(self) -> str:
        """Return a new key prefix; all workers must call this in the same order."""
        return f"{self._prefix}/own{next(self._prefixes)}"

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
            timeout_seconds: Float or `None`, the longest wait, or that of the group.
                Defaults to `None`.
            check: Callable, called every few seconds with the rank that this worker
                waits for. It may raise a `ValueError`, which withdraws this call.
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
        wait = functools.partial(self._wait, topic=topic, check=check)
        with progress.all_gathering(topic), self.guard():
            call = f"{self._prefix}/{self.num_calls}"
            self.num_calls += 1
            exchange = (
                self._exchange_with_chief if self.rank else self._collect_and_publish
            )
            try:
                answer = exchange(call, message, limit, wait)
            except ValueError:  # raised by `check`
                self.num_calls -= 1
                _compat.delete_key_value(f"{call}/{self.rank}")
                raise
            progress.texts_gathered()
            return self._values(topic, json.loads(answer))

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

    def leave(self) -> None:
        """Synchronize all workers before all of them raise an error.

        Worker 0 hosts the store, and must not end before the others have read its
        answer.
        """
        with contextlib.suppress(TimeoutError, RuntimeError, tf.errors.OpError):
            self.all_gather("an error", timeout_seconds=_LEAVE_SECONDS)

    def error(self, text: str) -> ValueError:
        """Synchronize all workers, and return the error that all of them raise.

        Args:
            text: String, the message.
        """
        self.leave()
        return ValueError(text)

    def _exchange_with_chief(
        self, call: str, message: str, limit: float | None, wait: _Wait
    ) -> str:
        """Send this worker's message to worker 0, and wait for its answer.

        Args:
            call: String, key prefix of this all-gather.
            message: String, JSON of this worker's topic and value.
            limit: Float or `None`, longest wait in seconds.
            wait: Callable, see `_Wait`.

        Returns:
            String, JSON of a list of all messages, `None` for a missing one.
        """
        _compat.set_key_value(f"{call}/{self.rank}", message)
        answer = wait(f"{call}/all", 0, limit and limit + _ANSWER_SECONDS)
        # Worker 0 may end, and the store with it, before this write is confirmed.
        with contextlib.suppress(tf.errors.OpError):
            _compat.set_key_value(f"{call}/seen/{self.rank}", "")
        return answer

    def _collect_and_publish(
        self, call: str, message: str, limit: float | None, wait: _Wait
    ) -> str:
        """Collect and publish all messages on worker 0: 2 N messages, not N * N.

        Arguments and result are those of `_exchange_with_chief`.
        """
        messages: list[str | None] = [message]
        for rank in range(1, self.num_workers):
            try:
                messages.append(wait(f"{call}/{rank}", rank, limit))
            except TimeoutError:
                messages.append(None)
                limit = 0.001  # only to find which others are missing
        if self._last_call is not None:
            # Every worker has sent its message of this call, and so has read the answer
            # of the call before.
            _compat.delete_key_value(self._last_call)
        answer = json.dumps(messages)
        _compat.set_key_value(f"{call}/all", answer)
        self._last_call = call
        return answer

    def _wait_for_readers(self) -> None:
        """Wait until the others have read the last answer, before the store ends."""
        if self._last_call is None:
            return
        end = time.monotonic() + _READING_SECONDS
        # The wait for a lost worker ends with an error, which does not matter at exit.
        with contextlib.suppress(Exception):
            for rank in range(1, self.num_workers):
                left = max(end - time.monotonic(), 0.01)
                self._wait(f"{self._last_call}/seen/{rank}", rank, left, "the end")

    def _wait(
        self,
        key: str,
        rank: int,
        limit: float | None,
        topic: str,
        check: Callable[[int], None] = lambda rank: None,
    ) -> str:
        """Wait for a key's value, with a warning and checks of its worker.

        Args:
            key: String, key of the store.
            rank: Int, the worker that sets the key.
            limit: Float or `None`, longest wait in seconds.
            topic: String, subject of the values, for messages.
            check: Callable, as for `all_gather`.

        Returns:
            String, the value.

        Raises:
            TimeoutError: If the key is not set in time.
        """
        begin = clock.now()
        while True:
            waited = clock.now() - begin
            if limit is not None and waited >= limit:
                self.check(rank, True, topic)
                raise TimeoutError(self._timeout_message(topic, [rank], limit))
            if waited >= _WARN_AFTER_SECONDS:
                user_code.warn(
                    f"Waiting for worker {rank} at {topic!r} for "
                    f"{_WARN_AFTER_SECONDS:.0f} s. Every worker has to run the "
                    "same calls of Keras and tfdp.",
                    once_for=self,
                    topic=key,
                )
            # Few long waits, since TensorFlow keeps each one until the key exists.
            step = min(_CHECK_SECONDS + waited / 5, _LONGEST_CHECK_SECONDS)
            left = step if limit is None else limit - waited
            try:
                return _compat.get_key_value(key, min(step, left))
            except tf.errors.DeadlineExceededError:
                self.check(rank, False, topic)
                check(rank)

    def _values(self, topic: str, messages: list[str | None]) -> list[Any]:
        """Return the values of an answer, after checking that all topics are equal.

        Args:
            topic: String, subject of the values, for messages.
            messages: List of strings, JSON of a topic and a value, by rank; `None` for
                a missing one.
        """
        missing = [rank for rank, text in enumerate(messages) if text is None]
        if missing:
            raise TimeoutError(
                self._timeout_message(topic, missing, self.timeout_seconds)
            )
        parsed = [json.loads(text) for text in messages if text is not None]
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
    """Mailbox on worker 0 for texts of the other workers, by number and rank.

    All workers must create their mailboxes in the same order.

    Args:
        worker_group: `WorkerGroup` between the workers.
    """

    def __init__(self, worker_group: WorkerGroup) -> None:
        self.rank = worker_group.rank
        self.num_workers = worker_group.num_workers
        self._prefix = worker_group.new_prefix()

    def send(self, number: int, text: str) -> None:
        """Send a text to worker 0.

        Args:
            number: Int, unique for each text of this worker.
            text: String, the text.
        """
        _compat.set_key_value(f"{self._prefix}/{number}/{self.rank}", text)

    def receive(self, number: int, rank: int, timeout_seconds: float) -> str | None:
        """Receive a text of another worker.

        Args:
            number: Int, number of the text.
            rank: Int, rank of the sender.
            timeout_seconds: Float, the longest wait.

        Returns:
            String, or `None` if no text arrived in time.
        """
        key = f"{self._prefix}/{number}/{rank}"
        try:
            text = _compat.get_key_value(key, timeout_seconds)
        except tf.errors.DeadlineExceededError:
            return None
        _compat.delete_key_value(key)
        return text


def remember_group(group: WorkerGroup) -> WorkerGroup:
    """Record a group as the latest one, and return it."""
    _latest[group.num_workers > 1] = group
    return group


def latest_group() -> WorkerGroup | None:
    """Return the group of the latest strategy, preferring several workers.

    Returns:
        `WorkerGroup`, or `None` before a strategy is created.
    """
    return _latest.get(True) or _latest.get(False)
