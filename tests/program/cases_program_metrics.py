"""Metrics of users and of Keras: each gives one device's numbers, in all loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.exactness.cases_exactness import precision
from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as
from tests.program.heads import BATCH_ROWS, MORE_ROWS, NUM_ROWS, features, labels

layers, metrics, ops = keras.layers, keras.metrics, keras.ops
_CASE: dict[str, Any] = {"tol": 1e-9, "deadline_seconds": 300.0}


# Functions with one number, or some, for a batch.


def r2(y: Any, p: Any) -> Any:
    return 1 - ops.sum((y - p) ** 2) / (ops.sum((y - ops.mean(y)) ** 2) + 1e-6)


def correlation(y: Any, p: Any) -> Any:
    a, b = y - ops.mean(y), p - ops.mean(p)
    return ops.sum(a * b) / ops.sqrt(ops.sum(a * a) * ops.sum(b * b) + 1e-9)


def largest_error(y: Any, p: Any) -> Any:
    return ops.max(ops.abs(y - p))


def deviation(y: Any, p: Any) -> Any:
    return ops.std(y - p)


def median(y: Any, p: Any) -> Any:
    return ops.median(ops.abs(y - p))


def num_right(y: Any, p: Any) -> Any:
    return ops.sum(ops.cast(ops.argmax(y, -1) == ops.argmax(p, -1), "int32"))


def share_of_first_half(y: Any, p: Any) -> Any:
    half = (tf.shape(p)[0] + 1) // 2
    return tf.reduce_sum(p[:half]) / tf.reduce_sum(p)


def nearest_is_alike(y: Any, p: Any) -> Any:
    gaps = ops.sum((p[:, None] - p[None]) ** 2, axis=-1)
    gaps += 1e3 * tf.eye(tf.shape(p)[0], dtype=p.dtype)
    nearest = ops.take(y, ops.argmin(gaps, axis=1), axis=0)
    return ops.mean(ops.sum(y * nearest, axis=-1))


FUNCTIONS: list[Callable] = [
    r2,
    correlation,
    largest_error,
    deviation,
    median,
    num_right,
    share_of_first_half,
    nearest_is_alike,
]


# Classes whose states are no sums.


class Batches(metrics.Metric):
    """Counts batches and rows, in integers too."""

    def __init__(self, name: str = "batches") -> None:
        super().__init__(name=name)
        self.batches = self.add_variable((), "zeros", name="batches")
        self.rows = self.add_variable((), "zeros", dtype="int32", name="rows")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.batches.assign_add(1.0)
        self.rows.assign_add(tf.shape(p)[0])

    def result(self) -> Any:
        return self.batches + ops.cast(self.rows, self.dtype) / 1000


class MeanOfMeans(metrics.Metric):
    """The mean over batches of what is no mean of rows."""

    def __init__(self, name: str = "mean_of_means", **options: Any) -> None:
        super().__init__(name=name)
        self.total = self.add_variable((), "zeros", name="total", **options)
        self.count = self.add_variable((), "zeros", name="count", **options)

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.total.assign(self.total + ops.sqrt(ops.mean((y - p) ** 2)))
        self.count.assign_add(1.0)

    def result(self) -> Any:
        return ops.divide_no_nan(self.total, self.count)


class Begun(metrics.Metric):
    """Sums and a maximum that begin with what they were created with."""

    def __init__(self, name: str = "begun") -> None:
        super().__init__(name=name)
        self.total = self.add_variable((3,), "ones", name="total")
        begin = keras.initializers.Constant(7)
        self.rows = self.add_variable((), begin, dtype="int32", name="rows")
        begin = keras.initializers.Constant(0.3)
        self.most = self.add_variable((), begin, name="most")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(ops.sum(p, axis=0))
        self.rows.assign_add(tf.shape(p)[0])
        self.most.assign(ops.maximum(self.most, ops.max(p)))

    def reset_state(self) -> None:
        """Go on from epoch to epoch."""

    def result(self) -> Any:
        return ops.sum(self.total) + ops.cast(self.rows, self.dtype) / self.most


class BegunOnce(Begun):
    """The same, reset to zeros from the second epoch on, as Keras does."""

    reset_state = metrics.Metric.reset_state

    def result(self) -> Any:
        return ops.sum(self.total) + ops.cast(self.rows, self.dtype) + self.most


class Extremes(metrics.Metric):
    """The largest and the least value seen, a product, and the last batch's mean."""

    def __init__(self, name: str = "extremes") -> None:
        super().__init__(name=name)
        self.most = self.add_variable((), "zeros", name="most")
        self.least = self.add_variable((), "ones", name="least")
        self.product = self.add_variable((), "ones", name="product")
        self.last = self.add_variable((3,), "zeros", name="last")
        self.moving = self.add_variable((), "zeros", name="moving")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.most.assign(ops.maximum(self.most, ops.max(p)))
        self.least.assign(ops.minimum(self.least, ops.min(p)))
        self.product.assign(self.product * (1 - 0.1 * ops.mean(p)))
        self.last.assign(ops.mean(p, axis=0))
        self.moving.assign(0.9 * self.moving + 0.1 * ops.mean(y))

    def reset_state(self) -> None:
        self.most.assign(0.0)
        self.least.assign(1.0)
        self.product.assign(1.0)
        self.last.assign(ops.zeros(3))
        self.moving.assign(0.0)

    def result(self) -> Any:
        extremes = self.most + 10 * self.least + 100 * self.product
        return extremes + ops.sum(self.last * self.moving)


