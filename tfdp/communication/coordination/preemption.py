"""Preemption notices: signals that make all workers save at one step and exit."""

from __future__ import annotations

import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from tfdp.ground.forks import in_forks
from tfdp.ground.text import say

# Exit code of a worker that has saved a checkpoint and should be restarted: EX_TEMPFAIL
# of sysexits.h.
PREEMPTED = 75
# `tfdp run` sends this signal, SIGURG, to make workers save and exit before it restarts
# with more workers. Unlike SIGTERM, it does not end a process without a handler.
SAVE_SIGNAL = getattr(signal, "SIGURG", signal.SIGTERM)
_SIGNALS = tuple({signal.SIGTERM, SAVE_SIGNAL})
_listening: weakref.WeakSet[PreemptionNotice] = weakref.WeakSet()
# Seconds of training between two all-gathers of the workers' preemption notices. A
# longer interval would delay a save; a shorter one would slow short steps down.
_ASK_SECONDS = 1.0
# A signal that is sent to all workers reaches each of them within this time, so workers
# without a notice are asked again after it.
_NOTICES_SECONDS = 0.2


class PreemptionNotice:
    """Handler that records SIGTERM and SIGURG, so that a step can end first.

    Python handles signals only in its main thread: on another thread, `listen` does
    nothing.
    """

    def __init__(self) -> None:
        self._is_answered = False
        self._received: set[int] = set()
        self._previous_handlers: dict[int, Any] = {}

    @property
    def is_received(self) -> bool:
        """Bool, whether one of the signals was received."""
        return bool(self._received)

    def listen(self) -> None:
        """Install the signal handlers, once, if this is the main thread."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not self._previous_handlers:
            _listening.add(self)
            for number in _SIGNALS:
                self._previous_handlers[number] = signal.signal(number, self._record)

    def exit(self, what: str, *, prints: bool) -> NoReturn:
        """Raise `SystemExit` with code 75, after a preemption notice to any worker.

        The signal then counts as answered: `stop` does not raise it again.

        Args:
            what: String, a clause for the message, such as
                `"the other workers continue"`.
            prints: Bool, whether this worker prints the message.
        """
        self._is_answered = True
        if prints:
            say(f"received a preemption notice; {what}. Exit code {PREEMPTED}.")
        raise SystemExit(PREEMPTED)

    def stop(self) -> None:
        """Restore the previous signal handlers; raise an unanswered SIGTERM again.

        A SIGTERM is unanswered if it was received and `exit` was not called since.
        """
        if not self._previous_handlers:
            return
        self.restore()
        if signal.SIGTERM in self._received and not self._is_answered:
            # No step has answered the signal, since it came after the last step that
            # could save. So it is raised again, for the previous handler.
            signal.raise_signal(signal.SIGTERM)

    def restore(self) -> None:
        """Restore the previous signal handlers, without raising a recorded signal."""
        _listening.discard(self)
        for number, handler in self._previous_handlers.items():
            # The previous handler is `None` if native code has installed it. Python
            # cannot restore such a handler, so the default is restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous_handlers = {}

    def _record(self, number: int, frame: Any) -> None:
        """Record the number of a received signal; the handler of both signals."""
        del frame
        self._received.add(number)


@in_forks
def _restore_handlers() -> None:
    """Restore the previous signal handlers in a fork, which has no state to save."""
    for notice in list(_listening):
        notice.restore()


class PreemptionWatch:
    """Exchange of preemption notices and applicants, at the same step on all workers.

    Workers all-gather their notices about once a second. The step of the next
    all-gather follows from the speed of all workers, and so is the same on each.

    Args:
        notice: `PreemptionNotice` of this worker.
        worker_group: `WorkerGroup` between the workers.
        applicants: Callable that returns the addresses of processes that apply to
            this worker to join the job, a list of strings. Defaults to none.

    Attributes:
        joining: List of strings, the addresses of all processes that apply to join, by
            the last call of `any_worker_notified`; empty at steps between two
            all-gathers.
        are_all_given: Bool, whether all workers had a notice at the last all-gather.
    """

    def __init__(
        self,
        notice: PreemptionNotice,
        worker_group: Any,
        applicants: Callable[[], list[str]] = list,
    ) -> None:
        self._notice = notice
        self._applicants, self.joining = applicants, list[str]()
        self.are_all_given = False
        self._worker_group = worker_group
        self._steps_between = self._next_step = 0
        self._last_step_and_time: tuple[int, float] | None = None

    def any_worker_notified(self, step: int, *, must_gather: bool = False) -> bool:
        """Return whether any worker has a notice, if workers all-gather at this step.

        All workers get the same answer: `False` at steps between two all-gathers.

        Args:
            step: Int, the same on all workers, never less than before.
            must_gather: Bool, whether to all-gather at this step in any case. Defaults
                to `False`.
        """
        self.joining = []
        if self._worker_group.num_workers == 1:
            self.joining = self._applicants()
            self.are_all_given = self._notice.is_received
            return self.are_all_given
        if step < self._next_step and not must_gather:
            return False
        answer = [self._notice.is_received, self._rate(step), self._applicants()]
        answers = self._worker_group.all_gather("preemption", answer)
        self.joining = sorted({each for *_, came in answers for each in came})
        slowest = min(rate for _, rate, _ in answers)
        self._steps_between = min(
            max(int(slowest * _ASK_SECONDS), 1), 2 * self._steps_between + 1
        )
        self._next_step = step + self._steps_between
        notices = [is_given for is_given, *_ in answers]
        self.are_all_given = all(notices)
        return any(notices)

    def all_workers_notified(self, step: int) -> bool:
        """Return whether all workers have a notice. All workers call it together.

        If some had none at the last all-gather, this waits 0.2 seconds for their
        notices, and all-gathers again.

        Args:
            step: Int, the same on all workers, never less than before.
        """
        if not self.are_all_given:
            time.sleep(_NOTICES_SECONDS)
            self.any_worker_notified(step, must_gather=True)
        return self.are_all_given

    def _rate(self, step: int) -> float:
        """Return the steps per second from the last all-gather of notices to `step`."""
        now = time.monotonic()
        before, then = self._last_step_and_time or (step, now)
        self._last_step_and_time = (step, now)
        return (step - before) / max(now - then, 1e-6)
