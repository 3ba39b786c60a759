"""Batches that do not divide evenly among the replicas."""

from __future__ import annotations

import functools

import keras
import numpy as np

from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as


def _build() -> keras.Model:
    return common.compiled(common.mlp(), metrics=["mae"])


def _train(env: Env, num_samples: int, batch_size: int) -> dict:
    data = common.regression_data(num_samples)
    return common.train(env, _build, *data, batch_size=batch_size)


@case("A partial last batch that divides evenly")
@same_as("partial_last_batch_of_unequal_shares")
def partial_last_batch_that_divides_evenly(env: Env) -> dict:
    return _train(env, 92, 8)


@case("Wrong numbers: a last batch of unequal shares")
def partial_last_batch_of_unequal_shares(env: Env) -> dict:
    return _train(env, 93, 8)


@case("Wrong numbers: a last batch smaller than N replicas")
@same_as("stop_at_the_shortest_of_known_lengths")
def last_batch_missing_on_one_worker(env: Env) -> dict:
    return _train(env, 89, 8)


@case("Crash: odd batch sizes, exact numbers")
@same_as("partial_last_batch_of_unequal_shares")
def odd_batch_size(env: Env) -> dict:
    return _train(env, 40, 5)


@case(
    "Crash: odd batch sizes, also as first or only batch, and smaller than N",
    compare=False,
)
@same_as("partial_last_batch_of_unequal_shares")
def odd_and_tiny_batches_run(env: Env) -> dict:
    results = {}
    for num_samples, batch_size in (10, 5), (5, 8), (9, 4), (1, 4):
        model = common.build_in_scope(env, _build)
        data = common.batched(
            *common.regression_data(num_samples), batch_size=batch_size
        )
        history = common.fit(model, data, epochs=2)
        assert np.isfinite(history["loss"]).all(), (num_samples, batch_size)
        results[f"{num_samples}by{batch_size}"] = history
        weights = env.weights(model)
        assert all(np.isfinite(w).all() for w in weights.values())
    return results


@case("Wrong numbers: NaN with BatchNormalization in a batch smaller than N")
@same_as("batch_normalization_survives_a_tiny_batch")
def evaluate_on_unequal_shares(env: Env) -> dict:
    def build():
        model = keras.Sequential(
            [
                keras.Input((common.NUM_FEATURES,)),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.Dense(1),
            ]
        )
        return common.compiled(model, metrics=["mae"])

    model = common.build_in_scope(env, build)
    x, y = common.regression_data(17)
    return {
        f"{size}": model.evaluate(x, y, batch_size=size, verbose=0, return_dict=True)
        for size in (8, 5)
    }


@case(
    "Wrong numbers: BatchNormalization gives NaN after a batch smaller than N",
    compare=False,
)
def batch_normalization_survives_a_tiny_batch(env: Env) -> dict:
    def build(synchronized):
        model = keras.Sequential(
            [
                keras.Input((common.NUM_FEATURES,)),
                keras.layers.BatchNormalization(synchronized=synchronized),
                keras.layers.Dense(1),
            ]
        )
        return common.compiled(model)

    results = {}
    for synchronized in True, False:
        model = common.build_in_scope(env, functools.partial(build, synchronized))
        common.fit(model, *common.regression_data(17), epochs=1)
        weights = env.weights(model)
        for path, value in weights.items():
            assert np.isfinite(value).all(), f"{path}, synchronized={synchronized}"
        results[f"synchronized={synchronized}"] = weights
    return results
