"""Updates at places where a program of one device has them: within a branch."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case

layers = keras.layers


class Guarded(keras.Model):
    """Updates where the loss of the whole batch is small enough, in a branch."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        gradients = tape.gradient(loss, self.trainable_variables)

        def update():
            self.optimizer.apply(gradients, self.trainable_variables)
            return 1

        updated = tf.cond(loss < self.largest, update, lambda: 0)
        return {"loss": loss, "updated": updated}


def _guarded() -> keras.Model:
    inputs = keras.Input((common.NUM_FEATURES,))
    h = layers.Dense(4, activation="tanh")(inputs)
    model = Guarded(inputs, layers.Dense(1)(h))
    model.largest = 0.9
    model.compile(keras.optimizers.SGD(0.1))
    return model


@case("An update in a branch: made where one device makes it")
def an_update_in_a_branch(env: Env) -> dict:
    x, y = common.regression_data()
    return common.train(env, _guarded, x, y, epochs=2)
