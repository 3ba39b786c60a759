"""Models with several outputs: the losses of each, over partial batches too."""

from __future__ import annotations

import typing

import keras
import numpy as np

from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as

# The last of three batches has five samples: replicas hold three and two.
NUM_SAMPLES = 2 * common.BATCH_SIZE + 5
LOSSES = {
    "value": "mse",
    "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
}


def _outputs() -> keras.Model:
    inputs = keras.Input((common.NUM_FEATURES,))
    h = keras.layers.Dense(4, activation="tanh", kernel_regularizer="l2")(inputs)
    outputs = {
        "value": keras.layers.Dense(1, name="value")(h),
        "kind": keras.layers.Dense(common.NUM_CLASSES, name="kind")(h),
    }
    return keras.Model(inputs, outputs)


def _data() -> tuple:
    x, value = common.regression_data(NUM_SAMPLES)
    # Each sample counts differently: a share of the wrong size shows.
    return x, {"value": value * np.arange(NUM_SAMPLES)[:, None] / 8, "kind": labels(x)}


def labels(x: np.ndarray) -> np.ndarray:
    """Labels in a column, as the losses of several outputs like them."""
    return common.labels(x)[:, None]


def _trained(env: Env, weights: typing.Any = None, **options: typing.Any) -> dict:
    def build() -> keras.Model:
        optimizer = keras.optimizers.SGD(0.02)
        return common.compiled(_outputs(), optimizer, **({"loss": LOSSES} | options))

    x, y = _data()
    more = () if weights is None else (weights,)
    model = common.build_in_scope(env, build)
    history = common.fit(
        model, x, y, epochs=2, sample_weight=weights, validation_data=(x, y, *more)
    )
    evaluated = {
        str(size): model.evaluate(
            x, y, size, sample_weight=weights, verbose=0, return_dict=True
        )
        for size in (common.BATCH_SIZE, 7)
    }
    return {
        "history": history,
        "evaluated": evaluated,
        "weights": env.weights(model),
    }


@case("Wrong numbers: losses of single outputs, with a partial last batch")
@same_as("sample_weight")
def losses_of_several_outputs(env: Env) -> dict:
    metrics = {"value": ["mae"], "kind": ["accuracy"]}
    return {
        "plain": _trained(env),
        "weighted": _trained(
            env, loss_weights={"value": 0.5, "kind": 2.0}, metrics=metrics
        ),
    }


def _weights() -> np.ndarray:
    return np.linspace(0.0, 2.0, NUM_SAMPLES).astype("float32")


@case("Wrong numbers: losses of single outputs, each with its sample weights")
@same_as("sample_weight")
def losses_of_several_outputs_with_sample_weights(env: Env) -> dict:
    weights = _weights()
    return _trained(env, {"value": weights, "kind": weights[::-1].copy()})


@case("Wrong numbers: losses of single outputs, with the same sample weights")
@same_as("sample_weight")
def losses_of_several_outputs_with_common_sample_weights(env: Env) -> dict:
    return _trained(env, _weights())


@case("Wrong numbers: losses of single outputs, each with its reduction")
@same_as("unequal_shares_with_masked_mean_accumulated")
def losses_of_several_outputs_with_reductions(env: Env) -> dict:
    reductions = ("sum", "mean", "mean_with_sample_weight")
    return {
        reduction: _trained(
            env,
            loss={
                "value": keras.losses.MeanSquaredError(reduction=reduction),
                "kind": keras.losses.SparseCategoricalCrossentropy(
                    from_logits=True, reduction=reduction
                ),
            },
            loss_weights={"value": 0.1, "kind": 0.2},
        )
        for reduction in reductions
    }
