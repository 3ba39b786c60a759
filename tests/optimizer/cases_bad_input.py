"""Wrong uses of `DistributedOptimizer` and its callbacks under a strategy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env

optimizers = keras.optimizers


def _wrong_uses(env: Env) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names of wrong uses, and what is to raise."""

    def in_scope(function: Callable, *args: Any, **options: Any) -> Any:
        with env.scope():
            return function(*args, **options)

    def built() -> optimizers.Optimizer:
        optimizer = optimizers.SGD()
        optimizer.build([keras.Variable(np.zeros(2, "float32"))])
        return optimizer

    outside = built()
    yield (
        "wrapped, built outside the scope",
        lambda: in_scope(tfdp.DistributedOptimizer, outside),
    )
    inner = optimizers.SGD()
    inner.build(common.mlp().trainable_variables)
    model = in_scope(common.mlp)
    yield (
        "compiled, built outside the scope",
        lambda: in_scope(model.compile, tfdp.DistributedOptimizer(inner), "mse"),
    )
    for name, callback in (
        ("accumulation", tfdp.callbacks.GradientAccumulation(2)),
        ("scaling", tfdp.callbacks.LossScaling()),
        ("warmup", tfdp.callbacks.LearningRateWarmup(steps=3)),
        ("noise", tfdp.callbacks.GradientNoiseScale()),
        ("sharding", tfdp.callbacks.ShardedOptimizer()),
    ):
        fresh = in_scope(common.mlp)
        yield (
            f"{name}, not compiled",
            lambda callback=callback, fresh=fresh: callback.set_model(fresh),
        )
    weights = model.trainable_variables
    optimizer = in_scope(lambda: tfdp.DistributedOptimizer(optimizers.SGD()))
    in_scope(optimizer.build, weights)
    gradients = [tf.zeros(w.shape) for w in weights]

    class Clipping(optimizers.SGD):
        def _clip_gradients(self, grads: Any) -> Any:
            return [tf.clip_by_norm(g, 0.1) for g in grads]

    sharded = in_scope(tfdp.DistributedOptimizer, Clipping(), sharding="optimizer")
    yield "sharded, clips by itself", lambda: in_scope(sharded.build, weights)

    class Averaging(Clipping):
        def build(self, variables: list) -> None:
            super().build(variables)
            self.average = self.add_variable((), initializer="zeros")

        def apply(self, gradients: Any, variables: Any = None) -> None:
            self.average.assign_add(1.0)
            super().apply(gradients, variables)

        _clip_gradients = optimizers.SGD._clip_gradients

    averaging = in_scope(tfdp.DistributedOptimizer, Averaging(), sharding="optimizer")
    yield "sharded, with state", lambda: in_scope(averaging.build, weights)

    class Langevin(optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, rate: Any) -> None:
            noise = tf.random.stateless_normal(variable.shape, [1, 2])
            super().update_step(gradient + noise, variable, rate)

    drawing = in_scope(common.compiled, in_scope(common.mlp), Langevin(0.1))
    shard = tfdp.callbacks.ShardedOptimizer()
    yield (
        "sharded, draws",
        lambda: drawing.fit(*common.regression_data(8), callbacks=[shard]),
    )
    yield (
        "apply outside `run`",
        lambda: in_scope(optimizer.apply, gradients, weights),
    )
    yield "apply outside the scope", lambda: optimizer.apply(gradients, weights)
    compiled = in_scope(common.compiled, in_scope(common.mlp))
    yield (
        "a class",
        lambda: compiled.fit(
            *common.regression_data(8), callbacks=[tfdp.callbacks.ConsistencyCheck]
        ),
    )
    warmup = tfdp.callbacks.LearningRateWarmup(epochs=2)

    def begin() -> None:
        # As in a `fit` on a generator.
        warmup.set_params({"steps": None})
        warmup.set_model(compiled)
        warmup.on_train_begin()

    yield "warmup of unknown length", begin


@registry.case(
    "Bad input of the optimizer and its callbacks",
    compare=False,
    quick_setup="two_by_two",
)
def wrong_uses_of_the_optimizer(env: Env) -> dict:
    return {"local": {name: _raised(action) for name, action in _wrong_uses(env)}}


@registry.case(
    "Bad input: callbacks under a strategy of TensorFlow's",
    compare=False,
    setups=("mirrored",),
)
def callback_under_a_stock_strategy(env: Env) -> dict:
    strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
    with strategy.scope():
        model = common.compiled(common.mlp())
    callback = tfdp.callbacks.GradientAccumulation(2)

    def wrap() -> None:
        with strategy.scope():
            tfdp.DistributedOptimizer(optimizers.SGD())

    return {
        "local": {
            "a callback": _raised(lambda: callback.set_model(model)),
            "the optimizer": _raised(wrap),
        }
    }


def _raised(action: Callable[[], Any]) -> dict:
    """The type and text of what an action raises, and how soon."""
    start = time.monotonic()
    try:
        action()
    except Exception as error:  # noqa: BLE001 its type is the result
        seconds = time.monotonic() - start
        kind = type(error).__name__
        return {"type": kind, "text": str(error), "seconds": seconds}
    return {"type": "nothing", "text": "nothing was raised", "seconds": 0.0}
