"""Batches of every kind: ragged, sparse, text, other numbers of rows, static shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as

layers = keras.layers
# The last batch has fewer rows than there are replicas.
NUM_ROWS = 2 * common.BATCH_SIZE + 2
WORDS = ["the", "cat", "sat", "on", "mat", "one", "dog", "ran", "far", "away"]
_RANDOM = np.random.default_rng(0)
TOKENS = _RANDOM.integers(0, 8, (NUM_ROWS, 4))
LENGTHS = _RANDOM.integers(0, 5, NUM_ROWS)
TEXTS = np.array([" ".join(_RANDOM.choice(WORDS, n + 1)) for n in LENGTHS])
X = _RANDOM.normal(size=(NUM_ROWS, 5)).astype("float32")
Y = _RANDOM.normal(size=(NUM_ROWS, 1)).astype("float32")


def near(seed: int = 1) -> keras.initializers.Initializer:
    return keras.initializers.RandomNormal(stddev=0.5, seed=seed)


def dense() -> keras.layers.Layer:
    return layers.Dense(1, kernel_initializer=near(9))


def embedding() -> keras.layers.Layer:
    return layers.Embedding(30, 4, embeddings_initializer=near())


class OfRows(keras.Model):
    """Layers one after another, without a symbolic input."""

    def __init__(self, *parts: keras.layers.Layer) -> None:
        super().__init__()
        self.parts = list(parts)

    def call(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x


class OfRagged(layers.Layer):
    """Embeds values: sums and maxima of rows, a mean of all, a penalty of values."""

    def build(self, shape: tuple) -> None:
        self.table = self.add_weight(shape=(30, 4), initializer=near())

    def call(self, x: Any) -> tf.Tensor:
        if not isinstance(x, tf.RaggedTensor):  # As Keras builds it.
            return tf.zeros([tf.shape(x)[0], 4])
        embedded = tf.ragged.map_flat_values(lambda v: tf.gather(self.table, v), x)
        self.add_loss(0.1 * tf.reduce_mean(tf.square(embedded.flat_values)))
        largest = tf.reduce_max(embedded.to_tensor(), axis=1)
        sums = tf.reduce_sum(embedded, axis=1)
        return sums + largest + tf.reduce_mean(embedded.flat_values)


class SumsOfRagged(layers.Layer):
    """Embeds values and adds up those of each row."""

    build = OfRagged.build

    def call(self, x: Any) -> tf.Tensor:
        if not isinstance(x, tf.RaggedTensor):  # As Keras builds it.
            return tf.zeros([tf.shape(x)[0], 4])
        embedded = tf.ragged.map_flat_values(lambda v: tf.gather(self.table, v), x)
        return tf.reduce_sum(embedded, axis=1)


def ragged() -> tf.RaggedTensor:
    values = np.arange(LENGTHS.sum()) * 7 % 30
    return tf.RaggedTensor.from_row_lengths(values, LENGTHS)


def fitted(env: Env, build: Callable, data: Any, **options: Any) -> dict:
    with env.scope():
        model = build()
        if not model.compiled:
            model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    history = model.fit(data, epochs=1, verbose=0, **options)
    return {"history": history.history, "weights": env.weights(model)}


def of_parts(*parts: Any, drop: bool = False) -> tf.data.Dataset:
    rows = tf.data.Dataset.from_tensor_slices(parts if len(parts) > 1 else parts[0])
    return rows.batch(common.BATCH_SIZE, drop_remainder=drop)


def vectorized(**options: Any) -> keras.layers.Layer:
    return layers.TextVectorization(vocabulary=WORDS[:6], **options)


def looked_up(**options: Any) -> keras.layers.Layer:
    return layers.StringLookup(vocabulary=WORDS[:6], **options)


@case("Ragged and sparse batches")
def ragged_and_sparse_batches(env: Env) -> dict:
    sparse = tf.sparse.from_dense(np.maximum(X, 0))
    programs: dict[str, tuple[Callable, Any]] = {
        "ragged": (lambda: OfRows(SumsOfRagged(), dense()), ragged()),
        "sparse": (lambda: keras.Sequential([dense()]), sparse),
    }
    return _all_fitted(env, programs)


@case("Ragged batches with sums and maxima of rows, a mean and a penalty of values")
@same_as("ragged_and_sparse_batches")
def ragged_batches_with_statistics(env: Env) -> dict:
    return fitted(env, lambda: OfRows(OfRagged(), dense()), of_parts(ragged(), Y))


@case("Text and sparse encodings in the model")
@same_as("ragged_and_sparse_batches")
def text_and_sparse_encodings(env: Env) -> dict:
    words = np.array(WORDS)[TOKENS]
    weights = list(np.linspace(1, 2, 6))
    programs: dict[str, tuple[Callable, Any]] = {
        "words": (
            lambda: OfRows(looked_up(), OfRagged(), dense()),
            tf.strings.split(TEXTS),
        ),
        "text": (
            lambda: OfRows(
                vectorized(output_sequence_length=5),
                embedding(),
                layers.GlobalAveragePooling1D(),
                dense(),
            ),
            TEXTS,
        ),
        "counted text": (
            lambda: OfRows(vectorized(output_mode="count"), dense()),
            TEXTS,
        ),
        "weighed text": (
            lambda: OfRows(
                vectorized(output_mode="tf_idf", idf_weights=weights), dense()
            ),
            TEXTS,
        ),
        "ragged text": (
            lambda: OfRows(vectorized(ragged=True), OfRagged(), dense()),
            TEXTS,
        ),
        "sparse counts": (
            lambda: OfRows(
                layers.CategoryEncoding(
                    8, output_mode="count", sparse=True, dtype="int64"
                ),
                dense(),
            ),
            TOKENS,
        ),
        "sparse words": (
            lambda: OfRows(looked_up(output_mode="multi_hot", sparse=True), dense()),
            words,
        ),
        "hashed": (
            lambda: OfRows(layers.Hashing(30), embedding(), layers.Flatten(), dense()),
            words,
        ),
        "numbers": (
            lambda: OfRows(
                layers.IntegerLookup(vocabulary=list(range(6)), output_mode="count"),
                dense(),
            ),
            TOKENS,
        ),
    }
    return _all_fitted(env, programs)


def _all_fitted(env: Env, programs: dict[str, tuple[Callable, Any]]) -> dict:
    return {
        name: fitted(env, build, of_parts(x, Y))
        for name, (build, x) in programs.items()
    }


class Attention(keras.Model):
    """Attention with a mask that is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = embedding()
        self.attention = layers.MultiHeadAttention(2, 2, kernel_initializer=near(2))
        self.last = dense()

    def call(self, x: dict) -> tf.Tensor:
        embedded, mask = self.embedding(x["ids"]), x["mask"]
        mask = mask[:, None, :] & mask[:, :, None]
        attended = self.attention(embedded, embedded, attention_mask=mask)
        return self.last(tf.reduce_mean(attended, axis=1))


