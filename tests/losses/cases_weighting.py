"""Shares of a batch that differ: every loss counts as in the global batch.

Batches have 8, 8 and 5 samples, so that replicas hold different numbers of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env
from tests.losses.cases_losses import Penalty
from tests.step.cases_accumulation import Switches, train

layers, losses, regularizers = keras.layers, keras.losses, keras.regularizers
NUM_SAMPLES = 21


def sgd(**options: Any) -> keras.optimizers.Optimizer:
    """Without slots: each update shows the gradient itself."""
    return keras.optimizers.SGD(0.02, **options)


def _weighted() -> tuple:
    weight = np.linspace(0.0, 2.0, NUM_SAMPLES).astype("float32")
    return *common.regression_data(NUM_SAMPLES), weight


def _masked() -> tuple:
    x = common.tokens(NUM_SAMPLES)
    return x, np.roll(x, -1, axis=1)


def _penalized() -> keras.Model:
    """Adds to the loss in every way that there is."""
    dense = layers.Dense(
        4,
        activation="tanh",
        kernel_regularizer=regularizers.L2(0.1),
        activity_regularizer=regularizers.L2(0.2),
    )
    inputs = keras.Input((common.NUM_FEATURES,))
    return keras.Model(inputs, layers.Dense(1)(Penalty()(dense(inputs))))


def _sequence() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((common.LENGTH,), dtype="int32"),
            layers.Embedding(common.NUM_TOKENS, 4, mask_zero=True),
            layers.Dense(common.NUM_TOKENS),
        ]
    )


def _crossentropy() -> losses.Loss:
    reduction = "mean_with_sample_weight"
    return losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def _regression() -> tuple:
    return common.regression_data(NUM_SAMPLES)


# Name: model, loss, data.
KINDS: dict[str, tuple[Callable, Callable, Callable]] = {
    "mean_over_the_batch_and_penalties": (
        _penalized,
        losses.MeanSquaredError,
        _regression,
    ),
    "sum": (
        common.mlp,
        lambda: losses.MeanSquaredError(reduction="sum"),
        _regression,
    ),
    "mean_with_sample_weight": (
        common.mlp,
        lambda: losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        _weighted,
    ),
    "sample_weight": (common.mlp, losses.MeanSquaredError, _weighted),
    "masked_mean": (_sequence, _crossentropy, _masked),
}
_PENALTIES = "mean_over_the_batch_and_penalties"
_WEIGHTED = "mean_with_sample_weight"
# The quick tier runs one of each kind; a mask is a weight of each token.
SAME_AS = {
    f"{_PENALTIES}_accumulated": f"{_PENALTIES}_at_once",
    "sum_accumulated": "sum_at_once",
    f"{_WEIGHTED}_at_once": "masked_mean_accumulated",
    f"{_WEIGHTED}_accumulated": "masked_mean_accumulated",
    "sample_weight_at_once": "masked_mean_accumulated",
    "sample_weight_accumulated": "masked_mean_accumulated",
    "masked_mean_at_once": "masked_mean_accumulated",
}


def _register(name: str, kind: tuple, steps: int) -> None:
    build, loss, data = kind

    def function(env: Env) -> dict:
        def wrapped(**options: Any) -> keras.optimizers.Optimizer:
            # With a `DistributedOptimizer` in either case.
            optimizer = sgd(**options)
            is_plain = env.is_reference
            return optimizer if is_plain else tfdp.DistributedOptimizer(optimizer)

        # Batches, not arrays: sample weights travel with them.
        dataset = common.batched(*data())
        options = {"loss": loss()}
        return train(
            env, Switches(steps), wrapped, build, dataset, compile_options=options
        )

    title = "accumulated" if steps > 1 else "of each batch"
    own = f"{name}_{'accumulated' if steps > 1 else 'at_once'}"
    registry.register(
        f"unequal_shares_with_{own}",
        function,
        f"A partial batch in unequal shares: {name}, {title}",
        quick_setup="two_workers" if own == "sum_at_once" else "",
        same_as=f"unequal_shares_with_{SAME_AS[own]}" if own in SAME_AS else "",
    )


for _name, _kind in KINDS.items():
    for _steps in (1, 3):
        _register(_name, _kind, _steps)
