"""One worker that trains by Keras `fit`, with the communication monitor or without."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

from tfdp.bench.channel import serve, take_over_output
from tfdp.bench.training import make_strategy
from tools.bench.models import MODELS

# Steps that are not timed: one is traced, the next ones find cold caches.
SKIPPED = 5


def main() -> None:
    take_over_output()
    setup = json.loads(sys.argv[1])
    strategy = make_strategy(setup)

    import keras
    import numpy as np

    from tfdp.bench.keras_models import build, make_batch
    from tfdp.callbacks import CommunicationMonitor

    class Clock(keras.callbacks.Callback):
        """Takes the time after each step."""

        def on_train_begin(self, logs: Any = None) -> None:
            self.times: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.times.append(time.perf_counter())

        @property
        def seconds(self) -> float:
            """Float, a step: the mean, which includes what a window costs."""
            timed = self.times[SKIPPED:]
            return (timed[-1] - timed[0]) / (len(timed) - 1)

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build(MODELS[setup["model"]])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss=loss)
    batch = 32 * strategy.num_replicas_in_sync
    x, y = make_batch(MODELS[setup["model"]], batch)
    folder = tempfile.TemporaryDirectory(prefix="tfdp-monitor-")

    def block(steps: int, *callbacks: Any) -> dict[str, float]:
        clock = Clock()
        # Both arms trace their step anew.
        model.train_function = None
        data = (np.concatenate([part] * steps) for part in (x, y))
        model.fit(
            *data,
            batch_size=batch,
            shuffle=False,
            verbose=0,
            callbacks=[*callbacks, clock],
        )
        return {"seconds": clock.seconds}

    def on(steps: int) -> dict[str, float]:
        monitor = CommunicationMonitor(folder.name, every=10)
        result = block(steps, monitor)
        last = monitor.recent(steps - SKIPPED)
        parts = (last.compute_seconds + last.exposed_seconds) / last.step_seconds
        return {**result, "parts": parts}

    serve({"off": block, "on": on})


if __name__ == "__main__":
    main()
