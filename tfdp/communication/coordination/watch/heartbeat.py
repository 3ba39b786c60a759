"""Heartbeats, by which each worker knows the state of all others."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable
from typing import Any

from tfdp.communication.coordination.clock import clock
from tfdp.communication.coordination.flight_record import (
    collective_ring,
    tensorflow_calls,
)
from tfdp.communication.coordination.progress import WorkerProgress, progress
from tfdp.communication.coordination.watch.errors import WorkerFailure
from tfdp.communication.coordination.watch.failure_detector import FailureDetector
from tfdp.communication.store import HostLost, Store
from tfdp.ground import user_code
from tfdp.ground._compat import runtime
from tfdp.ground.base.process_identity import ProcessIdentity

# After a wait of this many seconds, a worker's report is sent to all workers, so that
# they have it long before the watchdog warns of stragglers.
_LONG_WAIT_SECONDS = 5.0
# Fraction of one CPU core below which a process is idle: one that only sends heartbeats
# uses less, and one that computes uses more.
_IDLE_FRACTION = 0.2
# Fields of a worker's report. In a large job, not every report can be sent to all
# workers: one is sent at once if a field of `_NEWS` has changed, and with each
# heartbeat while a field of `_NOTABLE` is set. `_STATUS` are also fields of
# `WorkerStatus`.
_NEWS = ("num_record_requests", "has_left", "last_error", "failure")
_NOTABLE = ("has_left", "last_error", "failure")
_STATUS = ("has_left", "last_error", "idle_seconds")


class IdleMeter:
    """Meter of the time for which this process has been idle without interruption.

    The process is idle between two updates if it uses hardly any CPU. The meter also
    measures how long the main thread has been in its present call of TensorFlow while
    idle.

    Attributes:
        seconds: Float, time from the last CPU use to the last `update`; 0 if the
            process was not idle before that `update`.
        call_seconds: Float, the part of `seconds` in the present call; 0 outside calls.
    """

    def __init__(self) -> None:
        self.seconds = self.call_seconds = 0.0
        self._call: Any = None
        self._last = time.process_time(), clock.now()

    def update(self) -> None:
        """Add the time since the last update, or restart from zero if not idle."""
        (cpu, then), self._last = self._last, (time.process_time(), clock.now())
        elapsed = self._last[1] - then
        is_idle = self._last[0] - cpu <= _IDLE_FRACTION * elapsed
        self.seconds = self.seconds + elapsed if is_idle else 0.0
        before = self._call
        # The stack frame of a call is kept only while this process is idle, since the
        # frame keeps tensors alive.
        self._call = runtime.call_in_progress() if self.seconds else None
        is_same = self._call is not None and self._call is before
        self.call_seconds = self.call_seconds + elapsed if is_same else 0.0


class Heartbeat(threading.Thread):
    """Thread that publishes this worker's heartbeat and progress regularly.

    The store answers with the reports of the other workers. A call of the store does
    not return while its host is suspended, so this thread does nothing else.

    Args:
        rank: Int, rank of this worker.
        store: `Store` of the job.
        detector: `FailureDetector`, which records the state of the other workers.
        wake: Callable, called when another worker may be lost. Defaults to a function
            that does nothing.
    """

    def __init__(
        self,
        rank: int,
        store: Store,
        detector: FailureDetector,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name="tfdp heartbeat", daemon=True)
        self.failure: WorkerFailure | None = None
        self.last_error = ""
        self.has_left = False
        # The data source that this worker waits for, or `""`. Other workers receive it,
        # and do not declare a worker lost while it waits for data.
        self.source = ""
        # A worker requests flight records from all others by incrementing
        # `num_record_requests` in its report. The dict has the last numbers of the
        # others, so that a request that is reported again has no effect.
        self.num_record_requests = 0
        self._record_requests: dict[int, int] = {}
        # Hook that the watchdog sets. It receives the rank of another worker that was
        # signaled to write its flight record, so that this worker also writes one.
        self.record_requested: Callable[[int], None] = lambda rank: None
        self.rank = rank
        self._store = store
        self._detector = detector
        self._wake_watchdog = wake
        self._news: list[Any] = [0, False, "", None]
        store.news, store.lost = self._receive, self._lose_host
        self._idle = IdleMeter()
        self._process = dataclasses.asdict(ProcessIdentity.current())
        self._count = 0
        self._wake = threading.Event()
        # Number of completed beats. `beat_now` waits until a beat that began after its
        # call is complete, since an earlier one may lack the latest status.
        self._num_done = 0
        self._condition = threading.Condition()

    def run(self) -> None:
        """Send heartbeats until this worker has announced the end of its script."""
        is_last = False
        while not is_last:
            self._wake.wait(self._detector.beat_seconds)
            self._wake.clear()
            is_last = self.has_left
            with contextlib.suppress(HostLost):
                self._beat()
            with self._condition:
                self._num_done = self._count
                self._condition.notify_all()

    def beat_now(self, timeout_seconds: float) -> None:
        """Send a heartbeat at once, and wait until the store has answered.

        Args:
            timeout_seconds: Float, the longest wait.
        """
        with self._condition:
            wanted = self._count + 1
            self._wake.set()
            self._condition.wait_for(lambda: self._num_done >= wanted, timeout_seconds)

    @property
    def idle_seconds(self) -> float:
        """Float, seconds since this process last used the CPU noticeably."""
        return self._idle.seconds

    @property
    def call_seconds(self) -> float:
        """Float, seconds that the process has been idle in its present TensorFlow call.

        The call is that of the main thread; without one, this is 0.0.
        """
        return self._idle.call_seconds

    @property
    def progress(self) -> WorkerProgress:
        """`WorkerProgress` of this worker at this moment.

        Outside of Keras's loops, a long idle call of TensorFlow counts as a step.
        """
        newest = collective_ring.newest() | tensorflow_calls.newest()
        own = dataclasses.replace(
            progress.current, source=self.source, collectives=newest
        )
        if own.name:
            return own
        return dataclasses.replace(
            own,
            is_computing=self.call_seconds > _LONG_WAIT_SECONDS,
            line=user_code.describe_user_line(runtime.main_thread_frame()),
        )

    def _beat(self) -> None:
        """Send this worker's report to the store; record the other workers' reports."""
        with self._condition:
            self._count += 1
        self._idle.update()
        report = self._report()
        news = [report[name] for name in _NEWS]
        is_news, self._news = news != self._news, news
        seconds = report["progress"]["seconds"]
        summary = self._store.beat(
            json.dumps(report),
            is_notable=any(report[name] for name in _NOTABLE)
            or seconds > _LONG_WAIT_SECONDS,
            is_news=is_news,
            wants_all=seconds >= self._detector.beat_seconds,
        )
        self._receive(summary)
        # The summary has an age for each worker whose report it contains or whose
        # heartbeat is old. So a worker without an age has sent a heartbeat recently.
        self._detector.record_answer(
            set(map(int, [*summary["beats"], *summary["ages"]]))
        )

    def _report(self) -> dict[str, Any]:
        """Build this worker's report to the other workers, a dict that JSON supports.

        Returns:
            Dict with `"progress"`, `"process"` and `"failure"`, the fields of
            `WorkerProgress`, `ProcessIdentity` and `WorkerFailure` (or `None`); and
            with `"num_record_requests"`, `"has_left"`, `"last_error"` and
            `"idle_seconds"`.
        """
        return {
            "progress": dataclasses.asdict(self.progress),
            "process": self._process,
            "failure": self.failure and dataclasses.asdict(self.failure),
            "num_record_requests": self.num_record_requests,
            **{name: getattr(self, name) for name in _STATUS},
        }

    def _receive(self, news: dict[str, Any]) -> None:
        """Record in the detector what the store reports of other workers.

        If a worker is lost, or a failure is known, the watchdog is woken.

        Args:
            news: Dict with some of the keys `"beats"`, from the rank of a worker to the
                age of its last report in seconds and the report as JSON; `"ages"`, from
                the rank of a worker to the age of its last heartbeat; and `"lost"`,
                ranks whose connection has ended.
        """
        for text, (age, report) in news.get("beats", {}).items():
            rank = int(text)
            if rank != self.rank:
                self._receive_report(rank, json.loads(report), age)
        for text, age in news.get("ages", {}).items():
            if int(text) != self.rank:
                self._detector.record_heartbeat(int(text), age)
        lost = set(news.get("lost", ())) - {self.rank}
        for rank in lost:
            self._detector.record_status(rank, is_disconnected=True)
        if lost or self.failure is not None:
            self._wake_watchdog()

    def _receive_report(self, rank: int, report: dict[str, Any], age: float) -> None:
        """Record another worker's report.

        Its progress, process and status are recorded in the detector. A failure becomes
        that of this worker, if it has none. If the worker has requested flight records
        since its last report, this worker writes its own.

        Args:
            rank: Int, rank of the worker.
            report: Dict, the result of `_report` on that worker.
            age: Float, age of the report in seconds.
        """
        # The failure is read before the status, since a worker that ends because
        # another one is lost must not be declared lost itself.
        if report["failure"] and self.failure is None:
            self.failure = WorkerFailure(**report["failure"])
            # The failure counts as sent, since all workers have received it: this
            # worker must not send it as news again.
            self._news[-1] = report["failure"]
        self._detector.record_heartbeat(rank, age, WorkerProgress(**report["progress"]))
        status = {name: report[name] for name in _STATUS}
        process = ProcessIdentity(**report["process"])
        self._detector.record_status(rank, process=process, **status)
        num_requests = report["num_record_requests"]
        if num_requests > self._record_requests.get(rank, 0):
            self._record_requests[rank] = num_requests
            self.record_requested(rank)

    def _lose_host(self) -> None:
        """Record that the connection to the store's host has ended."""
        self._receive({"lost": [self._store.host]})
