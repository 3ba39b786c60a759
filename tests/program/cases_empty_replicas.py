"""A batch of one row: all replicas but one have none, in every kind of layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tests.exactness.cases_exactness import precision
from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as

layers = keras.layers
# One row, a batch that does not divide, and one row again.
NUM_ROWS = (1, 7, 1)


def branches(inputs: Any, kinds: dict[str, Callable]) -> keras.Model:
    """Return a model whose branches, one for each kind of layer, are added up."""
    found = [
        layers.Dense(1, name=f"{name}_head")(make(inputs))
        for name, make in kinds.items()
    ]
    return keras.Model(inputs, layers.Add()(found))


def train_on_few_rows(env: Env, build: Callable, x: np.ndarray) -> dict:
    """Train, test and predict on batches of `NUM_ROWS`."""
    y = np.sin(np.arange(len(x))).astype("float32")[:, None]
    model = common.build_in_scope(
        env,
        lambda: common.compiled(build(), keras.optimizers.SGD(0.01), metrics=["mae"]),
    )
    results: dict[str, Any] = {}
    begin = 0
    for place, count in enumerate(NUM_ROWS):
        rows = slice(begin, begin + count)
        begin += count
        results[str(place)] = {
            "train": model.train_on_batch(x[rows], y[rows], return_dict=True),
            "test": model.test_on_batch(x[rows], y[rows], return_dict=True),
            "predict": model.predict_on_batch(x[rows]),
        }
    history = model.fit(common.batched(x[:8], y[:8], batch_size=7), verbose=0).history
    return {**results, "history": history, "weights": env.weights(model)}


def flat(*stack: Any) -> Callable:
    """Return a branch of layers that ends in a vector for each row."""

    def call(h: Any) -> Any:
        for layer in (*stack, layers.Flatten()):
            h = layer(h)
        return h

    return call


@case(
    "Convolutions and poolings on replicas without rows",
    deadline_seconds=300.0,
)
@same_as("batch_normalization_survives_a_tiny_batch")
def images_on_replicas_without_rows(env: Env) -> dict:
    def build() -> keras.Model:
        return branches(
            keras.Input((6, 6, 2)),
            {
                "convolution": flat(layers.Conv2D(3, 3, activation="tanh")),
                "strided": flat(layers.Conv2D(3, 2, strides=2, padding="same")),
                "dilated": flat(layers.Conv2D(3, 2, dilation_rate=2)),
                "grouped": flat(layers.Conv2D(4, 3, groups=2)),
                "transposed": flat(layers.Conv2DTranspose(2, 3, strides=2)),
                "separable": flat(layers.SeparableConv2D(3, 2)),
                "depthwise": flat(layers.DepthwiseConv2D(2)),
                "maximum": flat(layers.Conv2D(2, 1), layers.MaxPooling2D(2)),
                "average": flat(layers.Conv2D(2, 1), layers.AveragePooling2D(2)),
                "global_maximum": flat(
                    layers.Conv2D(2, 1), layers.GlobalMaxPooling2D()
                ),
                "global_average": flat(
                    layers.Conv2D(2, 1), layers.GlobalAveragePooling2D()
                ),
                "upsampled": flat(
                    layers.Conv2D(2, 1), layers.UpSampling2D(interpolation="bilinear")
                ),
                "resized": flat(layers.Conv2D(2, 1), layers.Resizing(4, 5)),
                "padded": flat(layers.ZeroPadding2D(1), layers.Cropping2D(2)),
                "volumes": flat(
                    layers.Reshape((6, 6, 2, 1)),
                    layers.Conv3D(2, 2),
                    layers.MaxPooling3D((2, 2, 1)),
                    layers.AveragePooling3D((2, 2, 1)),
                ),
                "sequences": flat(
                    layers.Reshape((36, 2)),
                    layers.Conv1D(3, 3, padding="causal"),
                    layers.MaxPooling1D(2),
                    layers.Conv1DTranspose(2, 3),
                    layers.AveragePooling1D(2),
                ),
            },
        )

    x = np.random.default_rng(0).normal(size=(sum(NUM_ROWS), 6, 6, 2))
    return train_on_few_rows(env, build, x.astype("float32"))


@case(
    "Normalization layers on replicas without rows",
    deadline_seconds=300.0,
    tol=1e-9,
)
@same_as("an_option_makes_each_batch_normalization_global")
def normalizations_on_replicas_without_rows(env: Env) -> dict:
    def build() -> keras.Model:
        return branches(
            keras.Input((6, 6, 2)),
            {
                "batch": flat(layers.BatchNormalization(synchronized=True)),
                "batch_after_convolution": flat(
                    layers.Conv2D(4, 3, use_bias=False),
                    layers.BatchNormalization(synchronized=True),
                    layers.ReLU(),
                ),
                "layer": flat(layers.LayerNormalization()),
                "group": flat(layers.Conv2D(4, 1), layers.GroupNormalization(2)),
                "unit": flat(layers.UnitNormalization()),
                "spectral": flat(layers.SpectralNormalization(layers.Conv2D(2, 2))),
                "root_mean_square": flat(layers.RMSNormalization()),
            },
        )

    x = np.random.default_rng(0).normal(size=(sum(NUM_ROWS), 6, 6, 2))
    # Offsets are small differences of moments, of which float32 leaves little.
    with precision("float64"):
        return train_on_few_rows(env, build, x)


@case(
    "Local BatchNormalization on replicas without rows",
    compare=False,
    deadline_seconds=300.0,
)
@same_as("local_normalization_keeps_the_contract_of_keras")
def local_normalization_on_replicas_without_rows(env: Env) -> dict:
    def build() -> keras.Model:
        return branches(
            keras.Input((6, 6, 2)), {"batch": flat(layers.BatchNormalization())}
        )

    x = np.random.default_rng(0).normal(size=(sum(NUM_ROWS), 6, 6, 2))
    results = train_on_few_rows(env, build, x.astype("float32"))
    for name, weight in results["weights"].items():
        assert np.isfinite(weight).all(), name
    return {"weights": results["weights"], "history": results["history"]}


def attention(h: Any) -> Any:
    return layers.Flatten()(
        layers.MultiHeadAttention(2, 4, use_bias=False)(h, h, use_causal_mask=True)
    )


def of_tokens(kinds: dict[str, Callable]) -> keras.Model:
    """Return a model whose branches begin with embedded tokens and a mask."""
    inputs = keras.Input((common.LENGTH,), dtype="int32")
    h = layers.Embedding(common.NUM_TOKENS, 4, mask_zero=True)(inputs)
    found = [
        layers.Dense(1, name=f"{name}_head")(make(h)) for name, make in kinds.items()
    ]
    return keras.Model(inputs, layers.Add()(found))


@case("Attention and embeddings where the last batch has one row")
@same_as("partial_last_batch_of_unequal_shares")
def a_last_batch_of_one_row(env: Env) -> dict:
    kinds: dict[str, Callable] = {
        "attention": attention,
        "pooled": layers.GlobalAveragePooling1D(),
    }
    rows = common.batched(*common.token_data(8), batch_size=7)
    model = common.build_in_scope(env, lambda: common.compiled(of_tokens(kinds)))
    history = common.fit(model, rows, validation_data=rows)
    predicted = model.predict(rows, verbose=0)
    return {
        "history": history,
        "predicted": predicted,
        "weights": env.weights(model),
    }


@case(
    "Recurrence, attention and embeddings on replicas without rows",
    deadline_seconds=300.0,
)
@same_as("partial_last_batch_of_unequal_shares")
def sequences_on_replicas_without_rows(env: Env) -> dict:
    def build() -> keras.Model:
        kinds: dict[str, Callable] = {
            "attention": attention,
            "lstm": layers.LSTM(3),
            "gru": flat(layers.Bidirectional(layers.GRU(3, return_sequences=True))),
            "simple": layers.SimpleRNN(3),
            "time_distributed": flat(layers.TimeDistributed(layers.Dense(2))),
            "pooled": layers.GlobalAveragePooling1D(),
            "highest": layers.GlobalMaxPooling1D(),
            "dot": lambda h: layers.Flatten()(layers.Dot(axes=2)([h, h])),
            "additive": lambda h: layers.Flatten()(
                layers.AdditiveAttention(use_scale=False)([h, h])
            ),
        }
        return of_tokens(kinds)

    return train_on_few_rows(env, build, common.tokens(sum(NUM_ROWS)))


@case(
    "Augmentation and Dropout on replicas without rows",
    deadline_seconds=300.0,
)
@same_as("partial_last_batch_of_unequal_shares")
def augmentation_on_replicas_without_rows(env: Env) -> dict:
    def build() -> keras.Model:
        return branches(
            keras.Input((6, 6, 3)),
            {
                "flipped": flat(layers.RandomFlip(seed=1)),
                "moved": flat(layers.RandomTranslation(0.2, 0.2, seed=2)),
                "turned": flat(layers.RandomRotation(0.2, seed=3)),
                "zoomed": flat(layers.RandomZoom(0.2, seed=4)),
                "contrast": flat(layers.RandomContrast(0.3, seed=5)),
                "brightness": flat(
                    layers.RandomBrightness(0.3, value_range=(-3, 3), seed=6)
                ),
                "dropped": flat(layers.Dropout(0.3, seed=8)),
                "spatially": flat(layers.SpatialDropout2D(0.3, seed=9)),
                "noisy": flat(layers.GaussianNoise(0.1, seed=10)),
                "multiplied": flat(layers.GaussianDropout(0.1, seed=11)),
            },
        )

    x = np.random.default_rng(0).normal(size=(sum(NUM_ROWS), 6, 6, 3))
    return train_on_few_rows(env, build, x.astype("float32"))
