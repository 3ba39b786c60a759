"""Layers whose rows depend on each other, on a draw, or on anything that is written."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfdp
from tests.harness.env import Env
from tests.harness.registry import case
from tests.program.programs import (
    BATCH_SIZE,
    FEATURES,
    IMAGES,
    SEQUENCES,
    TOKENS,
    Perceptron,
    Programs,
    fit,
    fit_layers,
    fit_model,
    named,
    register,
    rows,
    sgd,
    targets,
    weights,
)

STATISTICS = Programs()
AUGMENTATIONS = Programs()
DRAWS = Programs()
NORMALIZATIONS = Programs()
RECURRENT = Programs()
FUNCTIONS = Programs()
CONTROL = Programs()


def _dense(*between: Any, units: int = 5) -> list:
    return [layers.Dense(units, activation="tanh"), *between, layers.Dense(1)]


def _image_head(*first: Any) -> list:
    return [
        *first,
        layers.Conv2D(3, 3, activation="tanh"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(1),
    ]


# Statistics of a batch.


def _mean_penalty(x: Any) -> Any:
    return 0.1 * ops.mean(ops.abs(x))


def _divergence(x: Any) -> Any:
    mean = ops.clip(ops.mean(ops.sigmoid(x), axis=0), 1e-3, 1 - 1e-3)
    return 0.1 * ops.sum(0.2 * ops.log(0.2 / mean) + 0.8 * ops.log(0.8 / (1 - mean)))


def _with_deviation(x: Any) -> Any:
    deviation = ops.sqrt(ops.var(x, axis=0, keepdims=True) + 0.01)
    return ops.concatenate([x, deviation + ops.zeros_like(x)], axis=1)


def _with_mean_deviation(x: Any) -> Any:
    """Minibatch deviation of a discriminator, see Karras et al. 2018."""
    mean = ops.mean(ops.sqrt(ops.var(x, axis=0) + 1e-6))
    tiled = ops.tile(ops.reshape(mean, (1, 1)), (ops.shape(x)[0], 1))
    return ops.concatenate([x, tiled], axis=1)


STATISTICS.layers(
    "activity_regularizer_that_returns_a_mean",
    lambda: [
        layers.Dense(5, "tanh", activity_regularizer=_mean_penalty),
        layers.Dense(1),
    ],
    validation_data=(FEATURES[:7], targets(FEATURES[:7])),
)
STATISTICS.layers(
    "activity_regularizer_of_a_divergence",
    lambda: [
        layers.Dense(5, activity_regularizer=_divergence),
        layers.Dense(1),
    ],
    validation_data=(FEATURES[:7], targets(FEATURES[:7])),
    validation_batch_size=4,
)
STATISTICS.layers(
    "activity_regularizer_of_keras",
    lambda: _dense(layers.ActivityRegularization(l1=0.01, l2=0.02)),
    validation_data=(FEATURES[:7], targets(FEATURES[:7])),
)
STATISTICS.layers(
    "deviation_of_the_batch", lambda: _dense(layers.Lambda(_with_deviation))
)
STATISTICS.layers(
    "mean_deviation_of_the_batch",
    lambda: _dense(layers.Lambda(_with_mean_deviation)),
    predicts=True,
)


class MinibatchDiscrimination(layers.Layer):
    """Distances of a row to all others, see Salimans et al. 2016."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 3, 2))

    def call(self, x: Any) -> Any:
        projected = ops.reshape(
            ops.matmul(x, ops.reshape(self.kernel, (x.shape[-1], 6))), (-1, 3, 2)
        )
        distances = ops.sum(
            ops.abs(projected[:, None] - ops.expand_dims(projected, 0)), axis=3
        )
        close = 0.1 * ops.mean(ops.exp(-distances), axis=1)
        return ops.concatenate([x, close], axis=1)


