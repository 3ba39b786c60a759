"""Corners of sharded state: tiny buckets, nothing at all, waiting slices, bad input."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import tfdp
from cases import common
from harness import registry
from harness.env import Env

case = registry.case
optimizers = keras.optimizers


class Empty(keras.layers.Layer):
    """Adds up a weight of no elements."""

    def build(self, input_shape: Any) -> None:
        self.nothing = self.add_weight(shape=(0, 3), name="nothing")

    def call(self, inputs: Any) -> Any:
        return inputs + keras.ops.sum(self.nothing)


@keras.saving.register_keras_serializable("sharded_corners")
class Doubling(optimizers.Optimizer):
    """Plain descent, twice as far once it is built."""

    def __init__(self, learning_rate: float = 0.01, **options: Any) -> None:
        super().__init__(learning_rate=learning_rate, **options)
        self.factor = 1

    def build(self, variables: list) -> None:
        super().build(variables)
        self.factor = 2

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign_sub(variable, gradient * learning_rate * self.factor)


def _compiled(env: Env, model: Any, optimizer: Any, **settings: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    with env.scope():
        built = model()
        if not env.is_reference:
            optimizer = tfdp.DistributedOptimizer(optimizer, **settings)
        built.compile(optimizer=optimizer, loss="mse", jit_compile=False)
        built.optimizer.build(built.trainable_variables)
    return built


def _sequential(*layers: Any) -> keras.Model:
    return keras.Sequential([keras.Input((common.NUM_FEATURES,)), *layers])


@case(
    "buckets smaller than replicas are many, variables of no elements",
    setups=("mirrored",),
)
def hardly_anything_is_trained(env: Env) -> dict:
    dense = keras.layers.Dense
    models = {
        "one": lambda: keras.Sequential([keras.Input((1,)), dense(1, use_bias=False)]),
        "none": lambda: _sequential(dense(3), Empty(), dense(1)),
    }
    x, y = common.regression_data(32)
    results = {}
    for name, make in (
        ("one", lambda: optimizers.SGD(0.05, clipnorm=0.1)),
        ("one", lambda: optimizers.Nadam(0.05, clipnorm=0.1)),
        ("none", lambda: optimizers.Adam(0.01)),
        ("none", lambda: optimizers.Lamb(0.01)),
        ("none", lambda: Doubling(0.01)),
    ):
        for sharding in ("none", "optimizer"):
            optimizer = make()
            model = _compiled(env, models[name], optimizer, sharding=sharding)
            common.fit(model, x[:, :1] if name == "one" else x, y, epochs=1)
            results[f"{name}/{optimizer.name}/{sharding}"] = [
                np.asarray(weight) for weight in model.get_weights()
            ]
    return {
        f"{name}/{index}": weight
        for name, weights in results.items()
        for index, weight in enumerate(weights)
    }


@case("slices that wait are each replica's own", setups=("two_workers",))
def waiting_slices_survive_what_is_shared(env: Env) -> dict:
    x, y = common.regression_data(64)
    make = optimizers.Adam(0.01)
    steps = {} if env.is_reference else {"accumulation_steps": 2}
    if env.is_reference:
        make = optimizers.Adam(0.01, gradient_accumulation_steps=2)
    model = _compiled(env, common.mlp, make, sharding="gradients", **steps)
    common.fit(model, x[:24], y[:24], batch_size=8, epochs=1)
    backup = keras.callbacks.BackupAndRestore(str(env.tmp / "backup"))
    common.fit(model, x[24:], y[24:], batch_size=8, epochs=1, callbacks=[backup])
    return env.weights(model)


@case("workers shard differently", setups=("two_workers",), compare=False)
def different_optimizers_are_named(env: Env) -> dict:
    if env.is_reference:
        return {}
    make = optimizers.Lion if env.is_chief else optimizers.Lamb
    with pytest.raises(ValueError, match=r"worker 0 has .*Lion.*worker 1 has .*Lamb"):
        _compiled(env, common.mlp, make(0.01), sharding="optimizer")
    return {}


@case("noise scale with sharded gradients", setups=("mirrored",), compare=False)
def noise_scale_needs_the_replicas_own_sums(env: Env) -> dict:
    if env.is_reference:
        return {}
    model = _compiled(
        env,
        common.mlp,
        optimizers.SGD(0.01),
        sharding="gradients",
        accumulation_steps=2,
    )
    with pytest.raises(ValueError, match='Use `sharding="optimizer"`, stage 1'):
        common.fit(
            model,
            *common.regression_data(32),
            callbacks=[tfdp.callbacks.GradientNoiseScale()],
        )
    return {}


@case("one worker cannot write", setups=("two_workers",), compare=False)
def all_workers_hear_that_the_first_could_not_save(env: Env) -> dict:
    if env.is_reference:
        return {}
    model = _compiled(env, common.mlp, optimizers.Adam(), sharding="optimizer")
    nowhere = env.tmp / "file"
    nowhere.touch()
    with pytest.raises(OSError):
        model.save_weights(nowhere / "below.weights.h5")
    return {}
