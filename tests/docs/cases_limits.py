"""What docs/limits.md says: the right ways are right, the wrong ones as told."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as

ops = keras.ops
# The last batch leaves replicas with unequal shares, or none.
NUM_SAMPLES = 33


class StandardDeviation(keras.metrics.Metric):
    """Its result is no mean: states have to be merged first."""

    def __init__(self, name="standard_deviation"):
        super().__init__(name=name)
        self.count = self.add_variable((), "zeros", name="count")
        self.total = self.add_variable((), "zeros", name="total")
        self.squares = self.add_variable((), "zeros", name="squares")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = ops.cast(y_pred - y_true, "float32")
        self.count.assign_add(ops.sum(ops.ones_like(error)))
        self.total.assign_add(ops.sum(error))
        self.squares.assign_add(ops.sum(error * error))

    def result(self):
        mean = self.total / self.count
        return ops.sqrt(self.squares / self.count - mean * mean)


class OfKeras(keras.Model):
    """A train step that lets Keras compute the loss, and returns its metrics."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs)

    def loss_of(self, x, y, y_pred):
        return self.compute_loss(x=x, y=y, y_pred=y_pred)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_of(x, y, y_pred)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        metrics = [metric for metric in self.metrics if metric.name != "loss"]
        for metric in metrics:
            metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in metrics}


def _train(env: Env, model_class: type, **options) -> dict:
    def build():
        optimizer = keras.optimizers.SGD(0.05)
        return common.compiled(model_class(), optimizer, metrics=[StandardDeviation()])

    data = common.regression_data(NUM_SAMPLES)
    return common.train(env, build, *data, **options)


@case("Limits: a train step with `compute_loss`, and a metric that keeps sums")
@same_as("compute_loss_overridden")
def train_step_that_lets_keras_compute_the_loss(env: Env) -> dict:
    return _train(env, OfKeras)


class BetweenRows(OfKeras):
    """Rows compared with each other: a replica has only its own."""

    def loss_of(self, x, y, y_pred):
        return tf.reduce_mean(tf.matmul(y_pred, y, transpose_b=True))


class LargestRow(OfKeras):
    def loss_of(self, x, y, y_pred):
        return tf.reduce_max(tf.square(y - y_pred))


@case("Limits: losses that compare rows")
@same_as("losses_that_couple_rows")
def losses_of_all_rows(env: Env) -> dict:
    return {kind.__name__: _train(env, kind) for kind in (BetweenRows, LargestRow)}


@case("Limits: an eager step of own", quick_setup="two_workers")
@same_as("eager_steps_of_ones_own_are_those_of_one_device")
def eager_steps_of_own(env: Env) -> dict:
    def build():
        model = LargestRow()
        optimizer = keras.optimizers.SGD(0.05)
        model.compile(optimizer, loss="mse", metrics=["mae"], run_eagerly=True)
        return model

    return common.train(env, build, *common.regression_data(8))


@case("Limits: a loop of own, the sum divided by the global batch size")
@same_as("average_loss_of_the_global_batch")
def loop_that_divides_by_the_global_batch_size(env: Env) -> dict:
    with env.scope():
        model = common.mlp()
        optimizer = keras.optimizers.SGD(0.05)
        optimizer.build(model.trainable_variables)
    dataset = common.batched(*common.regression_data(NUM_SAMPLES))

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            losses = keras.losses.mean_squared_error(y, model(x, training=True))
            loss = tf.nn.compute_average_loss(
                losses, global_batch_size=common.BATCH_SIZE
            )
        variables = model.trainable_variables
        values = [variable.value for variable in variables]
        optimizer.apply(tape.gradient(loss, values), variables)

    strategy = env.distribution
    step = tf.function(lambda batch: strategy.run(replica_step, args=batch))
    for batch in strategy.experimental_distribute_dataset(dataset):
        step(batch)
    return env.weights(model)


@case(
    "Limits: an all-reduce in a loop of one replica",
    compare=False,
    quick_setup="two_by_two",
)
def loop_inside_a_replica_is_refused_or_right(env: Env) -> dict:
    def replica_step():
        context = tf.distribute.get_replica_context()

        def turn(i, value):
            return i + 1, context.all_reduce("SUM", value) / env.num_replicas

        return tf.while_loop(lambda i, _: i < 3, turn, [0, tf.ones([2])])[1]

    step = tf.function(lambda: env.strategy.run(replica_step), autograph=False)
    if env.strategy.extended.group.backend == "ring":
        with pytest.raises(ValueError, match="Put the loop around"):
            step()
    else:
        np.testing.assert_array_equal(env.local_values(step())[0], [1.0, 1.0])
    return {}
