"""Trains a small model, and prints its weights on the first worker.

python tests/cli/train_on_hosts.py alone          on one device, without tfdp
tfdp run ... tests/cli/train_on_hosts.py          on all workers
tfdp run ... tests/cli/train_on_hosts.py FOLDER   with backups there; the last worker is
                                                  killed once
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import sys

import keras
import numpy as np

import tfdp

folder = None if sys.argv[1:] in ([], ["alone"]) else pathlib.Path(sys.argv[1])


class DieOnce(keras.callbacks.Callback):
    """Kills the last worker in the middle of the first epoch, the first time."""

    def on_train_batch_begin(self, batch, logs=None):
        config = json.loads(os.environ["TF_CONFIG"])
        is_last = config["task"]["index"] == len(config["cluster"]["worker"]) - 1
        marker = folder / "has died"
        if batch == 4 and is_last and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


keras.utils.set_random_seed(1)
strategy = None if "alone" in sys.argv else tfdp.auto_strategy()
with contextlib.nullcontext() if strategy is None else strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.AdamW(0.01), "mse")
x = np.random.default_rng(0).normal(size=(48, 8)).astype("float32")
y = x.sum(axis=1, keepdims=True)
callbacks = []
if folder is not None:
    backup = tfdp.callbacks.BackupAndRestore(folder / "backup", save_freq=2)
    callbacks = [backup, DieOnce()]
model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
weights = [weight.tolist() for weight in model.get_weights()]
num_replicas = 1 if strategy is None else strategy.num_replicas_in_sync
if strategy is None or strategy.extended.should_checkpoint:
    print("WEIGHTS", num_replicas, json.dumps(weights), flush=True)
