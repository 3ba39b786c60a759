"""Keras `fit` of several models on one device and under tfdp, with XLA or without.

It has the kernels that the process was started with.
"""

from __future__ import annotations

import contextlib
from typing import Any

from tfdp.launch.bench.channel import OnDemand, Variant, Variants, work

# Samples of a replica; of an MLP of another size its name tells them.
BATCH_SIZES = {"mlp": 32, "cnn": 16, "transformer": 8, "lstm": 32, "embedding": 256}
# Units of two hidden layers, by millions of parameters.
UNITS = {"1": 680, "5": 1860, "20": 4088}


def build(name: str) -> Any:
    """Make a model of ten classes.

    Args:
        name: String, a key of `BATCH_SIZES`, or `mlp-MILLIONS-ROWS`.
    """
    import keras

    layers = keras.layers
    if name == "mlp":
        parts = [
            keras.Input((784,)),
            layers.Dense(1024, activation="relu"),
            layers.BatchNormalization(),
            layers.Dense(1024, activation="relu"),
        ]
    elif name == "cnn":
        parts = [keras.Input((32, 32, 3))]
        for filters in (32, 32, 64, 64):
            parts += [
                layers.Conv2D(filters, 3, padding="same", use_bias=False),
                layers.BatchNormalization(),
                layers.Activation("relu"),
            ]
            if len(parts) in (7, 13):
                parts.append(layers.MaxPooling2D())
        parts.append(layers.GlobalAveragePooling2D())
    elif name == "lstm":
        parts = [keras.Input((64, 32)), layers.LSTM(128)]
    elif name == "embedding":
        inputs = keras.Input((16,), dtype="int32")
        parts = [inputs, layers.Embedding(50_000, 64), layers.GlobalAveragePooling1D()]
    elif name == "transformer":
        return _transformer()
    else:
        units = UNITS[name.split("-")[1]]
        hidden = [layers.Dense(units, activation="relu") for _ in range(2)]
        parts = [keras.Input((units // 4,)), *hidden]
    return keras.Sequential([*parts, layers.Dense(10)])


def _transformer() -> Any:
    import keras

    layers = keras.layers
    inputs = keras.Input((64,), dtype="int32")
    x = layers.Embedding(128, 128)(inputs)
    for _ in range(2):
        norm = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, 32)(norm, norm, use_causal_mask=True)
        norm = layers.LayerNormalization()(x)
        x = x + layers.Dense(128)(layers.Dense(512, activation="gelu")(norm))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def _batch(model: Any, size: int) -> tuple:
    import numpy as np

    rng = np.random.default_rng(0)
    shape = (size, *model.input_shape[1:])
    y = rng.integers(0, 10, size)
    if model.input_dtype == "int32":
        return rng.integers(0, 128, shape).astype("int32"), y
    return rng.normal(size=shape).astype("float32"), y


def fit_variant(strategy: Any, name: str, *, jit_compile: bool) -> Variant:
    """Seconds per step of `fit`, from the end of the first step on.

    Args:
        strategy: Strategy or `None`.
        name: String, the model.
        jit_compile: Bool, as of `compile`.
    """
    import keras

    from tfdp.launch.bench.fit import timed_fit

    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = build(name)
        model.compile(
            keras.optimizers.Adam(1e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=jit_compile,
        )
    num_replicas = strategy.num_replicas_in_sync if strategy else 1
    rows = BATCH_SIZES.get(name) or int(name.rpartition("-")[2])
    return timed_fit(model, _batch(model, rows * num_replicas))


def make_variants(setup: dict[str, Any]) -> Variants:
    strategies = _workers(setup) if len(setup["addresses"]) > 1 else _devices()

    def make(variant: str) -> Variant:
        name, who, how = variant.split("/")
        return fit_variant(strategies[who], name, jit_compile=how == "jit")

    return OnDemand(make, lambda variant: variant.partition("/")[0])


def _devices() -> dict[str, Any]:
    import tfdp

    devices = tfdp.testing.logical_cpus(2)
    return {
        "plain": None,
        "one": tfdp.MirroredStrategy(devices[:1]),
        "two": tfdp.MirroredStrategy(devices),
    }


def _workers(setup: dict[str, Any]) -> dict[str, Any]:
    """Reduces as gradients come, and all of them after the backward pass."""
    import tfdp
    from tfdp.launch.bench.training import make_strategy

    last = tfdp.CommunicationOptions(bucket_mb=1000.0, first_bucket_mb=1000.0)
    return {
        "workers": make_strategy(setup),
        "one bucket": tfdp.MultiWorkerMirroredStrategy(communication=last),
    }


if __name__ == "__main__":
    work(make_variants)
