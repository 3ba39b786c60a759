"""A `DistributedOptimizer` in loops of one's own, inside `strategy.run`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env

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


@case("`apply_gradients`, and an optimizer that is built by it")
@registry.same_as("loop_scales_accumulates_and_clips")
def loop_with_apply_gradients_builds_the_optimizer(env: Env) -> dict:
    return _loop(env, pairs=True, build_first=False)


@case("A loop without `tf.function`, whose `apply_gradients` builds the optimizer")
@registry.same_as("loop_scales_accumulates_and_clips")
def loop_without_tracing_builds_the_optimizer(env: Env) -> dict:
    return _loop(env, pairs=True, build_first=False, in_function=False)


@case("A loop without `tf.function`, and an optimizer that was made outside the scope")
@registry.same_as("loop_scales_accumulates_and_clips")
def loop_without_tracing(env: Env) -> dict:
    return _loop(env, in_function=False, made_outside=True)


@case("A loop with an overflow on the last replica", compare=False)
@registry.same_as("loop_scales_accumulates_and_clips")
def loop_skips_a_window_with_an_overflow(env: Env) -> dict:
    results = _loop(env, overflows=True)
    for path, value in results["weights"].items():
        assert np.isfinite(value).all(), path
    return {"weights": results["weights"]}


@case(
    "A loop inside `strategy.run`",
    setups=("mirrored",),  # over other transports it works, see below
    compare=False,
)
def loop_inside_run_is_refused(env: Env) -> dict:
    """Each way to update raises, where it would wait for ever."""
    for name, wrap in WAYS_TO_UPDATE.items():
        model, optimizer = _made(env, wrap)

        def updates(model=model, optimizer=optimizer):
            for _ in tf.range(2):
                _update(model, optimizer)

        with pytest.raises(ValueError, match=r"inside a loop inside `strategy.run`"):
            tf.function(env.distribution.run)(updates)
        assert not optimizer.iterations.numpy(), name
    return {}


@case(
    "A loop inside `strategy.run`, between workers",
    setups=("two_by_two", "two_workers"),
    compare=False,
)
@registry.same_as("loop_inside_a_replica_is_refused_or_right")
def loop_inside_run_is_a_loop_around_it(env: Env) -> dict:
    """Each way to update gives the weights of as many updates one by one."""
    run = env.distribution.run
    for name, wrap in WAYS_TO_UPDATE.items():
        model, optimizer = _made(env, wrap)
        other, one_by_one = _made(env, wrap)
        other.set_weights(model.get_weights())

        def updates(model=model, optimizer=optimizer):
            for _ in tf.range(4):
                _update(model, optimizer)

        tf.function(run)(updates)
        step = tf.function(functools.partial(run, _update, (other, one_by_one)))
        for _ in range(4):
            step()
        assert optimizer.iterations.numpy() == one_by_one.iterations.numpy() > 0, name
        pairs = zip(model.get_weights(), other.get_weights(), strict=True)
        for inside, around in pairs:
            np.testing.assert_allclose(inside, around, rtol=1e-6, err_msg=name)
    return {}


def _made(env: Env, wrap: Callable) -> tuple[keras.Model, optimizers.Optimizer]:
    with env.scope():
        model = common.mlp()
        optimizer = wrap(optimizers.Adam(0.01))
        optimizer.build(model.trainable_variables)
    return model, optimizer


def _update(model: keras.Model, optimizer: optimizers.Optimizer) -> None:
    """Apply gradients that differ between replicas."""
    context = tf.distribute.get_replica_context()
    scale = tf.cast(context.replica_id_in_sync_group + 1, tf.float32)
    variables = model.trainable_variables
    optimizer.apply([scale * tf.ones(v.shape) for v in variables], variables)


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
