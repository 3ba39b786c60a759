"""Losses that return one number for the whole batch."""

from __future__ import annotations

import typing

import keras
import numpy as np

from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as

# The last of three batches has five samples: replicas hold three and two.
NUM_SAMPLES = 2 * common.BATCH_SIZE + 5
REDUCTIONS = (None, "sum", "mean", "sum_over_batch_size", "mean_with_sample_weight")


def mean_square(y_true: typing.Any, y_pred: typing.Any) -> typing.Any:
    """The mean over all samples, as one number."""
    return keras.ops.mean(keras.ops.square(y_true - y_pred))


class MeanSquare(keras.losses.Loss):
    """A loss whose `call` returns a number, and not one for each sample."""

    def call(self, y_true, y_pred):
        return mean_square(y_true, y_pred)


def trained(env: Env, loss: typing.Any, *more: np.ndarray, **options: typing.Any):
    """History with validation, `evaluate`, and weights."""

    def build() -> keras.Model:
        optimizer = keras.optimizers.SGD(0.05)
        return common.compiled(common.mlp(), optimizer, loss, **options)

    model = common.build_in_scope(env, build)
    data = common.batched(*common.regression_data(NUM_SAMPLES), *more)
    history = common.fit(model, data, epochs=2, validation_data=data)
    evaluated = model.evaluate(data, verbose=0, return_dict=True)
    return {
        "history": history,
        "evaluated": evaluated,
        "weights": env.weights(model),
    }


def _weights_of_batches() -> np.ndarray:
    """Alike in a batch: one number knows nothing of single samples."""
    batches = np.arange(NUM_SAMPLES) // common.BATCH_SIZE
    return (0.5 + batches).astype("float32")


@case("Wrong numbers: a loss function that returns a number, partial batches")
@same_as("losses_that_couple_rows")
def loss_function_that_returns_a_number(env: Env) -> dict:
    return {
        "plain": trained(env, mean_square),
        "as a metric": trained(env, mean_square, metrics=[mean_square]),
    }


@case("Wrong numbers: a loss class that returns a number, with every reduction")
@same_as("losses_that_couple_rows")
def loss_class_that_returns_a_number(env: Env) -> dict:
    return {
        str(reduction): trained(env, MeanSquare(reduction=reduction))
        for reduction in REDUCTIONS
    }


@case("Wrong numbers: a loss that returns a number, with sample weights")
@same_as("sample_weight")
def loss_that_returns_a_number_with_sample_weights(env: Env) -> dict:
    weights = _weights_of_batches()
    losses = {
        "function": mean_square,
        "mean": MeanSquare(reduction="mean"),
        "weighted": MeanSquare(reduction="mean_with_sample_weight"),
    }
    return {
        name: trained(env, loss, weights, weighted_metrics=["mae"])
        for name, loss in losses.items()
    }


@case("Wrong numbers: a loss that returns a number, beside one that does not")
@same_as("losses_that_couple_rows")
def losses_that_return_a_number_and_that_do_not(env: Env) -> dict:
    def build() -> keras.Model:
        inputs = keras.Input((common.NUM_FEATURES,))
        h = keras.layers.Dense(4, activation="tanh", kernel_regularizer="l2")(inputs)
        outputs = {n: keras.layers.Dense(1, name=n)(h) for n in ("one", "each")}
        return common.compiled(
            keras.Model(inputs, outputs),
            keras.optimizers.SGD(0.05),
            {"one": mean_square, "each": "mae"},
            loss_weights={"one": 0.5, "each": 2.0},
        )

    x, y = common.regression_data(NUM_SAMPLES)
    model = common.build_in_scope(env, build)
    targets = {"one": y, "each": 2 * y}
    history = common.fit(model, x, targets, epochs=2, validation_data=(x, targets))
    return {"history": history, "weights": env.weights(model)}