class PositionBias(layers.Layer):
    """Looks up a small table at constant positions, see Liu et al. 2021 (Swin)."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(3, shape[-1]), initializer="ones")

    def call(self, x: Any) -> Any:
        return x * tf.reduce_mean(tf.gather(self.table, [0, 1, 2, 1, 0]), axis=0)


class Patches(layers.Layer):
    """Cuts each row, as an image of one column, into windows of two pixels."""

    def call(self, x: Any) -> Any:
        images = tf.reshape(x, [-1, x.shape[-1], 1, 1])
        ones = [1, 1, 1, 1]
        patches = tf.image.extract_patches(images, [1, 2, 1, 1], ones, ones, "VALID")
        return tf.reshape(patches, [-1, 2 * (x.shape[-1] - 1)])


STATISTICS.layers("position_bias", lambda: _dense(PositionBias()))
STATISTICS.layers("patches", lambda: _dense(Patches()))
STATISTICS.layers(
    "minibatch_discrimination",
    lambda: _dense(MinibatchDiscrimination()),
    predicts=True,
)


@STATISTICS.add
def trimmed_to_the_longest_row(env: Env) -> dict:
    def trim(x: Any) -> Any:
        longest = tf.reduce_max(tf.reduce_sum(tf.cast(x != 0, tf.int32), axis=1))
        return x[:, :longest]

    return fit_layers(
        env,
        lambda: [
            layers.Lambda(trim, output_shape=(None,)),
            layers.Embedding(9, 4),
            layers.Lambda(lambda x: tf.reduce_mean(x, axis=1), output_shape=(4,)),
            layers.Dense(1),
        ],
        x=TOKENS,
        predicts=True,
    )


@STATISTICS.add
def products_of_all_pairs_of_rows(env: Env) -> dict:
    with env.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(3),
                layers.Lambda(
                    lambda x: ops.matmul(x, ops.transpose(x)), output_shape=(None,)
                ),
            ]
        )
        model.compile(sgd(), loss=lambda y, p: ops.mean(ops.square(p - ops.eye(7))))
    found = model.predict(FEATURES[:8], batch_size=8, verbose=0)
    assert found.shape == (8, 8)
    uneven = model.predict(FEATURES[:7], batch_size=7, verbose=0)
    single = model.predict(FEATURES[:1], batch_size=7, verbose=0)
    history = model.fit(
        FEATURES[:14], targets(FEATURES[:14]), batch_size=7, shuffle=False, verbose=0
    ).history
    return {
        "even": found,
        "uneven": uneven,
        "single": single,
        "history": history,
        "weights": weights(env, model),
    }


STATISTICS.layers(
    "softmax_along_the_batch",
    lambda: _dense(layers.Lambda(lambda x: ops.softmax(x, axis=0) * x)),
    predicts=True,
)
STATISTICS.layers(
    "ranks_along_the_batch",
    lambda: _dense(
        layers.Lambda(
            lambda x: x + 0.1 * ops.cast(ops.argsort(ops.argsort(x, 0), 0), x.dtype)
        )
    ),
)
STATISTICS.layers(
    "sums_of_the_rows_before",
    lambda: _dense(layers.Lambda(lambda x: x + 0.1 * ops.cumsum(x, axis=0))),
)
STATISTICS.layers(
    "rows_rolled_and_reversed",
    lambda: _dense(
        layers.Lambda(lambda x: x + ops.roll(x, 1, axis=0) - ops.flip(x, axis=0))
    ),
)
STATISTICS.layers(
    "largest_rows_of_the_batch",
    lambda: _dense(
        layers.Lambda(lambda x: x - ops.max(x, axis=0) + ops.min(x, axis=0) / 2)
    ),
)
STATISTICS.layers(
    "norm_of_the_batch",
    lambda: _dense(layers.Lambda(lambda x: x / (1 + tf.norm(x)))),
)
STATISTICS.layers(
    "centred_and_divided_by_the_number_of_rows",
    lambda: _dense(
        layers.Lambda(
            lambda x: (
                x
                - tf.reduce_sum(x, 0) / tf.cast(tf.shape(x)[0], x.dtype)
                + 1.0 / tf.cast(tf.shape(x)[0], x.dtype)
            )
        )
    ),
)
STATISTICS.layers(
    "attention_across_rows",
    lambda: _dense(
        layers.Lambda(
            lambda x: ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(x))), x)
        )
    ),
)
STATISTICS.layers(
    "spectral_normalization",
    lambda: [
        layers.SpectralNormalization(layers.Dense(5, activation="tanh")),
        layers.Dense(1),
    ],
    predicts=True,
)


@STATISTICS.add
def attention_with_masks(env: Env) -> dict:
    def make() -> keras.Model:
        given = keras.Input((5,), dtype="int32")
        embedded = layers.Embedding(9, 4, mask_zero=True)(given)
        mixed = layers.MultiHeadAttention(2, 3, use_bias=False)(
            embedded, embedded, use_causal_mask=True
        )
        pooled = layers.GlobalAveragePooling1D()(
            layers.LayerNormalization()(mixed + embedded)
        )
        return keras.Model(given, layers.Dense(1)(pooled))

    return fit_model(env, make, x=TOKENS)


@STATISTICS.add
def attention_with_a_mask_that_is_given(env: Env) -> dict:
    def make() -> keras.Model:
        given = keras.Input((5, 3))
        mask = layers.Lambda(
            lambda x: (
                ops.expand_dims(x[..., 0] > -1.0, 1) & ops.ones((1, 5, 1), dtype="bool")
            ),
            output_shape=(5, 5),
        )(given)
        mixed = layers.MultiHeadAttention(2, 3, use_bias=False)(
            given, given, attention_mask=mask
        )
        pooled = layers.GlobalMaxPooling1D()(mixed)
        return keras.Model(given, layers.Dense(1)(pooled))

    return fit_model(env, make, x=SEQUENCES)


STATISTICS.layers(
    "temporal_weights",
    lambda: [layers.Dense(4, activation="tanh"), layers.Dense(1)],
    x=SEQUENCES,
    y=rows(5, 1, seed=2),
    sample_weight=np.abs(rows(5, seed=3)),
    metrics=["mae"],
)
STATISTICS.layers(
    "masked_weights",
    lambda: [
        layers.Embedding(9, 4, mask_zero=True),
        layers.LSTM(3, return_sequences=True),
        layers.Dense(1),
    ],
    x=TOKENS,
    y=rows(5, 1, seed=2),
    sample_weight=np.abs(rows(5, seed=4)),
)

# Augmentation.

for _name, _make in {
    "random_flip": lambda: layers.RandomFlip(seed=1),
    "random_translation": lambda: layers.RandomTranslation(0.2, 0.3, seed=2),
    "random_rotation": lambda: layers.RandomRotation(0.2, seed=3),
    "random_zoom": lambda: layers.RandomZoom(0.2, 0.3, seed=4),
    "random_contrast": lambda: layers.RandomContrast(0.4, seed=5),
    "random_brightness": lambda: layers.RandomBrightness(
        0.3, value_range=(-2.0, 2.0), seed=6
    ),
    "random_crop": lambda: layers.RandomCrop(4, 5, seed=7),
}.items():
    AUGMENTATIONS.layers(
        _name,
        lambda make=_make: _image_head(make()),
        x=IMAGES,
    )
AUGMENTATIONS.layers(
    "a_pipeline_of_augmentations",
    lambda: _image_head(
        keras.Sequential(
            [
                layers.RandomFlip("horizontal"),
                layers.RandomRotation(0.1, fill_mode="nearest"),
                layers.RandomZoom(0.1),
                layers.RandomContrast(0.2),
            ]
        ),
        layers.Dropout(0.3),
    ),
    x=IMAGES,
    predicts=True,
)

# Random numbers of layers.

for _name, _make in {
    "dropout": lambda: layers.Dropout(0.4),
    "dropout_with_a_seed": lambda: layers.Dropout(0.4, seed=5),
    "dropout_of_whole_columns": lambda: layers.Dropout(0.4, noise_shape=(1, 5)),
    "dropout_of_whole_rows": lambda: layers.Dropout(0.4, noise_shape=(None, 1)),
    "gaussian_noise": lambda: layers.GaussianNoise(0.3),
    "gaussian_dropout": lambda: layers.GaussianDropout(0.3),
    "alpha_dropout": lambda: layers.AlphaDropout(0.3),
}.items():
    DRAWS.layers(_name, lambda make=_make: _dense(make()))
DRAWS.layers(
    "spatial_dropout",
    lambda: [
        layers.Conv1D(4, 2),
        layers.SpatialDropout1D(0.4),
        layers.Flatten(),
        layers.Dense(1),
    ],
    x=SEQUENCES,
)
DRAWS.layers(
    "spatial_dropout_of_images",
    lambda: [layers.SpatialDropout2D(0.4), *_image_head()],
    x=IMAGES,
)
DRAWS.layers(
    "dropout_in_every_layer",
    lambda: [
        layers.Dropout(0.1),
        layers.Dense(5, activation="tanh"),
        layers.Dropout(0.3),
        layers.Dense(5, activation="relu"),
        layers.Dropout(0.3, seed=9),
        layers.Dense(1),
    ],
    metrics=["mae"],
)
DRAWS.layers(
    "recurrent_dropout",
    lambda: [layers.LSTM(3, dropout=0.2, recurrent_dropout=0.3), layers.Dense(1)],
    x=SEQUENCES,
)
DRAWS.layers(
    "recurrent_dropout_of_a_gru_both_ways",
    lambda: [
        layers.Bidirectional(layers.GRU(3, dropout=0.2, recurrent_dropout=0.3)),
        layers.Dense(1),
    ],
    x=SEQUENCES,
)
DRAWS.layers(
    "dropout_of_attention",
    lambda: [Attention(), layers.GlobalAveragePooling1D(), layers.Dense(1)],
    x=SEQUENCES,
)


class Attention(layers.Layer):
    """Attention to itself, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 3, dropout=0.3, use_bias=False)

    def build(self, shape: Any) -> None:
        self.attention.build(shape, shape)

    def call(self, x: Any, training: bool = False) -> Any:
        return x + self.attention(x, x, training=training)


