"""A training script of the tests: an island, which says what it has done."""

import json
import os
import pathlib
import sys
import time

import keras
import numpy as np

import tfdp
from tests.harness import common
from tests.harness.timing import wait_until
from tfdp.features.islands.island import Island

ISLAND = Island.from_environment()
NUM_BATCHES, EPOCHS, SYNC_EVERY = 11, 2, 4
WAITING_SECONDS = 120.0


def data() -> tuple:
    return common.regression_data(NUM_BATCHES * common.BATCH_SIZE)


def outer() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)


class Steps(keras.callbacks.Callback):
    """Writes the time of each step, which takes a while, into a file.

    Args:
        seconds: How long a step takes at least.
        waits_at: The first island's step at which it waits until the second one, which
            was killed, is back and has made a step; or 0.
    """

    def __init__(self, seconds: float, waits_at: int) -> None:
        super().__init__()
        self._seconds = seconds
        self._waits_at = waits_at if ISLAND.index == 0 else 0
        self._num_steps = 0
        self._file = open(f"steps-{ISLAND.index}", "a")  # noqa: SIM115

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(self._seconds)
        print(os.getpid(), time.monotonic(), file=self._file, flush=True)
        self._num_steps += 1
        if self._num_steps == self._waits_at:
            wait_until(self._is_other_back, "the other island", WAITING_SECONDS)

    def _is_other_back(self) -> bool:
        lines = pathlib.Path("steps-1").read_text().splitlines()
        return len({line.split()[0] for line in lines}) > 1


def main(
    epochs: int,
    seconds: float,
    backup: str,
    waits_at: int = 0,
    shards: bool = False,
    **options: object,
) -> None:
    # The islands begin with different weights, and train from those of the first.
    keras.utils.set_random_seed(ISLAND.index)
    strategy = tfdp.auto_strategy()
    with strategy.scope():
        model = common.compiled(common.mlp(), keras.optimizers.Adam(0.05))
    if ISLAND.index == 0:
        np.savez("first.npz", *model.get_weights())
    callbacks = [
        tfdp.callbacks.DiLoCo(SYNC_EVERY, outer(), **options),
        Steps(seconds, waits_at),
    ]
    if shards:
        callbacks += [
            tfdp.callbacks.ShardedOptimizer(stage=3),
            tfdp.callbacks.LossScaling(initial_scale=16.0),
        ]
    if backup:
        callbacks.append(tfdp.callbacks.BackupAndRestore(backup, save_freq=5))
    x, y = data()
    history = common.fit(
        model, x, y, epochs=epochs, validation_data=(x, y), callbacks=callbacks
    )
    model.save("model.keras")
    np.savez(f"last-{ISLAND.index}.npz", *model.get_weights())
    text = json.dumps({"replicas": strategy.num_replicas_in_sync, **history})
    pathlib.Path(f"history-{ISLAND.index}.json").write_text(text)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
