"""A save by Keras that is killed while the file is being written."""

from __future__ import annotations

import os
import signal
from typing import Any

import keras
import numpy as np

import tfdp
from tests.harness.interrupted import Layout


class Killing(keras.layers.Dense):
    """Kills its process when its weights are saved, the file being open."""

    is_armed = False

    def save_own_variables(self, store: Any) -> None:
        if Killing.is_armed:
            os.kill(os.getpid(), signal.SIGKILL)
        super().save_own_variables(store)


class Arm(keras.callbacks.Callback):
    """Has the process killed in the save of the second epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        Killing.is_armed = epoch > 0


def save(layout: Layout, rank: int, *, path: str, how: str, kills: bool) -> dict:
    """Saves twice to one path, from one process with a strategy of two devices.

    Args:
        layout: `Layout`.
        rank: Int, this worker's.
        path: String, of the file; beside it the first save is kept as `first`.
        how: String: `"save"`, `"save_weights"`, `"save_model"` or `"checkpoint"`.
        kills: Bool, whether the process is killed in the second save.

    Returns:
        Dict of `files`, the names in the folder.
    """
    tfdp.testing.logical_cpus(layout.devices)
    with tfdp.MirroredStrategy().scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), Killing(1)])
        model.compile("adam", "mse")
    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    if how == "checkpoint":
        checkpoint = keras.callbacks.ModelCheckpoint(path)
        both = [Arm(), checkpoint, _Copy(path)] if kills else [checkpoint]
        model.fit(x, y, batch_size=8, epochs=2, callbacks=both, verbose=0)
    else:
        _save(model, path, how)
        os.chmod(path, 0o600)
        _Copy(path).on_epoch_end(0)
        Killing.is_armed = kills
        _save(model, path, how)
    return {"files": sorted(os.listdir(os.path.dirname(path)))}


def _save(model: keras.Model, path: str, how: str) -> None:
    if how == "save_model":
        keras.saving.save_model(model, path)
    else:
        getattr(model, how)(path)


class _Copy(keras.callbacks.Callback):
    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        folder, _ = os.path.split(self._path)
        with open(self._path, "rb") as file, open(f"{folder}/first", "wb") as copy:
            copy.write(file.read())