class Drawn(layers.Layer):
    """Draws by `keras.random`, by a generator of its own and by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.random.SeedGenerator(4)

    def call(self, x: Any) -> Any:
        x = x + 0.1 * keras.random.normal(ops.shape(x), seed=self.generator)
        x = x + 0.1 * keras.random.uniform(ops.shape(x), seed=self.generator)
        x = x * keras.random.uniform((x.shape[-1],), 0.9, 1.1, seed=self.generator)
        x = x + 0.1 * keras.random.truncated_normal(ops.shape(x), seed=11)
        x = x + 0.1 * keras.random.gamma(ops.shape(x), 2.0, seed=self.generator)
        x = x + 0.1 * ops.cast(
            keras.random.randint(ops.shape(x), 0, 5, seed=self.generator), x.dtype
        )
        x = x + 0.1 * keras.random.dropout(x, 0.5, seed=self.generator)
        chosen = keras.random.categorical(x, 3, seed=self.generator)
        x = x + 0.1 * ops.sum(ops.cast(chosen, x.dtype), axis=1, keepdims=True)
        return x + 0.1 * keras.random.shuffle(x, axis=0, seed=self.generator)


DRAWS.layers("draws_of_keras", lambda: _dense(Drawn()))


class DrawnStatelessly(layers.Layer):
    """Draws by `tf.random.stateless_*`."""

    def call(self, x: Any) -> Any:
        seed = tf.constant([3, 4])
        x = x + 0.1 * tf.random.stateless_normal(tf.shape(x), seed)
        x = x + 0.1 * tf.random.stateless_uniform([tf.shape(x)[0], 1], seed)
        order = tf.random.experimental.stateless_shuffle(tf.range(tf.shape(x)[0]), seed)
        return x + 0.1 * tf.gather(x, order)


DRAWS.layers("draws_without_state", lambda: _dense(DrawnStatelessly()))


class DrawnByOperations(layers.Layer):
    """Draws by `tf.random.*` with a seed of the operation."""

    def call(self, x: Any) -> Any:
        x = x + 0.1 * tf.random.normal(tf.shape(x), seed=3)
        x = x + 0.1 * tf.random.uniform([tf.shape(x)[0], 1], seed=4)
        return x + 0.1 * tf.random.truncated_normal(tf.shape(x), seed=5)


DRAWS.layers("draws_of_operations_with_seeds", lambda: _dense(DrawnByOperations()))


# In parallel iterations one device draws in any order.
_IN_ORDER = {"parallel_iterations": 1}


def _three_times(step: Any, start: Any) -> Any:
    return tf.while_loop(
        lambda i, _: i < 3,
        lambda i, value: (i + 1, step(value)),
        [0, start],
        **_IN_ORDER,
    )[1]


class DrawnInLoops(layers.Layer):
    """Draws by `tf.random.*` for each row, for all rows, and for a state, in loops."""

    def build(self, shape: Any) -> None:
        self.chain = self.add_weight(
            shape=(2, shape[-1]), initializer="zeros", trainable=False
        )

    def call(self, x: Any) -> Any:
        x = tf.map_fn(
            lambda row: row * tf.random.uniform([], 0.5, 1.5, seed=2), x, **_IN_ORDER
        )
        x = _three_times(
            lambda rows: 0.9 * rows + 0.1 * tf.random.normal(tf.shape(rows), seed=3), x
        )
        chain = _three_times(
            lambda old: 0.5 * old + tf.random.uniform(tf.shape(old), seed=4),
            tf.convert_to_tensor(self.chain),
        )
        self.chain.assign(chain)
        return x + tf.reduce_mean(chain, axis=0)


DRAWS.layers("draws_in_loops", lambda: _dense(DrawnInLoops()))


class DrawnUnseeded(layers.Layer):
    """Keeps draws of operations without seeds, in loops and for sampled classes."""

    def build(self, shape: Any) -> None:
        self.drawn = self.add_weight(
            shape=(shape[-1],), initializer="zeros", trainable=False
        )

    def call(self, x: Any) -> Any:
        classes = tf.random.log_uniform_candidate_sampler(
            tf.zeros([1, 1], tf.int64), 1, 4, unique=True, range_max=50
        ).sampled_candidates
        begin, _, _ = tf.image.sample_distorted_bounding_box(
            [50, 50, 3], tf.zeros([1, 0, 4]), use_image_if_no_bounding_boxes=True
        )
        scanned = tf.scan(lambda old, one: old + one * tf.random.uniform([]), x)
        numbers = tf.concat([classes[:3], tf.cast(begin[:2], tf.int64)], axis=0)
        self.drawn.assign(tf.cast(numbers, x.dtype) + scanned[-1])
        return x + 0.01 * self.drawn


class NoisySGD(keras.optimizers.SGD):
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        noise = tf.random.normal(gradient.shape)
        super().update_step(gradient + 0.1 * noise, variable, learning_rate)


@DRAWS.add
def draws_without_seeds_are_the_same_on_all_replicas(env: Env) -> dict:
    tf.random.set_seed(None)  # type: ignore[arg-type]
    with env.scope():
        model = keras.Sequential([*_dense(DrawnUnseeded())])
        model.compile(NoisySGD(0.05), "mse")
    check = [] if env.strategy is None else [tfdp.callbacks.ConsistencyCheck(every=1)]
    fit(env, model, FEATURES, targets(FEATURES), callbacks=check)
    return {}


class Noisy(keras.Model):
    """Draws by a `tf.random.Generator`."""

    def __init__(self) -> None:
        super().__init__()
        self.last = layers.Dense(1)
        self.generator = tf.random.Generator.from_seed(5)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            x = x + 0.3 * self.generator.normal(tf.shape(x))
            x = x * self.generator.uniform([tf.shape(x)[0], 1], 0.9, 1.1)
        return self.last(x)


@DRAWS.add
def draws_of_a_generator(env: Env) -> dict:
    return fit_model(env, Noisy)


@DRAWS.add
def draws_of_a_generator_made_outside(env: Env) -> dict:
    generator = tf.random.Generator.from_seed(6)

    class Model(Perceptron):
        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                x = x + 0.3 * generator.normal(tf.shape(x))
            return super().call(x)

    return fit_model(env, Model)


# Normalization.

for _name, _make in {
    "synchronized": lambda: layers.BatchNormalization(synchronized=True),
    "layer_normalization": lambda: layers.LayerNormalization(),
    "unit_normalization": lambda: layers.UnitNormalization(),
    "rms_normalization": lambda: layers.RMSNormalization(),
    "group_normalization": lambda: layers.GroupNormalization(2),
    "standardized_input": lambda: layers.Normalization(
        mean=[0.1] * 4, variance=[2.0] * 4
    ),
}.items():
    NORMALIZATIONS.layers(
        _name,
        lambda make=_make: [
            layers.Dense(4, use_bias=False),
            make(),
            layers.ReLU(),
            layers.Dense(1),
        ],
        predicts=True,
    )
NORMALIZATIONS.layers(
    "synchronized_with_renewed_moments_of_images",
    lambda: [
        layers.Conv2D(4, 3, use_bias=False),
        layers.BatchNormalization(momentum=0.6, synchronized=True, scale=False),
        layers.GroupNormalization(2),
        layers.GlobalAveragePooling2D(),
        layers.Dense(1),
    ],
    x=IMAGES,
    predicts=True,
)
NORMALIZATIONS.layers(
    "synchronized_of_a_mask",
    lambda: [
        layers.Masking(),
        layers.BatchNormalization(synchronized=True),
        layers.SimpleRNN(3),
        layers.Dense(1),
    ],
    x=SEQUENCES * (TOKENS != 0)[..., None],
    predicts=True,
)


def _own_rows(count: int, num_replicas: int) -> list[slice]:
    """Returns the rows of each replica: the first ones have one more."""
    least, extra = divmod(count, num_replicas)
    ends = np.cumsum([least + (rank < extra) for rank in range(num_replicas)])
    return [
        slice(int(end) - least - (rank < extra), int(end))
        for rank, end in enumerate(ends)
    ]


def _train_local_normalization(num_replicas: int) -> dict:
    """Trains gamma and beta by moments of each replica's rows; no strategy."""
    gamma, beta = tf.Variable(tf.ones(6)), tf.Variable(tf.zeros(6))
    mean, variance = np.zeros(6, "float32"), np.ones(6, "float32")
    losses, y = [], targets(FEATURES)
    for first in range(0, len(FEATURES), BATCH_SIZE):
        x, y_true = FEATURES[first:][:BATCH_SIZE], y[first:][:BATCH_SIZE]
        with tf.GradientTape() as tape:
            outputs, moments = [], []
            for own in _own_rows(len(x), num_replicas):
                if own.start == own.stop:
                    continue
                found = tf.nn.moments(x[own], axes=[0])
                normal = (x[own] - found[0]) / tf.sqrt(found[1] + 1e-3)
                outputs.append(normal * gamma + beta)
                moments.append((own.stop - own.start, *found))
            loss = tf.reduce_mean(tf.square(tf.concat(outputs, axis=0) - y_true))
        gradients = tape.gradient(loss, [gamma, beta])
        gamma.assign_sub(0.1 * gradients[0])
        beta.assign_sub(0.1 * gradients[1])
        for kept, index in ((mean, 1), (variance, 2)):
            new = sum(moment[0] * moment[index].numpy() for moment in moments)
            kept[:] = 0.9 * kept + 0.1 * new / len(x)
        losses.append((len(x), float(loss)))
    total = sum(count * loss for count, loss in losses) / len(FEATURES)
    return {"loss": total, "values": [gamma.numpy(), beta.numpy(), mean, variance]}


