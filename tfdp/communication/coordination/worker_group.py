"""All-gather of short texts between workers, without collectives and with timeouts.

Collectives wait for ever when one worker is missing or sends another shape. What has
to be agreed beforehand therefore travels through the key-value store of TensorFlow's
coordination service, which the first worker hosts.
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
# How often a wait checks whether the other worker is alive, at first and later.
_CHECK_SECONDS, _CHECK_AT_LEAST_SECONDS = 1.0, 3.0
_LEAVE_SECONDS = 5.0
# Long enough for a worker on a machine that does many other things.
_READING_SECONDS = 30.0
# The first worker waits for the others as long, and may have started to wait later:
# whoever waits for its answer learns from it who is missing, and does not take the
# first worker for the missing one.
_ANSWER_SECONDS = 5.0
_instances = itertools.count()
# Where a worker is whose progress has no name.
NO_CALL = "no call of Keras or tfdp"
# The group of the strategy made last, and of the last one of several workers. They are
# kept: which ones there are must not depend on when a worker collects its garbage.
_latest: dict[bool, WorkerGroup] = {}

# Waits for a key of a worker, so many seconds at the longest.
_Wait: TypeAlias = Callable[[str, int, float | None], str]


class WorkerGroup:
    """Group of workers that all-gather texts; all make the same calls in order.

    Args:
        rank: Int, index of this worker.
        num_workers: Int.
        timeout_seconds: Float or `None`, the longest wait. Defaults to
            `None`, for ever, with a warning that names who is missing.
    """

    def __init__(
        self, rank: int, num_workers: int, timeout_seconds: float | None = None
    ) -> None:
        self.rank = rank
        self.num_workers = num_workers
        self.timeout_seconds = timeout_seconds
        # Alike on all workers, of which one may make groups of its own.
        self._prefix = f"tfdp/{next(_instances)}" if num_workers > 1 else "tfdp"
        # All-gathers that this worker has begun.
        self.num_calls = 0
        self._prefixes = itertools.count()
        self._last_call: str | None = None
        self.owner = forks.Owner()
        # Hooks of the failure detector: check the worker that is waited for, return its
        # progress, and translate errors of the store. See
        # `tfdp.communication.coordination.watch`.
        self.check: Callable[[int, bool, str], None] = lambda rank, is_over, call: None
        self.progress_of: Callable[[int], WorkerProgress | None] = lambda rank: None
        self.guard: Callable[[], contextlib.AbstractContextManager]
        self.guard = contextlib.nullcontext
        if rank == 0 and num_workers > 1:
            forks.at_exit(self._wait_for_readers)

    @property
    def is_chief(self) -> bool:
        """Bool, whether this worker writes the group's files, and reports for it."""
        return self.rank == 0

    @property
    def is_job_chief(self) -> bool:
        """Bool, whether it is the chief of the whole job, which may have islands."""
        island = Island.from_environment()
        return self.is_chief and (island is None or island.index == 0)

    def new_prefix(self) -> str:
        """Return a new key prefix; all workers call it in the same order."""
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
            value: What JSON can hold, this worker's. Defaults to `""`.
            timeout_seconds: Float or `None`, the longest wait where it is not that
                of the group. Defaults to `None`.
            check: Function that is called with the rank that is waited for, every few
                seconds, and may raise a `ValueError`: then this worker makes no call.
                Defaults to one that does nothing.

        Returns:
            List of values, ordered by worker.

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
            exchange = self._ask if self.rank else self._collect
            try:
                answer = exchange(call, message, limit, wait)
            except ValueError:  # of `check`
                self.num_calls -= 1
                _compat.delete_key_value(f"{call}/{self.rank}")
                raise
            progress.texts_gathered()
            return self._values(topic, json.loads(answer))

    def all_equal(self, topic: str, value: Any) -> bool:
        """Return whether the values of all workers are equal."""
        first, *others = self.all_gather(topic, value)
        return all(other == first for other in others)

    def any(self, topic: str, value: bool) -> bool:
        """Return whether the value is true on any worker."""
        return any(self.all_gather(topic, bool(value)))

    def leave(self) -> None:
        """Synchronize all workers before they raise an error that they agreed on.

        The first worker hosts the store: it must not end before the others have
        read their answer.
        """
        with contextlib.suppress(TimeoutError, RuntimeError, tf.errors.OpError):
            self.all_gather("an error", timeout_seconds=_LEAVE_SECONDS)

    def error(self, text: str) -> ValueError:
        """Return an error that all workers have agreed on, once all are about to raise.

        Args:
            text: String, its message.
        """
        self.leave()
        return ValueError(text)

    def _ask(self, call: str, own: str, limit: float | None, wait: _Wait) -> str:
        """Give the own message to the first worker, and take its answer."""
        _compat.set_key_value(f"{call}/{self.rank}", own)
        answer = wait(f"{call}/all", 0, limit and limit + _ANSWER_SECONDS)
        # The store may end with the first worker before it has confirmed this.
        with contextlib.suppress(tf.errors.OpError):
            _compat.set_key_value(f"{call}/seen/{self.rank}", "")
        return answer

    def _collect(self, call: str, own: str, limit: float | None, wait: _Wait) -> str:
        """Collect all messages, and answer with them: 2 N messages, not N * N."""
        messages: list[str | None] = [own]
        for rank in range(1, self.num_workers):
            try:
                messages.append(wait(f"{call}/{rank}", rank, limit))
            except TimeoutError:
                messages.append(None)
                limit = 0.001  # to name the others that are missing
        if self._last_call is not None:
            # All have read the previous answer, since all are at this call.
            _compat.delete_key_value(self._last_call)
        answer = json.dumps(messages)
        _compat.set_key_value(f"{call}/all", answer)
        self._last_call = call
        return answer

    def _wait_for_readers(self) -> None:
        """Wait until the others have read the last answer, then let the store end."""
        if self._last_call is None:
            return
        end = time.monotonic() + _READING_SECONDS
        # A lost worker reads nothing: the wait ends with an error.
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
        begin = clock.now()
        while True:
            waited = clock.now() - begin
            if limit is not None and waited >= limit:
                self.check(rank, True, topic)
                raise TimeoutError(self._missing(topic, [rank], limit))
            if waited >= _WARN_AFTER_SECONDS:
                user_code.warn(
                    f"Waiting for worker {rank} at {topic!r} for "
                    f"{_WARN_AFTER_SECONDS:.0f} s. Every worker has to run the "
                    "same calls of Keras and tfdp.",
                    once_for=self,
                    topic=key,
                )
            # TensorFlow remembers each wait until the key is there: few long ones.
            step = min(_CHECK_SECONDS + waited / 5, _CHECK_AT_LEAST_SECONDS)
            left = step if limit is None else limit - waited
            try:
                return _compat.get_key_value(key, min(step, left))
            except tf.errors.DeadlineExceededError:
                self.check(rank, False, topic)
                check(rank)

    def _values(self, topic: str, messages: list[str | None]) -> list[Any]:
        missing = [rank for rank, text in enumerate(messages) if text is None]
        if missing:
            raise TimeoutError(self._missing(topic, missing, self.timeout_seconds))
        parsed = [json.loads(text) for text in messages if text is not None]
        topics = [entry["topic"] for entry in parsed]
        if len(set(topics)) > 1:
            at = ", ".join(f"worker {r} at {t!r}" for r, t in enumerate(topics))
            raise RuntimeError(
                "Workers are at different calls: every worker has to run the "
                f"same calls of Keras and tfdp. Received: {at}"
            )
        return [entry["value"] for entry in parsed]

    def _missing(self, topic: str, ranks: list[int], limit: float | None) -> str:
        names = ", ".join(self._describe(rank) for rank in ranks)
        return (
            f"Waited {limit:.0f} s for {names} at {topic!r}. Start every worker and "
            "let all of them run the same calls."
        )

    def _describe(self, rank: int) -> str:
        """Name a worker, and the call that it is at if that is known."""
        known = self.progress_of(rank)
        if known is None:
            return f"worker {rank}"
        unnamed = "an operation of TensorFlow" if known.is_computing else NO_CALL
        return f"worker {rank} (at {known.name or unnamed})"


