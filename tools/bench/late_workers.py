"""Step times with a worker that sleeps in one of ten steps: a script for `tfdp run`.

    tfdp run -n 3 tools/bench/late_workers.py [UNITS] [ROWS] [SECONDS]

Two models train alternately, epoch by epoch, without and with `backup_workers=1`, and
with and without a sleep of the last worker. Worker 0 prints the times of its steps.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import keras
import numpy as np

import tfdp

EPOCHS, STEPS, EVERY = 4, 40, 10
FEATURES = 64


class Sleeper(keras.callbacks.Callback):
    """Sleeps before some steps of an epoch, and notes when each step has ended.

    Args:
        seconds: Float, how long it sleeps; 0 for not at all.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self.ends: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch % EVERY == EVERY // 2:
            time.sleep(self._seconds)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())


def new_model(units: int, backup_workers: int) -> keras.Model:
    options = tfdp.CommunicationOptions(backup_workers=backup_workers)
    strategy = tfdp.MultiWorkerMirroredStrategy(communication=options)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(units, "relu") for _ in range(2)]
        model = keras.Sequential(
            [keras.Input((FEATURES,)), *layers, keras.layers.Dense(1)]
        )
        model.compile("adam", "mse")
    return model


def main(units: int = 512, rows: int = 12288, seconds: int = 1) -> None:
    models = {spare: new_model(units, spare) for spare in (0, 1)}
    group = models[0].distribute_strategy.extended.worker_group
    is_last = group.rank == group.num_workers - 1
    x = np.random.default_rng(0).normal(size=(rows * STEPS, FEATURES))
    x, y = x.astype("float32"), x[:, :1].astype("float32")
    times: dict[tuple[int, bool], list[float]] = {}
    epochs: dict[tuple[int, bool], list[float]] = {}
    for epoch in range(EPOCHS + 1):
        for spare, model in models.items():
            for sleeps in (False, True):
                sleeper = Sleeper(seconds * (sleeps and is_last))
                begin = time.perf_counter()
                model.fit(x, y, rows, verbose=0, shuffle=False, callbacks=[sleeper])
                # The first epoch traces the step.
                if epoch:
                    times.setdefault((spare, sleeps), []).extend(np.diff(sleeper.ends))
                    took = time.perf_counter() - begin
                    epochs.setdefault((spare, sleeps), []).append(took)
    if group.rank:
        return
    millions = models[0].count_params() / 1e6
    print(
        f"{millions:.2f} million parameters, {rows} rows, {group.num_workers} workers"
    )
    for spare in models:
        quiet, late = times[spare, False], times[spare, True]
        p95 = [float(np.percentile(each, 95)) for each in (quiet, late)]
        medians = [1e3 * float(np.median(each)) for each in (quiet, late)]
        print(
            f"backup_workers={spare}: median {medians[0]:.0f} and {medians[1]:.0f} ms, "
            f"p95 {1e3 * p95[0]:.0f} and {1e3 * p95[1]:.0f} ms without and with the "
            f"sleeper, {p95[1] / p95[0]:.2f} times; an epoch of {STEPS} steps "
            f"{np.median(epochs[spare, False]):.1f} and "
            f"{np.median(epochs[spare, True]):.1f} s"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
