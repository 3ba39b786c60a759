"""Layers whose statistics are of the batch or of the weights."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.exactness.cases_exactness import precision
from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as
from tests.reduction.cases_plans import collectives

layers = keras.layers


def _with_normalization(synchronized: bool) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((common.NUM_FEATURES,)),
            layers.BatchNormalization(synchronized=synchronized, momentum=0.8),
            layers.Dense(4, activation="tanh"),
            layers.Dense(1),
        ]
    )


@case("Synchronized BatchNormalization")
@same_as("an_option_makes_each_batch_normalization_global")
def synchronized_batch_normalization(env: Env) -> dict:
    return _synchronized(env)


@case("Synchronized BatchNormalization in validation")
@same_as("an_option_makes_each_batch_normalization_global")
def validation_with_synchronized_batch_normalization(env: Env) -> dict:
    return _synchronized(env, validation_data=common.regression_data())


def _synchronized(env: Env, **options) -> dict:
    def build():
        return common.compiled(_with_normalization(True))

    x, y = common.regression_data()
    model = common.build_in_scope(env, build)
    history = common.fit(model, x, y, **options)
    return {
        "history": history,
        "weights": env.weights(model),
        "predict": model.predict(x, batch_size=common.BATCH_SIZE, verbose=0),
    }


def _masked() -> keras.Model:
    """Padding reaches the normalization as a mask; values lie far from zero."""
    inputs = keras.Input((common.LENGTH,), dtype="int32")
    h = layers.Embedding(
        common.NUM_TOKENS,
        4,
        mask_zero=True,
        embeddings_initializer=keras.initializers.RandomUniform(4.0, 6.0, seed=1),
    )(inputs)
    h = layers.BatchNormalization(synchronized=True, momentum=0.8)(h)
    h = layers.LSTM(4)(h)
    return keras.Model(inputs, layers.Dense(1)(h))


def _train_masked(env: Env, dtype: str) -> dict:
    # The last batch has one sample, so that only the first replica has any; and
    # the first half of the first batch is all padding.
    x, y = common.token_data(2 * common.BATCH_SIZE + 1)
    x[: common.BATCH_SIZE // 2] = 0
    with precision(dtype):
        return common.train(
            env, lambda: common.compiled(_masked()), x, y.astype(dtype), epochs=3
        )


@case("Wrong numbers: synchronized BatchNormalization with a mask")
@same_as("an_option_makes_each_batch_normalization_global")
def synchronized_batch_normalization_with_a_mask(env: Env) -> dict:
    results = _train_masked(env, "float32")
    if not env.is_reference:
        _check_collectives_of_masked(env)
    return results


@case("Synchronized BatchNormalization with a mask, float64", tol=1e-9)
@same_as("an_option_makes_each_batch_normalization_global")
def synchronized_batch_normalization_with_a_mask_in_float64(env: Env) -> dict:
    return _train_masked(env, "float64")


def _check_collectives_of_masked(env: Env) -> None:
    """One collective for sum and count, one for the squares around the mean."""
    key, local = env.strategy.extended.group.key, env.setup.devices_per_worker
    model = common.build_in_scope(env, _masked)
    x = tf.constant(common.tokens(4))
    forward = tf.function(lambda: env.strategy.run(lambda: model(x, training=True)))
    found = collectives(forward.get_concrete_function(), "all_reduce", key)
    assert found == 2 * local, found


@case(
    "Wrong numbers: local BatchNormalization, moving statistics not aggregated",
    compare=False,
)
@same_as("local_normalization_keeps_the_contract_of_keras")
def local_batch_normalization_averages_moving_statistics(env: Env) -> dict:
    def build():
        return common.compiled(_with_normalization(False))

    x, y = common.regression_data()
    # Each part of a batch is of its own scale: replicas see other statistics.
    x *= np.tile(np.arange(1, common.BATCH_SIZE + 1), 12)[:, None] / 4
    x = x.astype("float32")
    model = common.build_in_scope(env, build)
    common.fit(model, x, y)
    normalization = model.layers[0]
    mean, variance = np.zeros(common.NUM_FEATURES), np.ones(common.NUM_FEATURES)
    for batch in np.split(x, len(x) // common.BATCH_SIZE):
        shares = np.split(batch, env.num_replicas)
        mean = 0.8 * mean + 0.2 * np.mean([s.mean(0) for s in shares], 0)
        variance = 0.8 * variance + 0.2 * np.mean([s.var(0) for s in shares], 0)
    found = env.read([normalization.moving_mean, normalization.moving_variance])
    for value, expected in zip(found.values(), (mean, variance), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)
    predicted = model.predict(x, batch_size=common.BATCH_SIZE, verbose=0)
    path = str(env.tmp / "model.keras")
    if env.is_chief:
        model.save(path)
    env.wait_for_all("saved")
    plain = keras.models.load_model(path).predict(x, verbose=0)
    np.testing.assert_allclose(predicted, plain, rtol=1e-5, atol=1e-6)
    return {"weights": env.weights(model), "predict": predicted}


@case("SpectralNormalization")
@same_as("an_option_makes_each_batch_normalization_global")
def spectral_normalization(env: Env) -> dict:
    def build():
        model = keras.Sequential(
            [
                keras.Input((common.NUM_FEATURES,)),
                layers.SpectralNormalization(layers.Dense(4, activation="tanh")),
                layers.Dense(1),
            ]
        )
        return common.compiled(model)

    return common.train(env, build, *common.regression_data())


@case("Convolutions and pooling on replicas without samples")
@same_as("batch_normalization_survives_a_tiny_batch")
def convolutions_on_replicas_without_samples(env: Env) -> dict:
    def build():
        model = keras.Sequential(
            [
                keras.Input((6, 6, 2)),
                layers.Conv2D(3, 3, activation="tanh"),
                layers.BatchNormalization(synchronized=True),
                layers.SeparableConv2D(4, 2, activation="tanh"),
                layers.DepthwiseConv2D(2, activation="tanh"),
                layers.Reshape((4, 4)),
                layers.Conv1D(3, 2),
                layers.Reshape((3, 3, 1)),
                layers.MaxPooling2D(2, strides=1, padding="same"),
                layers.AveragePooling2D(2, strides=1),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        return common.compiled(model)

    # The last batch has one sample, so that only the first replica has any.
    x = np.random.default_rng(0).normal(size=(2 * common.BATCH_SIZE + 1, 6, 6, 2))
    x = x.astype("float32")
    y = x.mean(axis=(1, 2, 3))[:, None]
    model = common.build_in_scope(env, build)
    history = common.fit(model, x, y, validation_data=(x, y))
    predicted = model.predict(x, batch_size=common.BATCH_SIZE, verbose=0)
    return {"history": history, "weights": env.weights(model), "predict": predicted}
