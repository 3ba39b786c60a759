"""`GradientAccumulation(steps="auto")`: the result of the undivided batch."""

from __future__ import annotations

import contextlib
import pathlib
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as
from tfdp.features.micro_batches import MicroBatches, memory_search, search
from tfdp.training.program.micro_builder import StagedBuilder
from tfdp.training.program.step import DividedStep

layers, optimizers = keras.layers, keras.optimizers
# 8 and 8 rows for 2 replicas, and 7 and 6 in the last batch.
NUM_ROWS, BATCH = 45, 16
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@contextlib.contextmanager
def memory_for(env: Env, num_rows: int) -> Iterator[None]:
    """Makes the last replica run out of memory with more rows than these."""
    of_micro_batch = StagedBuilder._of_micro_batch

    def limited(self: Any, index: tf.Tensor, count: tf.Tensor) -> Any:
        part = of_micro_batch(self, index, count)
        if self.replica.rank == env.num_replicas - 1:

            def allocate(rows: np.ndarray) -> np.ndarray:
                if rows > num_rows:
                    raise MemoryError  # TensorFlow makes it a ResourceExhaustedError
                return np.int32(0)

            zero = tf.numpy_function(allocate, [part.own_rows], tf.int32)
            part.begin += tf.reshape(zero, [])
        return part

    def path(name: str) -> pathlib.Path:
        return env.tmp / name

    with (
        unittest.mock.patch.object(StagedBuilder, "_of_micro_batch", limited),
        unittest.mock.patch.object(search, "cache_path", path),
    ):
        yield


def train(
    env: Env,
    build: Callable[[], keras.Model],
    *data: Any,
    fits: int = 2,
    found: int = 2,
    make: Callable[[], optimizers.Optimizer] = lambda: optimizers.AdamW(0.01),
    reference: Callable[[], optimizers.Optimizer] | None = None,
    callbacks: Callable[[], list] = list,
    compile_options: dict | None = None,
    **options: Any,
) -> dict:
    """Trains with memory for `fits` rows, `found` in the end; on one device for all."""
    with env.scope():
        optimizer = (reference or make)() if env.is_reference else make()
        model = build()
        model.compile(optimizer, **{"loss": LOSS, **(compile_options or {})})
    options = {"batch_size": BATCH, "epochs": 2} | options
    if env.is_reference:
        history = common.fit(model, *data, **options)
    else:
        auto = tfdp.callbacks.GradientAccumulation("auto")
        with memory_for(env, fits):
            history = common.fit(
                model, *data, callbacks=[auto, *callbacks()], **options
            )
        number = BATCH // env.num_replicas // found
        numbers = history.pop("micro_batches")
        assert numbers == [number, number], numbers
    for name in "loss_scale", "skipped_steps":
        history.pop(name, None)
    return {
        "history": history,
        "weights": env.weights(model),
        "iterations": np.asarray(model.optimizer.iterations),
    }


def classifier() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((common.NUM_FEATURES,)),
            layers.Dense(8, activation="relu", kernel_regularizer="l2"),
            layers.Dropout(0.3, seed=3),
            layers.LayerNormalization(),
            layers.Dropout(0.2, seed=4),
            layers.Dense(common.NUM_CLASSES),
        ]
    )


@case("A replica out of memory: all divide their rows; Dropout, metrics, weights")
def micro_batches_equal_the_whole_batch(env: Env) -> dict:
    x, y = common.classification_data(NUM_ROWS)
    weights = np.linspace(0.5, 2, NUM_ROWS).astype("float32")
    auc = keras.metrics.SparseTopKCategoricalAccuracy(2)
    metrics = {"metrics": ["accuracy"], "weighted_metrics": [auc]}
    return train(env, classifier, x, y, sample_weight=weights, compile_options=metrics)


def _scaled(scale: float) -> Callable[[], optimizers.Optimizer]:
    inner = optimizers.Adam(0.01, global_clipnorm=0.5)
    return lambda: optimizers.LossScaleOptimizer(inner, initial_scale=scale)


