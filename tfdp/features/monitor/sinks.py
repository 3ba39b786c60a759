"""Sinks of a monitor: columns, CSV, TensorBoard, JSON and the summary table."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

from tfdp.features.monitor.windows import Row, RunTotals
from tfdp.ground.base.files import replaced
from tfdp.ground.text import pluralize

# Columns by subject, which becomes the first part of a tag: TensorBoard groups tags by
# it, and initially expands the two groups whose names come first in the alphabet.
VALUES = {
    "step": (
        "step_seconds",
        "p50_seconds",
        "p95_seconds",
        "p99_seconds",
        "samples_per_second",
        "input_seconds",
        "compute_seconds",
    ),
    "communication": (
        "communication_seconds",
        "exposed_seconds",
        "communication_fraction",
        "sent_bytes",
        "busbw_gb_per_second",
    ),
    "gradients": ("gradient_norm", "loss_scale", "skipped_steps"),
}
_SUBJECTS = {name: subject for subject, names in VALUES.items() for name in names}
_BY_WORKER, _BY_COLLECTIVE = "step_by_worker", "step_by_collective"
# Columns that locate a row in the run. They have no tag in TensorBoard, which stores
# the step with each value.
_POSITION_COLUMNS = ("step", "epoch")
_DISTRIBUTION = "distribution_seconds"
# Names of a step's times in the summary table, for users who do not know the columns.
_NAMES = {
    "compute": "compute",
    "exposed": "communication, exposed",
    "input": "of compute: until the data was there",
}


def column_names(num_workers: int, labels: Sequence[str]) -> list[str]:
    """Return the columns of a run, in order.

    Args:
        num_workers: Int, number of workers.
        labels: Sequence of strings, labels of the collectives of a step.

    Returns:
        List of strings.

    Example:

    >>> column_names(1, ["bucket 0"])[-3:]
    ['worker0_step_seconds', 'worker0_wait_seconds', 'bucket0_seconds']
    """
    workers = [
        f"worker{rank}_{what}_seconds"
        for rank in range(num_workers)
        for what in ("step", "wait")
    ]
    return [
        *_POSITION_COLUMNS,
        *_SUBJECTS,
        "straggler_rank",
        *workers,
        *(_column_of(label) for label in labels),
    ]


def _column_of(label: str) -> str:
    """Return the column of a collective's label: `"bucket0_seconds"`."""
    return f"{label.replace(' ', '')}_seconds"


def column_values(row: Row, straggler: int | None) -> dict[str, float]:
    """Return the values of a window of steps, by column of the CSV file.

    Args:
        row: `Row`, the window of all workers.
        straggler: Int, the rank of the worker that the others wait for, or `None`.

    Returns:
        Dict from column to number.
    """
    values: dict[str, float] = {"step": row.step, "epoch": row.epoch, **row.values}
    if straggler is not None:
        values["straggler_rank"] = straggler
    for rank, wait in row.waits().items():
        values[f"worker{rank}_step_seconds"] = row.workers[rank].mean.step_seconds
        values[f"worker{rank}_wait_seconds"] = wait
    for label, seconds in row.buckets.items():
        values[_column_of(label)] = seconds
    return values


