"""Files, callbacks and user code take a `DistributedOptimizer` for a Keras one."""

from __future__ import annotations

import inspect
import os
import pathlib
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env
from tests.keras_hooks.cases_callbacks import Interrupt, Interrupted
from tests.step.cases_accumulation import Switches, adamw, sgd, trained

case = registry.case
callbacks, optimizers = keras.callbacks, keras.optimizers
SWITCHES = Switches(4, scale=16.0, growth_steps=2)
# One update, and two micro-batches that wait for the next one.
FIRST, REST = slice(0, 48), slice(48, 96)

BLOCKER = """
import sys

class NoTfdp:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tfdp":
            raise ImportError(name)

sys.meta_path.insert(0, NoTfdp())
try:
    import tfdp
except ImportError:
    pass
else:
    sys.exit("tfdp can be imported")
import numpy
"""


def continue_plainly(folder):
    """Opens files with plain Keras and trains on; knows nothing of tfdp."""
    import keras
    import numpy as np

    data = np.load(f"{folder}/data.npz")
    results = {}
    model = keras.models.load_model(f"{folder}/m.keras")
    for name in "whole", "weights":
        if name == "weights":
            # It is trained already: all of this is overwritten.
            model.load_weights(f"{folder}/m.weights.h5")
        outer = model.optimizer
        results[f"{name}/class"] = type(outer).__name__
        results[f"{name}/inner"] = type(outer.inner_optimizer).__name__
        results[f"{name}/scale"] = outer.dynamic_scale.numpy()
        results[f"{name}/predicted"] = model.predict(data["x"], verbose=0)
        model.fit(data["x"], data["y"], batch_size=8, shuffle=False, verbose=0)
        for index, weight in enumerate(model.weights):
            results[f"{name}/{index}"] = weight.numpy()
        results[f"{name}/iterations"] = np.asarray(outer.inner_optimizer.iterations)
    return results


