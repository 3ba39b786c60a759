"""What states in memory cost while no worker is lost: a script for `tfdp run -n 2`.

tfdp run -n 2 tests/elastic/cost.py UNITS MEMORY_EVERY
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tfdp

NUM_PAIRS, BATCH_SIZE = 26, 64
# A number of steps that no run reaches.
NEVER = 10**6


class Times(keras.callbacks.Callback):
    """Times at which the steps of an epoch have ended."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())


def main(units: int, every: int, folder: Path) -> None:
    options = tfdp.CommunicationOptions(on_loss="continue")
    strategy = tfdp.MultiWorkerMirroredStrategy(communication=options)
    keras.utils.set_random_seed(1)
    # Three saves, none of them at the end.
    num_steps = max(100, 3 * every + every // 2)
    x = np.random.default_rng(0).normal(size=(BATCH_SIZE * num_steps, units))
    with strategy.scope():
        layers = [keras.layers.Dense(units, "relu") for _ in range(2)]
        model = keras.Sequential(
            [keras.Input((units,)), *layers, keras.layers.Dense(1)]
        )
        model.compile("adam", "mse")
    seconds: dict[int, list[float]] = {NEVER: [], every: []}
    for pair in range(NUM_PAIRS):
        for own in (NEVER, every):
            times = Times()
            backup = tfdp.callbacks.BackupAndRestore(
                folder / f"{pair}-{own}", NEVER, memory_every=own
            )
            model.fit(
                x.astype("float32"),
                x[:, :1].astype("float32"),
                batch_size=BATCH_SIZE,
                verbose=0,
                callbacks=[times, backup],
            )
            seconds[own].append(float(np.diff(times.ends)[10:].mean()))
    # The first pair traces the step.
    ratios = [b / a for a, b in zip(seconds[NEVER], seconds[every], strict=True)][1:]
    if strategy.cluster_resolver.task_id == 0:
        millions = model.count_params() / 1e6
        own = 1e3 * statistics.median(seconds[NEVER])
        print(f"{millions:.2f} million parameters, memory_every={every}: {own:.1f} ms")
        middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
        print(f"without, {middle:.3f} [{low:.3f}, {high:.3f}] of that with")


if __name__ == "__main__":
    # All workers of this machine have one parent.
    shared = Path(tempfile.gettempdir()) / f"tfdp-cost-{os.getppid()}"
    main(int(sys.argv[1]), int(sys.argv[2]), shared)
