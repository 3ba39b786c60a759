"""What a storm trains: a script as a user writes it, with stamps of every step.

python train.py FOLDER PLAN, where the plan is JSON: see `job.Plan`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np
import psutil
import tensorflow as tf

import tfdp

BATCH_SIZE = 24


class Stamps(keras.callbacks.Callback):
    """Writes down when each step ended, and makes steps last.

    Args:
        path: Path of the file, this worker's in this attempt.
        steps_per_epoch: Int.
        step_seconds: Float, to sleep after each step.
    """

    def __init__(self, path: Path, steps_per_epoch: int, step_seconds: float) -> None:
        super().__init__()
        self._steps_per_epoch = steps_per_epoch
        self._step_seconds = step_seconds
        self._file = path.open("w", buffering=1)
        self._file.write(f"start {psutil.Process().create_time()}\n")

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Notes the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Notes the step."""
        step = self._epoch * self._steps_per_epoch + batch + 1
        self._file.write(f"{step} {time.time()}\n")
        time.sleep(self._step_seconds)


def main(folder: Path, plan: dict) -> None:
    """Trains, and writes what came of it; with a `save_freq` of 0 without backups."""
    tf.config.experimental.enable_op_determinism()
    strategy = tfdp.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(1)
    draw = np.random.default_rng(0)
    steps = plan["steps_per_epoch"]
    x = draw.normal(size=(steps * BATCH_SIZE, 16)).astype("float32")
    y = (np.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]).astype("float32")
    with strategy.scope():
        layers = [keras.layers.Dense(32, "relu"), keras.layers.Dense(32, "relu")]
        if plan["dropout"]:
            layers.append(keras.layers.Dropout(plan["dropout"]))
        model = keras.Sequential([keras.Input((16,)), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(1e-3), "mse")
    config = json.loads(os.environ["TF_CONFIG"])
    rank, job = config["task"]["index"], config["tfdp"]["job"]
    (folder / f"{os.getpid()}.rank").write_text(f"{rank}")
    # Each attempt of a job has another port.
    attempt = f"{job}.{config['cluster']['worker'][0].rpartition(':')[2]}"
    callbacks = [
        tfdp.callbacks.GradientAccumulation(steps=2),
        tfdp.callbacks.ShardedOptimizer(),
        Stamps(folder / f"{attempt}-{rank}.stamps", steps, plan["step_seconds"]),
    ]
    if plan["save_freq"]:
        backup = tfdp.callbacks.BackupAndRestore(folder / "backup", plan["save_freq"])
        callbacks.append(backup)
    history = model.fit(
        x,
        y,
        batch_size=BATCH_SIZE,
        epochs=plan["epochs"],
        verbose=0,
        callbacks=callbacks,
    )
    weights = b"".join(value.tobytes() for value in model.get_weights())
    result = {
        "hash": hashlib.sha256(weights).hexdigest(),
        "losses": [float(loss) for loss in history.history["loss"]],
    }
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
