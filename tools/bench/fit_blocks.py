"""Blocks of steps of Keras `fit`, with callbacks or without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfdp.launch.bench.fit import timed_fit
from tfdp.launch.bench.keras_models import build, make_batch
from tools.bench.models import MODELS

# Steps that are not timed: one is traced, the next ones find cold caches.
SKIPPED = 5


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
    batch = make_batch(MODELS[name], 32 * strategy.num_replicas_in_sync)
    fit = timed_fit(model, batch, skipped)

    def block(steps: int, *callbacks: Any) -> dict[str, float]:
        # Both arms trace their step anew.
        model.train_function = None
        return {"seconds": fit(steps - skipped - 1, *callbacks)}

    return block
