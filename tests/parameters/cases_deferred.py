"""`strategy.scope(init="deferred")`: a model that is whole nowhere, from the start."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env
from tests.parameters.cases_parameters import deep

case = registry.case
layers, optimizers = keras.layers, keras.optimizers


def _scope(env: Env) -> contextlib.AbstractContextManager:
    return env.strategy.scope(init="deferred") if env.strategy else env.scope()


def _compile(env: Env, model: keras.Model) -> keras.Model:
    optimizer = optimizers.SGD(0.05, momentum=0.9)
    if not env.is_reference:
        optimizer = tfdp.DistributedOptimizer(optimizer, sharding="parameters")
    model.compile(optimizer, loss="mse")
    return model


@case("Sharded at once")
def deferred_parameters_train_like_one_device(env: Env) -> dict:
    keras.utils.set_random_seed(3)
    data = common.regression_data()
    with _scope(env):
        model = common.mlp(units=64)
        if not env.is_reference:
            parts = [v.value.values for v in model.trainable_variables]
            sizes = [sum(part.shape[0] for part in own) for own in parts]
            wholes = [v.value.num_elements for v in model.trainable_variables]
            local = env.num_replicas // env.setup.num_workers
            assert all(
                size <= -(-whole // env.num_replicas) * local
                for size, whole in zip(sizes, wholes, strict=True)
            )
        before = model.predict(data[0], verbose=0)
        model = _compile(env, model)
    history = common.fit(model, *data, batch_size=8, epochs=2, shuffle=False)
    return {"before": before, "history": history, "weights": env.weights(model)}


@case(
    "Initial values of the first worker",
    compare=False,
    quick_setup="two_by_two",
)
def deferred_parameters_begin_with_the_first_workers_values(env: Env) -> dict:
    if env.is_reference:
        return {}
    keras.utils.set_random_seed(3)
    expected = deep().get_weights()
    keras.utils.set_random_seed(3 + env.rank)
    with _scope(env):
        model = deep()
    for own, first in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(own, first)
    if env.setup.num_workers > 1:
        with pytest.raises(ValueError, match="worker 1 creates"), _scope(env):
            layers.Dense(3 + env.rank).build((None, 4))
    return {}


@case("Deferred on one worker", compare=False)
@registry.same_as("different_calls")
def a_scope_that_defers_on_one_worker_only_is_refused(env: Env) -> dict:
    if env.setup.num_workers < 2:
        return {}
    init = "deferred" if env.is_chief else None
    with (
        pytest.raises(RuntimeError, match="Workers are at different calls"),
        env.strategy.scope(init=init),
    ):
        deep()
    return {}


@case(
    "Files before there is an optimizer",
    compare=False,
)
@registry.same_as("files_of_sharded_parameters_are_those_of_plain_keras")
def deferred_models_are_saved_and_loaded_without_an_optimizer(env: Env) -> dict:
    data = common.regression_data()
    keras.utils.set_random_seed(3)
    plain = common.mlp()
    path = env.tmp / f"plain.{env.rank}.weights.h5"
    plain.save_weights(path)
    if env.is_reference:
        return {}
    keras.utils.set_random_seed(4)
    with _scope(env):
        model = common.mlp()
    model.load_weights(path)
    expected = plain.predict(data[0], verbose=0)
    predicted = model.predict(data[0], verbose=0)
    # The error of a tensor: a replica's rows are another batch size for the kernels.
    atol = 1e-6 * np.abs(expected).max()
    np.testing.assert_allclose(predicted, expected, rtol=0, atol=atol)
    again = env.tmp / f"again.{env.rank}.keras"
    model.save(again)
    if env.is_chief:
        read = keras.saving.load_model(again).get_weights()
        for own, first in zip(read, plain.get_weights(), strict=True):
            np.testing.assert_array_equal(own, first)
    with env.scope():
        model.compile(optimizers.SGD(0.05), loss="mse")
    with pytest.raises(
        ValueError, match=r'created in `strategy.scope\(init="deferred"\)'
    ):
        common.fit(model, *data, batch_size=8)
    stage = tfdp.callbacks.ShardedOptimizer(stage=3)
    common.fit(model, *data, batch_size=8, callbacks=[stage])
    return {}


@case("Another word", compare=False)
def an_unknown_kind_of_init_is_refused(env: Env) -> dict:
    if not env.is_reference:
        with pytest.raises(ValueError, match='`init` must be `None` or "deferred"'):
            env.strategy.scope(init="lazy")
    return {}