class Scaled(keras.Model):
    """Multiplies by a number that stands in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.last = dense()

    def call(self, x: tuple) -> tf.Tensor:
        return self.last(x[0]) * x[1]


class Restored(keras.Model):
    """Learns its input, without labels."""

    def __init__(self) -> None:
        super().__init__()
        self.last = layers.Dense(5, kernel_initializer=near())

    def call(self, x: tf.Tensor) -> tf.Tensor:
        restored = self.last(x)
        self.add_loss(tf.reduce_mean(tf.square(restored - x)))
        return restored


def restored() -> keras.Model:
    model = Restored()
    model.compile(keras.optimizers.SGD(0.1))
    return model


def temporal() -> keras.Model:
    model = keras.Sequential([keras.Input((4, 1)), dense()])
    model.compile(keras.optimizers.SGD(0.1), "mse", weighted_metrics=["mae"])
    return model


def cast(dtype: str, scale: float = 1.0) -> Callable:
    return lambda: keras.Sequential(
        [
            keras.Input((5,), dtype=dtype),
            layers.Lambda(lambda x: keras.ops.cast(x, "float32") * scale),
            dense(),
        ]
    )


@case("Batches of any structure and dtype")
def batches_of_any_structure_and_dtype(env: Env) -> dict:
    scaled = of_parts(X, Y).map(lambda x, y: ((x, tf.constant(2.0)), y))
    results = {
        "scalar": fitted(env, Scaled, scaled),
        "without labels": fitted(env, restored, of_parts(X)),
        "uint8": _of_dtype(env, X * 50 + 100, "uint8", 0.01),
    }
    with env.scope():
        words = OfRows(looked_up())
    text = np.array(WORDS)[np.arange(NUM_ROWS) % len(WORDS)][:, None]
    found = words.predict(of_parts(tf.constant(text)), verbose=0)
    return results | {"predicted": found}


@case("Batches with masks, temporal weights and other dtypes")
@same_as("batches_of_any_structure_and_dtype")
def batches_with_masks_weights_and_other_dtypes(env: Env) -> dict:
    mask = _of_chance(NUM_ROWS, 4) > 0.4
    mask[:, 0] = True
    steps = _of_chance(NUM_ROWS, 4, 1)
    without_weights = of_parts(X, Y).map(lambda x, y: (x, y, None))
    with env.scope():
        model = common.compiled(cast("float32")(), metrics=["mae"])
    logs = [model.train_on_batch(X[i : i + 7], Y[i : i + 7]) for i in (0, 7)]
    return {
        "on batches": {"logs": np.array(logs), "weights": env.weights(model)},
        "temporal": fitted(env, temporal, of_parts(steps, 1 - steps, steps[..., 0])),
        "mask": fitted(env, Attention, of_parts({"ids": TOKENS, "mask": mask}, Y)),
        "none": fitted(env, cast("float32"), without_weights),
        "bool": _of_dtype(env, X > 0, "bool", 1.0),
        "float16": _of_dtype(env, X * 3, "float16", 1.0),
        "int64": _of_dtype(env, X * 3, "int64", 0.1),
    }


def _of_dtype(env: Env, x: np.ndarray, dtype: str, scale: float) -> dict:
    return fitted(env, cast(dtype, scale), of_parts(x.astype(dtype), Y))


def _of_chance(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).random(shape).astype("float32")


class Hidden(keras.Model):
    """A layer that steps of one's own use."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(4, activation="tanh", kernel_initializer=near())
        self.hidden.build((None, 5))
        self.built = True

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.hidden(x)

    def loss_of(self, data: Any) -> tf.Tensor:
        raise NotImplementedError

    def train_step(self, data: Any) -> dict:
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}

    def test_step(self, data: Any) -> dict:
        return {"loss": self.loss_of(data)}


