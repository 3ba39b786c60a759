"""Five models, two optimizers, 12 updates: history, weights and slots."""

from __future__ import annotations

import functools

import keras
import numpy as np

from tests.harness import common, registry
from tests.harness.env import Env

layers = keras.layers
# 6 batches, twice: 12 updates in two epochs.
NUM_SAMPLES = 48
EPOCHS = 2


def mlp() -> tuple:
    """A perceptron that classifies."""
    model = common.mlp(8, common.NUM_CLASSES)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return model, loss, ["accuracy"], common.classification_data(NUM_SAMPLES)


def cnn() -> tuple:
    """A convolutional network with synchronized batch normalization."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            # A bias before the normalization would have no gradient.
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(synchronized=True),
            layers.Activation("gelu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(common.NUM_CLASSES),
        ]
    )
    images = np.random.default_rng(3).normal(size=(NUM_SAMPLES, 8, 8, 1))
    x = images.astype("float32")
    y = common.labels(x.reshape(NUM_SAMPLES, -1))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return model, loss, ["accuracy"], (x, y)


def embedding_lstm() -> tuple:
    """An LSTM over embedded tokens with a mask."""
    model = keras.Sequential(
        [
            keras.Input((common.LENGTH,), dtype="int32"),
            layers.Embedding(common.NUM_TOKENS, 4, mask_zero=True),
            layers.LSTM(4),
            layers.Dense(1),
        ]
    )
    return model, "mse", ["mae"], common.token_data(NUM_SAMPLES)


def transformer() -> tuple:
    """One pre-norm block of a transformer over embedded tokens."""
    ids = keras.Input((common.LENGTH,), dtype="int32")
    x = layers.Embedding(common.NUM_TOKENS, 8)(ids)
    h = layers.LayerNormalization()(x)
    attention = layers.MultiHeadAttention(2, 4)
    x = x + attention(h, h, use_causal_mask=True)
    h = layers.LayerNormalization()(x)
    x = x + layers.Dense(8)(layers.Dense(16, activation="gelu")(h))
    outputs = layers.Dense(common.NUM_TOKENS)(x)
    tokens = common.tokens(NUM_SAMPLES)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    data = tokens, np.roll(tokens, -1, axis=1)
    return keras.Model(ids, outputs), loss, ["accuracy"], data


def multi_output() -> tuple:
    """Two outputs with losses of different weight and metrics of their own."""
    inputs = keras.Input((common.NUM_FEATURES,))
    h = layers.Dense(6, activation="tanh")(inputs)
    value = layers.Dense(1, name="value")(h)
    kind = layers.Dense(common.NUM_CLASSES, name="kind")(h)
    model = keras.Model(inputs, {"value": value, "kind": kind})
    x = common.features(NUM_SAMPLES)
    loss = {
        "value": "mse",
        "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    }
    metrics = {"value": ["mae"], "kind": ["accuracy"]}
    y = {"value": common.targets(x), "kind": common.labels(x)}
    return model, loss, metrics, (x, y)


def train(env: Env, build, optimizer) -> dict:
    """Trains 12 updates; returns history, weights and optimizer variables."""
    with env.scope():
        model, loss, metrics, data = build()
        model.compile(optimizer=optimizer(), loss=loss, metrics=metrics)
    history = common.fit(model, *data, epochs=EPOCHS)
    return {
        "history": history,
        "weights": env.weights(model),
        "optimizer": env.read(model.optimizer.variables),
    }


MODELS = (mlp, cnn, embedding_lstm, transformer, multi_output)
OPTIMIZERS = {
    "sgd": functools.partial(keras.optimizers.SGD, 0.05, momentum=0.9),
    "adamw": functools.partial(keras.optimizers.AdamW, 0.01),
}
# A cell of the matrix trains a transformer block and a normalized convolution, too.
SAME_AS = {
    cnn: "loss_scale_optimizer_with_everything_in_float32",
    embedding_lstm: "masked_lstm",
    transformer: "loss_scale_optimizer_with_everything_in_float32",
    multi_output: "dict_inputs",
}
KEY_BIAS = {"*key*bias*": "softmax ignores it: its exact gradient is zero"}

for _model in MODELS:
    for _kind, _optimizer in OPTIMIZERS.items():
        _name = f"{_model.__name__}_with_{_kind}"

        def _function(env: Env, build=_model, optimizer=_optimizer) -> dict:
            return train(env, build, optimizer)

        registry.register(
            _name,
            _function,
            "Plain training",
            quick_setup="two_workers" if _kind == "sgd" else "two_by_two",
            same_as=SAME_AS.get(_model, ""),
            skip=KEY_BIAS if _model is transformer else {},
        )