def _sharded(env: Env, stage: int) -> dict:
    """Trains with a sharded optimizer, loss scaling and clipping."""
    return train(
        env,
        classifier,
        *common.classification_data(NUM_ROWS),
        make=lambda: optimizers.Adam(0.01, global_clipnorm=0.5),
        reference=_scaled(64.0),
        callbacks=lambda: [
            tfdp.callbacks.ShardedOptimizer(stage),
            tfdp.callbacks.LossScaling(64.0),
        ],
    )


@case("Micro-batches with ZeRO-1, loss scaling, clipping")
@same_as("micro_batches_equal_the_whole_batch")
def micro_batches_with_stage_1(env: Env) -> dict:
    return _sharded(env, 1)


@case("Micro-batches with ZeRO-2, loss scaling and clipping")
@same_as("micro_batches_equal_the_whole_batch")
def micro_batches_with_stage_2(env: Env) -> dict:
    return _sharded(env, 2)


@case("Masked tokens: the number of all tokens is counted before the gradients")
@same_as("micro_batches_equal_the_whole_batch")
def micro_batches_of_masked_tokens(env: Env) -> dict:
    def build() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((common.LENGTH,), dtype="int32"),
                layers.Embedding(common.NUM_TOKENS, 6, mask_zero=True),
                layers.LSTM(5, return_sequences=True),
                layers.Dense(common.NUM_TOKENS),
            ]
        )

    x = common.tokens(NUM_ROWS)
    return train(env, build, x, x, compile_options={"metrics": ["accuracy"]})


def contrastive(labels: Any, embedded: Any) -> Any:
    """Compares each row with all rows of the batch."""
    scores = tf.matmul(embedded, labels, transpose_b=True)
    rows = tf.range(tf.shape(scores)[0])
    return keras.losses.sparse_categorical_crossentropy(rows, scores, from_logits=True)


@case("In-batch negatives: embeddings of all micro-batches are compared")
@same_as("micro_batches_equal_the_whole_batch")
def micro_batches_of_a_loss_over_the_batch(env: Env) -> dict:
    x = common.features(NUM_ROWS)
    return train(
        env,
        lambda: common.mlp(outputs=common.NUM_FEATURES),
        x,
        x[:, ::-1].copy(),
        compile_options={"loss": contrastive},
    )


class Relative:
    """A loss relative to its moving average, a variable outside of the scope."""

    def __init__(self) -> None:
        self.average = tf.Variable(1.0, trainable=False)

    def __call__(self, y: Any, outputs: Any) -> Any:
        errors = tf.reduce_sum(tf.abs(y - outputs), axis=-1)
        self.average.assign(0.9 * self.average + 0.1 * tf.reduce_mean(errors))
        return errors / tf.stop_gradient(self.average)


