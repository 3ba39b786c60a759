"""Preemption notices: signals upon which all workers save at the same step and exit."""

from __future__ import annotations

import signal
import threading
import time
import weakref
from typing import Any

from tfdp.ground.forks import in_forks

# The exit code of a worker that has saved its training and is to be started again:
# EX_TEMPFAIL of sysexits.h.
PREEMPTED = 75
# The signal by which `tfdp run` asks workers to save and exit, to restart with more of
# them. A process without a handler ignores it, unlike SIGTERM.
SAVE_SIGNAL = getattr(signal, "SIGURG", signal.SIGTERM)
_SIGNALS = tuple({signal.SIGTERM, SAVE_SIGNAL})
_listening: weakref.WeakSet[PreemptionNotice] = weakref.WeakSet()
# Seconds of training between two all-gathers of the workers' notices.
_ASK_SECONDS = 1.0


def restore_python_handler() -> None:
    """Give SIGTERM back to Python, from which TensorFlow takes it without a word.

    Where TensorFlow joins a cluster it installs a handler in C that only notes the
    signal: nobody would hear it, and the process would not end.
    """
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)


class PreemptionNotice:
    """Handler that records SIGTERM and `SAVE_SIGNAL`, so that a step can end first.

    Python handles signals in its main thread only; in any other nothing is recorded.
    """

    def __init__(self) -> None:
        self.is_answered = False
        self._given: set[int] = set()
        self._before: dict[int, Any] = {}

    @property
    def is_given(self) -> bool:
        """Bool, whether one of the signals was received."""
        return bool(self._given)

    def listen(self) -> None:
        """Install the signal handlers."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not self._before:
            _listening.add(self)
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._record)

    def stop(self) -> None:
        """Restore the previous signal handlers."""
        if not self._before:
            return
        self.restore()
        if signal.SIGTERM in self._given and not self.is_answered:
            signal.raise_signal(signal.SIGTERM)  # it came when all was done

    def restore(self) -> None:
        """Restore the previous signal handlers, without acting on what was recorded."""
        _listening.discard(self)
        for number, handler in self._before.items():
            # None: it was set by other means than Python's, which cannot set it back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _record(self, number: int, frame: Any) -> None:
        del frame
        self._given.add(number)


@in_forks
def _restore_handlers() -> None:
    """Let SIGTERM end a forked process, such as one of a pool: it saves nothing."""
    for notice in list(_listening):
        notice.restore()


class PreemptionWatch:
    """Agreement of all workers, at the same step, that one of them is preempted.

    They ask each other about once a second: at a step that follows from how fast all
    were up to then, and so is the same on each.

    Args:
        notice: `PreemptionNotice` of this worker.
        worker_group: `WorkerGroup` between the workers.
    """

    def __init__(self, notice: PreemptionNotice, worker_group: Any) -> None:
        self._notice = notice
        self._worker_group = worker_group
        self._gap = self._next = 0
        self._asked_at: tuple[int, float] | None = None

    def is_given(self, step: int, *, must_ask: bool = False) -> bool:
        """Return whether a worker was given notice, the same on all workers.

        Args:
            step: Int, the same on all workers, and never less than before.
            must_ask: Bool, whether to ask now. Defaults to `False`.
        """
        if self._worker_group.num_workers == 1:
            return self._notice.is_given
        if step < self._next and not must_ask:
            return False
        own = [self._notice.is_given, self._rate(step)]
        answers = self._worker_group.all_gather("preemption", own)
        slowest = min(rate for _, rate in answers)
        self._gap = min(max(int(slowest * _ASK_SECONDS), 1), 2 * self._gap + 1)
        self._next = step + self._gap
        return any(is_given for is_given, _ in answers)

    def _rate(self, step: int) -> float:
        """Return the steps per second since the workers last asked."""
        now = time.monotonic()
        before, then = self._asked_at or (step, now)
        self._asked_at = (step, now)
        return (step - before) / max(now - then, 1e-6)
