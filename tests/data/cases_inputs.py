"""Kinds of input: dtypes, structures, PyDataset, generators."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as

layers = keras.layers
BATCH = common.BATCH_SIZE


@case("uint8 input (two workers: crash)")
@same_as("string_input")
def uint8_input(env: Env) -> dict:
    def build():
        model = keras.Sequential(
            [
                keras.Input((common.NUM_FEATURES,), dtype="uint8"),
                layers.Rescaling(1 / 255),
                layers.Dense(1),
            ]
        )
        return common.compiled(model)

    x = np.arange(common.NUM_SAMPLES * common.NUM_FEATURES) * 37 % 256
    x = x.astype("uint8").reshape(common.NUM_SAMPLES, -1)
    return common.train(env, build, x, x[:, :1].astype("float32") / 255)


@case("Crash: a cache in a file, at one path", quick_setup="two_workers")
def cache_in_a_file(env: Env) -> dict:
    path = str(env.tmp / "cache")
    rows = tf.data.Dataset.from_tensor_slices(common.regression_data())
    data = rows.cache(path).batch(BATCH)
    model = common.build_in_scope(env, lambda: common.compiled(common.mlp()))
    history = common.fit(model, data, epochs=3)
    return {"history": history, "weights": env.weights(model)}


@case("Crash: string input")
def string_input(env: Env) -> dict:
    words = ["red", "green", "blue"]

    def build():
        model = keras.Sequential(
            [
                keras.Input((1,), dtype="string"),
                layers.StringLookup(vocabulary=words),
                layers.Embedding(4, 2),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        return common.compiled(model)

    ids = np.arange(common.NUM_SAMPLES) % 3
    x = tf.constant(np.array(words)[ids][:, None])
    y = ids[:, None].astype("float32")
    return common.train(env, build, common.batched(x, y))


@case("Crash: bool input")
def bool_input(env: Env) -> dict:
    def build():
        model = keras.Sequential(
            [
                keras.Input((common.NUM_FEATURES,), dtype="bool"),
                layers.Lambda(lambda t: keras.ops.cast(t, "float32")),
                layers.Dense(1),
            ]
        )
        return common.compiled(model)

    x, y = common.regression_data()
    return common.train(env, build, x > 0, y)


@case("Crash: int64 input")
@same_as("string_input")
def int64_input(env: Env) -> dict:
    def build():
        model = keras.Sequential(
            [
                keras.Input((common.LENGTH,), dtype="int64"),
                layers.Embedding(common.NUM_TOKENS, 2),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        return common.compiled(model)

    x, y = common.token_data()
    return common.train(env, build, x.astype("int64"), y)


@case("Crash: sparse input")
@same_as("ragged_and_sparse_batches")
def sparse_input(env: Env) -> dict:
    def build():
        # Built by the data, which tells how many features there are.
        return common.compiled(keras.Sequential([layers.Dense(1)]))

    x, y = common.regression_data()
    x[x < 0] = 0
    dataset = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(x), y))
    return common.train(env, build, dataset.batch(BATCH))


class RaggedMean(layers.Layer):
    """Means the tokens of each row of a ragged tensor."""

    def call(self, inputs):
        return tf.reduce_mean(tf.cast(inputs, "float32"), axis=1, keepdims=True)

    def compute_output_shape(self, input_shape):
        return (input_shape[0], 1)


@case("Crash: ragged input")
@same_as("ragged_and_sparse_batches")
def ragged_input(env: Env) -> dict:
    def build():
        inputs = keras.Input((None,), dtype="int32", ragged=True)
        return common.compiled(
            keras.Model(inputs, layers.Dense(1)(RaggedMean()(inputs)))
        )

    x, y = common.token_data()
    rows = [row[row > 0] / 1 for row in x]
    ragged = tf.ragged.constant([row.astype("int32") for row in rows])
    dataset = tf.data.Dataset.from_tensor_slices((ragged, y)).batch(BATCH)
    return common.train(env, build, dataset)


def _two_inputs() -> keras.Model:
    left = keras.Input((common.NUM_FEATURES,), name="left")
    right = keras.Input((common.LENGTH,), dtype="int32", name="right")
    embedded = layers.Flatten()(layers.Embedding(common.NUM_TOKENS, 2)(right))
    h = layers.Concatenate()([left, embedded])
    value = layers.Dense(1, name="value")(h)
    kind = layers.Dense(1, name="kind")(h)
    return keras.Model([left, right], [value, kind])


@case("Multiple inputs and outputs; tuple inputs")
@same_as("dict_inputs")
def tuple_inputs_and_outputs(env: Env) -> dict:
    def build():
        return common.compiled(_two_inputs(), loss=["mse", "mae"])

    (x, y), (t, u) = common.regression_data(), common.token_data()
    return common.train(env, build, (x, t), (y, u))


@case("Multiple inputs and outputs; dict inputs")
def dict_inputs(env: Env) -> dict:
    def build():
        return common.compiled(_two_inputs(), loss=["mse", "mae"])

    (x, y), (t, u) = common.regression_data(), common.token_data()
    dataset = common.batched({"left": x, "right": t}, (y, u))
    return common.train(env, build, dataset)


class Batches(keras.utils.PyDataset):
    """Global batches that are views of the arrays."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x) // BATCH

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[rows], self.y[rows]


