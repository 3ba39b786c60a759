"""Updates at places where a program of one device has them: within a branch."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case

layers = keras.layers


def _step(model, call, data) -> dict:
    """Updates where the loss of the whole batch is small enough, in a branch."""
    x, y = data
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(call(x, training=True) - y))
    gradients = tape.gradient(loss, model.trainable_variables)

    def update():
        model.optimizer.apply(gradients, model.trainable_variables)
        return 1

    updated = tf.cond(loss < model.largest, update, lambda: 0)
    return {"loss": loss, "updated": updated}


class Guarded(keras.Model):
    def train_step(self, data):
        return _step(self, self, data)


def _guarded() -> keras.Model:
    inputs = keras.Input((common.NUM_FEATURES,))
    h = layers.Dense(4, activation="tanh")(inputs)
    model = Guarded(inputs, layers.Dense(1)(h))
    model.largest = 0.9
    model.compile(keras.optimizers.SGD(0.1))
    return model


class WithoutCall(keras.Model):
    """Has no `call`, so that the first update builds the optimizer, in a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1)
        self.dense.build((None, common.NUM_FEATURES))
        self.built, self.largest = True, 9.0

    def train_step(self, data):
        return _step(self, self.dense, data)


def _without_call() -> keras.Model:
    model = WithoutCall()
    model.compile(keras.optimizers.Adam(0.1), "mse")
    return model


@case("An update in a branch: made where one device makes it")
def an_update_in_a_branch(env: Env) -> dict:
    x, y = common.regression_data()
    return {
        build.__name__: common.train(env, build, x, y, epochs=2)
        for build in (_guarded, _without_call)
    }
