"""Report of a run: the windows of all workers, merged and written by worker 0."""

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
    Excess,
    Row,
    Totals,
    Window,
    excess_of,
    find_straggler,
    merge,
    persistent_straggler,
)

_NAME = "communication"
# Of so many windows it is known at the end who was slow; a run may have millions.
_KEPT_WINDOWS = 10_000
# How long the first worker waits for another one's windows, and at the end for all.
_PATIENCE_SECONDS, _PARTING_SECONDS = 10.0, 20.0
# Windows of this time travel together: every message costs the steps beside it.
_PAUSE_SECONDS = 1.0


class RunReport:
    """Writer of the rows of a run, on worker 0.

    Args:
        folder: `Path`, which is there.
        hosts: Sequence of strings, the host of each worker.
        histogram: Bool, whether TensorBoard gets histograms.
        number: Int, which `fit` of its callback this is: from the second on, the
            files have it in their names. Defaults to 1.
    """

    def __init__(
        self,
        folder: Path,
        hosts: Sequence[str],
        *,
        histogram: bool,
        number: int = 1,
    ) -> None:
        self.totals = Totals()
        # What is to be said of epochs that are over; another thread may say it.
        self.notices: collections.deque[str] = collections.deque()
        self._folder = folder
        self._name = _NAME if number == 1 else f"{_NAME}-{number}"
        self._hosts = hosts
        self._histogram = histogram
        # What the collectives of a step are for, known when one has been traced.
        self.labels: Sequence[str] = ()
        self._before: Row | None = None
        self._windows = _no_windows()
        self._windows_of_epoch = _no_windows()
        self._last_of_epoch_before: Excess | None = None
        self._files: list[CsvFile | TensorBoardFile] = []

    def take(self, row: Row) -> None:
        """Write a row; the first one of an epoch ends the epoch before."""
        if self._before is not None and row.epoch != self._before.epoch:
            self.end_epoch()
        recent = [row] if self._before is None else [self._before, row]
        straggler = find_straggler(recent, self._hosts)
        self._before = row
        excess = excess_of(row)
        if excess is not None:
            self._windows.append(excess)
            self._windows_of_epoch.append(excess)
        rank = None if straggler is None else straggler.rank
        values = column_values(row, rank)
        for file in self._files or self._open():
            file.add(row, values)
        self.totals.add(row)

    def end_epoch(self) -> None:
        """Note in `notices` which worker was slow in the windows of the epoch."""
        windows, self._windows_of_epoch = self._windows_of_epoch, _no_windows()
        if not windows or self._before is None:
            return
        last = windows[-1]
        if len(windows) == 1 and self._last_of_epoch_before is not None:
            # A short epoch: who is slow in it is slow again if it was before.
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
        """Write the JSON file.

        Args:
            facts: `Facts`.
            settings: Dict, what the run was.

        Returns:
            String, a table and one sentence of advice.
        """
        straggler = persistent_straggler(self._windows, self._hosts)
        values = self.totals.values
        advice = advise(values, facts, straggler)
        hosts = dict(enumerate(self._hosts))
        workers = [
            {"rank": rank, "host": hosts[rank], **own}
            for rank, own in self.totals.workers.items()
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
        names = column_names(len(self._hosts), self.labels)
        self._files = [CsvFile(self._folder / f"{self._name}.csv", names)]
        if has_tensorboard():
            events = TensorBoardFile(self._folder, histogram=self._histogram)
            self._files.append(events)
        return self._files


def _no_windows() -> collections.deque[Excess]:
    return collections.deque(maxlen=_KEPT_WINDOWS)


class ReportThread(threading.Thread):
    """A thread that sends this worker's windows, or on the first worker merges them.

    Training never waits for it: a worker that is silent is left out.

    Args:
        mailbox: `Mailbox` of all workers.
        report: `RunReport` on the first worker, which takes each `Row`, or `None`.
    """

    def __init__(self, mailbox: Mailbox, report: RunReport | None) -> None:
        super().__init__(name="tfdp monitor", daemon=True)
        self.error: Exception | None = None
        self._mailbox = mailbox
        self._report = report
        self._made: queue.SimpleQueue[Callable[[], Window] | None]
        self._made = queue.SimpleQueue()
        self._is_closing = threading.Event()
        self._num_sent = 0
        others = range(1, mailbox.num_workers)
        self._arrived: dict[int, dict[int, Window]] = {rank: {} for rank in others}
        self._num_received = dict.fromkeys(others, 0)
        self._silent: set[int] = set()

    def put(self, make: Callable[[], Window]) -> None:
        """Take a window of this worker, which is computed by the thread.

        Args:
            make: Callable that returns the `Window`.
        """
        if self.error is None:
            self._made.put(make)

    def stop(self) -> None:
        """Have the thread end once all windows are through."""
        self._is_closing.set()
        self._made.put(None)

    def close(self) -> None:
        """Wait until all windows are through, for a limited time."""
        self.stop()
        self.join(_PARTING_SECONDS)

    def run(self) -> None:
        """Work until closed; an error ends the reports, not the training."""
        is_open = True
        try:
            while is_open:
                batch = [self._made.get()]
                self._is_closing.wait(_PAUSE_SECONDS)
                while not self._made.empty():
                    batch.append(self._made.get())
                is_open = None not in batch
                self._pass_on([make() for make in batch if make is not None])
        except Exception as error:  # noqa: BLE001
            self.error = error

    def _pass_on(self, windows: list[Window]) -> None:
        if self._report is not None:
            for window in windows:
                others = self._of_others(window.step)
                windows_of_all = {0: window, **others}
                self._report.take(merge(windows_of_all, self._mailbox.num_workers))
        elif windows:
            texts = [window.to_json() for window in windows]
            self._mailbox.send(self._num_sent, json.dumps(texts))
            self._num_sent += 1

    def _of_others(self, step: int) -> dict[int, Window]:
        """The other workers' windows that end with a step, by rank."""
        found = {}
        for rank, arrived in self._arrived.items():
            while step not in arrived and self._receive(rank):
                pass
            if step in arrived:
                found[rank] = arrived.pop(step)
        return found

    def _receive(self, rank: int) -> bool:
        """Take in a message of a worker, and return whether there was one."""
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
