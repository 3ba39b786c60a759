"""Validation, evaluation, and several calls of `fit`."""

from __future__ import annotations

import keras

from cases import common
from harness import registry
from harness.env import Env
from harness.registry import case


def _build() -> keras.Model:
    return common.compiled(common.mlp(), metrics=["mae"])


@case("`validation_data`, `validation_freq`")
def validation_data(env: Env) -> dict:
    x, y = common.regression_data(32)
    held_out = common.regression_data(20, seed=1)
    model = common.build_in_scope(env, _build)
    history = common.fit(
        model, x, y, validation_data=held_out, validation_freq=2, epochs=2
    )
    dataset = common.batched(*held_out, batch_size=4)
    more = common.fit(model, x, y, validation_data=dataset, validation_steps=3)
    return {"history": history, "more": more, "weights": env.weights(model)}


@case("`validation_split`")
def validation_split(env: Env) -> dict:
    data = common.regression_data()
    return common.train(env, _build, *data, validation_split=0.25)


@case("`evaluate` (two workers: crash)", setups=registry.ALL)
def evaluate(env: Env) -> dict:
    model = common.build_in_scope(env, _build)
    x, y = common.regression_data(37)
    weight = abs(x[:, 0])
    return {
        "arrays": model.evaluate(x, y, batch_size=8, verbose=0),
        "weighted": model.evaluate(x, y, 8, sample_weight=weight, verbose=0),
        "dataset": model.evaluate(common.batched(x, y), verbose=0),
        "steps": model.evaluate(common.batched(x, y), steps=2, verbose=0),
    }


@case("A second `fit`, without and with recompiling")
def second_fit(env: Env) -> dict:
    model = common.build_in_scope(env, _build)
    data = common.regression_data()
    first = common.fit(model, *data, epochs=1)
    second = common.fit(model, *data, epochs=1)
    with env.scope():
        common.compiled(model, keras.optimizers.Adam(0.01), "mae")
    third = common.fit(model, *data, epochs=2)
    return {
        "first": first,
        "second": second,
        "third": third,
        "weights": env.weights(model),
    }


@case("A layer frozen between two calls of `fit`")
def second_fit_with_a_frozen_layer(env: Env) -> dict:
    model = common.build_in_scope(env, _build)
    data = common.regression_data()
    first = common.fit(model, *data, epochs=1)
    model.layers[0].trainable = False
    with env.scope():
        common.compiled(model, keras.optimizers.SGD(0.05))
    second = common.fit(model, *data, epochs=1)
    return {"first": first, "second": second, "weights": env.weights(model)}