def _in_a_process_without_tfdp(folder: pathlib.Path) -> dict:
    source = inspect.getsource(continue_plainly)
    done = f"results = continue_plainly({str(folder)!r})"
    save = f"numpy.savez({str(folder / 'results.npz')!r}, **results)"
    finished = subprocess.run(
        [sys.executable, "-c", "\n".join([BLOCKER, source, done, save])],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return dict(np.load(folder / "results.npz"))


def _make(**options: Any) -> optimizers.Optimizer:
    averages = {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 3}
    return optimizers.AdamW(0.01, global_clipnorm=0.1, **averages, **options)


def _saved_and_continued(env: Env, model: keras.Model) -> dict:
    """What the process that wrote the files goes on to, in the same loss_terms."""
    optimizer = model.optimizer
    assert optimizer.accumulated_steps == 2
    x, y = (array[REST] for array in common.regression_data())
    single = {
        "class": "LossScaleOptimizer",
        "inner": "AdamW",
        "scale": np.float32(optimizer.loss_scale),
        "predicted": model.predict(x, batch_size=8, verbose=0),
    }
    common.fit(model, x, y)
    single["iterations"] = optimizer.iterations.numpy()
    single |= {f"{index}": w.numpy() for index, w in enumerate(model.weights)}
    return {"whole": single, "weights": single}


def _trained_for_files(env: Env, *chosen: Any) -> keras.Model:
    x, y = common.regression_data()
    with env.scope():
        model = common.compiled(common.mlp(), _make())
    own = SWITCHES.callbacks(env)
    common.fit(model, x[FIRST], y[FIRST], callbacks=[*own, *chosen])
    np.savez(env.tmp / f"{env.rank}.npz", x=x[REST], y=y[REST])
    os.replace(env.tmp / f"{env.rank}.npz", env.tmp / "data.npz")
    return model


@case(
    "ModelCheckpoint's files open where tfdp cannot be imported",
    reference_last=True,
)
@registry.same_as("saved_files_open_in_plain_keras")
def files_open_in_a_process_without_tfdp(env: Env) -> dict:
    if env.is_reference:
        return _in_a_process_without_tfdp(env.tmp)
    model = _trained_for_files(
        env,
        callbacks.ModelCheckpoint(str(env.tmp / "m.keras")),
        callbacks.ModelCheckpoint(
            str(env.tmp / "m.weights.h5"), save_weights_only=True
        ),
    )
    return _saved_and_continued(env, model)


@case(
    "Files that the first of several workers wrote alone",
    reference_last=True,
)
@registry.same_as("saving_alone_inside_the_scope")
def files_of_the_chief_alone_hold_what_all_have_accumulated(env: Env) -> dict:
    if env.is_reference:
        return continue_plainly(env.tmp)
    model = _trained_for_files(env)
    if env.is_chief:
        model.save(str(env.tmp / "m.keras"))
        model.save_weights(str(env.tmp / "m.weights.h5"))
    env.wait_for_all("saved")
    return _saved_and_continued(env, model)


@case("Files of plain Keras go on under the strategy, with callbacks and without")
@registry.same_as("files_of_sharded_parameters_are_those_of_plain_keras")
def plain_files_with_accumulators_go_on_under_the_strategy(env: Env) -> dict:
    x, y = common.regression_data()
    path = str(env.tmp / "plain.keras")
    if env.is_chief:
        plain = _make(gradient_accumulation_steps=4)
        outer = optimizers.LossScaleOptimizer(plain, initial_scale=16.0)
        model = common.compiled(common.mlp(), outer)
        common.fit(model, x[FIRST], y[FIRST])
        model.save(path)
    env.wait_for_all("saved")
    results = {}
    for name in "with", "without":
        with env.scope():
            model = keras.models.load_model(path)
        chosen = SWITCHES.callbacks(env) if name == "with" else []
        history = common.fit(model, x[REST], y[REST], callbacks=chosen)
        optimizer = model.optimizer
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        results[name] = {
            "loss": history["loss"],
            "weights": {str(i): w.numpy() for i, w in enumerate(model.weights)},
            "iterations": np.asarray(inner.iterations),
        }
    return results


@case("BackupAndRestore, interrupted with micro-batches that wait")
@registry.same_as("backup_restores_sharded_state")
def backup_restores_what_was_accumulated(env: Env) -> dict:
    x, y = common.regression_data(48)

    def make_model() -> keras.Model:
        with env.scope():
            return common.compiled(common.mlp(), SWITCHES.optimizer(env, _make))

    def fit(*chosen: Any) -> dict:
        own = SWITCHES.callbacks(env)
        return common.fit(model, x, y, epochs=3, callbacks=[*own, *chosen])

    model = make_model()
    if env.is_reference:
        fit()
        return trained(model, env)
    backup = str(env.tmp / "backup")
    try:
        fit(callbacks.BackupAndRestore(backup), Interrupt(1))
    except Interrupted:
        pass
    else:
        raise AssertionError("was not interrupted")
    env.wait_for_all("interrupted")
    keras.backend.clear_session()
    keras.utils.set_random_seed(99)
    model = make_model()
    history = fit(callbacks.BackupAndRestore(backup))
    assert len(history["loss"]) < 3, "started again from the first epoch"
    return trained(model, env)


@case("The `learning_rate` setter and Keras's callbacks act on it")
@registry.same_as("other_callbacks_act_on_the_rate_after_warmup")
def learning_rate_and_averages_obey_keras_callbacks(env: Env) -> dict:
    with env.scope():
        optimizer = sgd(use_ema=True, ema_momentum=0.7)
        if not env.is_reference:
            optimizer = tfdp.DistributedOptimizer(optimizer)
        model = common.compiled(common.mlp(), optimizer)
    x, y = common.regression_data(32)
    options = {"validation_data": (x, y), "epochs": 2}
    model.optimizer.learning_rate = 0.02
    results = {"set": common.fit(model, x, y)}
    schedule = callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
    swap = callbacks.SwapEMAWeights(swap_on_epoch=True)
    results["scheduled"] = common.fit(
        model, x, y, callbacks=[schedule, swap], **options
    )
    plateau = callbacks.ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=1e9)
    results["plateau"] = common.fit(model, x, y, callbacks=[plateau], epochs=3)
    rate = model.optimizer.learning_rate.numpy()
    assert rate == np.float32(0.05 / 4)
    return results | {"rate": rate, **trained(model, env)}


