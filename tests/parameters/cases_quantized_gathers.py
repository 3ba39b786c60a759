"""Gathers of 8 bits: every replica computes with rounded weights, and keeps its own."""

from __future__ import annotations

import typing
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.compression.numpy_definitions import Quantized
from tests.harness import common, registry
from tests.harness.env import Env
from tests.parameters.cases_parameters import gathered_bytes
from tests.reduction import cases_selection as routes
from tests.sharding.cases_plans import small_buckets
from tfdp.communication.collectives.timing import UNIT, UNIT_AGAIN, Recorder

case = registry.case
layers, optimizers = keras.layers, keras.optimizers
BLOCK = 256
DEFAULT = Quantized(bits=8, block=BLOCK)


def perceptron(dtype: str = "float64") -> keras.Model:
    """Two kernels that are rounded, one that is too small for it, and biases."""
    keras.utils.set_random_seed(3)
    dense = [
        layers.Dense(units, activation="tanh", dtype=dtype) for units in (32, 96, 40)
    ]
    inputs = keras.Input((common.NUM_FEATURES,), dtype="float32")
    outputs = inputs
    for layer in [*dense, layers.Dense(1, dtype=dtype)]:
        outputs = layer(outputs)
    return keras.Model(inputs, outputs)


def rounded(value: np.ndarray, num_owners: int, *, whole: bool = False) -> np.ndarray:
    """What a parameter is gathered as: each owner rounds its part, in blocks.

    Args:
        value: Array.
        num_owners: Int.
        whole: Bool, whether one owner has all of it.
    """
    if value.ndim < 2 or value.size < BLOCK * num_owners:
        return value
    length = value.size if whole else -(-value.size // num_owners)
    flat = value.ravel().astype("float32")
    parts = [flat[begin : begin + length] for begin in range(0, value.size, length)]
    found = [DEFAULT.rounded(part[np.newaxis])[0] for part in parts]
    return np.concatenate(found).reshape(value.shape).astype(value.dtype)


def sgd() -> optimizers.Optimizer:
    return optimizers.SGD(0.05, momentum=0.9)


def define(env: Env, data: tuple) -> list[np.ndarray]:
    """Weights by definition: the gradient at the rounded ones, for those that are not.

    Source: ZeRO++, https://arxiv.org/abs/2306.10209, section 3.1.
    """
    model, kept, optimizer = perceptron(), perceptron(), sgd()
    optimizer.build(kept.trainable_variables)
    x, y = data
    for begin in range(0, len(x), common.BATCH_SIZE):
        rows = slice(begin, begin + common.BATCH_SIZE)
        model.set_weights([rounded(w, env.num_replicas) for w in kept.get_weights()])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x[rows]) - y[rows].astype("float64")))
        values = [v.value for v in model.trainable_variables]
        optimizer.apply(tape.gradient(loss, values))
    return kept.get_weights()


def trained(
    env: Env, build: common.Build = perceptron, inner: typing.Any = None, **options
) -> keras.Model:
    """A model that has trained with gathers of 8 bits, unless told otherwise."""
    options = {"gather_compression": "int8"} | options
    fit_options = {"run_eagerly": options.pop("run_eagerly", False)}
    with env.scope():
        model = build()
        optimizer = tfdp.DistributedOptimizer(
            inner or sgd(), sharding="parameters", **options
        )
        # Keras computes losses in float32 otherwise.
        loss = keras.losses.MeanSquaredError(dtype=model.variables[0].dtype)
        common.compiled(model, optimizer, loss, **fit_options)
    common.fit(model, *common.regression_data())
    return model