def scalars_of(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values of a window of steps by TensorBoard tag, `subject/column`.

    The subjects of columns are those of `VALUES`, `step_by_collective`, and
    `step_by_worker`. A subject at the start of a column's name is removed from it.

    Args:
        values: Mapping from column to number.

    Returns:
        Dict from tag to number.

    Example:

    >>> scalars_of({"step": 10, "step_seconds": 0.5, "bucket0_seconds": 0.1})
    {'step/seconds': 0.5, 'step_by_collective/bucket0_seconds': 0.1}
    """
    return {
        _tag_of(k): value for k, value in values.items() if k not in _POSITION_COLUMNS
    }


def _tag_of(column: str) -> str:
    """Return the TensorBoard tag of a column: `"step/seconds"` for `"step_seconds"`.

    It is the column's subject, from `VALUES`, and its name without the subject. Columns
    of single workers and of collectives have subjects that are not in `VALUES`.
    """
    if re.match(r"straggler_|worker\d+_", column):
        return f"{_BY_WORKER}/{column}"
    subject = _SUBJECTS.get(column, _BY_COLLECTIVE)
    # The subject is not repeated in the rest of a tag, since TensorBoard truncates long
    # titles.
    return f"{subject}/{column.removeprefix(f'{subject}_')}"


def histograms_of(row: Row) -> dict[str, Sequence[float]]:
    """Return step times and collectives' times of a window, by TensorBoard tag.

    Args:
        row: `Row`, the window of all workers.

    Returns:
        Dict from tag to a sequence of seconds.
    """
    return {
        f"step/{_DISTRIBUTION}": row.times,
        f"{_BY_COLLECTIVE}/{_DISTRIBUTION}": list(row.buckets.values()),
    }


class CsvFile:
    """CSV file with a row for each window.

    Args:
        path: `Path` of the file, which is overwritten.
        columns: Sequence of strings, names of the columns.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._file = path.open("w", encoding="utf-8", newline="")
        self._writer = csv.DictWriter(
            self._file, columns, restval="", extrasaction="ignore"
        )
        self._writer.writeheader()

    def add(self, row: Row, values: Mapping[str, float]) -> None:
        """Write a line of `values`, by column; NaN is left empty. `row` is unused."""
        del row
        self._writer.writerow({k: v for k, v in values.items() if not math.isnan(v)})
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardFile:
    """Writer of scalars and histograms for TensorBoard.

    The values of a window are written as one protocol buffer: one operation per value
    would take longer than the rest of the monitor.

    Args:
        folder: `Path` of the log directory.
        histogram: Bool, whether to write histograms.
    """

    def __init__(self, folder: Path, *, histogram: bool) -> None:
        self._writer = tf.summary.create_file_writer(str(folder))
        self._histogram = histogram

    def add(self, row: Row, values: Mapping[str, float]) -> None:
        """Write `values`, by column, without NaN, and the histograms of `row` if on."""
        from tensorboard.plugins.histogram.summary_v2 import histogram_pb

        # TensorBoard also reads the scalar format of TensorFlow 1, which is faster to
        # create.
        summary = tf.compat.v1.Summary()
        for tag, value in scalars_of(values).items():
            if not math.isnan(value):
                summary.value.add(tag=tag, simple_value=value)
        parts = [summary]
        histograms = histograms_of(row) if self._histogram else {}
        parts += [histogram_pb(t, np.asarray(v)) for t, v in histograms.items() if v]
        # Concatenated protocol buffers of one type parse as their merged message:
        # thus one operation writes all values.
        joined = b"".join(part.SerializeToString() for part in parts)
        with self._writer.as_default():
            tf.summary.experimental.write_raw_pb(joined, row.step)

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


def has_tensorboard() -> bool:
    """Return whether TensorBoard is installed."""
    return importlib.util.find_spec("tensorboard") is not None


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically; NaN and infinities become `null`.

    Args:
        path: `Path` of the file.
        content: Nest of dicts, lists and plain values.
    """
    text = json.dumps(_finite(content), indent=1) + "\n"
    with replaced(path) as temporary:
        Path(temporary).write_text(text, "utf-8")


def _finite(value: Any) -> Any:
    """Return a copy of nested dicts, lists and values; NaN and infinity as `None`."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summary_table(totals: RunTotals, hosts: Mapping[int, str], advice: str) -> str:
    """Format the totals of a run as a table, followed by advice.

    Args:
        totals: `RunTotals` of at least one row.
        hosts: Mapping from rank to the name of a host.
        advice: String, one sentence.

    Returns:
        String of several lines.
    """
    values = totals.values
    step = values["step_seconds"]
    title = f"Communication in {pluralize(totals.num_steps, 'step')}"
    table = Table(title=title, show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("note")
    table.add_row("step", _ms(step), _percentiles(values))
    if not math.isnan(values["samples_per_second"]):
        speed = f"{values['samples_per_second']:,.0f}"
        table.add_row("samples per second", speed, "of all replicas")
    for name in ("compute", "exposed", "input"):
        seconds = values[f"{name}_seconds"]
        table.add_row(_NAMES[name], _ms(seconds), f"{seconds / step:.0%} of the step")
    hidden = values["communication_seconds"] - values["exposed_seconds"]
    table.add_row(
        "communication, all",
        _ms(values["communication_seconds"]),
        f"{_ms(max(0.0, hidden))} hidden behind compute; "
        f"s = {values['communication_fraction']:.2f}",
    )
    table.add_row(
        "sent by each replica",
        f"{values['sent_bytes'] / 1e6:.2f} MB",
        f"busbw {values['busbw_gb_per_second']:.2f} GB/s",
    )
    for name, text in (
        ("gradient_norm", "gradient norm"),
        ("loss_scale", "loss scale"),
    ):
        if not math.isnan(values[name]):
            table.add_row(text, f"{values[name]:.4g}", "the latest")
    if values["skipped_steps"]:
        table.add_row("skipped steps", f"{values['skipped_steps']:.0f}", "overflows")
    if len(totals.workers) > 1:
        for rank, means in totals.workers.items():
            table.add_row(
                f"worker {rank} ({hosts[rank]})",
                _ms(means["compute_seconds"]),
                f"own part of a step; waits {_ms(means['wait_seconds'])} for others",
            )
    shown = io.StringIO()
    Console(file=shown, width=100, force_jupyter=False).print(table)
    return f"{shown.getvalue()}{advice}"


def _ms(seconds: float) -> str:
    """Format seconds as milliseconds, such as `"12.34 ms"`."""
    return f"{1000 * seconds:.2f} ms"


def _percentiles(values: Mapping[str, float]) -> str:
    """Format the percentiles of step times: `"p50 1.00 ms, p95 2.00 ms, ..."`.

    Args:
        values: Mapping from column to number, with the columns of percentiles.
    """
    shown = [
        f"{name} {_ms(values[f'{name}_seconds'])}" for name in ("p50", "p95", "p99")
    ]
    return ", ".join(shown)
