"""What tfdp saves opens in plain Keras, and the other way round."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as


def _build() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((common.NUM_FEATURES,)),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dense(4, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )
    return common.compiled(model, keras.optimizers.Adam(0.01))


@case("`save`, `save_weights`, `export` open in plain Keras", reference_last=True)
def saved_files_open_in_plain_keras(env: Env) -> dict:
    """One device opens what the set-up saved: the process has no tfdp."""
    x, y = common.regression_data(32)
    whole, weights = str(env.tmp / "m.keras"), str(env.tmp / "m.weights.h5")
    exported = str(env.tmp / "exported")
    if env.is_reference:
        model = keras.models.load_model(whole)
        fresh = _build()
        fresh.load_weights(weights)
        loaded = tf.saved_model.load(exported)
        return _continued(env, model, {"fresh": fresh.predict, "served": loaded.serve})
    model = common.build_in_scope(env, _build)
    common.fit(model, x, y)
    # Every worker asks to save to the same path.
    model.save(whole)
    model.save_weights(weights)
    model.export(exported, verbose=False)
    env.wait_for_all("saved")
    return _continued(env, model, {"fresh": model.predict, "served": model.predict})


def _continued(env: Env, model: keras.Model, callables: dict) -> dict:
    """Returns what is predicted, and what training goes on to."""
    x, y = common.regression_data(32)
    predicted = {name: np.asarray(call(x)) for name, call in callables.items()}
    return {
        "predict": model.predict(x, batch_size=8, verbose=0),
        "iterations": model.optimizer.iterations.numpy(),
        **predicted,
        "history": common.fit(model, x, y),
        "weights": {f"{i}": w.numpy() for i, w in enumerate(model.weights)},
    }


@case("`tf.train.Checkpoint` and SavedModels of all workers at one path")
@same_as("checkpoints_at_one_path")
def checkpoints_of_tensorflow_at_one_path(env: Env) -> dict:
    """Workers that save at the same time do not touch each other's files."""
    x, y = common.regression_data(32)
    model = common.build_in_scope(env, _build)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    manager = tf.train.CheckpointManager(checkpoint, str(env.tmp / "managed"), 2)
    for index in range(3):
        common.fit(model, x, y)
        env.wait_for_all(f"trained {index}")
        manager.save()
        checkpoint.write(str(env.tmp / "written"))
        tf.saved_model.save(model, str(env.tmp / "served"))
    env.wait_for_all("saved")
    common.fit(model, x, y)
    env.wait_for_all("trained on")
    checkpoint.restore(manager.latest_checkpoint).assert_existing_objects_matched()
    restored = model.predict(x, batch_size=8, verbose=0)
    served = tf.saved_model.load(str(env.tmp / "served")).signatures["serving_default"]
    return {
        "restored": restored,
        "served": next(iter(served(tf.constant(x)).values())).numpy(),
        "files": len(list((env.tmp / "managed").glob("*"))),
        "left": len(list(env.tmp.glob("*/.*"))) + len(list(env.tmp.glob(".*.written"))),
    }


@case("`tf.train.Checkpoint` of all workers at one path")
@same_as("checkpoints_at_one_path")
def checkpoint_of_tensorflow_at_one_path(env: Env) -> dict:
    x, y = common.regression_data(32)
    model = common.build_in_scope(env, lambda: common.compiled(common.mlp()))
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    manager = tf.train.CheckpointManager(checkpoint, str(env.tmp / "managed"), 1)
    common.fit(model, x, y)
    for index in range(2):
        env.wait_for_all(f"before {index}")
        manager.save()
        checkpoint.write(str(env.tmp / "written"))
    env.wait_for_all("saved")
    common.fit(model, x, y)
    env.wait_for_all("trained on")
    checkpoint.restore(manager.latest_checkpoint).assert_existing_objects_matched()
    return {
        "weights": env.weights(model),
        "iterations": model.optimizer.iterations.numpy(),
        "files": len(list((env.tmp / "managed").glob("*"))),
        "left": len(list(env.tmp.glob("*/.*"))) + len(list(env.tmp.glob(".*.written"))),
    }


@case(
    "A file name that Keras refuses: the error has the name that was given",
    quick_setup="two_workers",
)
def refused_file_name(env: Env) -> dict:
    given = str(env.tmp / "model")
    model = common.build_in_scope(env, _build)
    try:
        model.save(given)
    except ValueError as error:
        return {"names_the_file": float(f"filepath={given}." in str(error))}
    return {"names_the_file": -1.0}


@case("Saving on the chief alone does not hang", reference_last=True)
@same_as("saving_alone_inside_the_scope")
def saving_on_the_chief_alone(env: Env) -> dict:
    whole = str(env.tmp / "m.keras")
    x, y = common.regression_data(32)
    if env.is_reference:
        return _continued(env, keras.models.load_model(whole), {})
    model = common.build_in_scope(env, _build)
    common.fit(model, x, y)
    if env.is_chief:
        model.save(whole)
    env.wait_for_all("saved")
    return _continued(env, model, {})


@case("Files of plain Keras open under the strategy and training goes on")
@same_as("saved_files_open_in_plain_keras")
def plain_files_open_under_the_strategy(env: Env) -> dict:
    whole, weights = str(env.tmp / "m.keras"), str(env.tmp / "m.weights.h5")
    x, y = common.regression_data(32)
    if env.is_chief:
        plain = _build()
        common.fit(plain, x, y, epochs=1)
        plain.save(whole)
        plain.save_weights(weights)
    env.wait_for_all("saved")
    keras.utils.set_random_seed(3)
    with env.scope():
        model = keras.models.load_model(whole)
        fresh = _build()
    fresh.load_weights(weights)
    return {
        "history": common.fit(model, x, y, epochs=2),
        "weights": env.read(model.weights),
        "iterations": model.optimizer.iterations.numpy(),
        "fresh": fresh.predict(x, batch_size=8, verbose=0),
    }


@case("`get_weights` and `set_weights`")
@same_as("saved_files_open_in_plain_keras")
def set_weights_under_the_strategy(env: Env) -> dict:
    model = common.build_in_scope(env, _build)
    values = [np.full(w.shape, 0.1 * (i + 1)) for i, w in enumerate(model.weights)]
    model.set_weights(values)
    for got, value in zip(model.get_weights(), values, strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-6)
    x, y = common.regression_data(32)
    return {"history": common.fit(model, x, y), "weights": env.weights(model)}
