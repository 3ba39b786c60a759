"""Metrics are those of the global data, also per batch, on every worker."""

from __future__ import annotations

import keras
import numpy as np

from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as

metrics = keras.metrics


@case("Regression metrics whose results are no means of rows; a vector in each log")
def regression_metrics(env: Env) -> dict:
    def build():
        of_each = metrics.R2Score(class_aggregation=None, name="of_each")
        chosen = [metrics.RootMeanSquaredError(), of_each]
        return common.compiled(common.mlp(outputs=2), metrics=chosen)

    x = common.features()
    recorder = Recorder()
    results = common.train(env, build, x, x[:, :2], callbacks=[recorder], epochs=2)
    assert all(np.shape(value) == (2,) for value in recorder.logs["of_each"])
    return {"logs": recorder.logs, **results}


@case("Regression metrics, all and in validation too")
@same_as("regression_metrics")
def regression_metrics_of_validation(env: Env) -> dict:
    def build():
        return common.compiled(
            common.mlp(),
            metrics=[
                "mse",
                "mae",
                metrics.RootMeanSquaredError(),
                metrics.R2Score(),
                metrics.MeanAbsolutePercentageError(),
                metrics.CosineSimilarity(),
                metrics.PearsonCorrelation(),
            ],
        )

    data = common.regression_data()
    return common.train(env, build, *data, validation_data=data)


def _binary(env: Env, **options) -> dict:
    x = common.features()
    y = (x[:, :2] > 0.2).astype("float32")

    def build():
        model = common.mlp(outputs=2)
        model.add(keras.layers.Activation("sigmoid"))
        chosen = [
            metrics.AUC(num_thresholds=20),
            metrics.Precision(),
            metrics.Recall(),
            metrics.BinaryAccuracy(),
            metrics.F1Score(threshold=0.5),
            metrics.PrecisionAtRecall(0.5, num_thresholds=20),
        ]
        return common.compiled(model, loss="binary_crossentropy", metrics=chosen)

    return common.train(env, build, x, y, **options)


@case("Classification metrics, AUC, Precision, F1Score (a vector)")
@same_as("regression_metrics")
def binary_metrics(env: Env) -> dict:
    return _binary(env, validation_split=0.25)


@case("Classification metrics on labels")
@same_as("regression_metrics")
def label_metrics(env: Env) -> dict:
    def build():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        chosen = [
            "accuracy",
            metrics.SparseTopKCategoricalAccuracy(2),
            metrics.SparseCategoricalCrossentropy(from_logits=True),
        ]
        return common.compiled(common.mlp(outputs=3), loss=loss, metrics=chosen)

    return common.train(env, build, *common.classification_data())


class Recorder(keras.callbacks.Callback):
    """Keeps the logs of every batch, vectors too."""

    def __init__(self):
        super().__init__()
        self.logs: dict[str, list] = {}

    def on_train_batch_end(self, batch, logs=None):
        for name, value in logs.items():
            value = keras.ops.convert_to_numpy(value)
            self.logs.setdefault(name, []).append(value)


@case("Wrong numbers: per-batch logs; vector logs collapse")
@same_as("regression_metrics")
def logs_of_every_batch(env: Env) -> dict:
    recorder = Recorder()
    results = _binary(env, callbacks=[recorder], epochs=2)
    return {"logs": recorder.logs, **results}


class LargestError(metrics.Metric):
    """The largest absolute error seen: its states merge by max."""

    def __init__(self, name="largest_error", **options):
        super().__init__(name=name, **options)
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = keras.ops.max(keras.ops.abs(y_true - y_pred))
        self.largest.assign(keras.ops.maximum(self.largest, error))

    def result(self):
        return self.largest


@case("Wrong numbers: a metric whose state merges by max")
@same_as("regression_metrics")
def metric_that_merges_by_max(env: Env) -> dict:
    return _largest_errors(env)


@case("The same in validation")
@same_as("regression_metrics")
def metric_that_merges_by_max_in_validation(env: Env) -> dict:
    return _largest_errors(env, validation_data=common.regression_data())


def _largest_errors(env: Env, **options) -> dict:
    def build():
        return common.compiled(common.mlp(), metrics=[LargestError()])

    recorder = Recorder()
    data = common.regression_data()
    results = common.train(env, build, *data, callbacks=[recorder], **options)
    return {"logs": recorder.logs, **results}


class Watched(keras.layers.Layer):
    """Tracks the mean of its input in a metric of its own."""

    def __init__(self, **options):
        super().__init__(**options)
        self.activity = metrics.Mean(name="activity")

    def call(self, inputs):
        # Squares: the mean of what cancels out has few digits in float32.
        self.activity.update_state(keras.ops.square(inputs))
        return inputs


@case("Metrics held by layers")
@same_as("regression_metrics")
def metric_held_by_a_layer(env: Env) -> dict:
    def build():
        model = keras.Sequential(
            [
                keras.Input((common.NUM_FEATURES,)),
                keras.layers.Dense(4, activation="tanh"),
                Watched(),
                keras.layers.Dense(1),
            ]
        )
        return common.compiled(model)

    return common.train(env, build, *common.regression_data())


@case("Wrong numbers: whole numbers as a state; scalars are no arrays or numbers")
def whole_numbers_as_a_state(env: Env) -> dict:
    with env.scope():
        # One row of nine is nobody's half.
        metric = metrics.MeanIoU(num_classes=2)
        metric.update_state([0, 0, 1, 1, 1, 0, 1, 0, 1], [0, 1, 1, 1, 0, 0, 1, 0, 0])
        result = metric.result()
        mean = metrics.Mean()
        mean.update_state([1.0, 2.0])
        total = np.array(mean.total.value)
        assert (float(mean.total), int(mean.count)) == (3.0, 2)
    state = np.array(metric.total_cm)
    np.testing.assert_array_equal(state, [[3, 1], [2, 3]])
    return {"result": result, "state": state, "total": total}
