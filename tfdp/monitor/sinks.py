"""Where a monitor writes: a table of rows, and TensorBoard."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf


class CsvFile:
    """A row for each window.

    Args:
        path: `Path`.
        columns: Sequence of strings.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._file = path.open("w", encoding="utf-8", newline="")
        self._writer = csv.DictWriter(
            self._file, columns, restval="", extrasaction="ignore"
        )
        self._writer.writeheader()

    def add(self, values: Mapping[str, float]) -> None:
        """Writes a row; what is unknown stays empty."""
        self._writer.writerow({k: v for k, v in values.items() if not math.isnan(v)})
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoardFile:
    """Scalars and histograms as TensorBoard shows them.

    One protocol buffer holds all of a window: an operation for each number would
    cost more than the rest of the monitor.

    Args:
        folder: `Path`.
    """

    def __init__(self, folder: Path) -> None:
        self._writer = tf.summary.create_file_writer(str(folder))

    def add(
        self,
        step: int,
        scalars: Mapping[str, float],
        histograms: Mapping[str, Sequence[float]],
    ) -> None:
        """Writes what belongs to a step.

        Args:
            step: Int.
            scalars: Mapping from tag to number; NaN is left out.
            histograms: Mapping from tag to numbers.
        """
        from tensorboard.plugins.histogram.summary_v2 import histogram_pb

        # The older form of a scalar, which TensorBoard reads alike, is made faster.
        summary = tf.compat.v1.Summary()
        for tag, value in scalars.items():
            if not math.isnan(value):
                summary.value.add(tag=tag, simple_value=value)
        parts = [summary]
        parts += [histogram_pb(t, np.asarray(v)) for t, v in histograms.items() if v]
        # Serialized messages one after the other are one message.
        joined = b"".join(part.SerializeToString() for part in parts)
        with self._writer.as_default():
            tf.summary.experimental.write_raw_pb(joined, step)

    def close(self) -> None:
        """Writes what is still in memory."""
        self._writer.close()


def has_tensorboard() -> bool:
    """Whether TensorBoard is installed."""
    return importlib.util.find_spec("tensorboard") is not None


def write_json(path: Path, content: Any) -> None:
    """Writes a file whole or not at all; what is no number becomes `null`."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(_finite(content), indent=1) + "\n", "utf-8")
    os.replace(temporary, path)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
