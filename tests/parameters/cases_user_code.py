"""What users write around sharded parameters: loops, steps, assignments, callbacks."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env
from tests.keras_hooks.cases_loops import Gan
from tests.parameters.cases_parameters import deep
from tests.sharding.cases_plans import small_buckets
from tfdp.training.parameters import host_gathers

case = registry.case
layers, optimizers = keras.layers, keras.optimizers
# Replicas beside each other and on other workers, and the cheaper one first.


def sharded(env: Env, optimizer: optimizers.Optimizer, **options: Any) -> Any:
    """An optimizer that shards parameters where there are replicas."""
    if env.is_reference:
        return optimizer
    return tfdp.DistributedOptimizer(optimizer, sharding="parameters", **options)


def compiled(
    env: Env, build: common.Build = deep, seed: int = 3, **options: Any
) -> keras.Model:
    """A model that is trained with sharded parameters."""
    keras.utils.set_random_seed(seed)
    with env.scope():
        model = build()
        model(np.zeros((1, common.NUM_FEATURES), "float32"))
        optimizer = sharded(env, optimizers.SGD(0.05, momentum=0.9))
        options = {"jit_compile": False} | options
        model.compile(optimizer, loss="mse", **options)
    return model


def trained(
    env: Env, build: common.Build = deep, **options: Any
) -> tuple[keras.Model, dict]:
    """A model after 12 batches in several units, its history and weights."""
    with small_buckets(env) if env.strategy else env.scope():
        model = compiled(env, build, **options)
        history = common.fit(model, *common.regression_data())
    check_sharded(env, model)
    return model, {"history": history, "weights": env.weights(model)}


def check_sharded(env: Env, model: keras.Model) -> None:
    """Checks that no replica holds a trained variable whole."""
    assert env.is_reference or all(v.value.has_parts for v in model.trainable_variables)


# Layers that compute again.


class Subclassed(keras.Model):
    """Three layers that call each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = layers.Dense(32, activation="relu")
        self.second = layers.Dense(32, activation="relu")
        self.last = layers.Dense(1)

        self.build((None, common.NUM_FEATURES))

    def call(self, inputs):
        return self.last(self.second(self.first(inputs)))


def _functional() -> keras.Model:
    inputs = keras.Input((common.NUM_FEATURES,))
    hidden = layers.Dense(32, activation="relu")(inputs)
    hidden = hidden + layers.Dense(32, activation="tanh")(hidden)
    return keras.Model(inputs, layers.Dense(1)(hidden))