class OfTwoDatasets(Hidden):
    """Learns of labelled rows, and of twice as many without labels."""

    def loss_of(self, data: tuple) -> tf.Tensor:
        (x, y), others = data
        labelled, other = self(x), self(others)
        both = self(tf.concat([x, others], 0))
        alike = tf.nn.softmax(tf.matmul(labelled, other, transpose_b=True))
        loss = tf.reduce_mean((labelled - y) ** 2) + 0.3 * tf.reduce_mean(other**2)
        spread = tf.reduce_mean(tf.math.reduce_std(both, 0))
        return loss + 0.1 * tf.reduce_mean(alike[:, 0]) + 0.1 * spread


class OfPairs(Hidden):
    """Compares anchors and positives: the first axis has these two."""

    def loss_of(self, data: Any) -> tf.Tensor:
        x = data[0] if isinstance(data, tuple) else data
        anchors, positives = x[0], x[1]
        alike = tf.matmul(self(anchors), self(positives), transpose_b=True)
        classes = tf.range(tf.shape(anchors)[0])
        return tf.reduce_mean(
            keras.losses.sparse_categorical_crossentropy(
                classes, alike, from_logits=True
            )
        )


class Pairs(keras.utils.PyDataset):
    """Batches of shape (2, classes, features)."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> np.ndarray:
        return np.random.default_rng(index).random((2, 6, 5)).astype("float32")


class OfStaticShape(keras.Model):
    """Takes the number of rows from the static shape of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.last = dense()

    def call(self, x: tf.Tensor) -> tf.Tensor:
        number = tf.range(x.shape[0], dtype=tf.float32)[:, None] / x.shape[0]
        return self.last(tf.concat([x, number], axis=1))


class OfFixedNoise(keras.Model):
    """Adds noise for a number of rows that it knows, as diffusion models do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = keras.Sequential(
            [
                keras.Input((4, 4, 1)),
                layers.Conv2D(3, 3, padding="same", kernel_initializer=near()),
                layers.AveragePooling2D(2),
                layers.UpSampling2D(2),
                layers.Conv2D(1, 3, padding="same", kernel_initializer=near(2)),
            ]
        )

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.net(x)

    def loss_of(self, x: tf.Tensor) -> tf.Tensor:
        shape = (common.BATCH_SIZE, 4, 4, 1)
        noise = tf.random.stateless_normal(shape, (1, 2))
        return tf.reduce_mean((self.net(x + noise) - noise) ** 2)

    train_step = Hidden.train_step
    test_step = Hidden.test_step


class OfStaticRows(OfTwoDatasets):
    """Divides by numbers of rows, which are Python numbers only if they are static."""

    def train_step(self, data: tuple) -> dict:
        (x, y), u = data
        scaled = x / keras.ops.shape(x)[0], u / keras.ops.shape(u)[0]
        return super().train_step(((scaled[0], y), scaled[1]))


def compiled(cls: type) -> Callable:
    def build() -> keras.Model:
        model = cls()
        model.compile(keras.optimizers.SGD(0.1))
        return model

    return build


def stateful() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input(batch_shape=(common.BATCH_SIZE, 4, 1)),
            layers.LSTM(
                3,
                stateful=True,
                kernel_initializer=near(),
                recurrent_initializer=near(2),
            ),
            dense(),
        ]
    )


@case("Parts of other numbers of rows, and static numbers of rows")
@same_as("batches_of_any_structure_and_dtype")
def other_and_static_numbers_of_rows(env: Env) -> dict:
    size = common.BATCH_SIZE
    first = of_parts(X, Y, drop=True)
    others = tf.data.Dataset.from_tensor_slices(_of_chance(4 * size, 5))
    zipped = tf.data.Dataset.zip((first, others.batch(2 * size, drop_remainder=True)))
    return {
        "two datasets": fitted(env, compiled(OfTwoDatasets), zipped),
        "two static": fitted(env, compiled(OfStaticRows), zipped),
        "static": fitted(env, OfStaticShape, first),
    }


@case("Pairs along the first axis, stateful layers, noise for a known number of rows")
@same_as("batches_of_any_structure_and_dtype")
def pairs_stateful_layers_and_noise_of_static_shape(env: Env) -> dict:
    size = common.BATCH_SIZE
    steps = of_parts(_of_chance(2 * size, 4, 1), Y[: 2 * size], drop=True)
    images = of_parts(_of_chance(2 * size, 4, 4, 1), drop=True)
    return {
        "pairs": fitted(env, compiled(OfPairs), Pairs(), shuffle=False),
        "stateful": fitted(env, stateful, steps),
        "noise": fitted(env, compiled(OfFixedNoise), images),
    }


class OfGraphs(keras.Model):
    """Passes messages along edges, and averages the nodes of each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(4, activation="tanh", kernel_initializer=near())
        self.last = dense()

    def call(self, x: dict) -> tf.Tensor:
        nodes, edges = self.hidden(x["nodes"]), x["edges"]
        sent = tf.gather(nodes, edges[:, 1])
        got = tf.math.unsorted_segment_sum(sent, edges[:, 0], tf.shape(nodes)[0])
        return self.last(tf.math.segment_mean(nodes + 0.5 * got, x["graph"]))


