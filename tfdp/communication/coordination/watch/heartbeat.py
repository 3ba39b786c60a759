"""Heartbeats through the key-value store of the first worker."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import threading
import time
from typing import Any

import tensorflow as tf

from tfdp.communication.coordination.clock import clock
from tfdp.communication.coordination.progress import WorkerProgress, progress
from tfdp.communication.coordination.watch.errors import WorkerFailure
from tfdp.communication.coordination.watch.failure_detector import FailureDetector
from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.ground import _compat
from tfdp.ground.base.process_identity import ProcessIdentity

BEAT_SECONDS = 1.0
# Longest wait for a key, since a key that is overwritten is missing for a moment.
_READ_SECONDS = 0.02
# Number of heartbeats within which a SIGTERM sent before joining may surface.
_BEATS_AFTER_JOINING = 5
# A wait that is reported to all workers, long before the watchdog warns of stragglers.
_LONG_WAIT_SECONDS = 5.0
# Fraction of one CPU core: heartbeats and TensorFlow's polling use less, computing
# more.
_IDLE_FRACTION = 0.2
# Fields of `WorkerStatus` that a worker reports.
_STATUS = ("has_left", "last_error", "idle_seconds")


class IdleMeter:
    """Time for which this process has used hardly any CPU.

    It also measures the time that the main thread has meanwhile spent in one call of
    TensorFlow.

    Attributes:
        seconds: Float, time without CPU use until the last `update`.
        call_seconds: Float, time in one call until the last `update`.
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
        # The frame is kept only while idle, since it keeps tensors alive.
        self._call = _compat.call_in_progress() if self.seconds else None
        is_same = self._call is not None and self._call is before
        self.call_seconds = self.call_seconds + elapsed if is_same else 0.0


