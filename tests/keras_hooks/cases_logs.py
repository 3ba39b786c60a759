"""Logs of steps of one's own: metrics under other names, and what is computed of them.

A step returns results of metrics by any name, alone, together or changed. Which metric
a log is follows from the variables that it reads, not from its name.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as
from tests.keras_hooks.cases_metrics import Recorder

BATCH = 7  # of 40 rows: replicas have different numbers of rows


class Capped(keras.metrics.Mean):
    """A mean whose result has a condition that reads states itself."""

    def result(self):
        return keras.ops.cond(
            self.count > 0,
            lambda: keras.ops.minimum(self.total / self.count, 0.9),
            lambda: 0.0,
        )


class ManyLogs(keras.Model):
    """Returns the results of its metrics in every way. `metrics` is Keras's own."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(4, activation="tanh")
        self.head = keras.layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="own")
        self.auc = keras.metrics.AUC(num_thresholds=20, name="area")
        self.capped = Capped(name="capped")
        # Keras looks for metrics in attributes, not in what a function holds.
        hidden = keras.metrics.Mean(name="hidden")
        self.hidden_mean = lambda: hidden

    def build(self, input_shape):
        self.late = keras.metrics.Mean(name="late")
        super().build(input_shape)

    def call(self, inputs):
        return self.head(self.hidden(inputs))

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = keras.ops.mean(keras.losses.mean_squared_error(y, y_pred))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self._logs(y, y_pred)

    def test_step(self, data):
        x, y = data[:2]
        return self._logs(y, self(x, training=False))

    def _logs(self, y, y_pred):
        error = keras.losses.mean_squared_error(y, y_pred)
        before = self.late.result()
        for mean in self.tracker, self.capped, self.hidden_mean():
            mean.update_state(error)
        self.late.update_state(keras.losses.mean_absolute_error(y, y_pred))
        self.auc.update_state(y > 0, tf.sigmoid(y_pred))
        compiled = self.compute_metrics(None, y, y_pred)
        return {
            # Keras has a metric of this name, which this step never updates.
            "loss": self.tracker.result(),
            "roc": self.auc.result(),
            "capped": self.capped.result(),
            "limited": self.capped.result(),
            "exp": tf.exp(self.tracker.result()),
            "two": self.tracker.result() + 2 * self.auc.result(),
            "late": self.late.result(),
            "late_before": before,
            "hidden": self.hidden_mean().result(),
            "nested": {"mean": self.late.result(), "more": {"area": self.auc.result()}},
            "compiled": compiled["mean_absolute_error"],
            "plain": keras.ops.mean(error),
        }


def _model(env: Env, **options) -> ManyLogs:
    def build():
        return common.compiled(ManyLogs(), metrics=["mean_absolute_error"], **options)

    return common.build_in_scope(env, build)


def _fit(env: Env, validates: bool = True, **options) -> dict:
    recorder = Recorder()
    stops = keras.callbacks.EarlyStopping(monitor="loss", patience=1)
    data = common.regression_data(40)
    model = _model(env, **options)
    history = common.fit(
        model,
        *data,
        batch_size=BATCH,
        epochs=3,
        callbacks=[recorder, stops],
        validation_data=data if validates else None,
    )
    assert len(history["loss"]) == 3
    results = {"history": history, "batches": recorder.logs}
    if validates:
        results["evaluated"] = model.evaluate(
            *data, batch_size=BATCH, verbose=0, return_dict=True
        )
    return results


@case("Wrong numbers: metrics under other names in the logs")
def logs_are_of_the_metrics_that_they_read(env: Env) -> dict:
    return _fit(env, validates=False)


@case("Wrong numbers: the same in validation and in `evaluate`")
@same_as("logs_are_of_the_metrics_that_they_read")
def logs_of_validation_are_of_the_metrics_that_they_read(env: Env) -> dict:
    return _fit(env)


@case("Wrong numbers: the same on single batches")
@same_as("logs_are_of_the_metrics_that_they_read")
def logs_of_single_batches(env: Env) -> dict:
    model = _model(env)
    x, y = common.regression_data(BATCH)
    return {
        f"{call}/{step}": getattr(model, call)(x, y, return_dict=True)
        for call in ("train_on_batch", "test_on_batch")
        for step in range(2)
    }


@case("Wrong numbers: the same in a loop of several steps")
@same_as("logs_are_of_the_metrics_that_they_read")
def logs_of_several_steps_per_execution(env: Env) -> dict:
    return _fit(env, steps_per_execution=2)


@case("Wrong numbers: the same with XLA")
@same_as("xla_in_all_loops")
def logs_of_steps_that_xla_compiles(env: Env) -> dict:
    return _fit(env, jit_compile=True)


class RenamedLogs(ManyLogs):
    """Returns results as they are, which is what an eager step is known by."""

    def _logs(self, y, y_pred):
        logs = super()._logs(y, y_pred)
        names = ("loss", "roc", "capped", "late", "nested", "compiled", "plain")
        return {name: logs[name] for name in names}


@case("Wrong numbers: metrics under other names with `run_eagerly`")
@same_as("logs_are_of_the_metrics_that_they_read")
def logs_of_eager_steps(env: Env) -> dict:
    def build():
        return common.compiled(
            RenamedLogs(), metrics=["mean_absolute_error"], run_eagerly=True
        )

    data = common.regression_data(24)
    return common.train(env, build, *data, batch_size=BATCH, validation_data=data)