class BatchesOfRows(Batches):
    """The same, of which each worker asks for its rows."""

    def num_rows(self, index):
        return BATCH

    def rows(self, index, start, stop):
        x, y = self[index]
        return x[start:stop], y[start:stop]


@case("PyDataset input")
def py_dataset(env: Env) -> dict:
    def build():
        return common.compiled(common.mlp())

    return common.train(env, build, Batches(*common.regression_data()))


@case("Wrong numbers: generator input, one batch lost")
def generator_loses_no_batch(env: Env) -> dict:
    def build():
        return common.compiled(common.mlp())

    dataset = Batches(*common.regression_data())

    def generate():
        for index in range(len(dataset)):
            yield dataset[index]

    # As many batches as there are: one that is lost would be missed.
    return common.train(env, build, generate(), steps_per_epoch=12)


@case("Wrong numbers: generator input without `steps_per_epoch`")
@same_as("generator_loses_no_batch")
def generator_of_unknown_length(env: Env) -> dict:
    def build():
        return common.compiled(common.mlp())

    dataset = Batches(*common.regression_data())
    batches = (dataset[index] for index in range(len(dataset)))
    return common.train(env, build, batches)


def _aligned(array: np.ndarray) -> np.ndarray:
    """Copies an array to memory that TensorFlow uses without a copy."""
    buffer = np.empty(array.nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    view = buffer[start : start + array.nbytes].view(array.dtype)
    view = view.reshape(array.shape)
    view[...] = array
    return view


@case("Wrong: the user's own label array is overwritten")
@same_as("shuffled_data_gives_the_batches_of_one_device")
def label_array_is_not_overwritten(env: Env) -> dict:
    def build():
        return common.compiled(common.mlp())

    x, y = map(_aligned, common.regression_data(256))
    before = x.copy(), y.copy()

    def generate():
        for start in range(0, len(x), 64):
            yield x[start : start + 64], y[start : start + 64]

    spec = tuple(tf.TensorSpec((None, *a.shape[1:]), a.dtype) for a in (x, y))
    dataset = tf.data.Dataset.from_generator(generate, output_signature=spec)
    results = common.train(env, build, dataset, epochs=2)
    model = common.build_in_scope(env, build)
    common.fit(model, Batches(x, y), epochs=1)
    common.fit(model, BatchesOfRows(x, y), epochs=1)
    common.fit(model, generate(), epochs=1)
    np.testing.assert_array_equal(x, before[0])
    np.testing.assert_array_equal(y, before[1])
    return results