class Flags(metrics.Metric):
    """Bools, which are whole when a batch has assigned them, and a complex number."""

    def __init__(self, name: str = "flags") -> None:
        super().__init__(name=name)
        self.any = self.add_variable((3,), "zeros", dtype="bool", name="any")
        self.all = self.add_variable((3,), "ones", dtype="bool", name="all")
        self.is_odd = self.add_variable((), "ones", dtype="bool", name="is_odd")
        self.wave = self.add_variable((), "zeros", dtype="complex128", name="wave")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.any.assign(ops.logical_or(self.any, ops.any(y[:2] > 0, axis=0)))
        self.all.assign(ops.logical_and(self.all, ops.any(y[1:5] > 0, axis=0)))
        self.is_odd.assign(ops.logical_not(self.is_odd))
        self.wave.assign(self.wave * ops.cast(1j, "complex128"))
        self.wave.assign(self.wave + ops.cast(ops.mean(p[:, 0]), "complex128"))

    def reset_state(self) -> None:
        self.any.assign(ops.zeros(3, "bool"))
        self.all.assign(ops.ones(3, "bool"))
        self.is_odd.assign(True)
        self.wave.assign(ops.zeros((), "complex128"))

    def result(self) -> Any:
        bits = ops.concatenate([self.any, self.all, self.is_odd[None]])
        number = ops.sum(ops.cast(bits, "float64") * 2.0 ** np.arange(7))
        return number + ops.real(self.wave) + 10 * ops.imag(self.wave)


class Rows(metrics.Metric):
    """Adds up rows one by one, in a `tf.function` and in a loop inside of it."""

    def __init__(self, name: str = "rows") -> None:
        super().__init__(name=name)
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", name="count")

    @tf.function
    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        for row in y * p:
            if tf.reduce_sum(row) > 0.2:
                self.total.assign_add(tf.reduce_sum(row))
        self.count.assign_add(1.0)

    @tf.function
    def result(self) -> Any:
        return self.total / self.count


class KernelDistance(metrics.Metric):
    """As in Keras's examples of image models: it compares the rows of a batch."""

    def __init__(self, name: str = "kernel_distance") -> None:
        super().__init__(name=name)
        self.mean = metrics.Mean()

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        def kernel(a: Any, b: Any) -> Any:
            return (ops.matmul(a, ops.transpose(b)) / ops.shape(a)[1] + 1.0) ** 3.0

        count = ops.shape(y)[0]
        real, made, crossed = kernel(y, y), kernel(p, p), kernel(y, p)
        size = ops.cast(count, p.dtype)
        pairs = size * (size - 1)
        off_diagonal = 1.0 - ops.eye(count, dtype=p.dtype)
        within = ops.sum((real + made) * off_diagonal) / (pairs + 1e-3)
        self.mean.update_state(within - 2 * ops.mean(crossed))

    def result(self) -> Any:
        return self.mean.result()

    def reset_state(self) -> None:
        self.mean.reset_state()