def check(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for own, defined in zip(found, wanted, strict=True):
        allowed = 1e-9 * max(abs(defined).max(), 1e-3)
        np.testing.assert_allclose(own, defined, rtol=0, atol=allowed)


@case("Gathers of 8 bits are what they say", compare=False)
@registry.same_as("sharded_parameters_travel_in_the_dtype_of_the_model")
def quantized_gathers_train_as_rounded_weights_do(env: Env) -> dict:
    if env.is_reference:
        return {}
    with small_buckets(env):
        wanted = define(env, common.regression_data())
        with Recorder() as recorder:
            model = trained(env)
        found = model.get_weights()
    check(found, wanted)
    exact = gathered_bytes(model, itemsize=8) / env.num_replicas
    assert _gathered_bytes(recorder) <= 0.27 * exact
    assert env.strategy.communication_plan(model).gather_ratio <= 0.27
    return {str(index): weight for index, weight in enumerate(found)}


@case("Ways to gather 8 bits", setups=("mirrored",), compare=False)
@registry.same_as("sharded_parameters_travel_in_the_dtype_of_the_model")
def quantized_gathers_are_the_same_kept_and_run_eagerly(env: Env) -> dict:
    if env.is_reference:
        return {}
    with small_buckets(env):
        wanted = define(env, common.regression_data())
        exact = trained(env, gather_compression=None).get_weights()
        assert max(abs(a - b).max() for a, b in zip(wanted, exact, strict=True)) > 1e-4
        check(trained(env, reshard_after_forward=False).get_weights(), wanted)
        check(trained(env, run_eagerly=True).get_weights(), wanted)
    return {}


@case(
    "Gathers of 8 bits in nodes",
    setups=("two_by_two",),
    compare=False,
)
@registry.same_as("sharded_parameters_travel_in_the_dtype_of_the_model")
def quantized_gathers_go_on_inside_of_nodes(env: Env) -> dict:
    if env.is_reference:
        return {}
    with routes.routed(env, algorithm="ring"), small_buckets(env):
        wanted = define(env, common.regression_data())
        check(trained(env, reshard_after_forward="node").get_weights(), wanted)
    return {}


def seen_by_replicas(env: Env, model: keras.Model) -> list[list[np.ndarray]]:
    """The weights that a step of each local replica reads."""

    @tf.function
    def step() -> typing.Any:
        return env.strategy.run(lambda: [tf.identity(v) for v in model.weights])

    return [env.local_values(value) for value in step()]


@case("Replicas read the same bits", compare=False)
@registry.same_as("sharded_parameters_travel_in_the_dtype_of_the_model")
def replicas_read_the_same_rounded_weights(env: Env) -> dict:
    if env.is_reference:
        return {}
    found = {}
    for name, inner, whole in (("sgd", sgd(), False), ("lamb", None, True)):
        model = trained(
            env, lambda: perceptron("float32"), inner or optimizers.Lamb(0.01)
        )
        kept, read = model.get_weights(), seen_by_replicas(env, model)
        num_rounded = 0
        for value, seen in zip(kept, read, strict=True):
            wanted = rounded(value, env.num_replicas, whole=whole)
            num_rounded += not np.array_equal(wanted, value)
            for own in seen:
                np.testing.assert_array_equal(own, seen[0])
                np.testing.assert_array_equal(own, wanted)
        assert num_rounded == 2
        found[name] = {str(index): seen[0] for index, seen in enumerate(read)}
    # All workers have the same, bit by bit.
    return found


def half_precision() -> keras.Model:
    return perceptron("mixed_bfloat16")


@case("Gathers of 8 bits in half precision", compare=False)
@registry.same_as("sharded_parameters_travel_in_the_dtype_of_the_model")
def quantized_gathers_send_half_of_the_bytes_of_16_bits(env: Env) -> dict:
    if env.is_reference:
        return {}
    sent, weights = [], []
    for compression in (None, "int8"):
        with small_buckets(env), Recorder() as recorder:
            model = trained(env, half_precision, gather_compression=compression)
        sent.append(_gathered_bytes(recorder))
        weights.append(model.get_weights())
    assert sent[1] <= 0.6 * sent[0], sent
    for own, other in zip(*weights, strict=True):
        assert own.dtype == "float32"
        np.testing.assert_allclose(own, other, rtol=0, atol=0.05)
    return {}


def _gathered_bytes(recorder: Recorder) -> int:
    labels = (UNIT, UNIT_AGAIN)
    return sum(
        c.num_bytes
        for c in recorder.collectives
        if c.replica == 0 and c.label.split()[0] in labels
    )


def _wide() -> keras.Model:
    return keras.Sequential(
        [keras.Input((6,)), *map(layers.Dense, (64, 512, 64)), layers.Dense(1)]
    )


@case(
    "Bytes of gathers of 8 bits",
    compare=False,
)
@registry.same_as("sharded_parameters_travel_in_the_dtype_of_the_model")
def quantized_gathers_send_a_quarter_of_the_bytes(env: Env) -> dict:
    if env.is_reference:
        return {}
    sent, planned = [], []
    for compression in (None, "int8"):
        with small_buckets(env), Recorder() as recorder:
            model = trained(env, _wide, gather_compression=compression)
        sent.append(_gathered_bytes(recorder))
        planned.append(env.strategy.communication_plan(model).gather_ratio)
    assert sent[1] <= 0.27 * sent[0], sent
    assert planned[0] == 1.0
    assert planned[1] == pytest.approx(sent[1] / sent[0], rel=0.02)
    return {}


@case("Files have weights that are not rounded", compare=False)
@registry.same_as("files_of_sharded_parameters_are_those_of_plain_keras")
def files_have_the_weights_that_are_kept(env: Env) -> dict:
    if env.is_reference:
        return {}
    model = trained(env)
    kept = model.get_weights()
    path = env.tmp / "model.keras"
    model.save(path)
    env.wait_for_all("saved")
    loaded = keras.saving.load_model(path)
    for own, wanted in zip(loaded.get_weights(), kept, strict=True):
        np.testing.assert_array_equal(own, wanted)
    return {}


@case("What gathers of 8 bits cannot do", compare=False)
def constraints_of_rounded_weights_are_refused(env: Env) -> dict:
    if env.is_reference:
        return {}
    with pytest.raises(ValueError, match="would keep the rounding error"):
        trained(env, lambda: _constrained(kernel_constraint="non_neg"))
    return {}


@case("Constraints beside gathers of 8 bits", compare=False)
@registry.same_as("sharded_parameters_travel_in_the_dtype_of_the_model")
def constraints_of_exact_weights_are_kept(env: Env) -> dict:
    if env.is_reference:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(env, lambda: _constrained(bias_constraint="non_neg"))
    return {}


def _constrained(**options: typing.Any) -> keras.Model:
    dense = layers.Dense(64, **options)
    return keras.Sequential([keras.Input((6,)), dense, layers.Dense(1)])
