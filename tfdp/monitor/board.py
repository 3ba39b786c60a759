"""What the first worker keeps and writes of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdp.monitor import columns
from tfdp.monitor.advice import Facts, advise
from tfdp.monitor.sinks import CsvFile, TensorBoardFile, has_tensorboard, write_json
from tfdp.monitor.stragglers import Straggler, find_straggler
from tfdp.monitor.summary import summary_table
from tfdp.monitor.windows import Row, Totals

_NAME = "communication"


class Board:
    """Takes the rows of a run and writes them.

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
        self.straggler: Straggler | None = None
        self._folder = folder
        self._name = _NAME if number == 1 else f"{_NAME}-{number}"
        self._hosts = hosts
        self._histogram = histogram
        # What the collectives of a step are for, known when one has been traced.
        self.labels: Sequence[str] = ()
        self._before: Row | None = None
        self._slow_steps: dict[int, int] = {}
        self._csv: CsvFile | None = None
        self._events: TensorBoardFile | None = None

    def take(self, row: Row) -> None:
        """Writes a row."""
        recent = [row] if self._before is None else [self._before, row]
        self.straggler = find_straggler(recent, self._hosts)
        if self.straggler is not None:
            rank = self.straggler.rank
            self._slow_steps[rank] = self._slow_steps.get(rank, 0) + row.num_steps
        self._before = row
        if self._csv is None:
            self._open()
        assert self._csv is not None
        rank_or_none = None if self.straggler is None else self.straggler.rank
        values = columns.values_of(row, rank_or_none)
        self._csv.add(values)
        if self._events is not None:
            self._write_events(row, values)
        self.totals.add(row)

    def close(self) -> None:
        """Closes the files."""
        for file in (self._csv, self._events):
            if file is not None:
                file.close()

    def finish(self, facts: Facts, settings: dict[str, Any]) -> str:
        """Writes the JSON file.

        Args:
            facts: `Facts`.
            settings: Dict, what the run was.

        Returns:
            String, a table and one sentence of advice.
        """
        straggler = self._persistent_straggler()
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

    def _open(self) -> None:
        names = columns.names(len(self._hosts), self.labels)
        self._csv = CsvFile(self._folder / f"{self._name}.csv", names)
        if has_tensorboard():
            self._events = TensorBoardFile(self._folder)

    def _write_events(self, row: Row, values: dict[str, float]) -> None:
        assert self._events is not None
        skipped = ("step", "epoch")
        scalars = {
            f"communication/{name}": value
            for name, value in values.items()
            if name not in skipped
        }
        histograms: dict[str, Sequence[float]] = {}
        if self._histogram:
            histograms["communication/steps_seconds"] = row.times
            histograms["communication/buckets_seconds"] = list(row.buckets.values())
        self._events.add(row.step, scalars, histograms)

    def _persistent_straggler(self) -> Straggler | None:
        """A worker that was slow in at least half of the steps."""
        for rank, steps in self._slow_steps.items():
            if 2 * steps >= self.totals.num_steps:
                own = {r: w["compute_seconds"] for r, w in self.totals.workers.items()}
                others = [value for key, value in own.items() if key != rank]
                excess = own[rank] - sum(others) / len(others)
                return Straggler(rank, self._hosts[rank], excess)
        return None
