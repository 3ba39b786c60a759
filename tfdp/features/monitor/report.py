"""Report of a run: worker 0 merges the windows of all workers, and writes them."""

from __future__ import annotations

import collections
import dataclasses
import json
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfdp.communication.coordination.worker_group import Mailbox
from tfdp.features.monitor.advice import Facts, advise
from tfdp.features.monitor.sinks import (
    CsvFile,
    TensorBoardFile,
    column_names,
    column_values,
    has_tensorboard,
    summary_table,
    write_json,
)
from tfdp.features.monitor.windows import (
    Row,
    RunTotals,
    SlowestWorker,
    Window,
    find_straggler,
    merge,
    persistent_straggler,
    slowest_worker,
)

# Name of the report files without the ending, and without the number that keeps the
# files of a later `fit` apart.
_NAME = "communication"
# Stragglers are sought only in this many of the latest windows, since a run may have
# millions of windows.
_KEPT_WINDOWS = 10_000
# Timeouts in seconds, so that reports do not delay training: how long the first worker
# waits for the windows of another, and how long `fit` waits for the reporting thread.
_PATIENCE_SECONDS, _PARTING_SECONDS = 10.0, 20.0
# Windows of this many seconds are sent in one message, since each message slows
# concurrent steps.
_PAUSE_SECONDS = 1.0


class RunReport:
    """Writer of a run's measurements to CSV, TensorBoard and JSON, on worker 0.

    Args:
        folder: `Path` of an existing folder.
        hosts: Sequence of strings, the host of each worker.
        histogram: Bool, whether TensorBoard gets histograms.
        number: Int, number of this `fit` of the callback, which is part of the file
            names from 2 on. Defaults to 1.

    Attributes:
        totals: `RunTotals` of the rows so far.
        notices: Deque of strings, messages about completed epochs.
        labels: Sequence of strings, the collectives of a step, which must be set before
            the first `take`.
    """

    def __init__(
        self,
        folder: Path,
        hosts: Sequence[str],
        *,
        histogram: bool,
        number: int = 1,
    ) -> None:
        self.totals = RunTotals()
        # Messages about completed epochs. The reporting thread appends them, and the
        # callback prints them on the thread of `fit`, below the progress bar.
        self.notices: collections.deque[str] = collections.deque()
        self._folder = folder
        self._name = _NAME if number == 1 else f"{_NAME}-{number}"
        self._hosts = hosts
        self._histogram = histogram
        # Labels of the collectives of a step, which become columns of the CSV file. The
        # callback sets them, since they are known only after a step has been traced.
        self.labels: Sequence[str] = ()
        self._before: Row | None = None
        self._windows = _no_windows()
        self._windows_of_epoch = _no_windows()
        self._last_of_epoch_before: SlowestWorker | None = None
        self._files: list[CsvFile | TensorBoardFile] = []

    def take(self, row: Row) -> None:
        """Write a window of all workers, a row, to all files, and add it to the totals.

        The first row of another epoch ends the previous epoch.
        """
        if self._before is not None and row.epoch != self._before.epoch:
            self.end_epoch()
        recent = [row] if self._before is None else [self._before, row]
        straggler = find_straggler(recent, self._hosts)
        self._before = row
        slowest = slowest_worker(row)
        if slowest is not None:
            self._windows.append(slowest)
            self._windows_of_epoch.append(slowest)
        rank = None if straggler is None else straggler.rank
        values = column_values(row, rank)
        for file in self._files or self._open():
            file.add(row, values)
        self.totals.add(row)

    def end_epoch(self) -> None:
        """Append a message to `notices` if the epoch has a persistent straggler."""
        windows, self._windows_of_epoch = self._windows_of_epoch, _no_windows()
        if not windows or self._before is None:
            return
        last = windows[-1]
        if len(windows) == 1 and self._last_of_epoch_before is not None:
            # Only a worker that is slow in two windows is a straggler. For an epoch of
            # a single window, the other one is the last window of the previous epoch.
            windows.appendleft(self._last_of_epoch_before)
        self._last_of_epoch_before = last
        straggler = persistent_straggler(windows, self._hosts)
        if straggler is not None:
            self.notices.append(
                f"in epoch {self._before.epoch + 1} {straggler}: {straggler.remedy}."
            )

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def finish(self, facts: Facts, settings: dict[str, Any]) -> str:
        """Write the JSON file, and return a summary.

        Args:
            facts: `Facts` of the run.
            settings: Dict, settings of the run.

        Returns:
            String, a table and one sentence of advice.
        """
        straggler = persistent_straggler(self._windows, self._hosts)
        values = self.totals.values
        advice = advise(values, facts, straggler)
        hosts = dict(enumerate(self._hosts))
        workers = [
            {"rank": rank, "host": hosts[rank], **means}
            for rank, means in self.totals.workers.items()
        ]
        content = {
            "settings": {**settings, **dataclasses.asdict(facts)},
            "num_steps": self.totals.num_steps,
            "totals": values,
            "workers": workers,
            "buckets": [
                {"label": label, "seconds": seconds}
                for label, seconds in self.totals.buckets.items()
            ],
            "straggler": straggler and dataclasses.asdict(straggler),
            "advice": advice,
        }
        write_json(self._folder / f"{self._name}.json", content)
        return summary_table(self.totals, hosts, advice)

    def _open(self) -> list[CsvFile | TensorBoardFile]:
        """Open and return the CSV file, and TensorBoard's if it is installed."""
        names = column_names(len(self._hosts), self.labels)
        self._files = [CsvFile(self._folder / f"{self._name}.csv", names)]
        if has_tensorboard():
            events = TensorBoardFile(self._folder, histogram=self._histogram)
            self._files.append(events)
        return self._files


