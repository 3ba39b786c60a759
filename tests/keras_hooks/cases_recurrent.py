"""Recurrent layers, with masks and with state kept between batches."""

from __future__ import annotations

import keras
import numpy as np

from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as

layers = keras.layers


@case("Masked LSTM")
def masked_lstm(env: Env) -> dict:
    def build():
        model = keras.Sequential(
            [
                keras.Input((common.LENGTH, 2)),
                layers.Masking(),
                layers.LSTM(3),
                layers.Dense(1),
            ]
        )
        return common.compiled(model)

    x = np.random.default_rng(1).normal(size=(common.NUM_SAMPLES, common.LENGTH, 2))
    x[::2, 3:] = 0.0
    x = x.astype("float32")
    return common.train(env, build, x, x[:, 0, :1])


@case("GRU")
@same_as("masked_lstm")
def gru(env: Env) -> dict:
    def build():
        model = keras.Sequential(
            [keras.Input((common.LENGTH, 2)), layers.GRU(3), layers.Dense(1)]
        )
        return common.compiled(model)

    x = np.random.default_rng(1).normal(size=(common.NUM_SAMPLES, common.LENGTH, 2))
    x = x.astype("float32")
    return common.train(env, build, x, x[:, 0, :1])


@case("Stateful RNN")
@same_as("masked_lstm")
def stateful_rnn(env: Env) -> dict:
    def build():
        # The layer's state has a row for each sample of the global batch.
        model = keras.Sequential(
            [
                keras.Input(batch_shape=(common.BATCH_SIZE, 4, 2)),
                layers.SimpleRNN(3, stateful=True),
                layers.Dense(1),
            ]
        )
        return common.compiled(model)

    x = np.random.default_rng(1).normal(size=(common.NUM_SAMPLES, 4, 2))
    x = x.astype("float32")
    model = common.build_in_scope(env, build)
    history = common.fit(model, x, x[:, 0, :1])
    return {"history": history, "weights": env.read(model.variables)}
