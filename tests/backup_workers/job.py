"""A script for three workers, the last of which is late, and then ends.

tfdp run -n 3 tests/backup_workers/job.py
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from typing import Any

import keras
import numpy as np

import tfdp

STEPS, BATCH_SIZE = 20, 12


class Trouble(keras.callbacks.Callback):
    """Lets a worker sleep in the first `fit`, and kills it in the second.

    Args:
        rank: Int, this worker's.
        kills: Bool, whether the last worker is killed.
    """

    def __init__(self, rank: int, kills: bool) -> None:
        super().__init__()
        self._is_last, self._kills = rank == 2, kills

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._is_last and batch == STEPS // 2:
            if self._kills:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.5)


def main() -> None:
    options = tfdp.CommunicationOptions(backup_workers=1, timeout_seconds=30.0)
    strategy = tfdp.MultiWorkerMirroredStrategy(communication=options)
    rank = strategy.cluster_resolver.task_id
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)]
        )
        model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(STEPS * BATCH_SIZE, 4)).astype("float32")
    for kills in (False, True):
        model.fit(
            x,
            x[:, :1],
            batch_size=BATCH_SIZE,
            callbacks=[Trouble(rank, kills)],
            verbose=0,
        )
        bits = b"".join(weight.tobytes() for weight in model.get_weights())
        print("weights", hashlib.sha256(bits).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