def graphs() -> tf.data.Dataset:
    """Batches of molecules, whose nodes and edges are merged as on keras.io."""
    sizes = LENGTHS + 1
    nodes = tf.RaggedTensor.from_row_lengths(_of_chance(sizes.sum(), 5), sizes)
    random = np.random.default_rng(4)
    pairs = np.concatenate([random.integers(0, size, (3, 2)) for size in sizes])
    edges = tf.RaggedTensor.from_row_lengths(pairs, [3] * NUM_ROWS)

    def merge(x: tuple, y: tf.Tensor) -> tuple:
        nodes, edges = x
        starts = tf.gather(nodes.row_starts(), edges.value_rowids())
        merged = {
            "nodes": nodes.values,
            "graph": nodes.value_rowids(),
            "edges": edges.values + starts[:, None],
        }
        return merged, y

    rows = tf.data.Dataset.from_tensor_slices(((nodes, edges), Y))
    return rows.shuffle(NUM_ROWS, seed=1).batch(common.BATCH_SIZE).map(merge)


def two_datasets(size: int, other: int, drop: bool) -> tf.data.Dataset:
    labelled = tf.data.Dataset.from_tensor_slices((X, Y))
    others = tf.data.Dataset.from_tensor_slices(_of_chance(5 * NUM_ROWS, 5))
    batches = labelled.batch(size, drop), others.batch(other, drop)
    return tf.data.Dataset.zip(batches).prefetch(1)


def of_other_rows(env: Env, build: Callable, make: Callable, **options: Any) -> dict:
    with env.scope():
        model = build()
        loss = None if isinstance(model, Hidden) else "mse"
        model.compile(keras.optimizers.SGD(0.1), loss, **options)
    data = {"validation_data": make(), "verbose": 0}
    history = model.fit(make(), epochs=2, **data)
    found = {"history": history.history, "weights": env.weights(model)}
    found["evaluated"] = np.ravel(model.evaluate(make(), verbose=0))
    if loss:
        found["predicted"] = model.predict(make(), verbose=0)
    return found


@case("Parts whose numbers of rows are not known, or do not divide")
@same_as("batches_of_any_structure_and_dtype")
def other_numbers_of_rows_that_do_not_divide(env: Env) -> dict:
    return {
        "merged": of_other_rows(env, OfGraphs, graphs),
        "dropped": of_other_rows(
            env, OfTwoDatasets, lambda: two_datasets(7, 5, True), steps_per_execution=2
        ),
        "last": of_other_rows(env, OfTwoDatasets, lambda: two_datasets(8, 13, False)),
    }


@case("Parts of other numbers of rows, eagerly", setups=("mirrored", "two_by_two"))
@same_as("batches_of_any_structure_and_dtype")
def other_numbers_of_rows_run_eagerly(env: Env) -> dict:
    return {
        "merged": of_other_rows(env, OfGraphs, graphs, run_eagerly=True),
        "zipped": of_other_rows(
            env, OfTwoDatasets, lambda: two_datasets(8, 13, False), run_eagerly=True
        ),
    }