class Recomputed(keras.Model):
    """Two layers that are computed again for the backward pass, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        with keras.RematScope(mode="full"):
            self.first = layers.Dense(32, activation="relu")
            self.second = layers.Dense(32, activation="relu")
        self.last = layers.Dense(1)

    def call(self, inputs):
        return self.last(self.second(self.first(inputs)))


def _recomputing(env: Env, build: common.Build) -> common.Build:
    """Builds a model that is computed again, where plain Keras on TensorFlow cannot.

    In a graph it refuses layers that are called with keyword arguments, as those of
    functional and sequential models are.
    """

    def build_in_scope() -> keras.Model:
        with keras.RematScope(mode="full"):
            return build()

    return build if env.is_reference else build_in_scope


@case("RematScope: layers, and models of three kinds")
@registry.same_as("layers_that_are_coupled_and_computed_again")
def recomputed_layers_of_sharded_parameters(env: Env) -> dict:
    kinds = {"functional": _functional, "sequential": deep, "subclassed": Subclassed}
    results = {
        name: trained(env, _recomputing(env, build))[1] for name, build in kinds.items()
    }
    eager = trained(env, _recomputing(env, deep), run_eagerly=True)[1]
    return results | {"layers": trained(env, Recomputed)[1], "eager": eager}


# Layers that need the rows of all replicas, in their backward passes, too.


def _synchronized(x: Any) -> Any:
    return x - 0.3 * tf.reduce_mean(tf.abs(x), axis=0)


def _ordered(x: Any) -> Any:
    return x + 0.1 * tf.sort(x, axis=0)


def _coupled() -> keras.Model:
    return _behind(layers.BatchNormalization(synchronized=True))


def _coupled_without_state() -> keras.Model:
    """One that may be computed twice: moving averages would move twice."""
    return _behind(layers.Lambda(_synchronized))


def _behind(layer: layers.Layer) -> keras.Model:
    hidden = [
        layers.Dense(32, activation="tanh"),
        layers.Lambda(_synchronized),
        layers.Dense(32, activation="tanh"),
        layer,
        layers.Dense(32, activation="tanh"),
        layers.Lambda(_ordered),
    ]
    return keras.Sequential(
        [keras.Input((common.NUM_FEATURES,)), *hidden, layers.Dense(1)]
    )


def _coupled_once() -> keras.Model:
    hidden = [
        layers.Dense(32, activation="tanh"),
        layers.Lambda(_synchronized),
        layers.Dense(32, activation="tanh"),
        layers.Lambda(_ordered),
    ]
    return keras.Sequential(
        [keras.Input((common.NUM_FEATURES,)), *hidden, layers.Dense(1)]
    )


@case("RematScope: a sum and a gather in the forward and the backward pass")
def layers_that_are_coupled_and_computed_again(env: Env) -> dict:
    return trained(env, _recomputing(env, _coupled_once))[1]


@case("Sums and gathers in the forward and the backward pass")
@registry.same_as("layers_that_are_coupled_and_computed_again")
def coupled_layers_of_sharded_parameters(env: Env) -> dict:
    return {
        "coupled": trained(env, _coupled)[1],
        "computed again": trained(env, _recomputing(env, _coupled_without_state))[1],
    }


# Steps and loops.


class OwnStep(Subclassed):
    """A step of one's own, that changes what the tape returns."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients = [0.5 * gradient for gradient in gradients]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class TwoSteps(OwnStep):
    """Two updates of one batch: the second reads what the first has made."""

    def train_step(self, data):
        super().train_step(data)
        return super().train_step(data)


@case("A train_step of one's own with two updates")
@registry.same_as("deferred_parameters_train_like_one_device")
def two_updates_in_a_step_of_sharded_parameters(env: Env) -> dict:
    return trained(env, TwoSteps)[1]


@case("A train_step of one's own")
@registry.same_as("deferred_parameters_train_like_one_device")
def own_steps_of_sharded_parameters(env: Env) -> dict:
    return trained(env, OwnStep)[1]


@case("A loop of one's own in a tf.function")
@registry.same_as("deferred_parameters_train_like_one_device")
def own_loops_of_sharded_parameters(env: Env) -> dict:
    strategy = env.distribution
    keras.utils.set_random_seed(3)
    with env.scope():
        model = deep()
        optimizer = sharded(env, optimizers.SGD(0.05, momentum=0.9))

    def step(x, y):
        with tf.GradientTape() as tape:
            errors = keras.losses.mean_squared_error(y, model(x, training=True))
            loss = tf.reduce_sum(errors) / common.BATCH_SIZE
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    def one_step(batch):
        losses = strategy.run(step, args=batch)
        return strategy.reduce("SUM", losses, axis=None)

    data = common.batched(*common.regression_data())
    batches = list(strategy.experimental_distribute_dataset(data))
    if not env.is_reference:
        with pytest.raises(ValueError, match="Build it before the first step"):
            tf.function(one_step)(batches[0])
    with env.scope():
        optimizer.build(model.trainable_variables)
    traced = tf.function(one_step)
    losses = np.array([traced(batch).numpy() for batch in batches])
    check_sharded(env, model)
    return {"losses": losses, "weights": env.weights(model)}