@case(
    "BatchNormalization: moments of each replica, moving ones their mean by rows",
    compare=False,
    # There the last batch, of one row, leaves three replicas without any.
    quick_setup="two_by_two",
)
def local_normalization_keeps_the_contract_of_keras(env: Env) -> dict:
    with env.scope():
        layer = layers.BatchNormalization(momentum=0.9)
        model = keras.Sequential([keras.Input((6,)), layer])
        model.compile(keras.optimizers.SGD(0.1), loss="mse")
    history = model.fit(
        FEATURES, targets(FEATURES), batch_size=BATCH_SIZE, shuffle=False, verbose=0
    ).history
    expected = _train_local_normalization(env.num_replicas)
    np.testing.assert_allclose(history["loss"][-1], expected["loss"], rtol=1e-5)
    for own, value in zip(layer.weights, expected["values"], strict=True):
        np.testing.assert_allclose(own.numpy(), value, rtol=1e-5, atol=1e-6)
    return {}


# Recurrent layers and layers around others.


class Counter(layers.Layer):
    """Counts its calls and its rows, and scales by the former."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.rows = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        self.calls.assign(self.calls + 1.0)
        self.rows.assign_add(ops.cast(ops.shape(x)[0], "float32"))
        return x / ops.sqrt(self.calls)


RECURRENT.layers(
    "both_ways",
    lambda: [
        layers.Bidirectional(layers.LSTM(3, return_sequences=True), merge_mode="sum"),
        layers.Bidirectional(layers.SimpleRNN(2)),
        layers.Dense(1),
    ],
    x=SEQUENCES,
    predicts=True,
)
RECURRENT.layers(
    "masked_both_ways",
    lambda: [
        layers.Embedding(9, 4, mask_zero=True),
        layers.Bidirectional(layers.GRU(3)),
        layers.Dense(1),
    ],
    x=TOKENS,
)
RECURRENT.layers(
    "convolutional_lstm",
    lambda: [
        layers.Reshape((3, 4, 6)),
        layers.ConvLSTM1D(2, 3, padding="same"),
        layers.Flatten(),
        layers.Dense(1),
    ],
    x=IMAGES,
    y=targets(IMAGES),
)
RECURRENT.layers(
    "layer_at_each_step",
    lambda: [
        layers.TimeDistributed(layers.Dense(3, activation="tanh")),
        layers.TimeDistributed(layers.Dropout(0.3)),
        layers.TimeDistributed(layers.LayerNormalization()),
        layers.Flatten(),
        layers.Dense(1),
    ],
    x=SEQUENCES,
)
RECURRENT.layers(
    "cells_of_its_own",
    lambda: [
        layers.RNN([layers.LSTMCell(3), layers.GRUCell(2)]),
        layers.Dense(1),
    ],
    x=SEQUENCES,
)
RECURRENT.layers(
    "unrolled_and_backwards",
    lambda: [
        layers.LSTM(3, unroll=True, return_sequences=True),
        layers.GRU(3, go_backwards=True, reset_after=False),
        layers.Dense(1),
    ],
    x=SEQUENCES,
)
RECURRENT.layers("counters", lambda: _dense(Counter()), predicts=True)

# Functions of TensorFlow.


def _reversed_gradient(x: Any) -> Any:
    @tf.custom_gradient
    def reverse(x: Any) -> Any:
        return tf.identity(x), lambda upstream: -0.5 * upstream

    return reverse(x) + x


def _gradient_of_unit_norm(x: Any) -> Any:
    @tf.custom_gradient
    def same(x: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            return upstream / (1e-3 + tf.norm(upstream))

        return tf.identity(x), gradient

    return same(x)


def _clipped_gradient(x: Any) -> Any:
    return tf.grad_pass_through(tf.round)(x) + x


def _svd(x: Any) -> Any:
    values, _, right = tf.linalg.svd(tf.matmul(x, x, transpose_a=True) + tf.eye(5))
    return x @ right / (1 + tf.reduce_sum(values))


def _whitened(x: Any) -> Any:
    centred = x - tf.reduce_mean(x, axis=0)
    count = tf.cast(tf.shape(x)[0], x.dtype)
    covariance = tf.matmul(centred, centred, transpose_a=True) / count
    factor = tf.linalg.cholesky(covariance + 0.1 * tf.eye(5))
    return tf.transpose(tf.linalg.triangular_solve(factor, tf.transpose(centred)))


def _solved(x: Any) -> Any:
    gram = tf.matmul(x, x, transpose_a=True) + tf.eye(5)
    return x @ tf.linalg.inv(gram) + tf.linalg.logdet(gram) / 50.0


def _shuffled(x: Any) -> Any:
    order = tf.argsort(x[:, 0])
    return x + 0.3 * tf.gather(x, order)


def _selected(x: Any) -> Any:
    kept = tf.boolean_mask(x, x[:, 0] > 0)
    return x - tf.reduce_sum(kept, axis=0) / 10.0


def _segments(x: Any) -> Any:
    classes = tf.cast(x[:, 0] > 0, tf.int32)
    sums = tf.math.unsorted_segment_sum(x, classes, 2)
    return x - 0.05 * tf.gather(sums, classes)


def _scattered(x: Any) -> Any:
    classes = tf.cast(x[:, :1] > 0, tf.int32)
    sums = tf.scatter_nd(classes, x, [2, 5])
    return x - 0.05 * tf.gather_nd(sums, classes)


def _partitioned(x: Any) -> Any:
    classes = tf.cast(x[:, 0] > 0, tf.int32)
    first, second = tf.dynamic_partition(x, classes, 2)
    places = tf.dynamic_partition(tf.range(tf.shape(x)[0]), classes, 2)
    found = tf.dynamic_stitch(places, [first * 2.0, second])
    return tf.reshape(found, [-1, 5])


def _quantile(x: Any) -> Any:
    ordered = tf.sort(x, axis=0)
    return x - ordered[tf.shape(x)[0] // 2]


def _numpy(x: Any) -> Any:
    def deviation(values: Any) -> Any:
        return np.std(values, axis=0, dtype="float32")

    found = tf.numpy_function(deviation, [x], tf.float32)
    return x / (1.0 + tf.ensure_shape(found, [5]))


def _python(x: Any) -> Any:
    found = tf.py_function(
        lambda values: tf.sort(values, axis=0) * 0.5 + values, [x], tf.float32
    )
    return tf.ensure_shape(found, [None, 5])


def _recomputed(x: Any) -> Any:
    @tf.recompute_grad
    def inner(x: Any) -> Any:
        return tf.tanh(x) * tf.reduce_mean(x)

    return inner(x)


def _frequencies(x: Any) -> Any:
    return tf.math.real(tf.signal.ifft(tf.signal.fft(tf.cast(x, tf.complex64)) * 0.5))


def _histogram(x: Any) -> Any:
    counts = tf.histogram_fixed_width(x, [-1.0, 1.0], nbins=5)
    return x + 0.01 * tf.cast(counts, x.dtype)


def _unique(x: Any) -> Any:
    classes = tf.cast(tf.round(3 * x[:, 0]), tf.int32)
    unique, places, counts = tf.unique_with_counts(classes)
    return x / tf.cast(tf.gather(counts, places), x.dtype)[:, None] + (
        0.01 * tf.cast(tf.size(unique), x.dtype)
    )


def _columns_up_to_a_sum(x: Any) -> Any:
    is_largest = tf.equal(x[:, 0], tf.reduce_max(x[:, 0]))
    return x * x[:, : tf.reduce_sum(tf.cast(is_largest, tf.int32))]


def _padded_diagonal(x: Any) -> Any:
    sums = tf.reduce_sum(x, axis=0)
    return 0.05 * tf.matmul(x, tf.linalg.diag(sums, padding_value=1.0))


def _rows_as_the_height_of_an_image(x: Any) -> Any:
    image = tf.image.resize(x[tf.newaxis, :, :, tf.newaxis], [4, 5])
    return x - tf.reduce_mean(image[0, :2, :, 0], axis=0)


def _array_of_other_shapes(x: Any) -> Any:
    array = tf.TensorArray(x.dtype, size=2, infer_shape=False)
    array = array.write(0, x).write(1, tf.concat([x, 2.0 * x], axis=1))
    rest = 0.1 * tf.reduce_mean(array.read(1) ** 2)
    return tf.ensure_shape(array.read(0), [None, 5]) + rest


for _function in (
    _columns_up_to_a_sum,
    _padded_diagonal,
    _rows_as_the_height_of_an_image,
    _array_of_other_shapes,
    _reversed_gradient,
    _gradient_of_unit_norm,
    _clipped_gradient,
    _svd,
    _whitened,
    _solved,
    _shuffled,
    _selected,
    _segments,
    _scattered,
    _partitioned,
    _quantile,
    _numpy,
    _python,
    _recomputed,
    _frequencies,
    _histogram,
    _unique,
):
    FUNCTIONS.layers(
        _function.__name__.removeprefix("_"),
        lambda function=_function: _dense(layers.Lambda(function, output_shape=(5,))),
    )


# Control flow, and what a program says.


def _branch(x: Any) -> Any:
    return tf.cond(
        tf.reduce_mean(x) > 0, lambda: 2.0 * x, lambda: x - tf.reduce_max(x, axis=0)
    )


def _branch_by_rows(x: Any) -> Any:
    return tf.cond(tf.shape(x)[0] > 10, lambda: 2.0 * x, lambda: tf.tanh(x))


def _case(x: Any) -> Any:
    which = tf.cast(tf.reduce_sum(x) * 2, tf.int32) % 3
    return tf.switch_case(
        which, [lambda: x, lambda: 1.5 * x, lambda: x - tf.reduce_mean(x)]
    )


def _loop(x: Any) -> Any:
    return tf.while_loop(
        lambda i, x: i < 3,
        lambda i, x: (i + 1, 0.9 * x - 0.1 * tf.reduce_mean(x, axis=0)),
        [tf.constant(0), x],
    )[1]


def _loop_until_the_batch_is_small(x: Any) -> Any:
    def is_large(i: Any, x: Any) -> Any:
        return tf.logical_and(i < 9, tf.norm(x) > 1.0)

    return tf.while_loop(
        is_large,
        lambda i, x: (i + 1, 0.7 * x),
        [tf.constant(0), x],
        maximum_iterations=9,
    )[1]


def _mapped_rows(x: Any) -> Any:
    return tf.map_fn(lambda row: row * tf.reduce_max(row), x)


def _mapped_columns(x: Any) -> Any:
    columns = tf.map_fn(lambda column: column - tf.reduce_mean(column), tf.transpose(x))
    return tf.transpose(columns)


def _mapped_at_once(x: Any) -> Any:
    return tf.vectorized_map(lambda row: row * tf.reduce_sum(row) * 0.1, x)


def _scanned_rows(x: Any) -> Any:
    return tf.scan(lambda before, row: 0.5 * before + row, x)


def _folded_rows(x: Any) -> Any:
    return x - 0.1 * tf.foldl(lambda total, row: 0.9 * total + row, x)


def _scanned_by_keras(x: Any) -> Any:
    _, found = ops.scan(
        lambda carry, row: (0.5 * carry + row, carry), ops.zeros((5,)), x
    )
    return x + 0.1 * found


def _array_of_tensors(x: Any) -> Any:
    array = tf.TensorArray(x.dtype, size=3)
    for index in range(3):
        array = array.write(index, x * float(index + 1))
    return tf.reduce_mean(array.stack(), axis=0)


def _branch_within_a_loop(x: Any) -> Any:
    def body(i: Any, x: Any) -> Any:
        found = tf.cond(tf.reduce_sum(x) > 0, lambda: 0.5 * x, lambda: x + 0.1)
        return i + 1, found

    return tf.while_loop(lambda i, x: i < 3, body, [tf.constant(0), x])[1]


@tf.function
def _traced_by_itself(x: Any) -> Any:
    if tf.reduce_mean(x) > 0:
        return x * 2.0
    return x - tf.reduce_mean(x, axis=0)


def _function(x: Any) -> Any:
    return _traced_by_itself(x)


def _asserted(x: Any) -> Any:
    tf.debugging.assert_all_finite(x, "not finite")
    tf.debugging.assert_rank(x, 2)
    checks = [
        tf.debugging.assert_equal(tf.shape(x)[1], 5),
        tf.debugging.assert_greater(tf.shape(x)[0], 0),
        tf.debugging.assert_less(tf.abs(x), 100.0),
        tf.debugging.assert_non_negative(tf.square(x)),
    ]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.debugging.check_numerics(tf.identity(x), "not finite")


for _function_of_rows in (
    _branch,
    _branch_by_rows,
    _case,
    _loop,
    _loop_until_the_batch_is_small,
    _mapped_rows,
    _mapped_columns,
    _mapped_at_once,
    _scanned_rows,
    _folded_rows,
    _scanned_by_keras,
    _array_of_tensors,
    _branch_within_a_loop,
    _function,
    _asserted,
):
    CONTROL.layers(
        _function_of_rows.__name__.removeprefix("_"),
        lambda function=_function_of_rows: _dense(
            layers.Lambda(function, output_shape=(5,))
        ),
    )


@CONTROL.add
def assertion_that_fails(env: Env) -> dict:
    def checked(x: Any) -> Any:
        tf.debugging.assert_less(
            tf.reduce_sum(tf.cast(x[:, 0] > 0, tf.int32)), 7, "too many rows above 0"
        )
        return x

    with env.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Lambda(checked, output_shape=(6,)),
                layers.Dense(1),
            ]
        )
        model.compile(sgd(), loss="mse")
    x = np.abs(FEATURES[:12])
    try:
        fit(env, model, x, targets(x))
    except tf.errors.InvalidArgumentError as error:
        return {"said": np.array("too many rows above 0" in str(error))}
    return {"said": np.array(False)}


@case(
    "`tf.print` and `tf.summary`: once for a step, not for a replica",
    setups=("mirrored",),
    compare=False,
)
def prints_and_summaries_are_made_once(env: Env) -> dict:
    printed, folder = env.tmp / "printed.txt", env.tmp / "summaries"
    writer = tf.summary.create_file_writer(str(folder))

    class Model(Perceptron):
        def train_step(self, data: tuple) -> dict:
            x, _ = data
            total = tf.reduce_sum(x)
            tf.print("rows", tf.shape(x)[0], output_stream=f"file://{printed}")
            with writer.as_default(step=self.optimizer.iterations.value):
                tf.summary.scalar("total", total)
            return super().train_step(data)

    fit_model(env, Model, epochs=1)
    writer.flush()
    assert printed.read_text().split("\n") == ["rows 15", "rows 15", "rows 1", ""]
    found = [
        tf.make_ndarray(value.tensor).item()
        for path in folder.iterdir()
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    ]
    expected = [FEATURES[i:][:BATCH_SIZE].sum() for i in (0, 15, 30)]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    return {}


register(
    "programs_of_layers",
    "layers that draw, or couple rows in Python",
    named(
        "dropout",
        "draws_in_loops",
        "python",
        of=[*DRAWS, *FUNCTIONS],
    ),
)
for _name, _covers, _programs in (
    ("layers_of_statistics_of_a_batch", "layers that couple rows", STATISTICS),
    ("augmentations_draw_as_one_device", "augmentation layers", AUGMENTATIONS),
    ("layers_draw_as_one_device", "random numbers of layers", DRAWS),
    ("normalizations_are_those_of_one_device", "normalization", NORMALIZATIONS),
    ("recurrent_layers_and_wrappers", "recurrent layers", RECURRENT),
    ("functions_of_tensorflow_in_layers", "Lambda with anything", FUNCTIONS),
    ("control_flow_in_layers", "branches, loops, assertions", CONTROL),
):
    register(_name, _covers, _programs, same_as="programs_of_layers")
