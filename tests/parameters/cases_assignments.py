"""Assignments to sharded parameters that only some workers make are named by all."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as
from tests.parameters.cases_user_code import compiled

SETUPS = ("two_workers", "two_by_two")
OPTIONS: dict[str, Any] = {"setups": SETUPS, "compare": False}


def refused(env: Env, model: keras.Model, path: str, *counts: str) -> None:
    """Checks that each loop names the parameter, however often it is called."""
    x, y = common.regression_data(16)
    assert env.setup.num_workers == len(counts)
    for call in (
        lambda: common.fit(model, x, y),
        lambda: model.evaluate(x, y, verbose=0),
        lambda: model.predict(x, verbose=0),
    ):
        with pytest.raises(ValueError, match="assigned different values") as caught:
            call()
        text = str(caught.value)
        assert f"Received: {path!r}, " in text
        for rank, count in enumerate(counts):
            assert (f"{count} (" in text) == (count != "nothing"), text
            assert f"on worker {rank}" in text
        counts = ("nothing",) * len(counts)


@case("Sharded parameters: a value assigned on one worker only is named", **OPTIONS)
@same_as("weights_of_one_worker_beside_sharded_state")
def values_of_one_worker(env: Env) -> dict:
    x, y = common.regression_data(16)
    model = compiled(env, common.mlp)
    common.fit(model, x, y)
    weights = model.get_weights()
    kernel = model.layers[0].kernel
    if env.rank == 1:
        kernel.assign(weights[0])
    refused(env, model, kernel.path, "nothing", "1 value")
    model.set_weights(weights)
    model.evaluate(x, y, verbose=0)
    # By other values, though as many.
    bias = model.layers[1].bias
    bias.assign(weights[3] + env.rank)
    refused(env, model, bias.path, "1 value", "1 value")
    model.set_weights(weights)
    return {"history": common.fit(model, x, y)}


@case("Sharded parameters: values are counted until all are replaced", **OPTIONS)
@same_as("weights_of_one_worker_beside_sharded_state")
def values_of_one_worker_count_until_they_are_replaced(env: Env) -> dict:
    x, y = common.regression_data(16)
    model = compiled(env, common.mlp)
    common.fit(model, x, y)
    weights = model.get_weights()

    def repair() -> None:
        model.set_weights(weights)
        model.evaluate(x, y, verbose=0)

    kernel, bias = model.layers[0].kernel, model.layers[1].bias
    if env.rank == 1:
        kernel.assign(weights[0])
    refused(env, model, kernel.path, "nothing", "1 value")
    repair()
    bias.assign(weights[3] + env.rank)
    refused(env, model, bias.path, "1 value", "1 value")
    if env.rank == 0:
        bias.value.assign_add(weights[3])
    refused(env, model, bias.path, "1 value", "nothing")
    repair()
    # What replaces all of it counts for all that was assigned before.
    if env.rank == 0:
        kernel.value.assign_add(weights[0])
    with pytest.raises(ValueError, match="assigned different values"):
        model.train_on_batch(x, y)
    repair()
    return {"history": common.fit(model, x, y)}


@case("Sharded state: weights of one worker only are named, in each stage", **OPTIONS)
def weights_of_one_worker_beside_sharded_state(env: Env) -> dict:
    x, y = common.regression_data(16)
    for stage in (3, 2):
        with env.scope():
            model = common.compiled(common.mlp())
        if env.rank == 1:
            # What is assigned to the copies of replicas is not recorded.
            for part in (p for weight in model.weights for p in weight.value.values):
                part.assign_add(tf.ones_like(part))
        callbacks = [tfdp.callbacks.ShardedOptimizer(stage=stage)]
        with pytest.raises(RuntimeError, match="apart, as seen before the") as error:
            common.fit(model, x, y, callbacks=callbacks)
        assert f"in {model.weights[0].path!r} (4 of " in str(error.value)
    return {}


@case("Sharded state: values of one worker only are named between steps", **OPTIONS)
@same_as("weights_of_one_worker_beside_sharded_state")
def values_of_one_worker_beside_sharded_state(env: Env) -> dict:
    x, y = common.regression_data(16)
    with env.scope():
        model = common.compiled(common.mlp())
    before = model.get_weights()
    common.fit(model, x, y, callbacks=[tfdp.callbacks.ShardedOptimizer(stage=2)])
    kernel = model.layers[0].kernel
    if env.rank == 0:
        kernel.assign(before[0])
    refused(env, model, kernel.path, "1 value", "nothing")
    model.set_weights(before)
    # A step mixes what one worker assigns before the next check, for all replicas.
    check = tfdp.callbacks.ConsistencyCheck(every=3)
    with pytest.raises(RuntimeError, match="drifted apart, as seen at step 6") as error:
        common.fit(model, *common.regression_data(), callbacks=[Assign(env, 3), check])
    assert f"in {kernel.path!r} (1 of 4 variables)" in str(error.value)
    model.set_weights(before)
    return {"history": common.fit(model, x, y)}


class Assign(keras.callbacks.Callback):
    """Assigns a parameter on one worker after a batch."""

    def __init__(self, env: Env, batch: int):
        super().__init__()
        self.is_here = env.rank == 1
        self.batch = batch

    def on_train_batch_end(self, batch, logs=None):
        if self.is_here and batch == self.batch:
            kernel = self.model.layers[0].kernel
            kernel.assign(np.ones(kernel.shape, "float32"))


@case("Drift: what one worker assigns to a sharded parameter is named", **OPTIONS)
@same_as("weights_of_one_worker_beside_sharded_state")
def consistency_check_names_what_one_worker_assigns(env: Env) -> dict:
    model = compiled(env, common.mlp)
    data = common.regression_data()
    for batch, when in ((3, "at step 6 of `fit`"), (11, "after the last step")):
        check = tfdp.callbacks.ConsistencyCheck(every=3)
        with (
            pytest.warns(UserWarning, match="skips 4 of 4 weights"),
            pytest.raises(RuntimeError, match="Replicas have drifted apart") as caught,
        ):
            common.fit(model, *data, callbacks=[Assign(env, batch), check])
        text = str(caught.value)
        assert f"as seen {when}" in text
        assert f"in {model.layers[0].kernel.path!r} (1 of 4 variables)" in text
        assert "of worker 1, localhost)" in text
        with pytest.raises(ValueError, match="assigned different values"):
            common.fit(model, *data)
        model.set_weights([np.ones(w.shape, "float32") for w in model.weights])
    return {"history": common.fit(model, *data)}