@case("train_on_batch, run_eagerly, steps_per_execution")
@registry.same_as("deferred_parameters_train_like_one_device")
def keras_loops_of_sharded_parameters(env: Env) -> dict:
    results = {
        "eagerly": trained(env, common.mlp, run_eagerly=True)[1],
        # The last execution has two.
        "five steps": trained(env, steps_per_execution=5)[1],
    }
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        results["XLA"] = trained(env, jit_compile=not env.is_reference)[1]
    found = [w for w in told if "`jit_compile=True` is ignored" in str(w.message)]
    assert len(found) == (not env.is_reference)
    model = compiled(env)
    x, y = common.regression_data()
    logs = [
        model.train_on_batch(x[row : row + 8], y[row : row + 8], return_dict=True)
        for row in range(0, len(x), 8)
    ]
    check_sharded(env, model)
    results["batches"] = {
        "loss": np.array([log["loss"] for log in logs]),
        "weights": env.weights(model),
        "tested": model.test_on_batch(x, y, return_dict=True)["loss"],
    }
    return results


@case("Two models, two optimizers")
@registry.same_as("gan_with_two_optimizers")
def adversaries_with_sharded_parameters(env: Env) -> dict:
    keras.utils.set_random_seed(3)
    with env.scope():
        model = Gan()
        model.compile(
            sharded(env, optimizers.Adam(0.01)), sharded(env, optimizers.Lamb(0.02))
        )
    images = common.features()
    data = images[::-1, :2].copy(), images
    if not env.is_reference:
        # Which of its variables each trains is known in its step only.
        with pytest.raises(ValueError, match="Build it before the first step"):
            common.fit(model, *data)
    with env.scope():
        model.d_optimizer.build(model.discriminator.trainable_variables)
        model.g_optimizer.build(model.generator.trainable_variables)
    history = common.fit(model, *data)
    for part in model.generator, model.discriminator:
        check_sharded(env, part)
    return {
        "history": history,
        "generator": env.weights(model.generator),
        "discriminator": env.weights(model.discriminator),
    }


# Variables that user code sets and reads.


class Assigning(Subclassed):
    """Halves a kernel in each step, before it is read and after it has been."""

    def train_step(self, data):
        for layer in self.first, self.second:
            layer.kernel.assign(layer.kernel * 0.99)
        x, y = data
        with tf.GradientTape() as tape:
            hidden = self.second(self.first(x))
            loss = self.compute_loss(x, y, self.last(hidden))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.first.kernel.assign_add(0.01 * tf.ones_like(self.first.kernel))
        self.last.bias.assign_sub(tf.constant([0.001]))
        return {"loss": loss, "norm": tf.norm(self.first.kernel)}


@case("Variables assigned to within a step and outside of it")
@registry.same_as("deferred_parameters_train_like_one_device")
def sharded_parameters_are_assigned_to(env: Env) -> dict:
    data = common.regression_data()
    model, results = trained(env, Assigning)
    kernel = model.layers[0].kernel
    kernel.assign(0.5 * kernel.numpy())
    np.testing.assert_array_equal(kernel.numpy(), np.array(model.get_weights()[0]))
    model.layers[-1].bias.assign_add([0.25])
    results["second"] = common.fit(model, *data)
    results["weights"] = env.weights(model)
    return results


class Decaying(Subclassed):
    """Decays the weights by hand, between their gradients and the update."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        for variable in variables:
            variable.assign(0.9 * variable)
        self.optimizer.apply(gradients, variables)
        return {"loss": loss}


class Climbing(Subclassed):
    """Takes the gradients at weights that the first gradients have moved (SAM)."""

    def train_step(self, data):
        x, y = data
        variables = self.trainable_variables
        gradients = self._gradients(x, y)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_add(0.05 * gradient)
        moved = self._gradients(x, y)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.05 * gradient)
        self.optimizer.apply(moved, variables)
        return {"norm": tf.linalg.global_norm(moved)}

    def _gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        return tape.gradient(loss, self.trainable_variables)


@case("Variables assigned to between a gradient and the update")
@registry.same_as("deferred_parameters_train_like_one_device")
def sharded_parameters_are_assigned_before_an_update(env: Env) -> dict:
    return {kind.__name__: trained(env, kind)[1] for kind in (Decaying, Climbing)}


class Reading(keras.callbacks.Callback):
    """Keeps what all workers read after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        self.norms.append(float(np.linalg.norm(self.model.layers[0].kernel.numpy())))


