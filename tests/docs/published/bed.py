"""The surroundings of a published program: its strategy, its data, its folder."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tests.harness.timing import wait_until

NUM_REPLICAS = 2
# Begins the names of results that are added over workers.
SUMMED = "summed "
NUM_TRAINING_ROWS = 300
NUM_TEST_ROWS = 90
NUM_CLASSES = 10
_SIDE = 28


class Bed:
    """What a program is given.

    Args:
        kind: `"one"` device without tfdp, two `"devices"` of one process, or two
            `"workers"`.
        folder: Folder that all workers share.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self._first: Any = None
        if kind == "workers":
            # A later strategy of the process is one of the same cluster.
            self._first = self._new_strategy()

    @property
    def rank(self) -> int:
        """Index of this worker."""
        if self.kind != "workers":
            return 0
        return json.loads(os.environ["TF_CONFIG"])["task"]["index"]

    def strategy(self) -> tf.distribute.Strategy:
        """A new strategy for the page's; on one device, TensorFlow's default."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return self._new_strategy()

    def _new_strategy(self) -> tf.distribute.Strategy:
        if self.kind == "one":
            return tf.distribute.get_strategy()
        import tfdp

        return tfdp.auto_strategy()

    def per_replica(self, rows: int, strategy: tf.distribute.Strategy) -> int:
        """Rows of a replica; one device takes those of all replicas of the others."""
        return rows * NUM_REPLICAS // strategy.num_replicas_in_sync

    def pictures(self) -> tuple:
        """Training and test data in MNIST's form: uint8, [rows, 28, 28] and [rows]."""
        return _pictures(NUM_TRAINING_ROWS, 1), _pictures(NUM_TEST_ROWS, 2)

    def rows(self, name: str, parts: Sequence, num_rows: int) -> dict:
        """A result of replicas: their rows of the global batch, at their places.

        Other workers' rows are zero; what a test compares is the sum over workers.
        """
        own = np.concatenate([np.asarray(part) for part in parts])
        whole = np.zeros((num_rows, *own.shape[1:]), own.dtype)
        first = 0 if self.rank == 0 else num_rows - len(own)
        whole[first : first + len(own)] = own
        return {f"{SUMMED}{name}": whole}

    def num_event_files(self, folder: Path) -> int:
        """Number of TensorBoard's files, without what a launcher adds of goodput."""
        return sum(path.parent.name != "goodput" for path in folder.rglob("events*"))

    def wait_for_all(self, label: str, timeout_seconds: float = 60.0) -> None:
        """Wait until all workers are here."""
        (self.folder / f".{label}.{self.rank}").touch()
        num_workers = NUM_REPLICAS if self.kind == "workers" else 1
        wait_until(
            lambda: len(list(self.folder.glob(f".{label}.?"))) >= num_workers,
            f"all workers at {label!r}",
            timeout_seconds,
        )


def _pictures(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A picture of noise for each class, and more noise on top."""
    shape = (NUM_CLASSES, _SIDE, _SIDE)
    classes = np.random.default_rng(0).integers(0, 128, shape)
    random = np.random.default_rng(seed)
    labels = random.integers(0, NUM_CLASSES, rows)
    noise = random.integers(0, 128, (rows, _SIDE, _SIDE))
    return (classes[labels] + noise).astype("uint8"), labels.astype("uint8")
