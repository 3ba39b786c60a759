"""Signals as a notice that training is to end: save, then exit."""

from __future__ import annotations

import json
import signal
import threading
import time
from typing import Any

# The exit code of a worker that has saved its training and is to be started again:
# EX_TEMPFAIL of sysexits.h.
PREEMPTED = 75
# How `tfdp run` asks workers to save and to end, so that more of them can go on. Who
# does not listen is not disturbed by it, as it would be by SIGTERM.
SAVE_SIGNAL = getattr(signal, "SIGURG", signal.SIGTERM)
_SIGNALS = tuple({signal.SIGTERM, SAVE_SIGNAL})
# How long workers train between two looks at each other's notices.
_LOOK_SECONDS = 1.0


class Notice:
    """Notes SIGTERM, and `SAVE_SIGNAL`, while it listens, so that a step can end first.

    Python tells only its main thread of signals; in any other it notes nothing.
    """

    def __init__(self) -> None:
        self.is_answered = False
        self._given: set[int] = set()
        self._before: dict[int, Any] = {}

    @property
    def is_given(self) -> bool:
        """Whether one of the signals came."""
        return bool(self._given)

    def listen(self) -> None:
        """Takes the signals' handlers over."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not self._before:
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._note)

    def stop(self) -> None:
        """Gives the handlers back."""
        if not self._before:
            return
        for number, handler in self._before.items():
            # None: it was set by other means than Python's, which cannot set it back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
        if signal.SIGTERM in self._given and not self.is_answered:
            signal.raise_signal(signal.SIGTERM)  # it came when all was done

    def _note(self, number: int, frame: Any) -> None:
        del frame
        self._given.add(number)


class PreemptionWatch:
    """Lets all workers know at the same step that one of them was given notice.

    They ask each other about once a second: at a step that follows from how fast all
    were up to then, and so is the same on each.

    Args:
        notice: `Notice` of this worker.
        worker_group: `WorkerGroup` between the workers.
    """

    def __init__(self, notice: Notice, worker_group: Any) -> None:
        self._notice = notice
        self._worker_group = worker_group
        self._gap = self._next = 0
        self._looked_at: tuple[int, float] | None = None

    def is_given(self, step: int, *, must_look: bool = False) -> bool:
        """Whether a worker was given notice, the same answer on all.

        Args:
            step: Int, the same on all workers, and never less than before.
            must_look: Bool, whether to ask now. Defaults to `False`.
        """
        if self._worker_group.num_workers == 1:
            return self._notice.is_given
        if step < self._next and not must_look:
            return False
        told = self._worker_group.all_gather(
            "preemption", json.dumps([self._notice.is_given, self._rate(step)])
        )
        answers = [json.loads(text) for text in told]
        slowest = min(rate for _, rate in answers)
        self._gap = min(max(int(slowest * _LOOK_SECONDS), 1), 2 * self._gap + 1)
        self._next = step + self._gap
        return any(is_given for is_given, _ in answers)

    def _rate(self, step: int) -> float:
        """Steps per second since the last look."""
        now = time.monotonic()
        before, then = self._looked_at or (step, now)
        self._looked_at = (step, now)
        return (step - before) / max(now - then, 1e-6)
