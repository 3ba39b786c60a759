"""All-gather of short texts between workers, without collectives and with timeouts.

Collectives wait for ever when one worker is missing or sends another shape. What has
to be agreed beforehand therefore travels through the key-value store of TensorFlow's
coordination service, which the first worker hosts.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
import warnings
from collections.abc import Callable

import tensorflow as tf

from tfdp import _compat, forks
from tfdp.coordination.clock import clock
from tfdp.coordination.progress import progress

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
# The group of the strategy made last, and of the last one of several workers. They are
# kept: which ones there are must not depend on when a worker collects its garbage.
_latest: dict[bool, WorkerGroup] = {}


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
        self._prefix = f"tfdp/{next(_instances)}"
        # All-gathers that this worker has begun.
        self.num_calls = 0
        self._prefixes = itertools.count()
        self._last_call: str | None = None
        self.owner = forks.Owner()
        # Hooks of the failure detector: check the worker that is waited for, and
        # translate errors of the store. See `tfdp.coordination.watch`.
        self.check: Callable[[int, bool, str], None] = lambda rank, is_over, call: None
        self.guard: Callable[[], contextlib.AbstractContextManager]
        self.guard = contextlib.nullcontext
        if rank == 0 and num_workers > 1:
            forks.at_exit(self._wait_for_readers)

    def new_prefix(self) -> str:
        """Return a new key prefix; all workers call it in the same order."""
        return f"{self._prefix}/own{next(self._prefixes)}"

    def all_gather(
        self, topic: str, text: str = "", timeout_seconds: float | None = None
    ) -> list[str]:
        """Gather the texts of all workers on every worker.

        Args:
            topic: String, subject of the texts, for error messages.
            text: String, this worker's. Defaults to `""`.
            timeout_seconds: Float or `None`, the longest wait where it is not that
                of the group. Defaults to `None`.

        Returns:
            List of strings, ordered by worker.

        Raises:
            TimeoutError: If a worker does not take part in time.
            RuntimeError: If workers are not at the same call.
        """
        if self.num_workers == 1:
            return [text]
        self.owner.check(topic)
        with progress.all_gathering(topic), self.guard():
            return self._all_gather(topic, text, timeout_seconds)

    def _all_gather(
        self, topic: str, text: str, timeout_seconds: float | None
    ) -> list[str]:
        call = f"{self._prefix}/{self.num_calls}"
        self.num_calls += 1
        limit = timeout_seconds or self.timeout_seconds
        message = json.dumps({"topic": topic, "text": text})
        if self.rank == 0:
            # The first worker collects and answers: 2 N messages, not N * N.
            answer = self._collect(call, topic, message, limit)
            _compat.set_key_value(f"{call}/all", answer)
            self._last_call = call
        else:
            _compat.set_key_value(f"{call}/{self.rank}", message)
            patience = limit and limit + _ANSWER_SECONDS
            answer = self._wait(f"{call}/all", topic, 0, patience)
            # The store may end with the first worker before it has confirmed this.
            with contextlib.suppress(tf.errors.OpError):
                _compat.set_key_value(f"{call}/seen/{self.rank}", "")
        return self._texts(topic, json.loads(answer))

    def all_equal(self, topic: str, text: str) -> tuple[bool, list[str]]:
        """Return whether the texts of all workers are equal, and the texts."""
        texts = self.all_gather(topic, text)
        return len(set(texts)) == 1, texts

    def any(self, topic: str, value: bool) -> bool:
        """Return whether the value is true on any worker."""
        return "1" in self.all_gather(topic, "1" if value else "0")

    def leave(self) -> None:
        """Synchronize all workers before they raise an error that they agreed on.

        The first worker hosts the store: it must not end before the others have
        read their answer.
        """
        with contextlib.suppress(TimeoutError, RuntimeError, tf.errors.OpError):
            self.all_gather("an error", timeout_seconds=_LEAVE_SECONDS)

    def _collect(self, call: str, topic: str, own: str, limit: float | None) -> str:
        messages: list[str | None] = [own]
        for rank in range(1, self.num_workers):
            key = f"{call}/{rank}"
            try:
                messages.append(self._wait(key, topic, rank, limit))
            except TimeoutError:
                messages.append(None)
                limit = 0.001  # to name the others that are missing
        if self._last_call is not None:
            # All have read the previous answer, since all are at this call.
            _compat.delete_key_value(self._last_call)
        return json.dumps(messages)

    def _wait_for_readers(self) -> None:
        """Wait until the others have read the last answer, then let the store end."""
        if self._last_call is None:
            return
        end = time.monotonic() + _READING_SECONDS
        # A lost worker reads nothing: the wait ends with an error.
        with contextlib.suppress(Exception):
            for rank in range(1, self.num_workers):
                left = max(end - time.monotonic(), 0.01)
                self._wait(f"{self._last_call}/seen/{rank}", "the end", rank, left)

    def _wait(self, key: str, topic: str, rank: int, limit: float | None) -> str:
        begin = clock.now()
        warned = False
        while True:
            waited = clock.now() - begin
            if limit is not None and waited >= limit:
                self.check(rank, True, topic)
                raise TimeoutError(_missing(topic, [rank], limit))
            if waited >= _WARN_AFTER_SECONDS and not warned:
                warned = True
                warnings.warn(
                    f"Waiting for worker {rank} at {topic!r} for "
                    f"{_WARN_AFTER_SECONDS:.0f} s. Every worker has to run the "
                    "same calls of Keras and tfdp.",
                    stacklevel=2,
                )
            # TensorFlow remembers each wait until the key is there: few long ones.
            step = min(_CHECK_SECONDS + waited / 5, _CHECK_AT_LEAST_SECONDS)
            left = step if limit is None else limit - waited
            try:
                return _compat.get_key_value(key, min(step, left))
            except tf.errors.DeadlineExceededError:
                self.check(rank, False, topic)

    def _texts(self, topic: str, messages: list[str | None]) -> list[str]:
        missing = [rank for rank, text in enumerate(messages) if text is None]
        if missing:
            raise TimeoutError(_missing(topic, missing, self.timeout_seconds))
        parsed = [json.loads(text) for text in messages if text is not None]
        topics = [entry["topic"] for entry in parsed]
        if len(set(topics)) > 1:
            at = ", ".join(f"worker {r} at {t!r}" for r, t in enumerate(topics))
            raise RuntimeError(
                "Workers are at different calls: every worker has to run the "
                f"same calls of Keras and tfdp. Received: {at}"
            )
        return [entry["text"] for entry in parsed]


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


def _missing(topic: str, ranks: list[int], limit: float | None) -> str:
    names = ", ".join(f"worker {rank}" for rank in ranks)
    return (
        f"Waited {limit:.0f} s for {names} at {topic!r}. Start every worker and "
        "let all of them run the same calls."
    )
