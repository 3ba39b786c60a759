"""A training that is resumed from backups of which the newest was mutated."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tests.checkpoint import fuzzing
from tfdp.callbacks import BackupAndRestore

X = np.arange(12, dtype="float32").reshape(6, 2) / 12


class _Cut(Exception):
    """Ends a training."""


class _Observer(keras.callbacks.Callback):
    """Notes the weights before each batch, and may cut training off after a step."""

    def __init__(self, step: int | None = None) -> None:
        super().__init__()
        self.step, self.seen = step, []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append(self.model.get_weights())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if len(self.seen) == self.step:
            raise _Cut


class FuzzedFit:
    """Backups of a training at steps 4 and 5 of 9, and how to resume from them.

    Args:
        folder: Path, where the backups are made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        self._model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        self._first = self._model.get_weights()
        watch = _Observer()
        self._fit(folder / "none", watch)
        self._weights = watch.seen
        try:
            self._fit(folder, _Observer(6))
        except _Cut:
            shutil.rmtree(folder / "step-3")

    def resume(self, folder: Path) -> str:
        """Resume from backups, and say what came of it."""
        watch = _Observer()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            self._fit(folder, watch)
        for item in said:
            warnings.warn_explicit(item.message, item.category, "", 0)
        began = watch.seen[0] if watch.seen else self._model.get_weights()
        if any("newer backups are damaged" in str(item.message) for item in said):
            is_right = _are_equal(began, self._weights[4])
            return fuzzing.REFUSED if is_right else "a wrong backup before it"
        # In the middle of an epoch, or at its begin again where the data has changed.
        is_right = any(_are_equal(began, self._weights[step]) for step in (3, 5))
        return fuzzing.EQUAL if is_right else "a wrong load"

    def _fit(self, folder: Path, *callbacks: Any) -> None:
        self._model.set_weights(self._first)
        self._model.optimizer.iterations.assign(0)
        self._model.stop_training = False
        stopping = keras.callbacks.EarlyStopping("loss", patience=9)
        backup = BackupAndRestore(folder, save_freq=1)
        self._model.fit(
            X,
            X[:, :1],
            batch_size=2,
            epochs=3,
            shuffle=False,
            verbose=0,
            callbacks=[backup, stopping, *callbacks],
        )


def _are_equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
