"""What tfdp sees of a step: rows that are mixed or selected, logs, metrics' states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.harness import common, registry
from tests.harness.env import Env
from tfdp.checkpoint.training_state import metric_variables

case, same_as = registry.case, registry.same_as
ONE_PROCESS: dict[str, Any] = {"setups": ("mirrored",)}


def squared(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.square(y_pred - y_true))


def of_selected(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    kept = y_true > 0
    return squared(tf.boolean_mask(y_true, kept), tf.boolean_mask(y_pred, kept))


LOSSES: list[Callable] = [
    of_selected,
    lambda y, p: squared(y, tf.roll(p, 1, axis=0)),
    lambda y, p: squared(y, tf.reverse(p, [0])),
    lambda y, p: squared(y, tf.cumsum(p, axis=0)),
    lambda y, p: tf.reduce_mean(tf.math.top_k(tf.square(y - p)[:, 0], 2).values),
]


@case("Losses of rows that are mixed or selected", **ONE_PROCESS)
@same_as("losses_that_couple_rows")
def losses_of_mixed_or_selected_rows(env: Env) -> dict:
    results: dict[str, Any] = {}
    for number, loss in enumerate(LOSSES):
        with env.scope():
            model = common.compiled(common.mlp(), loss=loss)
        results[str(number)] = common.fit(model, *common.regression_data(8), epochs=1)
    return results


class Logs(keras.Model):
    """Logs the norm of its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(1)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.layer(x)

    def train_step(self, data: tuple) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {
            "loss": loss,
            "norm": tf.linalg.global_norm(gradients),
            "mean": tf.reduce_mean(gradients[0]),
        }


@case("Logged norms of gradients are those of the global batch", **ONE_PROCESS)
@same_as("logs_are_of_the_metrics_that_they_read")
def norms_of_gradients_are_logged_as_on_one_device(env: Env) -> dict:
    with env.scope():
        model = Logs()
        model.compile(keras.optimizers.SGD(0.05), "mse")
    data = common.regression_data(4 * common.BATCH_SIZE)
    return {"history": common.fit(model, *data)}


class Least(keras.metrics.Metric):
    """The least prediction so far, from one on."""

    def __init__(self) -> None:
        super().__init__(name="least")
        self.least = self.add_variable((), "ones", name="least")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        del y_true, sample_weight
        found = 0.6 + tf.reduce_min(tf.abs(y_pred)) / 1e3
        self.least.assign(tf.minimum(self.least, found))

    def result(self) -> Any:
        return self.least

    def reset_state(self) -> None:
        self.least.assign(1.0)


@case("Whole numbers of a metric begin with their own value", **ONE_PROCESS)
def integers_of_metrics_are_set_outside_of_the_scope(env: Env) -> dict:
    with env.scope():
        metric = keras.metrics.Metric(name="count")
        count = metric.add_variable((), "zeros", dtype="int32", name="count")
    count.assign(1)
    return {"count": int(keras.ops.convert_to_numpy(count.value))}


@case("How a metric merges is told by a backup", compare=False, **ONE_PROCESS)
def merges_of_metrics_are_restored(env: Env) -> dict:
    model = common.build_in_scope(env, lambda: common.compiled(common.mlp()))
    common.fit(model, *common.regression_data(8), epochs=1)
    variables = [v for metric in model.metrics for v in metric.variables]
    metric_variables(model, ["max"] * len(variables))
    assert [variable.value.merge for variable in variables] == ["max"] * len(variables)
    return {}


@case("A metric that begins with one is that of one device", **ONE_PROCESS)
@same_as("regression_metrics")
def minimum_metrics_begin_with_their_own_value(env: Env) -> dict:
    with env.scope():
        model = common.compiled(common.mlp(), metrics=[Least()])
    data = common.regression_data(4 * common.BATCH_SIZE)
    history = common.fit(model, *data, epochs=2, validation_data=data)
    assert 0.6 <= min(history["least"] + history["val_least"]) < 0.7
    return {"history": {name: np.array(values) for name, values in history.items()}}
