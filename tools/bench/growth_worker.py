"""A worker that counts Python calls per step and watches its memory."""

from __future__ import annotations

import cProfile
import json
import os
from pathlib import Path
from typing import Any

import psutil

from tfdp.launch.bench.channel import Variant, Variants, work

BATCH_SIZE = 64  # global
SAMPLE_EVERY = 50
# Steps that are not profiled: the first traces.
WARM_UP = 4
HOME = str(Path(__file__).resolve().parents[2] / "tfdp")


def calls_variant(strategy: Any, num_variables: int) -> Variant:
    """Python calls per step of `fit`, of a model of so many variables."""
    import keras
    import numpy as np

    with strategy.scope():
        layers = [keras.layers.Dense(4) for _ in range(num_variables // 2)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile("sgd", "mse")

    class Profile(keras.callbacks.Callback):
        """Profiler of the steps after the first few."""

        def __init__(self) -> None:
            super().__init__()
            self.profile = cProfile.Profile()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == WARM_UP:
                self.profile.enable()
            elif batch == self.params["steps"] - 2:
                self.profile.disable()

    def run(steps: int) -> dict[str, float]:
        callback = Profile()
        x = np.zeros((BATCH_SIZE * (steps + WARM_UP + 2), 4), "float32")
        model.fit(x, x, batch_size=BATCH_SIZE, verbose=0, callbacks=[callback])
        total = own = 0
        for entry in callback.profile.getstats():
            total += entry.callcount
            if getattr(entry.code, "co_filename", "").startswith(HOME):
                own += entry.callcount
        return {"total": round(total / steps, 1), "own": round(own / steps, 1)}

    return run


def memory_variant(strategy: Any, kind: str) -> Variant:
    """Resident memory in MB every so many steps of `fit`."""
    import keras
    import numpy as np

    layers = keras.layers
    with strategy.scope():
        if kind == "dense":
            stem = [keras.Input((64,)), layers.Dense(256, activation="relu")]
        else:
            stem = [keras.Input((8,)), layers.Embedding(1000, 32), layers.Flatten()]
        model = keras.Sequential([*stem, layers.Dense(64), layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])

    process = psutil.Process(os.getpid())

    class Memory(keras.callbacks.Callback):
        """Sampler of resident memory."""

        def __init__(self) -> None:
            super().__init__()
            self.samples: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch % SAMPLE_EVERY == SAMPLE_EVERY - 1:
                self.samples.append(process.memory_info().rss / 2**20)

    def run(steps: int) -> list[float]:
        generator = np.random.default_rng(0)
        rows = steps * BATCH_SIZE
        y = generator.integers(0, 10, rows)
        if kind == "dense":
            x = generator.normal(size=(rows, 64)).astype("float32")
        else:
            x = generator.integers(0, 1000, (rows, 8))
        callback = Memory()
        model.fit(x, y, batch_size=BATCH_SIZE, verbose=0, callbacks=[callback])
        return callback.samples

    return run


def make_variants(setup: dict[str, Any]) -> Variants:
    task = {"type": "worker", "index": setup["rank"]}
    cluster = {"worker": setup["addresses"]}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    import tfdp

    strategy = tfdp.MultiWorkerMirroredStrategy()
    return {
        "calls 10": calls_variant(strategy, 10),
        "calls 500": calls_variant(strategy, 500),
        "memory dense": memory_variant(strategy, "dense"),
        "memory embedding": memory_variant(strategy, "embedding"),
    }


if __name__ == "__main__":
    work(make_variants)
