"""Workers exchange short texts, without collectives and without hanging.

Collectives wait for ever when one worker is not there or sends another shape.
What has to be agreed beforehand therefore travels through the key-value store
of TensorFlow's coordination service, which the first worker hosts.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import time
import warnings
from collections.abc import Callable

import tensorflow as tf

from tfdp import _compat
from tfdp.coordination.progress import progress

_WARN_AFTER_SECONDS = 10.0
# How often a wait looks whether the other worker is still there, at first and later.
_CHECK_SECONDS, _CHECK_AT_LEAST_SECONDS = 1.0, 3.0
_PARTING_SECONDS = 5.0
# Long enough for a worker on a machine that does many other things.
_READING_SECONDS = 30.0
# The first worker waits for the others as long, and may have come later: who waits for
# its answer hears from it who is missing, and does not take it for the missing one.
_ANSWER_SECONDS = 5.0
_instances = itertools.count()


class WorkerGroup:
    """Exchanges texts between workers, in step: all make the same calls.

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
        self._calls = itertools.count()
        self._prefixes = itertools.count()
        self._last_call: str | None = None
        # What looks after the worker that is waited for, and explains what the
        # store raises: see `tfdp.coordination.watch`.
        self.check: Callable[[int, bool], None] = lambda rank, is_over: None
        self.guard: Callable[[], contextlib.AbstractContextManager]
        self.guard = contextlib.nullcontext
        if rank == 0 and num_workers > 1:
            atexit.register(self._wait_for_readers)

    def new_prefix(self) -> str:
        """A prefix for keys of one's own; all workers ask in the same order."""
        return f"{self._prefix}/own{next(self._prefixes)}"

    def all_gather(
        self, topic: str, text: str = "", timeout_seconds: float | None = None
    ) -> list[str]:
        """Gives every worker the texts of all of them.

        Args:
            topic: String, what this is about, for error messages.
            text: String, what this worker has to say.
            timeout_seconds: Float or `None`, instead of the usual one.

        Returns:
            List of strings, ordered by worker.

        Raises:
            TimeoutError: If a worker does not take part in time.
            RuntimeError: If workers are not at the same call.
        """
        if self.num_workers == 1:
            return [text]
        with progress.all_gathering(topic), self.guard():
            return self._all_gather(topic, text, timeout_seconds)

    def _all_gather(
        self, topic: str, text: str, timeout_seconds: float | None
    ) -> list[str]:
        call = f"{self._prefix}/{next(self._calls)}"
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

    def same(self, topic: str, text: str) -> tuple[bool, list[str]]:
        """Whether all workers say the same, and what each said."""
        texts = self.all_gather(topic, text)
        return len(set(texts)) == 1, texts

    def any(self, topic: str, value: bool) -> bool:
        """Whether the value is true on any worker."""
        return "1" in self.all_gather(topic, "1" if value else "0")

    def leave(self) -> None:
        """Called by all before they raise what they have agreed on.

        The first worker hosts the store: it must not end before the others have
        read their answer.
        """
        with contextlib.suppress(TimeoutError, RuntimeError, tf.errors.OpError):
            self.all_gather("an error", timeout_seconds=_PARTING_SECONDS)

    def _collect(self, call: str, topic: str, own: str, limit: float | None) -> str:
        messages: list[str | None] = [own]
        for rank in range(1, self.num_workers):
            key = f"{call}/{rank}"
            try:
                messages.append(self._wait(key, topic, rank, limit))
            except TimeoutError:
                messages.append(None)
                limit = 0.001  # who else is missing?
        if self._last_call is not None:
            # All have read the previous answer, since all are at this call.
            _compat.delete_key_value(self._last_call)
        return json.dumps(messages)

    def _wait_for_readers(self) -> None:
        """Lets the others read the last answer before the store ends with us."""
        if self._last_call is None:
            return
        end = time.monotonic() + _READING_SECONDS
        # Who is lost reads nothing: the wait ends with an error.
        with contextlib.suppress(Exception):
            for rank in range(1, self.num_workers):
                left = max(end - time.monotonic(), 0.01)
                self._wait(f"{self._last_call}/seen/{rank}", "the end", rank, left)

    def _wait(self, key: str, topic: str, rank: int, limit: float | None) -> str:
        begin = time.monotonic()
        warned = False
        while True:
            waited = time.monotonic() - begin
            if limit is not None and waited >= limit:
                self.check(rank, True)
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
                self.check(rank, False)

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


def _missing(topic: str, ranks: list[int], limit: float | None) -> str:
    names = ", ".join(f"worker {rank}" for rank in ranks)
    return (
        f"Waited {limit:.0f} s for {names} at {topic!r}. Start every worker and "
        "let all of them run the same calls."
    )