class Mailbox:
    """Key-value mailbox of the first worker, with texts by number and rank.

    All workers have to create their mailboxes in the same order.

    Args:
        worker_group: `WorkerGroup` between the workers.
    """

    def __init__(self, worker_group: WorkerGroup) -> None:
        self.rank = worker_group.rank
        self.num_workers = worker_group.num_workers
        self._prefix = worker_group.new_prefix()

    def send(self, number: int, text: str) -> None:
        """Send a text to the first worker.

        Args:
            number: Int, a new one for each text.
            text: String.
        """
        _compat.set_key_value(f"{self._prefix}/{number}/{self.rank}", text)

    def receive(self, number: int, rank: int, timeout_seconds: float) -> str | None:
        """Receive a text of another worker.

        Args:
            number: Int.
            rank: Int, the other worker's.
            timeout_seconds: Float, the longest wait.

        Returns:
            String, or `None` if it did not come in time.
        """
        key = f"{self._prefix}/{number}/{rank}"
        try:
            text = _compat.get_key_value(key, timeout_seconds)
        except tf.errors.DeadlineExceededError:
            return None
        _compat.delete_key_value(key)
        return text


def remember_group(group: WorkerGroup) -> WorkerGroup:
    """Make a group the latest, and return it."""
    _latest[group.num_workers > 1] = group
    return group


def latest_group() -> WorkerGroup | None:
    """Return the group of the strategy made last, of several workers if there is one.

    Returns:
        `WorkerGroup`, or `None` before there is a strategy.
    """
    return _latest.get(True) or _latest.get(False)