class Memory(layers.Layer):
    """Keeps means of rows by their sign; a micro-batch does not know their shape."""

    def build(self, shape: tuple) -> None:
        self.means = self.add_weight(shape=(2, shape[-1]), trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            signs = tf.cast(x[:, 0] > 0, tf.int32)
            means = tf.math.unsorted_segment_mean(x, signs, 2)
            self.means.assign(0.9 * self.means + 0.1 * means)
        return x + tf.reduce_mean(self.means.value, axis=0)


class Branching(keras.Sequential):
    """Resets a state in a branch of every second step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def train_step(self, data: Any) -> dict:
        logs = super().train_step(data)
        is_even = tf.equal(self.optimizer.iterations.value % 2, 0)
        tf.cond(is_even, lambda: self._set(0.0), lambda: self._set(self.count + 1.0))
        return logs | {"count": self.count.value}

    def _set(self, value: Any) -> Any:
        self.count.assign(value)
        return tf.constant(0)


@case("A branch after the update, and a state that replicas of a process share")
@same_as("micro_batches_equal_the_whole_batch")
def micro_batches_with_a_branch_and_a_shared_state(env: Env) -> dict:
    loss, data = Relative(), common.regression_data(NUM_ROWS)
    branching = train(
        env,
        lambda: Branching(common.mlp().layers),
        *data,
        compile_options={"loss": loss},
    )
    remembering = train(
        env,
        lambda: keras.Sequential([*common.mlp().layers, Memory()]),
        *data,
        compile_options={"loss": "mse"},
    )
    average = loss.average.numpy()
    return {"average": average, "branching": branching, "remembering": remembering}


class Numbers(keras.callbacks.Callback):
    """Notes the number of micro-batches of each step; may end the run after some."""

    def __init__(self, last: int | None = None) -> None:
        super().__init__()
        self.numbers: list[int] = []
        self._last = last

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.numbers.append(
            self.model.optimizer.features.installed[MicroBatches].number
        )
        if len(self.numbers) == self._last:
            raise InterruptedError


def _raised(model: keras.Model, *others: Any) -> str:
    """Fits a model that must fail; returns the message."""
    chosen = [tfdp.callbacks.GradientAccumulation("auto"), *others]
    x, y = common.classification_data(NUM_ROWS)
    try:
        common.fit(model, x, y, batch_size=BATCH, epochs=1, callbacks=chosen)
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was raised")


@case("A limit of memory on one worker: all begin with single rows, and search")
@same_as("micro_batches_equal_the_whole_batch")
def micro_batches_below_a_limit(env: Env) -> dict:
    is_last = env.rank == env.setup.num_workers - 1
    answers = iter((True, False))
    free = 1e9 if is_last else float("inf")
    with (
        unittest.mock.patch.object(
            memory_search, "free_in_container", return_value=free
        ),
        unittest.mock.patch.object(
            memory_search.MemoryPredictor, "can_double", side_effect=answers
        ),
    ):
        # Single rows in the first step, half as many micro-batches in the second.
        data = common.classification_data(NUM_ROWS)
        return train(env, classifier, *data, fits=NUM_ROWS, found=2)


@case(
    "What cannot be divided into micro-batches is one sentence before a weight moves",
    compare=False,
    quick_setup="two_by_two",
)
def micro_batches_that_are_refused(env: Env) -> None:
    def made(*parts: Any, **options: Any) -> keras.Model:
        stack = [keras.Input((common.NUM_FEATURES,)), *parts, layers.Dense(4)]
        with env.scope():
            model = keras.Sequential(stack)
            model.compile("sgd", LOSS, **options)
        return model

    class Twice(keras.Model):
        """Updates the weights, and computes with them in the same step."""

        def __init__(self) -> None:
            super().__init__()
            self.head = layers.Dense(4)

        def call(self, x: Any) -> Any:
            return self.head(x)

        def train_step(self, data: Any) -> dict:
            x, y = data
            for _ in range(2):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(LOSS(y, self(x)))
                gradients = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    normalized = made(layers.BatchNormalization())
    with env.scope():
        twice = Twice()
        twice.compile("sgd", LOSS)
    before = env.weights(normalized)
    texts = {
        "normalizes the rows of each micro-batch separately": _raised(normalized),
        "on what the whole batch has changed or summed": _raised(twice),
        "Received: steps_per_execution=2": _raised(made(steps_per_execution=2)),
        "Received: run_eagerly=True": _raised(made(run_eagerly=True)),
        'is not for `sharding="parameters"`': _raised(
            made(), tfdp.callbacks.ShardedOptimizer(3)
        ),
        "Remove `LocalSGD` or `DiLoCo`": _raised(
            made(), tfdp.callbacks.LocalSGD(sync_every=2)
        ),
        "Give `fit` one `tfdp.callbacks.GradientAccumulation`": _raised(
            made(), tfdp.callbacks.GradientAccumulation(4)
        ),
    }
    for expected, text in texts.items():
        assert expected in text, text
        assert "steps=4" in text or "LocalSGD" in text or "Received: 2" in text, text
    for name, weight in env.weights(normalized).items():
        np.testing.assert_array_equal(weight, before[name])


@case("With weights, without, and a step by hand: each kind of batch is kept apart")
@same_as("micro_batches_equal_the_whole_batch")
def batches_of_other_kinds_are_kept_apart(env: Env) -> dict:
    x, y = common.classification_data(NUM_ROWS)
    weights = np.linspace(0.5, 2, NUM_ROWS).astype("float32")
    with env.scope():
        model = classifier()
        model.compile(optimizers.Adam(0.01), LOSS)
    results = []
    for given in {"sample_weight": weights}, {}, {"sample_weight": weights}:
        auto = tfdp.callbacks.GradientAccumulation("auto")
        options = {"batch_size": BATCH, "callbacks": [] if env.is_reference else [auto]}
        with memory_for(env, 2):
            history = common.fit(model, x, y, epochs=1, **options, **given)
        loss = model.train_on_batch(x[:BATCH], y[:BATCH])
        results.append([*history["loss"], loss])
    return {"losses": results, "weights": env.weights(model)}


@case(
    "A row that does not fit in memory ends the run with a sentence",
    compare=False,
    quick_setup="two_workers",
)
@same_as("micro_batches_equal_the_whole_batch")
def a_row_that_does_not_fit(env: Env) -> None:
    if env.is_reference:
        return
    with env.scope():
        model = classifier()
        model.compile("sgd", LOSS)
    before = env.weights(model)
    with memory_for(env, 0):
        text = _raised(model)
    number = BATCH // env.num_replicas
    assert f"ran out of memory with {number} micro-batches for each replica" in text
    is_last = env.rank == env.setup.num_workers - 1
    assert ("a single row does not fit either" in text) is is_last, text
    for name, weight in env.weights(model).items():
        np.testing.assert_array_equal(weight, before[name])


@case(
    "Without the callback, or with a number, a step has no loop and keeps no batch",
    setups=("mirrored",),
    compare=False,
)
@same_as("micro_batches_equal_the_whole_batch")
def no_micro_batches_without_auto(env: Env) -> None:
    counts = {}
    for steps in 1, 2, "auto":
        with env.scope():
            model = classifier()
            model.compile("sgd", LOSS)
        x, y = common.classification_data(BATCH)
        kinds: set[str] = set()
        build = DividedStep.__call__

        def noted(self: Any, *args: Any) -> Any:
            result = build(self, *args)  # noqa: B023 called within the iteration
            graph = tf.compat.v1.get_default_graph()
            kinds.update(op.type for op in graph.get_operations())  # noqa: B023
            return result

        auto = tfdp.callbacks.GradientAccumulation(steps)
        with unittest.mock.patch.object(DividedStep, "__call__", noted):
            common.fit(model, x, y, batch_size=BATCH, epochs=1, callbacks=[auto])
        counts[steps] = {"StatelessWhile", "QueueEnqueueV2"} & kinds
        common.fit(model, x, y, batch_size=BATCH, epochs=1)
        # An optimizer of one batch an update is Keras's own.
        features = getattr(model.optimizer, "features", None)
        assert features is None or not features.installed
    assert not counts[1] | counts[2], counts
    assert len(counts["auto"]) == 2, counts


@case("The number is in a backup, and beside the links: later runs begin with it")
@same_as("micro_batches_equal_the_whole_batch")
def micro_batches_are_kept(env: Env) -> dict:
    x, y = common.classification_data(NUM_ROWS)

    def weights(model: keras.Model) -> dict:
        # A later model has layers of other names.
        return {str(i): value for i, value in enumerate(env.weights(model).values())}

    def run(*callbacks: Any) -> keras.Model:
        with env.scope():
            model = common.mlp(outputs=common.NUM_CLASSES)
            model.compile(optimizers.Adam(0.01), LOSS)
        with contextlib.suppress(InterruptedError):
            common.fit(model, x, y, batch_size=BATCH, epochs=2, callbacks=callbacks)
        return model

    if env.is_reference:
        return weights(run())
    numbers = []
    found = BATCH // env.num_replicas // 2
    for last, folder in ((4, "one"), (1, "two"), (None, "one")):
        noted = Numbers(last)
        backup = tfdp.callbacks.BackupAndRestore(env.tmp / folder, save_freq=1)
        auto = tfdp.callbacks.GradientAccumulation("auto")
        with memory_for(env, 2 if last == 4 else NUM_ROWS):
            # The resumed run has its backup only.
            if env.is_chief and last is None:
                (env.tmp / "micro_batches.json").unlink(missing_ok=True)
            model = run(auto, backup, noted)
        numbers.append(noted.numbers)
    assert numbers == [[found] * 4, [found], [found] * 3], numbers
    return weights(model)
