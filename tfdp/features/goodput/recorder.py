"""Recorder of this worker's time by class, from the events of `fit` to lines."""

from __future__ import annotations

import copy
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from tfdp.features.goodput import account
from tfdp.features.goodput.account import Account
from tfdp.features.goodput.ledger import (
    FORMAT,
    Launch,
    LedgerFile,
    Moment,
    read,
    uptime,
)
from tfdp.ground.base import activities
from tfdp.ground.base.process_identity import state_and_start
from tfdp.ground.forks import Owner

# A killed process loses its time since the last write. The interval between writes is
# this fraction of the attempt's time so far, between the least and the largest number
# of seconds, so that only a small part of the time is lost.
_MIN_SECONDS, _MAX_SECONDS, _OF_ATTEMPT = 1.0, 10.0, 1e-3
# Class of time of each activity. `activities` does not know these classes, since the
# ledger is only one of its observers.
_CLASSES = {
    activities.EVALUATION: account.EVALUATION,
    activities.SAVE: account.SAVE,
    activities.BACKUP: account.BACKUP,
}


class GoodputRecorder:
    """Recorder that divides worker 0's time into classes, such as steps or saves.

    Each event adds the time since the previous one to the current class, and begins the
    next. A callback and the wrapped step notify it of the events of `fit`, and
    `tfdp.ground.base.activities` of evaluations and saves. Lines are written at most
    about once a second, and wait in memory until a write succeeds.

    Args:
        file: `LedgerFile` to append to.
        launch: `Launch`, or `None` without a launcher.
        since: `Moment` from which time counts, such as the start of the process.
        is_asynchronous: Bool, whether the call of a step returns before the step ends,
            as on GPUs. Time between two steps is then a part of steps. Defaults to
            `False`.
        continues: Bool, whether the job has continued without a restart, after the
            loss of the worker that recorded before. Defaults to `False`.
        follows: Bool, whether this process has recorded before, in another ledger.
            Defaults to `False`.

    Attributes:
        wait_seconds: Callable that returns how long steps have waited for data so far.
        exposed_seconds: Callable that returns the exposed communication of a step, the
            mean of the latest ones in seconds, or `None` if it is not measured.
    """

    def __init__(
        self,
        file: LedgerFile,
        launch: Launch | None,
        since: Moment,
        *,
        is_asynchronous: bool = False,
        continues: bool = False,
        follows: bool = False,
    ) -> None:
        self.wait_seconds: Callable[[], float] = lambda: 0.0
        self.exposed_seconds: Callable[[], float | None] = lambda: None
        self.file = file
        self._thread = threading.get_ident()
        self._between = account.STEP if is_asynchronous else account.IDLE
        self._start = self._at = self._due = since.up
        self._class = account.STARTUP
        self._outer: list[str] = []
        self._seconds: dict[str, float] = {}
        self._waited = 0.0
        self._fit = 0
        self._epoch = 0
        # First and last batch of the steps since the last line, numbered within the
        # epoch: the next line has them, so that steps that are done again are
        # recognized. `_batch` is the batch of the running step.
        self._first: int | None = None
        self._last = self._batch = 0
        self._is_done = self._has_steps = False
        self._owner = Owner()
        # Sums of the lines in the file, which may have those of earlier attempts. The
        # file is read when `shares` is first called, which only TensorBoard needs.
        self._account: Account | None = None
        launched = None if launch is None else vars(launch.since)
        line = {"kind": "attempt", "format": FORMAT, **vars(since)}
        line |= {"continues": True} if continues else {}
        line |= {"follows": True} if follows else {}
        _, ticks = state_and_start(os.getpid())
        line["process"] = f"{os.getpid()}-{ticks}"
        self._lines = [json.dumps({**line, "launched": launched})]

    def fit_begins(self) -> None:
        """Record the beginning of a `fit`: time from now on counts as its start-up."""
        self._fit += 1
        self._is_done = False
        self._waited = self.wait_seconds()
        self._change(account.STARTUP)

    def epoch_begins(self, epoch: int) -> None:
        """Record the number of an epoch, and add a line of the previous one's steps.

        Keras now creates an iterator, which may wait for its data: time from now on is
        a wait for data, or start-up of `fit` in the first epoch.

        Args:
            epoch: Int, number of the epoch, from 0.
        """
        self._end_line()
        if self._class != account.STARTUP:
            self._change(account.DATA)
        self._epoch = epoch

    def batch_begins(self, batch: int) -> None:
        """Record the number of a batch; an epoch's first one ends the wait for data.

        Time from then on is idle, or that of steps if `is_asynchronous`.

        Args:
            batch: Int, number of the batch in its epoch, from 0.
        """
        if self._class == account.DATA:
            self._change(self._between)
        self._batch = batch

    def step_begins(self) -> None:
        """Count the time from now on as that of steps: a call of the step begins."""
        self._change(account.STEP)

    def step_ends(self, num_steps: int, *, was_traced: bool) -> None:
        """Record the end of a call of one or more steps; write lines if that is due.

        Args:
            num_steps: Int, number of steps of the call.
            was_traced: Bool, whether the call has traced the step: then its time counts
                as tracing, and otherwise as that of steps.
        """
        if was_traced:
            self._class = account.TRACE
        self._change(self._between)
        self._has_steps = True
        if self._first is None:
            self._first = self._batch
        self._last = self._batch + num_steps - 1
        if self._at >= self._due:
            self.write()

    def step_fails(self, *, has_data: bool) -> None:
        """Record that a call of the step has raised an error.

        Args:
            has_data: Bool, `True` if the step has failed: its time, and the time after
                it, count as recovery. `False` if the data has ended: its time counts as
                a wait for data, and the time after it as idle.
        """
        self._class = account.RECOVERY if has_data else account.DATA
        self._change(account.RECOVERY if has_data else account.IDLE)

    def fit_ends(self, *, is_complete: bool) -> None:
        """Record the end of a `fit`, and write the lines.

        Args:
            is_complete: Bool, whether `fit` has ended without an error: time from now
                on then counts as idle, and otherwise as recovery.
        """
        self._is_done = is_complete
        self._change(account.IDLE if is_complete else account.RECOVERY)
        self.write()

    def close(self) -> None:
        """Write the last lines and close the file, at the exit of the process."""
        self._end_line()
        line = {"kind": "exit", "time": time.time(), "up": self._at}
        self._lines.append(json.dumps({**line, "done": self._is_done}))
        self._append()
        self.file.close()

    def begins(self, activity: str) -> None:
        """Begin to count the time of an activity, if it runs on the thread of `fit`.

        Args:
            activity: String, `EVALUATION`, `SAVE` or `BACKUP` of `activities`. It ends
                with the call of `ends`.
        """
        if threading.get_ident() == self._thread:
            self._outer.append(self._class)
            self._change(_CLASSES[activity])

    def ends(self, activity: str) -> None:
        """End an activity, and count time in the class before it again.

        It does nothing on a thread other than that of `fit`.
        """
        del activity
        if threading.get_ident() == self._thread:
            self._change(self._outer.pop())
            if self._at >= self._due:
                self.write()

    def write(self) -> None:
        """Append the lines since the last write; if that fails, keep them.

        Before the first step nothing is written: a script that does not train leaves no
        ledger.
        """
        self._end_line()
        age = self._at - self._start
        interval = min(max(_MIN_SECONDS, _OF_ATTEMPT * age), _MAX_SECONDS)
        self._due = self._at + interval
        self._append()

    def shares(self) -> account.Shares:
        """Write waiting lines; return the job's time so far, in seconds by class."""
        self.write()
        if self._account is None:
            self._account = Account()
            self._account.add_all(read(self.file.path) if self.file.path else ())
        total = copy.deepcopy(self._account)
        total.add_all(self._lines)
        return total.shares

    def _append(self) -> None:
        """Append the waiting lines to the file, once the attempt has made a step.

        If that fails, the lines wait for the next write.
        """
        is_due = self._has_steps and self._owner.is_current
        if is_due and self.file.append(self._lines):
            if self._account is not None:
                self._account.add_all(self._lines)
            self._lines = []

    def _change(self, new: str) -> None:
        """Add the time since the last event to the current class, and begin `new`."""
        now = uptime()
        elapsed = now - self._at
        self._seconds[self._class] = self._seconds.get(self._class, 0.0) + elapsed
        self._class, self._at = new, now

    def _end_line(self) -> None:
        """Queue a line of the seconds by class, and the steps, since the last line."""
        self._change(self._class)
        self._divide_steps()
        line: dict[str, Any] = {"kind": "work", "time": time.time(), "up": self._at}
        rounded = {name: round(s, 6) for name, s in self._seconds.items()}
        line["seconds"] = {name: s for name, s in rounded.items() if s}
        line["fit"] = self._fit
        if self._first is not None:
            line |= {"epoch": self._epoch, "first": self._first, "last": self._last}
        self._seconds, self._first = {}, None
        if line["seconds"]:
            self._lines.append(json.dumps(line))

    def _divide_steps(self) -> None:
        """Move parts of the steps' time to the classes `DATA` and `EXPOSED`.

        These are the steps since the last line. The increase of `wait_seconds()` since
        then is waiting for data; `exposed_seconds()` of each step is communication.
        """
        if self._first is None:
            return
        waited = self.wait_seconds()
        wait, self._waited = waited - self._waited, waited
        wait -= self._move(account.STEP, account.DATA, wait)
        self._move(account.TRACE, account.DATA, wait)
        exposed = self.exposed_seconds()
        if exposed is not None:
            num_steps = self._last - self._first + 1
            self._move(account.STEP, account.EXPOSED, exposed * num_steps)

    def _move(self, source: str, target: str, seconds: float) -> float:
        """Move seconds from one class to another, and return how many were moved.

        Args:
            source: String, a class; if it has fewer seconds, all of these are moved.
            target: String, the class that receives the seconds.
            seconds: Float, seconds to move; none if negative.
        """
        moved = min(max(0.0, seconds), self._seconds.get(source, 0.0))
        for name, change in ((source, -moved), (target, moved)):
            self._seconds[name] = self._seconds.get(name, 0.0) + change
        return moved
