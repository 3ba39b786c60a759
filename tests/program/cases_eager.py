"""`run_eagerly=True`: replicas compute what one device does, whatever Python it is."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.harness import common, registry
from tests.harness.env import Env
from tests.program.cases_program_metrics import Flags, MeanOfMeans

case, same_as = registry.case, registry.same_as
layers = keras.layers
# The last batch has one row: other replicas have none.
NUM_ROWS = 3 * common.BATCH_SIZE + 1


def root_of_mean(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """No mean over rows, and it asks for a value."""
    mean = tf.reduce_mean(tf.square(y_true - y_pred))
    assert float(mean) >= 0
    return tf.sqrt(mean)


def of_rows_sorted(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """A sum that compares rows."""
    ahead = tf.sort(y_pred - y_true, axis=0)
    return tf.reduce_sum(tf.square(ahead[1:] - ahead[:-1]))


def largest_error(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """One number for a batch."""
    return tf.reduce_max(tf.abs(y_true - y_pred))


def trained(env: Env, build: common.Build, **options: object) -> dict:
    """Trains, evaluates and predicts."""
    model = common.build_in_scope(env, build)
    x, y = common.regression_data(NUM_ROWS)
    history = common.fit(model, x, y, **options)
    results = {"history": history, "weights": env.weights(model)}
    if model.loss is not None:
        sizes = {"batch_size": common.BATCH_SIZE, "verbose": 0}
        results["evaluated"] = model.evaluate(x, y, return_dict=True, **sizes)
    return results | {"predicted": model.predict(x, verbose=0)}


@case("Eager losses and metrics of a whole batch")
@same_as("eager_steps_of_ones_own_are_those_of_one_device")
def eager_losses_and_metrics_are_of_the_whole_batch(env: Env) -> dict:
    return _trained_by(env, root_of_mean)


@case("Eager losses that compare rows")
@same_as("eager_steps_of_ones_own_are_those_of_one_device")
def eager_losses_compare_rows_of_the_whole_batch(env: Env) -> dict:
    return _trained_by(env, of_rows_sorted)


def _trained_by(env: Env, loss: object) -> dict:
    def build() -> keras.Model:
        hidden = layers.Dense(4, "tanh", kernel_regularizer="l2")
        model = keras.Sequential(
            [
                keras.Input((common.NUM_FEATURES,)),
                hidden,
                layers.Dropout(0.3, seed=1),
                layers.BatchNormalization(synchronized=True),
                layers.Dense(1),
            ]
        )
        mean_of_means = MeanOfMeans(aggregation="mean")
        own = [largest_error, Flags(), mean_of_means]
        metrics = [keras.metrics.R2Score(), "mae", *own]
        optimizer = keras.optimizers.SGD(0.01)
        options = {"metrics": metrics, "run_eagerly": True}
        return common.compiled(model, optimizer, loss, **options)

    return trained(env, build)


class OfOnesOwn(keras.Model):
    """A step that branches by values, and has states and logs of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1)
        self.rows = self.add_weight(shape=(), trainable=False, name="rows")
        self.center = self.add_weight(shape=(1,), trainable=False, name="center")
        self.norm = keras.metrics.Mean(name="norm")
        self.auc = keras.metrics.AUC(name="auc")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.dense(x)

    def train_step(self, data: tuple) -> dict:
        x, y = data
        self.rows.assign_add(float(len(x)))
        with tf.GradientTape() as tape:
            y_pred = self(x)
            loss = tf.reduce_sum(tf.square(y - y_pred)) / tf.reduce_max(1 + y**2)
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        norm = float(tf.linalg.global_norm(gradients))
        if norm > 0.5:
            gradients = [gradient / norm for gradient in gradients]
        self.optimizer.apply(gradients, variables)
        self.center.assign(0.9 * self.center + 0.1 * tf.reduce_max(y_pred, axis=0))
        self.norm.update_state(norm)
        self.auc.update_state(tf.cast(y > 0, tf.float32), tf.sigmoid(y_pred))
        results = {m.name: m.result() for m in (self.norm, self.auc)}
        return {"own": loss, "half": results["norm"] / 2, **results}


@case("Eager steps of one's own")
def eager_steps_of_ones_own_are_those_of_one_device(env: Env) -> dict:
    def build() -> keras.Model:
        model = OfOnesOwn()
        model.compile(keras.optimizers.Adam(0.01), run_eagerly=True)
        return model

    return trained(env, build)


@case("BatchNormalization of a replica's own rows in eager steps", compare=False)
@same_as("local_normalization_keeps_the_contract_of_keras")
def eager_normalization_is_of_own_rows(env: Env) -> dict:
    """As in a step that is traced, whose moments are those of each replica's rows."""

    def build(*, eagerly: bool) -> keras.Model:
        model = keras.Sequential(
            [
                keras.Input((common.NUM_FEATURES,)),
                layers.Dense(4),
                layers.BatchNormalization(),
                layers.Dense(1),
            ]
        )
        return common.compiled(model, run_eagerly=eagerly)

    found = []
    for eagerly in True, False:
        keras.utils.set_random_seed(7)
        data = common.regression_data(NUM_ROWS)
        results = common.train(
            env, lambda eagerly=eagerly: build(eagerly=eagerly), *data
        )
        found.append([results["history"]["loss"], *results["weights"].values()])
    for eager, traced in zip(*found, strict=True):
        np.testing.assert_allclose(eager, traced, atol=1e-5)
    return {}
