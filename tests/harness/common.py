"""Small data, small models and the training that most cases share."""

from __future__ import annotations

import collections.abc
import typing

import keras
import numpy as np
import tensorflow as tf

from tests.harness.env import Env

# 12 batches, so 12 updates, in one epoch: a new epoch costs a new iterator.
NUM_SAMPLES = 96
NUM_FEATURES = 6
NUM_CLASSES = 3
NUM_TOKENS = 12
LENGTH = 5
BATCH_SIZE = 8
EPOCHS = 1

Build = collections.abc.Callable[[], keras.Model]


def features(num_samples: int = NUM_SAMPLES, seed: int = 0) -> np.ndarray:
    """Returns normal features of shape `(num_samples, NUM_FEATURES)`."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(num_samples, NUM_FEATURES)).astype("float32")


def targets(x: np.ndarray) -> np.ndarray:
    """Returns targets of shape `(num_samples, 1)` that depend on the features."""
    return (np.sin(x[:, :1]) + 0.5 * x[:, 1:2] - 0.3).astype("float32")


def labels(x: np.ndarray) -> np.ndarray:
    """Returns int32 labels of shape `(num_samples,)` below `NUM_CLASSES`."""
    return np.argmax(x[:, :NUM_CLASSES], axis=1).astype("int32")


def tokens(num_samples: int = NUM_SAMPLES, seed: int = 0) -> np.ndarray:
    """Returns int32 tokens of shape `(num_samples, LENGTH)`, 0 at some ends."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, NUM_TOKENS - 2, size=(num_samples, LENGTH))
    lengths = rng.integers(2, LENGTH + 1, size=(num_samples, 1))
    return np.where(np.arange(LENGTH) < lengths, ids, 0).astype("int32")


def regression_data(num_samples: int = NUM_SAMPLES, seed: int = 0) -> tuple:
    """Returns features and targets."""
    x = features(num_samples, seed)
    return x, targets(x)


def classification_data(num_samples: int = NUM_SAMPLES, seed: int = 0) -> tuple:
    """Returns features and labels."""
    x = features(num_samples, seed)
    return x, labels(x)


def token_data(num_samples: int = NUM_SAMPLES, seed: int = 0) -> tuple:
    """Returns tokens and targets."""
    x = tokens(num_samples, seed)
    return x, (x.mean(axis=1, keepdims=True) / 6 - 1).astype("float32")


def mlp(units: int = 4, outputs: int = 1, **options: typing.Any) -> keras.Model:
    """Returns a two-layer perceptron; options go to the hidden layer."""
    return keras.Sequential(
        [
            keras.Input((NUM_FEATURES,)),
            keras.layers.Dense(units, activation="tanh", **options),
            keras.layers.Dense(outputs),
        ]
    )


def compiled(
    model: keras.Model,
    optimizer: typing.Any = None,
    loss: typing.Any = "mse",
    **options: typing.Any,
) -> keras.Model:
    """Compiles with SGD with momentum, unless told otherwise."""
    optimizer = optimizer or keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer=optimizer, loss=loss, **options)
    return model


def build_in_scope(env: Env, build: Build) -> keras.Model:
    """Builds a model in the scope of the strategy of the set-up."""
    with env.scope():
        return build()


def fit(model: keras.Model, *data: typing.Any, **options: typing.Any) -> dict:
    """Fits silently and in order; returns the history."""
    options = {"batch_size": BATCH_SIZE, "epochs": EPOCHS, "shuffle": False} | options
    if not isinstance(data[0], (np.ndarray, tf.Tensor, dict, tuple, list)):
        options.pop("batch_size")
    return model.fit(*data, verbose=0, **options).history


def train(env: Env, build: Build, *data: typing.Any, **options: typing.Any) -> dict:
    """Builds in scope, fits, and returns history and weights."""
    model = build_in_scope(env, build)
    history = fit(model, *data, **options)
    return {"history": history, "weights": env.weights(model)}


def batched(*arrays: typing.Any, batch_size: int = BATCH_SIZE) -> tf.data.Dataset:
    """Returns a dataset of global batches, the same on every worker."""
    data = arrays if len(arrays) > 1 else arrays[0]
    return tf.data.Dataset.from_tensor_slices(data).batch(batch_size)