def _no_windows() -> collections.deque[SlowestWorker]:
    """Return an empty deque that keeps the latest `_KEPT_WINDOWS` windows."""
    return collections.deque(maxlen=_KEPT_WINDOWS)


class ReportThread(threading.Thread):
    """Thread that sends this worker's windows to the first worker, which merges them.

    A window has the means over several steps. Training does not wait for this thread,
    and windows of workers that do not answer are left out.

    Args:
        mailbox: `Mailbox` of all workers.
        report: `RunReport` on the first worker, or `None` on the others.

    Attributes:
        error: Exception that has ended the reports, or `None`.
    """

    def __init__(self, mailbox: Mailbox, report: RunReport | None) -> None:
        super().__init__(name="tfdp monitor", daemon=True)
        self.error: Exception | None = None
        self._mailbox = mailbox
        self._report = report
        self._queue: queue.SimpleQueue[Callable[[], Window] | None]
        self._queue = queue.SimpleQueue()
        self._is_closing = threading.Event()
        self._num_sent = 0
        others = range(1, mailbox.num_workers)
        self._arrived: dict[int, dict[int, Window]] = {rank: {} for rank in others}
        self._num_received = dict.fromkeys(others, 0)
        self._silent: set[int] = set()

    def put(self, make: Callable[[], Window]) -> None:
        """Queue a window of this worker, unless an error has ended the reports.

        Args:
            make: Callable that returns the `Window`, called on the thread.
        """
        if self.error is None:
            self._queue.put(make)

    def stop(self) -> None:
        """Have the thread end after all queued windows, without waiting for it."""
        self._is_closing.set()
        self._queue.put(None)

    def close(self) -> None:
        """Have the thread end after all queued windows; wait at most 20 seconds."""
        self.stop()
        self.join(_PARTING_SECONDS)

    def run(self) -> None:
        """Process windows until closed; an error ends the reports, not the training."""
        is_open = True
        try:
            while is_open:
                batch = [self._queue.get()]
                self._is_closing.wait(_PAUSE_SECONDS)
                while not self._queue.empty():
                    batch.append(self._queue.get())
                is_open = None not in batch
                self._send_or_merge([make() for make in batch if make is not None])
        except Exception as error:  # noqa: BLE001 the callback warns of the error
            self.error = error

    def _send_or_merge(self, windows: list[Window]) -> None:
        """Send windows to worker 0; on worker 0, merge and report those of all."""
        if self._report is not None:
            for window in windows:
                others = self._windows_of_others(window.step)
                windows_of_all = {0: window, **others}
                self._report.take(merge(windows_of_all, self._mailbox.num_workers))
        elif windows:
            texts = [window.to_json() for window in windows]
            self._mailbox.send(self._num_sent, json.dumps(texts))
            self._num_sent += 1

    def _windows_of_others(self, step: int) -> dict[int, Window]:
        """Return the other workers' windows that end with a step, by rank.

        It waits for them for a limited time, and leaves out those that do not arrive.
        """
        windows = {}
        for rank, arrived in self._arrived.items():
            while step not in arrived and self._receive(rank):
                pass
            if step in arrived:
                windows[rank] = arrived.pop(step)
        return windows

    def _receive(self, rank: int) -> bool:
        """Receive the next message of a worker, and store the windows in it.

        Returns:
            Bool, whether a message has arrived in time: within ten seconds, or ten
            milliseconds from a worker whose last message did not arrive in time.
        """
        patience = 0.01 if rank in self._silent else _PATIENCE_SECONDS
        text = self._mailbox.receive(self._num_received[rank], rank, patience)
        if text is None:
            self._silent.add(rank)
            return False
        self._silent.discard(rank)
        self._num_received[rank] += 1
        for window in map(Window.from_json, json.loads(text)):
            self._arrived[rank][window.step] = window
        return True