@case("Switched on after `fit` was traced, and a model compiled anew")
@registry.same_as("accumulation_steps_change_by_epoch_without_a_new_trace")
def optimizer_switched_on_after_fit_is_traced_again(env: Env) -> dict:
    """Mean gradients of two batches are those of one of twice the size."""
    x, y = common.regression_data(32)

    def fit(accumulates: bool, *chosen: Any) -> None:
        size = 16 if accumulates and env.is_reference else 8
        common.fit(model, x, y, batch_size=size, callbacks=list(chosen))

    model = common.build_in_scope(env, lambda: common.compiled(common.mlp(), adamw()))
    fit(False)
    on = [] if env.is_reference else [tfdp.callbacks.GradientAccumulation(2)]
    fit(True, *on)
    # It stays so without the callback.
    fit(True)
    results = {"first": trained(model, env)}
    with env.scope():
        common.compiled(model, sgd())
    fit(False)
    results["recompiled"] = trained(model, env)
    fit(True, *on)
    results["again"] = trained(model, env)
    # Switched on in an optimizer that is tfdp's already: a scale that doubles.
    more = [] if env.is_reference else [tfdp.callbacks.LossScaling(16.0, 1)]
    fit(True, *on, *more)
    if not env.is_reference:
        assert model.optimizer.loss_scale == 16.0 * 2**2
    return results | {"scaled": trained(model, env)}


@case("Two models of one process, trained by turns")
@registry.same_as("two_strategies_reduce_in_one_function")
def two_models_accumulate_by_turns(env: Env) -> dict:
    data = common.regression_data(24)
    models = []
    for steps in 2, 4:
        keras.utils.set_random_seed(steps)
        switches = Switches(steps)
        with env.scope():
            optimizer = switches.optimizer(env, adamw)
            models.append((common.compiled(common.mlp(), optimizer), switches))
    for _ in range(2):
        for model, switches in models:
            common.fit(model, *data, callbacks=switches.callbacks(env))
    return {
        f"{switches.steps}": {
            "weights": {str(i): w.numpy() for i, w in enumerate(model.weights)},
            "iterations": np.asarray(model.optimizer.iterations),
        }
        for model, switches in models
    }


class NormalizedDescent(optimizers.Optimizer):
    """A user's optimizer that looks at whole tensors: steps of a given length."""

    def update_step(self, gradient, variable, learning_rate):
        norm = keras.ops.sqrt(keras.ops.sum(keras.ops.square(gradient)))
        rate = keras.ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, rate * gradient / (norm + 1e-3))


class SignOfMean(optimizers.SGD):
    """A subclass of an optimizer of Keras that looks at more than elements."""

    def update_step(self, gradient, variable, learning_rate):
        sign = keras.ops.sign(keras.ops.mean(gradient))
        self.assign_sub(variable, 0.01 * sign * keras.ops.abs(gradient))


@case("A user's own optimizer class sees whole tensors")
def own_optimizer_class_sees_whole_tensors(env: Env) -> dict:
    return _trained_with(env, NormalizedDescent)


@case("A user's subclass of an optimizer of Keras sees whole tensors")
@registry.same_as("own_optimizer_class_sees_whole_tensors")
def subclass_of_an_optimizer_sees_whole_tensors(env: Env) -> dict:
    return _trained_with(env, SignOfMean)


def _trained_with(env: Env, kind: type) -> dict:
    keras.utils.set_random_seed(3)
    with env.scope():
        optimizer = kind(0.05, global_clipnorm=0.2)
        if not env.is_reference:
            optimizer = tfdp.DistributedOptimizer(optimizer)
        model = common.compiled(common.mlp(), optimizer)
    common.fit(model, *common.regression_data(64))
    return {str(i): w.numpy() for i, w in enumerate(model.weights)}


@case("TensorFlow's own files of sharded state", setups=("mirrored",), compare=False)
def tensorflow_exports_and_checkpoints_what_it_sees(env: Env) -> dict:
    checkpoint = _exported(env, "optimizer")
    # It would be written without the slots, and nobody would be told.
    with pytest.raises(ValueError, match="does not see sharded optimizer state"):
        checkpoint.save(env.tmp / "checkpoint")
    return {}


@case("TensorFlow's own files", setups=("mirrored",), compare=False)
@registry.same_as("checkpoints_at_one_path")
def tensorflow_exports_and_checkpoints_a_distributed_optimizer(env: Env) -> dict:
    _exported(env, "none").save(env.tmp / "checkpoint")
    return {}


def _exported(env: Env, sharding: str) -> tf.train.Checkpoint:
    """Trains and exports a model; returns a checkpoint that was not written yet."""
    x, y = common.regression_data(8)
    with env.scope():
        optimizer = tfdp.DistributedOptimizer(optimizers.Adam(), sharding=sharding)
        model = common.compiled(common.mlp(), optimizer)
    common.fit(model, x, y, epochs=1)
    model.export(env.tmp / "exported", verbose=False)
    loaded = tf.saved_model.load(env.tmp / "exported")
    np.testing.assert_allclose(loaded.serve(x), model.predict(x, verbose=0), rtol=1e-5)
    return tf.train.Checkpoint(model=model)
