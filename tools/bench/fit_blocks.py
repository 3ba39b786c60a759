"""Blocks of steps of Keras `fit`, timed step by step, with callbacks or without."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tfdp.bench.keras_models import build, make_batch
from tools.bench.models import MODELS

# Steps that are not timed: one is traced, the next ones find cold caches.
SKIPPED = 5


class Clock(keras.callbacks.Callback):
    """Clock of steps.

    Args:
        skipped: Int, steps at the begin that are not timed.
    """

    def __init__(self, skipped: int) -> None:
        super().__init__()
        self._skipped = skipped

    def on_train_begin(self, logs: Any = None) -> None:
        """Forget the `fit` before."""
        self.times: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Take the time."""
        self.times.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """Float, a step: the mean, which includes what happens now and then."""
        timed = self.times[self._skipped :]
        return (timed[-1] - timed[0]) / (len(timed) - 1)


def block_of(
    strategy: Any, name: str, skipped: int = SKIPPED, first: Any = None
) -> Callable[..., dict[str, float]]:
    """Make a model, and a function that fits it for a block.

    Args:
        strategy: A `tf.distribute` strategy.
        name: String, the model, see `tools.bench.models`.
        skipped: Int, steps at the begin that are not timed. Defaults to `SKIPPED`.
        first: Keras layer in front of it, or `None`. Defaults to `None`.

    Returns:
        Callable that takes the number of steps and callbacks, and returns
        `{"seconds": ...}` of a step.
    """
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build(MODELS[name])
        if first is not None:
            inputs = keras.Input(model.input_shape[1:])
            model = keras.Model(inputs, model(first(inputs)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss=loss)
    batch = 32 * strategy.num_replicas_in_sync
    x, y = make_batch(MODELS[name], batch)

    def block(steps: int, *callbacks: Any) -> dict[str, float]:
        clock = Clock(skipped)
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

    return block
