"""The models that are timed, with a fixed batch for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from examples.char_transformer import CONTEXT, VOCABULARY
from examples.char_transformer import build_model as char_transformer

Batch = tuple[np.ndarray, np.ndarray]

DESCRIPTIONS = {
    "mlp": "MLP 784-1024-1024-10, 1.86 million parameters",
    "transformer": "character transformer, 6 blocks of width 512, sequence length 64, "
    "19.1 million parameters",
}


def mlp() -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((784,)),
            layers.Dense(1024, activation="relu"),
            layers.Dense(1024, activation="relu"),
            layers.Dense(10),
        ]
    )


def mlp_batch(size: int) -> Batch:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(size, 784)).astype("float32")
    return x, generator.integers(0, 10, size)


def transformer() -> Any:
    return char_transformer(width=512, num_blocks=6, num_heads=8)


def transformer_batch(size: int) -> Batch:
    generator = np.random.default_rng(0)
    ids = generator.integers(0, VOCABULARY, (size, CONTEXT + 1)).astype("int32")
    return ids[:, :-1], ids[:, 1:]


MODELS: dict[str, tuple[Callable[[], Any], Callable[[int], Batch]]] = {
    "mlp": (mlp, mlp_batch),
    "transformer": (transformer, transformer_batch),
}
