"""Corners of sharded state: tiny buckets, nothing at all, waiting slices, bad input."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env
from tests.sharding.cases_sharded import sharding_of

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
            settings["sharding"] = sharding_of(settings.get("sharding", "none"))
            optimizer = tfdp.DistributedOptimizer(optimizer, **settings)
        built.compile(optimizer=optimizer, loss="mse", jit_compile=False)
        built.optimizer.build(built.trainable_variables)
    return built


def _sequential(*layers: Any) -> keras.Model:
    return keras.Sequential([keras.Input((common.NUM_FEATURES,)), *layers])


@case("buckets smaller than replicas are many, variables of no elements")
@registry.same_as("sharded_step_has_two_collectives_for_each_bucket")
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


@case("slices that wait are each replica's own")
@registry.same_as("backup_restores_sharded_state")
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


@case(
    "workers shard differently",
    setups=("two_workers", "two_by_two"),
    compare=False,
)
def different_optimizers_are_named(env: Env) -> dict:
    if env.is_reference:
        return {}
    make = optimizers.Lion if env.is_chief else optimizers.Lamb
    text = "optimizers/0: 'Lion' on worker 0, 'Lamb' on worker 1"
    with pytest.raises(ValueError, match=text):
        _compiled(env, common.mlp, make(0.01), sharding="optimizer")
    return {}


@case("noise scale with sharded gradients", compare=False)
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


@case("one worker cannot write", quick_setup="two_by_two", compare=False)
def all_workers_hear_that_the_first_could_not_save(env: Env) -> dict:
    if env.is_reference:
        return {}
    model = _compiled(env, common.mlp, optimizers.Adam(), sharding="optimizer")
    nowhere = env.tmp / "file"
    nowhere.touch()
    with pytest.raises(OSError):
        model.save_weights(nowhere / "below.weights.h5")
    return {}


@keras.saving.register_keras_serializable("sharded_corners")
class OwnNadam(optimizers.Nadam):
    """Not known to treat elements by themselves, with one variable besides slots."""


@keras.saving.register_keras_serializable("sharded_corners")
class OwnAdamW(optimizers.AdamW):
    """Not known to treat elements by themselves."""


@case("what belongs to no variable, with whole owners")
@registry.same_as("sharded_step_has_two_collectives_for_each_bucket")
def owner_without_a_gradient_counts_on(env: Env) -> dict:
    model = _compiled(env, common.mlp, OwnNadam(0.05), sharding="optimizer")
    x, y = (tf.constant(array[:8]) for array in common.regression_data(8))
    # The first kernel is alone with its owner, and every other step leaves it out.
    variables = model.trainable_variables

    def update(chosen: list) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2) / env.num_replicas
        gradients = tape.gradient(loss, [v.value for v in chosen])
        model.optimizer.apply(gradients, chosen)

    @tf.function(autograph=False)
    def step(number: int) -> None:
        chosen = variables[:2] if number % 2 else variables[2:]
        env.distribution.run(update, args=(chosen,))

    for number in range(6):
        step(number)
    return env.weights(model)


@case("names excluded from weight decay, on the host")
@registry.same_as("offloaded_state_is_updated_on_the_host")
def offload_heeds_names_that_are_excluded(env: Env) -> dict:
    optimizer = OwnAdamW(0.01, weight_decay=5.0)
    optimizer.exclude_from_weight_decay(var_names=["kernel"])
    settings = {"sharding": "optimizer", "offload": "cpu"}
    model = _compiled(env, common.mlp, optimizer, **settings)
    common.fit(model, *common.regression_data(32), epochs=1)
    return env.weights(model)


@case("waiting slices and another loss scale", compare=False)
@registry.same_as("backup_restores_sharded_state")
def waiting_slices_take_the_scale_that_is_restored(env: Env) -> dict:
    if env.is_reference:
        return {}
    x, y = common.regression_data(24)
    settings = {"accumulation_steps": 2, "sharding": "gradients"}

    def make(scale: float) -> keras.Model:
        scaling = tfdp.callbacks.LossScaling(initial_scale=scale).scaling
        sgd = optimizers.SGD(0.1)
        return _compiled(env, common.mlp, sgd, loss_scale=scaling, **settings)

    model, again = make(1024.0), make(32768.0)
    common.fit(model, x, y, batch_size=8, epochs=1)
    assert model.optimizer.accumulated_steps == 1
    tfdp.checkpoint.save(model, env.tmp / "checkpoint")
    tfdp.checkpoint.restore(again, env.tmp / "checkpoint")
    for item in (model, again):
        item.optimizer.flush()
    for found, wanted in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)
    return {}


@case("whole sums after ZeRO-2 took over", compare=False)
@registry.same_as("each_replica_holds_its_share_of_the_slots")
def sums_that_were_taken_over_are_freed(env: Env) -> dict:
    if env.is_reference:
        return {}
    data = common.regression_data(24)
    model = _compiled(env, common.mlp, optimizers.Adam(), accumulation_steps=2)
    common.fit(model, *data, batch_size=8, epochs=1)
    sums = model.optimizer.features.accumulation.sums
    alive = [weakref.ref(part) for item in sums for part in item.value.values]
    del sums
    sharded = tfdp.callbacks.ShardedOptimizer(stage=2)
    common.fit(model, *data, batch_size=8, epochs=1, callbacks=[sharded])
    gc.collect()
    assert not any(reference() is not None for reference in alive)
    return {}


@case("ZeRO-2 switched on in the scope")
@registry.same_as("backup_restores_sharded_state")
def waiting_slices_survive_the_scope(env: Env) -> dict:
    x, y = common.regression_data(64)
    adam = optimizers.Adam(0.01)
    if env.is_reference:
        adam = optimizers.Adam(0.01, gradient_accumulation_steps=2)
    steps = {} if env.is_reference else {"accumulation_steps": 2}
    model = _compiled(env, common.mlp, adam, **steps)
    common.fit(model, x[:24], y[:24], batch_size=8, epochs=1)
    stage = [] if env.is_reference else [tfdp.callbacks.ShardedOptimizer(stage=2)]
    with env.scope():
        common.fit(model, x[24:], y[24:], batch_size=8, epochs=1, callbacks=stage)
    return env.weights(model)


@case("TensorBoard saves embeddings")
@registry.same_as("files_of_sharded_parameters_are_those_of_plain_keras")
def tensorboard_saves_embeddings_of_sharded_state(env: Env) -> dict:
    def build() -> keras.Model:
        layers = keras.layers
        flat = [layers.Embedding(10, 3), layers.Flatten(), layers.Dense(1)]
        return _sequential(*flat)

    x, y = common.regression_data(32)
    model = _compiled(env, build, optimizers.Adam(0.01), sharding="optimizer")
    board = keras.callbacks.TensorBoard(str(env.tmp / "logs"), embeddings_freq=1)
    ids = np.abs(3 * x).astype("int32") % 10
    common.fit(model, ids, y, epochs=2, callbacks=[board])
    return env.weights(model)


@case(
    "a file on one disk only",
    setups=("two_workers", "two_by_two"),
    compare=False,
)
def file_that_one_worker_sees_is_loaded_by_none(env: Env) -> dict:
    if env.is_reference:
        return {}
    model = _compiled(env, common.mlp, optimizers.Adam(), sharding="optimizer")
    model.save_weights(env.tmp / "0.weights.h5")
    env.wait_for_all("saved")
    with pytest.raises(ValueError, match="where worker 1 finds it"):
        model.load_weights(env.tmp / f"{env.rank}.weights.h5")
    return {}