class Heartbeat(threading.Thread):
    """Thread that publishes this worker's heartbeat and progress every second.

    All workers report to worker 0, which hosts the store, publishes a summary and names
    lost workers. A call of the store may never return if worker 0 hangs, so this thread
    does nothing else.

    Args:
        worker_group: `WorkerGroup` between the workers.
        detector: `FailureDetector`, which records received heartbeats.
    """

    def __init__(self, worker_group: WorkerGroup, detector: FailureDetector) -> None:
        super().__init__(name="tfdp heartbeat", daemon=True)
        self.failure: WorkerFailure | None = None
        self.last_error = ""
        self.has_left = False
        # The data source that this worker waits for, or `""`.
        self.source = ""
        self._rank = worker_group.rank
        self._prefix = worker_group.new_prefix()
        self._detector = detector
        self._idle = IdleMeter()
        self._process = dataclasses.asdict(ProcessIdentity.current())
        self._count = 0
        self._is_notice_repeated = False
        self._counts_seen: dict[int, int] = {}
        self._wake = threading.Event()
        # Number of completed beats; `beat_now` waits for one that begins after its
        # call.
        self._num_done = 0
        self._condition = threading.Condition()

    def run(self) -> None:
        """Beat every second until this worker has announced the end of its script."""
        is_last = False
        while not is_last:
            self._wake.wait(BEAT_SECONDS)
            self._wake.clear()
            is_last = self.has_left
            # Worker 0 may not answer, which the watchdog detects by its missing
            # heartbeat.
            with contextlib.suppress(tf.errors.OpError):
                self._beat()
            with self._condition:
                self._num_done = self._count
                self._condition.notify_all()

    def beat_now(self, timeout_seconds: float) -> None:
        """Beat at once, and wait until the beat is complete.

        Args:
            timeout_seconds: Float, the longest wait.
        """
        with self._condition:
            wanted = self._count + 1
            self._wake.set()
            self._condition.wait_for(lambda: self._num_done >= wanted, timeout_seconds)

    @property
    def idle_seconds(self) -> float:
        """Float, time for which this process has used hardly any CPU."""
        return self._idle.seconds

    @property
    def call_seconds(self) -> float:
        """Float, time that the main thread has spent in one call of TensorFlow."""
        return self._idle.call_seconds

    @property
    def progress(self) -> WorkerProgress:
        """`WorkerProgress`, including a long wait outside of Keras's loops."""
        own = dataclasses.replace(progress.current, source=self.source)
        waits = not own.name and self.call_seconds > _LONG_WAIT_SECONDS
        return dataclasses.replace(own, is_computing=True) if waits else own

    def _beat(self) -> None:
        """Publish this worker's heartbeat, and receive the others'."""
        with self._condition:
            self._count += 1
        self._idle.update()
        if self._count <= _BEATS_AFTER_JOINING:
            self._repeat_notice()
        if self._rank > 0:
            self._publish(f"beat/{self._rank}", self._report())
            self._receive_summary(self._read("summary"))
            return
        for rank in self._detector.ranks():
            self._receive(rank, self._read(f"beat/{rank}"))
        self._publish("summary", {"own": self._report(), "of": self._summary()})

    def _repeat_notice(self) -> None:
        """Send this process again the SIGTERM that it received while it joined.

        TensorFlow's handler was installed then, and writes a key within a second.
        """
        with contextlib.suppress(tf.errors.DeadlineExceededError):
            task = _compat.get_key_value(_compat.PREEMPTED_TASK_KEY, _READ_SECONDS)
            if task == _compat.own_task() and not self._is_notice_repeated:
                self._is_notice_repeated = True
                os.kill(os.getpid(), signal.SIGTERM)

    def _report(self) -> dict[str, Any]:
        """Build this worker's report to the others, a dict that JSON supports."""
        return {
            "count": self._count,
            "progress": dataclasses.asdict(self.progress),
            "process": self._process,
            "failure": self.failure and dataclasses.asdict(self.failure),
            **{name: getattr(self, name) for name in _STATUS},
        }

    def _receive(
        self, rank: int, beat: dict[str, Any] | None, age: float = 0.0
    ) -> bool:
        """Record another worker's report; return whether it is new.

        Args:
            rank: Int, rank of the worker.
            beat: Dict, the result of `_report`, an entry of `_summary`, or `None` if
                none was published.
            age: Float, age of the report in seconds. Defaults to `0.0`.
        """
        if beat is None or beat["count"] == self._counts_seen.get(rank):
            return False
        self._counts_seen[rank] = beat["count"]
        # The failure is read first, since a worker that ends because of a lost one must
        # not be blamed.
        if beat.get("failure") and self.failure is None:
            self.failure = WorkerFailure(**beat["failure"])
        if beat.get("process"):  # only in a report of the worker, not in the summary
            process = ProcessIdentity(**beat["process"])
            self._detector.record_status(rank, process=process)
        self._detector.record_heartbeat(rank, age, WorkerProgress(**beat["progress"]))
        self._detector.record_status(rank, **{name: beat[name] for name in _STATUS})
        return True

    def _summary(self) -> dict[int, dict[str, Any]]:
        """Collect the status of workers that wait, failed or ended, by rank.

        Workers that make progress are left out, so that the summary of a thousand
        workers stays short.
        """
        now = clock.now()
        found = {}
        for rank, count in self._counts_seen.items():
            status = self._detector.status(rank)
            its_progress = status.progress
            is_waiting = its_progress and its_progress.seconds > _LONG_WAIT_SECONDS
            if not (is_waiting or status.last_error or status.has_left):
                continue
            found[rank] = {
                "count": count,
                "age": now - status.last_heartbeat,
                "progress": its_progress and dataclasses.asdict(its_progress),
                **{name: getattr(status, name) for name in _STATUS},
            }
        return found

    def _receive_summary(self, summary: dict[str, Any] | None) -> None:
        """Record worker 0's report and its summary of the others."""
        if summary is None or not self._receive(0, summary["own"]):
            return
        for text, beat in summary["of"].items():
            if int(text) != self._rank:
                self._receive(int(text), beat, beat["age"])

    def _publish(self, key: str, content: dict[str, Any]) -> None:
        """Set a key of the store to JSON; delete it first, to overwrite it."""
        _compat.delete_key_value(f"{self._prefix}/{key}")
        _compat.set_key_value(f"{self._prefix}/{key}", json.dumps(content))

    def _read(self, key: str) -> dict[str, Any] | None:
        """Read the JSON of a key of the store; return `None` if it is missing."""
        try:
            text = _compat.get_key_value(f"{self._prefix}/{key}", _READ_SECONDS)
        except tf.errors.DeadlineExceededError:
            return None
        return json.loads(text)
