"""Dropout: another mask on each replica, the same again from the same seed."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as


def _masks(env: Env) -> np.ndarray:
    """Returns one mask per replica of all workers, of two steps each."""
    keras.utils.set_random_seed(7)
    with env.scope():
        layer = keras.layers.Dropout(0.5)
        layer.build((4, 16))

    @tf.function
    def masks():
        def step():
            return layer(tf.ones((4, 16)), training=True)[None]

        return env.strategy.gather(env.strategy.run(step), axis=0)

    return np.stack([masks().numpy(), masks().numpy()])


@case(
    "Wrong numbers: Dropout, the same mask on both replicas",
    compare=False,
)
def dropout_masks_differ_between_replicas_and_steps(env: Env) -> dict:
    masks = _masks(env)
    flat = masks.reshape(2 * env.num_replicas, -1)
    assert len(np.unique(flat, axis=0)) == len(flat), "two masks are the same"
    np.testing.assert_array_equal(_masks(env), masks, "another mask, same seed")
    return {"masks": masks}


@case("Dropout: reproducible from the seed through `fit`", compare=False)
@same_as("dropout_masks_differ_between_replicas_and_steps")
def fit_with_dropout_is_reproducible(env: Env) -> dict:
    def build():
        model = keras.Sequential(
            [
                keras.Input((common.NUM_FEATURES,)),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(1),
            ]
        )
        return common.compiled(model)

    runs = []
    for _ in range(2):
        keras.backend.clear_session()
        keras.utils.set_random_seed(11)
        runs.append(common.train(env, build, *common.regression_data(), epochs=1))
    first, second = runs
    for path, value in first["weights"].items():
        np.testing.assert_array_equal(second["weights"][path], value)
    return first


@case("Variables that a traced function creates in the scope", setups=("mirrored",))
def random_initial_value_of_traced_function(env: Env) -> dict:
    created = []

    @tf.function
    def draw(part: tf.Tensor) -> tf.Tensor:
        if not created:
            created.append(tf.Variable(lambda: tf.random.normal(())))
            created.append(tf.Variable(lambda: tf.reduce_mean(part)))
        return tf.random.normal(())

    tf.random.set_seed(5)
    with env.scope():
        drawn = [draw(tf.ones(3)), *created, tf.random.normal(())]
    return {"drawn": [float(tf.convert_to_tensor(each)) for each in drawn]}


@case(
    "initial values of several messages",
    compare=False,
    quick_setup="two_by_two",
)
def all_workers_start_from_the_first_ones_values(env: Env) -> dict:
    rank = env.strategy.extended.first_rank
    sizes = (3, 3 * 2**19 + 1, 0, 5)  # one of them takes two messages
    with env.scope():
        variables = [
            tf.Variable(np.arange(size, dtype="float32") + rank) for size in sizes
        ]
    for variable, size in zip(variables, sizes, strict=True):
        for part in env.strategy.experimental_local_results(variable):
            np.testing.assert_array_equal(part.numpy(), np.arange(size))
    return {}
