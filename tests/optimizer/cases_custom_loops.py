"""A `DistributedOptimizer` in loops of one's own, inside `strategy.run`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env
from tests.step.cases_accumulation import MIRRORED

case = registry.case
optimizers = keras.optimizers
BATCH = common.BATCH_SIZE


def _optimizer(env: Env) -> optimizers.Optimizer:
    """Accumulation, loss scaling and clipping; on one device by Keras alone."""

    def make(**options: Any) -> optimizers.Optimizer:
        return optimizers.Adam(0.01, global_clipnorm=0.1, **options)

    if not env.is_reference:
        return tfdp.DistributedOptimizer(
            make(), accumulation_steps=2, loss_scale="dynamic"
        )
    inner = make(gradient_accumulation_steps=2)
    return optimizers.LossScaleOptimizer(inner, initial_scale=2.0**15)


def _loop(
    env: Env,
    *,
    build_first: bool = True,
    in_function: bool = True,
    pairs: bool = False,
    made_outside: bool = False,
    overflows: bool = False,
) -> dict:
    strategy = env.distribution
    outside = _optimizer(env)
    with env.scope():
        model = common.mlp()
        optimizer = outside if made_outside else _optimizer(env)
        if build_first:
            optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            per_sample = keras.losses.mean_squared_error(y, model(x, training=True))
            loss = tf.reduce_sum(per_sample) / BATCH
            scaled = optimizer.scale_loss(loss)
        variables = model.trainable_variables
        gradients = tape.gradient(scaled, variables)
        if pairs:
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
        else:
            optimizer.apply(gradients, variables)
        return loss

    def one_step(batch):
        return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)

    one_step = tf.function(one_step) if in_function else one_step
    x, y = common.regression_data(64)
    if overflows:
        x[BATCH - 1], y[BATCH - 1] = 1e30, 3e38
    dataset = strategy.experimental_distribute_dataset(common.batched(x, y))
    losses = [one_step(batch).numpy() for batch in dataset]
    results = {"weights": env.weights(model), "losses": losses}
    if not env.is_reference:
        assert optimizer.iterations.numpy() == (3 if overflows else 4)
        assert optimizer.skipped_steps == int(overflows)
        optimizer.check_progress()
    return results


@case("`scale_loss` and `apply` in a traced step")
def loop_scales_accumulates_and_clips(env: Env) -> dict:
    return _loop(env)


@case("`apply_gradients`, and an optimizer that is built by it", setups=MIRRORED)
def loop_with_apply_gradients_builds_the_optimizer(env: Env) -> dict:
    return _loop(env, pairs=True, build_first=False)


@case("A loop without `tf.function`, and an optimizer that was made outside the scope")
def loop_without_tracing(env: Env) -> dict:
    return _loop(env, in_function=False, made_outside=True)


@case("A loop with an overflow on the last replica", compare=False)
def loop_skips_a_window_with_an_overflow(env: Env) -> dict:
    results = _loop(env, overflows=True)
    for path, value in results["weights"].items():
        assert np.isfinite(value).all(), path
    return {"weights": results["weights"]}


@case(
    "A loop inside `strategy.run`",
    setups=("mirrored",),
    full_setups=("two_by_two",),  # a process of one replica may loop
    compare=False,
)
def loop_inside_run_is_refused(env: Env) -> dict:
    """Each way to update raises, where it would wait for ever."""
    for name, wrap in WAYS_TO_UPDATE.items():
        with env.scope():
            model = common.mlp()
            optimizer = wrap(optimizers.Adam(0.01))
            optimizer.build(model.trainable_variables)

        def updates(model=model, optimizer=optimizer):
            for _ in tf.range(2):
                variables = model.trainable_variables
                optimizer.apply([tf.ones(v.shape) for v in variables], variables)

        with pytest.raises(ValueError, match=r"inside a loop inside `strategy.run`"):
            tf.function(env.distribution.run)(updates)
        assert not optimizer.iterations.numpy(), name
    return {}


WAYS_TO_UPDATE: dict[str, Callable[[optimizers.Optimizer], optimizers.Optimizer]] = {
    "of Keras": lambda optimizer: optimizer,
    "of Keras, accumulating": lambda optimizer: optimizers.Adam(
        0.01, gradient_accumulation_steps=2
    ),
    "wrapped": tfdp.DistributedOptimizer,
    "wrapped, accumulating": lambda optimizer: tfdp.DistributedOptimizer(
        optimizer, accumulation_steps=2
    ),
    "sharded": lambda optimizer: tfdp.DistributedOptimizer(
        optimizer, sharding="optimizer"
    ),
}
