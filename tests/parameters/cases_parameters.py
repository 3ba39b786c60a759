"""Sharded parameters: models of every kind, their bytes, their files, wrong use."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env
from tests.sharding.cases_plans import small_buckets
from tfdp.communication.collectives.timing import Recorder

case = registry.case
layers, optimizers = keras.layers, keras.optimizers
_ROWS, _TIMES, _WIDTH, _WORDS = 24, 5, 6, 12


class Tied(keras.Model):
    """The embeddings are read at the begin and, transposed, at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = layers.Embedding(_WORDS, 8, name="embed")
        self.hidden = layers.Dense(8, name="hidden")

    def call(self, words):
        hidden = self.hidden(self.embed(words))
        return keras.ops.matmul(hidden, keras.ops.transpose(self.embed.embeddings))


class Alone(layers.Dense):
    """A layer whose product is a `tf.function` of its own."""

    @tf.function
    def _product(self, inputs):
        return tf.matmul(inputs, self.kernel)

    def call(self, inputs):
        return self._product(inputs)


def _recurrent() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((_TIMES, _WIDTH)),
            layers.Conv1D(8, 3, padding="same"),
            layers.LSTM(7, return_sequences=True),
            layers.GRU(4),
            layers.Dense(1, kernel_regularizer="l2", kernel_constraint="max_norm"),
        ]
    )


def _attention() -> keras.Model:
    inputs = keras.Input((_TIMES, _WIDTH))
    hidden = layers.Dense(8)(inputs)
    hidden = hidden + layers.MultiHeadAttention(2, 4)(hidden, hidden)
    hidden = layers.LayerNormalization(center=False)(hidden)
    hidden = layers.BatchNormalization(synchronized=True)(hidden)
    hidden = layers.Dense(8, activation="gelu")(hidden)
    return keras.Model(inputs, layers.Dense(1)(layers.Flatten()(hidden)))


def deep() -> keras.Model:
    """Five layers, of which a few kilobytes make several units."""
    names = "first", "second", "third", "fourth"
    stack = [layers.Dense(64, activation="relu", name=name) for name in names]
    last = layers.Dense(1, name="last")
    return keras.Sequential([keras.Input((_WIDTH,)), *stack, last])


def _series() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(_ROWS, _TIMES, _WIDTH))
    return x.astype("float32"), (2 * x[:, 0, :1]).astype("float32")


def _words() -> tuple[np.ndarray, np.ndarray]:
    words = np.random.default_rng(0).integers(0, _WORDS, size=(_ROWS, _TIMES))
    return words, words[:, ::-1].copy()


def _optimizer(env: Env, optimizer: optimizers.Optimizer) -> optimizers.Optimizer:
    if env.is_reference:
        return optimizer
    return tfdp.DistributedOptimizer(optimizer, sharding="parameters")


def _sharded(env: Env) -> tuple[keras.Model, tuple]:
    """A model with sharded parameters, and its data."""
    with env.scope():
        model = common.mlp()
        model.compile(_optimizer(env, optimizers.SGD(0.01)), loss="mse")
        model.optimizer.build(model.trainable_variables)
    assert all(v.value.has_parts for v in model.trainable_variables)
    return model, common.regression_data(24)


def _trained(env: Env, build: common.Build, data: tuple, loss: object) -> dict:
    keras.utils.set_random_seed(3)
    with env.scope():
        model = build()
        model.compile(_optimizer(env, optimizers.SGD(0.05, 0.9)), loss=loss)
    history = common.fit(model, *data, batch_size=12, epochs=2, shuffle=False)
    found = {"history": history, "weights": env.weights(model)}
    found["evaluated"] = model.evaluate(*data, batch_size=12, verbose=0)
    found["predicted"] = model.predict(data[0], batch_size=12, verbose=0)
    return found


@case("Convolution and loops")
@registry.same_as("layers_that_are_coupled_and_computed_again")
def recurrent_models_of_sharded_parameters(env: Env) -> dict:
    return _trained(env, _recurrent, _series(), "mse")


