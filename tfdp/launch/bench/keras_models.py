"""The models that are timed, built by Keras, with a fixed batch for each."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tfdp.launch.bench.models import (
    CONTEXT,
    IMAGE_CHANNELS,
    IMAGE_SIDE,
    NUM_CLASSES,
    NUM_INPUTS,
    VOCABULARY,
    Model,
)

Batch = tuple[np.ndarray, np.ndarray]
_INPUTS = {"mlp": (NUM_INPUTS,), "cnn": (IMAGE_SIDE, IMAGE_SIDE, IMAGE_CHANNELS)}


def make_batch(model: Model, size: int) -> Batch:
    """Inputs and labels, the same at each call.

    Args:
        model: The `Model` that they are for.
        size: Int, number of samples.

    Returns:
        Tuple of two arrays: `[size, 784]` and `[size]` for an MLP, `[size, 32, 32,
        3]` and `[size]` for a CNN, twice `[size, 64]` for a transformer.
    """
    generator = np.random.default_rng(0)
    if model.family in _INPUTS:
        x = generator.normal(size=(size, *_INPUTS[model.family])).astype("float32")
        return x, generator.integers(0, NUM_CLASSES, size)
    ids = generator.integers(0, VOCABULARY, (size, CONTEXT + 1)).astype("int32")
    return ids[:, :-1], ids[:, 1:]


def build(model: Model) -> Any:
    """Build the Keras model.

    Args:
        model: `Model`.

    Returns:
        A `keras.Model` whose outputs are logits.

    Example:

    >>> build(Model("mlp", 8)).count_params()
    6442
    """
    families = {"mlp": _mlp, "cnn": _cnn, "transformer": _transformer}
    return families[model.family](model)


class TokenAndPosition(keras.layers.Layer):
    """Learned embeddings of the tokens plus learned ones of the positions.

    Args:
        width: Int, their size.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = keras.layers.Embedding(VOCABULARY, width)
        self.positions = keras.layers.Embedding(CONTEXT, width)

    def build(self, input_shape: Any) -> None:
        self.tokens.build(input_shape)
        self.positions.build((CONTEXT,))

    def call(self, ids: Any) -> Any:
        # [batch, CONTEXT, width] + [CONTEXT, width]
        return self.tokens(ids) + self.positions(keras.ops.arange(CONTEXT))


def _mlp(model: Model) -> Any:
    hidden = [keras.layers.Dense(model.width, activation="relu") for _ in range(2)]
    head = keras.layers.Dense(NUM_CLASSES)
    return keras.Sequential([keras.Input((NUM_INPUTS,)), *hidden, head])


def _cnn(model: Model) -> Any:
    layers = keras.layers
    network = keras.Sequential([keras.Input(_INPUTS["cnn"])])
    for channels in model.channels:
        for _ in range(2):
            network.add(layers.Conv2D(channels, 3, padding="same", activation="relu"))
        network.add(layers.MaxPooling2D())
    network.add(layers.GlobalAveragePooling2D())
    network.add(layers.Dense(NUM_CLASSES))
    return network


def _transformer(model: Model) -> Any:
    layers, width = keras.layers, model.width
    ids = keras.Input((CONTEXT,), dtype="int32")
    x = TokenAndPosition(width)(ids)
    for _ in range(model.num_blocks):
        y = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(model.num_heads, width // model.num_heads)
        x = layers.Add()([x, attention(y, y, use_causal_mask=True)])
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * width, activation="gelu")(y)
        x = layers.Add()([x, layers.Dense(width)(y)])
    x = layers.LayerNormalization()(x)
    return keras.Model(ids, layers.Dense(VOCABULARY)(x))