class States(keras.callbacks.Callback):
    """Keeps the logs of all batches, and the states of metrics after each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, list] = {}

    def _keep(self, name: str, value: Any) -> None:
        value = np.array(ops.convert_to_numpy(value))
        value = np.array([value.real, value.imag], "float64")
        self.kept.setdefault(name, []).append(value)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        for name, value in logs.items():
            self._keep(f"batch {name}", value)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        for name, value in logs.items():
            self._keep(f"test batch {name}", value)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for name, value in self.model.get_metrics_result().items():
            self._keep(f"result {name}", value)
        for place, variable in enumerate(self.model.metrics_variables):
            self._keep(f"state {place} {variable.name}", variable)


def measured(
    env: Env,
    make: Callable[[], list],
    *,
    weighted: Callable[[], list] | None = None,
    batch_rows: int = MORE_ROWS,
    sample_weight: Any = None,
) -> dict:
    """Train, validate and evaluate a classifier with metrics, in float64."""

    def build() -> keras.Model:
        model = common.mlp(outputs=3)
        model.add(layers.Activation("softmax"))
        return common.compiled(
            model,
            loss="categorical_crossentropy",
            metrics=make(),
            weighted_metrics=weighted() if weighted else None,
        )

    with precision("float64"):
        x = features()
        y = labels(x)
        states = States()
        model = common.build_in_scope(env, build)
        history = common.fit(
            model,
            x,
            y,
            batch_size=batch_rows,
            epochs=2,
            callbacks=[states],
            sample_weight=sample_weight,
            validation_data=(x, y),
            validation_batch_size=BATCH_ROWS,
        )
        evaluated = model.evaluate(
            x, y, batch_size=BATCH_ROWS, verbose=0, return_dict=True
        )
        return {"history": history, "evaluated": evaluated, "kept": states.kept}


@case("Metric functions with one number for a batch", **_CASE)
@same_as("regression_metrics")
def metric_functions_of_a_batch(env: Env) -> dict:
    return measured(env, lambda: list(FUNCTIONS))


@case("Metric classes that count, multiply, keep extremes and bools", **_CASE)
@same_as("regression_metrics")
def metric_classes_that_are_no_sums(env: Env) -> dict:
    def make() -> list:
        others = [
            MeanOfMeans(kind, aggregation=kind)
            for kind in ("mean", "only_first_replica")
        ]
        return [Extremes(), Flags(), Rows(), *others]

    return measured(env, make, weighted=lambda: [Batches("weighted_batches")])


@case("Metric classes that begin with other values than zero, or compare rows", **_CASE)
@same_as("regression_metrics")
def metric_classes_that_begin_with_values_or_compare_rows(env: Env) -> dict:
    def make() -> list:
        return [
            Batches(),
            MeanOfMeans(),
            Begun(),
            BegunOnce("begun_once"),
            KernelDistance(),
        ]

    return measured(env, make)


@case("Metrics of Keras by thresholds, confusion matrices and top-k", **_CASE)
@same_as("regression_metrics")
def metrics_of_keras(env: Env) -> dict:
    def make() -> list:
        return [
            metrics.AUC(num_thresholds=20),
            metrics.AUC(num_thresholds=10, multi_label=True, name="labels"),
            metrics.Precision(thresholds=[0.3, 0.5]),
            metrics.Precision(top_k=2, name="top_precision"),
            metrics.Recall(class_id=1),
            metrics.F1Score(average="macro"),
            metrics.FBetaScore(average="micro", beta=2.0, threshold=0.4),
            metrics.MeanIoU(3, sparse_y_true=False, sparse_y_pred=False),
            metrics.OneHotIoU(3, [0, 2]),
            metrics.SensitivityAtSpecificity(0.5, num_thresholds=20),
            metrics.TruePositives(),
            metrics.CosineSimilarity(),
            metrics.KLDivergence(),
            metrics.R2Score(class_aggregation="variance_weighted_average"),
            metrics.PearsonCorrelation(),
            metrics.ConcordanceCorrelation(),
            "accuracy",
        ]

    weight = np.linspace(0.0, 2.0, NUM_ROWS)
    return measured(
        env,
        make,
        weighted=lambda: ["mae", metrics.F1Score(name="weighted"), metrics.AUC()],
        batch_rows=BATCH_ROWS,
        sample_weight=weight,
    )


class Nested(keras.Model):
    """Logs vectors and nests, of the batch and of metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(3)
        self.total = metrics.Mean(name="total")

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def train_step(self, data: Any) -> dict:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = self.compute_loss(x, y, p)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.total.update_state(loss)
        return {
            "loss": self.total.result(),
            "columns": tf.reduce_mean(p, axis=0),
            "counts": tf.math.bincount(tf.cast(tf.argmax(p, 1), tf.int32), minlength=3),
            "norms": {
                "kernel": tf.norm(gradients[0]),
                "all": tf.linalg.global_norm(gradients),
            },
            "rows": tf.shape(x)[0],
            "most": tf.reduce_max(p),
        }