@case(
    "Attention and statistics",
    skip={"*key*bias*": "softmax ignores it: its exact gradient is zero"},
)
@registry.same_as("layers_that_are_coupled_and_computed_again")
def attention_of_sharded_parameters(env: Env) -> dict:
    return _trained(env, _attention, _series(), "mse")


@case("Tied weights")
@registry.same_as("deferred_parameters_train_like_one_device")
def tied_weights_of_sharded_parameters(env: Env) -> dict:
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return _trained(env, Tied, _words(), entropy)


def _traced(env: Env, build: common.Build = deep) -> tuple[keras.Model, list]:
    """A trained model of several units, and the collectives of the first replica."""
    with small_buckets(env), Recorder() as recorder:
        with env.scope():
            model = build()
            model.compile(_optimizer(env, optimizers.SGD(0.05)), loss="mse")
        common.fit(model, *common.regression_data(), batch_size=8)
    traced = [c for c in recorder.collectives if c.replica == 0]
    return model, traced


@case("3 S (N - 1) / N bytes", compare=False)
def a_step_of_sharded_parameters_sends_three_halves_of_an_all_reduce(env: Env) -> dict:
    model, traced = _traced(env)
    replicas = env.num_replicas
    gathered = [c for c in traced if c.kind == "all_gather" and c.num_bytes >= 64]
    kinds = ("all_to_all", "reduce_scatter")
    scattered = [c for c in traced if c.kind in kinds and c.num_bytes >= 64]
    units = [v.value.unit for v in model.trainable_variables]
    units = list({unit.number: unit for unit in units}.values())
    # Not gathered again: the last unit of the forward pass, which is still there, and
    # the first layer, since nobody asks for the gradient of the inputs.
    assert len(gathered) == 2 * len(units) - 2
    assert len(scattered) == len(units) > 3
    received = sum(c.num_bytes for c in gathered) * replicas
    expected = gathered_bytes(model)
    assert abs(received / expected - 1) <= 0.01, (received, expected)
    size = sum(4 * v.value.num_elements for v in model.trainable_variables)
    assert abs(sum(c.num_bytes for c in scattered) / size - 1) <= 0.01
    return {}


def gathered_bytes(model: keras.Model, itemsize: int = 4) -> int:
    """Bytes of all that a step gathers: twice each unit, once the first and the last.

    Args:
        model: Keras model whose parameters are sharded.
        itemsize: Int, the bytes of an element that travels.
    """
    units = [v.value.unit for v in model.trainable_variables]
    units = list({unit.number: unit for unit in units}.values())
    sizes = [itemsize * sum(p.num_elements for p in unit.parameters) for unit in units]
    return 2 * sum(sizes) - sizes[0] - sizes[-1]


@case("16 bits: half of the bytes", compare=False)
def sharded_parameters_travel_in_the_dtype_of_the_model(env: Env) -> dict:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model, traced = _traced(env, lambda: common.mlp(units=64))
    finally:
        keras.config.set_dtype_policy(before)
    gathers = [c for c in traced if c.label.startswith("unit")]
    sent = sum(c.num_bytes for c in gathers) * env.num_replicas
    expected = gathered_bytes(model)
    assert abs(sent / expected - 0.5) <= 0.01, (sent, expected)
    return {}