@case("A callback reads a weight, on all workers; a summary")
@registry.same_as("files_of_sharded_parameters_are_those_of_plain_keras")
def sharded_parameters_are_read_by_callbacks(env: Env) -> dict:
    reading = Reading()
    model = compiled(env)
    history = common.fit(model, *common.regression_data(), callbacks=[reading])
    lines: list[str] = []
    model.summary(print_fn=lines.append)
    return {
        "history": history,
        "norms": np.array(reading.norms),
        "params": model.count_params(),
        "local": {"summary": "\n".join(lines)},
        "shapes": {v.path: np.array(v.shape) for v in model.weights},
    }


@case("Layers of a model that was built outside", compare=False)
def models_from_outside_cannot_be_sharded(env: Env) -> dict:
    if env.is_reference:
        return {}
    model = deep()
    with env.scope(), pytest.raises(ValueError, match="scope"):
        _train_with_sharded_parameters(env, model)
    return {}


def _train_with_sharded_parameters(env: Env, model: keras.Model) -> None:
    model.compile(sharded(env, optimizers.Adam(0.01)), loss="mse")
    common.fit(model, *common.regression_data())


@case("Save, load, export, evaluate, predict")
@registry.same_as("files_of_sharded_parameters_are_those_of_plain_keras")
def sharded_models_are_used_as_any_other(env: Env) -> dict:
    data = common.regression_data()
    model, results = trained(env)
    path = str(env.tmp / f"model.{env.rank}.weights.h5")
    model.save_weights(path)
    weights = model.get_weights()
    results["evaluated"] = model.evaluate(*data, batch_size=8, verbose=0)
    results["predicted"] = model.predict(data[0], batch_size=8, verbose=0)
    results["on_batch"] = model.predict_on_batch(data[0][:8])
    model.set_weights([0 * weight for weight in weights])
    assert not model.predict(data[0], verbose=0).any()
    env.wait_for_all("saved")
    model.load_weights(str(env.tmp / "model.0.weights.h5"))
    for found, wanted in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(found, wanted)
    results["again"] = common.fit(model, *data)
    results["weights again"] = env.weights(model)
    return results


@case("ConsistencyCheck, nodes with copies", compare=False)
def consistency_check_says_what_it_leaves_out(env: Env) -> dict:
    if env.is_reference:
        return {}
    keras.utils.set_random_seed(3)
    sgd = optimizers.SGD(0.05)
    with env.scope():
        model = common.mlp()
        model.compile(sharded(env, sgd, shard_scope="node"), loss="mse")
    check = tfdp.callbacks.ConsistencyCheck(every=3)
    with pytest.warns(UserWarning, match="skips 4 of 4 weights: parameters that"):
        common.fit(model, *common.regression_data(), callbacks=[check])
    return {}


@case("Read and saved in many messages", compare=False, quick_setup="two_workers")
@registry.same_as("files_of_sharded_parameters_are_those_of_plain_keras")
def large_parameters_are_read_in_messages(env: Env) -> dict:
    if env.is_reference:
        return {}
    results = {}
    before = host_gathers.MESSAGE_BYTES
    # Lamb's parameters are each on one worker, Adam's in parts on both.
    for kind in optimizers.Adam, optimizers.Lamb:
        keras.utils.set_random_seed(3)
        with env.scope():
            model = common.mlp(units=37)
            model.compile(sharded(env, kind(0.01)), loss="mse")
            model.optimizer.build(model.trainable_variables)
        check_sharded(env, model)
        whole = model.get_weights()
        host_gathers.MESSAGE_BYTES = 64
        try:
            parts = model.get_weights()
            model.save_weights(str(env.tmp / f"{env.rank}.weights.h5"))
        finally:
            host_gathers.MESSAGE_BYTES = before
        env.wait_for_all(f"saved {kind.__name__}")
        plain = common.mlp(units=37)
        plain.load_weights(str(env.tmp / "0.weights.h5"))
        for read, found, wanted in zip(plain.get_weights(), parts, whole, strict=True):
            np.testing.assert_array_equal(found, wanted)
            np.testing.assert_array_equal(read, wanted)
        results[kind.__name__] = env.weights(model)
    return results
