"""`predict` returns every row once, in order, on every worker."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as


def _identity() -> keras.Model:
    """Returns a model of two outputs that tell which row is which."""
    inputs = keras.Input((1,))
    double = keras.layers.Lambda(lambda t: 2 * t)(inputs)
    return keras.Model(inputs, {"same": inputs, "double": double})


@case("`predict` returns 104 rows for 101")
def predict_returns_101_rows_in_order(env: Env) -> dict:
    with env.scope():
        model = _identity()
    rows = np.arange(101, dtype="float32")[:, None]
    found = {
        "arrays": model.predict(rows, batch_size=8, verbose=0),
        "dataset": model.predict(common.batched(rows), verbose=0),
        "large": model.predict(rows, batch_size=256, verbose=0),
    }
    for outputs in found.values():
        np.testing.assert_array_equal(outputs["same"], rows)
        np.testing.assert_array_equal(outputs["double"], 2 * rows)
    return found


@case("Wrong numbers: `predict_on_batch` returns the rows of one replica")
def predict_on_batch_returns_all_rows(env: Env) -> dict:
    with env.scope():
        model = _identity()
    rows = np.arange(9, dtype="float32")[:, None]
    found = {
        "even": model.predict_on_batch(rows[:8]),
        "odd": model.predict_on_batch(rows),
        "one": model.predict_on_batch(rows[:1]),
    }
    np.testing.assert_array_equal(found["even"]["same"], rows[:8])
    np.testing.assert_array_equal(found["odd"]["same"], rows)
    np.testing.assert_array_equal(found["one"]["double"], 2 * rows[:1])
    return found


@case("`predict` with several steps per execution, and with `steps`")
@same_as("predict_returns_101_rows_in_order")
def predict_with_several_steps_per_execution(env: Env) -> dict:
    with env.scope():
        model = _identity()
        model.compile(steps_per_execution=3)
    rows = np.arange(37, dtype="float32")[:, None]
    found = {
        "all": model.predict(rows, batch_size=8, verbose=0),
        "some": model.predict(common.batched(rows), steps=2, verbose=0),
    }
    np.testing.assert_array_equal(found["all"]["same"], rows)
    return found


class Difference(keras.Model):
    """Has a pair of arrays as its one input."""

    def call(self, inputs):
        left, right = inputs
        return left - right


@case("`predict` of a pair of arrays: it is the input, not input and target")
def predict_of_a_pair(env: Env) -> dict:
    with env.scope():
        model = Difference()
    rows = np.arange(9, dtype="float32")[:, None]
    pair = (3 * rows, rows)
    found = {
        "arrays": model.predict(pair, batch_size=4, verbose=0),
        "dataset": model.predict(common.batched((pair,), batch_size=4), verbose=0),
        "batch": model.predict_on_batch(pair),
    }
    for output in found.values():
        np.testing.assert_array_equal(output, 2 * rows)
    return found


class OfKinds(keras.Model):
    """Has outputs that are not dense arrays of numbers, and one without rows."""

    def call(self, inputs):
        return {
            "text": tf.strings.as_string(tf.argmax(inputs, axis=1)),
            "ragged": tf.ragged.boolean_mask(inputs, inputs > 0),
            "sparse": tf.sparse.from_dense(tf.nn.relu(inputs)),
            "number": tf.size(inputs),
        }


@case("`predict` fails for text, ragged and sparse rows", quick_setup="two_workers")
@same_as("ragged_and_sparse_batches")
def predict_of_text_ragged_and_sparse_rows(env: Env) -> dict:
    return _predicted_kinds(env, [5])


@case("The same eagerly, and with replicas without rows", deadline_seconds=300.0)
@same_as("ragged_and_sparse_batches")
def eager_predict_of_text_ragged_and_sparse_rows(env: Env) -> dict:
    return _predicted_kinds(env, [6, 1], run_eagerly=True)


def _predicted_kinds(env: Env, batches: list, **options) -> dict:
    rows = np.random.default_rng(0).normal(size=(sum(batches), 3)).astype("float32")
    with env.scope():
        model = OfKinds()
        model.compile(**options)
    outputs = model.predict(rows, batch_size=batches[0], verbose=0)
    assert outputs["text"].tolist() == [b"%d" % each for each in rows.argmax(axis=1)]
    assert outputs["ragged"].to_list() == [row[row > 0].tolist() for row in rows]
    dense = tf.sparse.to_dense(outputs["sparse"])
    np.testing.assert_array_equal(dense, np.maximum(rows, 0))
    np.testing.assert_array_equal(np.ravel(outputs["number"]), 3 * np.array(batches))
    return {"dense": dense}