@case("Files and weights are whole")
def files_of_sharded_parameters_are_those_of_plain_keras(env: Env) -> dict:
    data = common.regression_data()
    with env.scope():
        model = common.mlp()
        # Adam would divide rounding errors by the roots of tiny squares.
        optimizer = _optimizer(env, optimizers.Adam(0.01, epsilon=1e-3))
        model.compile(optimizer, loss="mse")
    common.fit(model, *data, batch_size=8, epochs=1)
    path = str(env.tmp / f"model.{env.rank}.keras")
    model.save(path)
    weights = model.get_weights()
    expected = model.predict(data[0], verbose=0)
    common.fit(model, *data, batch_size=8, epochs=1)
    model.set_weights(weights)
    np.testing.assert_array_equal(model.predict(data[0], verbose=0), expected)
    if env.is_chief:
        plain = keras.saving.load_model(path)
        for own, read in zip(weights, plain.get_weights(), strict=True):
            np.testing.assert_array_equal(own, read)
    if not env.is_reference:
        tfdp.checkpoint.save(model, env.tmp / "checkpoint")
        model.set_weights([0 * own for own in weights])
        tfdp.checkpoint.restore(model, env.tmp / "checkpoint")
    np.testing.assert_array_equal(model.predict(data[0], verbose=0), expected)
    return {"weights": env.weights(model)}


@case("An exported model has no replicas", compare=False)
@registry.same_as("files_of_sharded_parameters_are_those_of_plain_keras")
def exported_models_have_whole_parameters(env: Env) -> dict:
    if env.is_reference:
        return {}
    model, data = _sharded(env)
    model.export(str(env.tmp / "exported"), verbose=False)
    predicted = model.predict(data[0], verbose=0)
    if env.is_chief:  # whose folder it is
        loaded = tf.saved_model.load(str(env.tmp / "exported"))
        np.testing.assert_allclose(loaded.serve(data[0]), predicted, rtol=1e-6)
    common.fit(model, *data, batch_size=8, epochs=1)
    return {}


@case("By the callback, while micro-batches wait")
@registry.same_as("backup_restores_sharded_state")
def whole_parameters_are_sharded_within_a_window(env: Env) -> dict:
    data = common.regression_data(88)
    keras.utils.set_random_seed(3)
    steps = {"gradient_accumulation_steps": 4} if env.is_reference else {}
    with env.scope():
        model = common.mlp()
        model.compile(optimizers.Nadam(0.01, clipnorm=0.1, **steps), loss="mse")
    callbacks = [] if env.is_reference else [tfdp.callbacks.GradientAccumulation(4)]
    common.fit(model, *data, callbacks=callbacks)
    if not env.is_reference:
        callbacks.append(tfdp.callbacks.ShardedOptimizer(stage=3))
    common.fit(model, *data, callbacks=callbacks)
    if not env.is_reference:
        assert all(v.value.has_parts for v in model.trainable_variables)
    return {"weights": env.weights(model)}


@case("A tf.function inside of a step")
@registry.same_as("deferred_parameters_train_like_one_device")
def a_function_in_a_step_reads_sharded_parameters(env: Env) -> dict:
    with env.scope():
        model = keras.Sequential([keras.Input((_WIDTH,)), Alone(3), layers.Dense(1)])
        model.compile(_optimizer(env, optimizers.SGD(0.01)), loss="mse")
    return common.fit(model, *common.regression_data(8))


@case("One replica has nobody to share with", compare=False)
def parameters_of_one_replica_stay_whole_with_a_warning(env: Env) -> dict:
    if env.is_reference:
        return {}
    strategy = tfdp.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = deep()
        model.compile(_optimizer(env, optimizers.SGD(0.01)), loss="mse")
    with pytest.warns(UserWarning, match="has no effect: there is one replica"):
        common.fit(model, *common.regression_data(), batch_size=8)
    assert not model.optimizer.is_sharded
    return {}


@case("Compiled again with another optimizer", compare=False)
def sharded_parameters_need_an_optimizer_that_shards_them(env: Env) -> dict:
    if env.is_reference:
        return {}
    model, data = _sharded(env)
    for sharding in "none", "optimizer":
        other = tfdp.DistributedOptimizer(optimizers.SGD(0.01), sharding=sharding)
        with env.scope():
            model.compile(other, loss="mse")
        with pytest.raises(ValueError, match="sharded by another optimizer"):
            common.fit(model, *data, batch_size=8)
    with env.scope():
        model.compile(_optimizer(env, optimizers.Adam(0.01)), loss="mse")
    common.fit(model, *data, batch_size=8)
    return {}