@case("Logs that are vectors, nests and integers", **_CASE)
@same_as("logs_are_of_the_metrics_that_they_read")
def logs_of_vectors_and_nests(env: Env) -> dict:
    with precision("float64"):
        x = features()
        with env.scope():
            model = Nested()
            model.compile(keras.optimizers.SGD(0.05), "mse")
        found = []
        for begin in range(0, NUM_ROWS, BATCH_ROWS):
            rows = slice(begin, begin + BATCH_ROWS)
            logs = model.train_on_batch(x[rows], labels(x)[rows], return_dict=True)
            found.append(
                {
                    name: tf.nest.map_structure(ops.convert_to_numpy, value)
                    for name, value in logs.items()
                }
            )
        return {str(place): logs for place, logs in enumerate(found)}


# Sequences and images, with a replica that has no rows.


def edit_distance(y: Any, p: Any) -> Any:
    """CTC decoding in a metric, as in Keras's example of captchas."""
    steps = tf.fill([tf.shape(p)[0]], tf.shape(p)[1])
    (decoded,), _ = tf.nn.ctc_greedy_decoder(tf.transpose(p, [1, 0, 2]), steps)
    truth = tf.sparse.from_dense(tf.cast(y, tf.int64))
    return tf.reduce_mean(tf.edit_distance(decoded, truth, normalize=False))


def decoded_length(y: Any, p: Any) -> Any:
    lengths = ops.full((ops.shape(p)[0],), ops.shape(p)[1], dtype="int32")
    found, _ = ops.ctc_decode(p, lengths, strategy="greedy", mask_index=0)
    return ops.sum(ops.cast(found[0] >= 0, "float32"), axis=-1)


def edges(y: Any, p: Any) -> Any:
    return ops.mean(ops.abs(tf.image.sobel_edges(p)[..., 0]), axis=(1, 2, 3))


def sharpest_edge(y: Any, p: Any) -> Any:
    return ops.max(tf.image.sobel_edges(p))


@case("Metrics that decode CTC, and of edges, with a replica without rows")
@same_as("regression_metrics")
def metrics_that_decode(env: Env) -> dict:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_ROWS, 8, 4)).astype("float32")
    y = {
        "text": rng.integers(1, 5, size=(NUM_ROWS, 3)).astype("int32"),
        "image": rng.normal(size=(NUM_ROWS, 8, 4, 1)).astype("float32"),
    }

    def build() -> keras.Model:
        inputs = keras.Input((8, 4))
        h = layers.Dense(8, activation="tanh")(inputs)
        image = layers.Reshape((8, 4, 1), name="image")(layers.Dense(4)(h))
        outputs = {"text": layers.Dense(6, name="text")(h), "image": image}
        return common.compiled(
            keras.Model(inputs, outputs),
            keras.optimizers.SGD(0.01),
            {"text": "ctc", "image": "mse"},
            metrics={
                "text": [edit_distance, decoded_length],
                "image": [edges, sharpest_edge],
            },
        )

    return common.train(
        env, build, x, y, batch_size=BATCH_ROWS, epochs=2, validation_data=(x, y)
    )
