"""Gradient accumulation, against Keras's own on one device or larger batches."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env
from tests.harness.launches import launches
from tests.reduction import cases_plans as plans

case = registry.case
layers, optimizers = keras.layers, keras.optimizers
Make = Callable[..., optimizers.Optimizer]
MIRRORED = ("mirrored",)


@dataclasses.dataclass(frozen=True)
class Switches:
    """What is switched on: by callbacks, and on one device by Keras's own options.

    Args:
        steps: Micro-batches of an update.
        scale: First loss scale, or `None` for none.
        growth_steps: Updates after which the scale doubles.
    """

    steps: int = 1
    scale: float | None = None
    growth_steps: int = 5

    def optimizer(self, env: Env, make: Make) -> optimizers.Optimizer:
        """The optimizer to compile with."""
        if not env.is_reference:
            return make()
        options = {"gradient_accumulation_steps": self.steps} if self.steps > 1 else {}
        optimizer = make(**options)
        if self.scale is None:
            return optimizer
        return optimizers.LossScaleOptimizer(
            optimizer,
            initial_scale=self.scale,
            dynamic_growth_steps=self.growth_steps,
        )

    def callbacks(self, env: Env) -> list[keras.callbacks.Callback]:
        """The callbacks to fit with."""
        if env.is_reference:
            return []
        chosen: list[keras.callbacks.Callback] = []
        if self.steps > 1:
            chosen.append(tfdp.callbacks.GradientAccumulation(self.steps))
        if self.scale is not None:
            chosen.append(tfdp.callbacks.LossScaling(self.scale, self.growth_steps))
        return chosen


def trained(model: keras.Model, env: Env) -> dict:
    """What is compared of a trained model."""
    return {
        "weights": env.weights(model),
        "iterations": np.asarray(model.optimizer.iterations),
    }


def train(
    env: Env,
    switches: Switches,
    make: Make,
    build: Callable[[], keras.Model],
    *data: Any,
    compile_options: dict | None = None,
    **options: Any,
) -> dict:
    """Builds in scope, compiles, fits with what is switched on; returns all of it."""
    with env.scope():
        optimizer = switches.optimizer(env, make)
        model = common.compiled(build(), optimizer, **(compile_options or {}))
    history = common.fit(model, *data, callbacks=switches.callbacks(env), **options)
    for name in "loss_scale", "skipped_steps":
        history.pop(name, None)
    return {"history": history, **trained(model, env)}


def sgd(**options: Any) -> optimizers.Optimizer:
    return optimizers.SGD(0.05, momentum=0.9, **options)


def adamw(**options: Any) -> optimizers.Optimizer:
    return optimizers.AdamW(0.01, **options)


@case("Leftover micro-batches are carried over, as in Keras")
@registry.same_as("stage_1_by_constructor_with_accumulation_and_loss_scaling")
def accumulation_carries_leftovers_over_as_keras_does(env: Env) -> dict:
    # 11 batches an epoch: 5 updates in two epochs, and 2 batches wait.
    data = common.regression_data(88)
    results = train(env, Switches(4), sgd, common.mlp, *data, epochs=2)
    assert results["iterations"] == 5
    return results


def _num_traces(model: keras.Model) -> int:
    """How often the step of a model that was fit has been traced."""
    cells = [
        cell.cell_contents for cell in inspect.unwrap(model.train_function).__closure__
    ]
    (step,) = [
        cell
        for cell in cells
        if hasattr(cell, "get_concrete_function")
        and "iterator" in cell.python_function.__name__
    ]
    return step.experimental_get_tracing_count()


@case("`steps={epoch: steps}`: mean gradients of larger batches, one trace")
def accumulation_steps_change_by_epoch_without_a_new_trace(env: Env) -> dict:
    x, y = common.regression_data(64)
    with env.scope():
        # Its steps are long enough to tell iterations from micro-batches.
        rate = optimizers.schedules.ExponentialDecay(0.1, 2, 0.5, staircase=True)
        model = common.compiled(common.mlp(), optimizers.SGD(rate, momentum=0.9))
    steps = {0: 4, 1: 2, 2: 1}
    losses = []
    if env.is_reference:
        for count in steps.values():
            losses += common.fit(model, x, y, batch_size=8 * count)["loss"]
    else:
        accumulation = tfdp.callbacks.GradientAccumulation(steps)
        losses += common.fit(model, x, y, epochs=3, callbacks=[accumulation])["loss"]
        assert _num_traces(model) == 1
    results = trained(model, env)
    assert results["iterations"] == 2 + 4 + 8
    return results | {"losses": losses}


@case('`flush="epoch"`: leftovers make an update with their true number')
def flush_applies_leftovers_with_their_true_number(env: Env) -> dict:
    # 11 micro-batches of 8: updates from 32, 32 and 24 samples, before validation.
    x, y = common.regression_data(88)
    model = common.build_in_scope(env, _adam_model)
    options: dict[str, Any] = {"batch_size": 32}
    if not env.is_reference:
        accumulation = tfdp.callbacks.GradientAccumulation(4, flush="epoch")
        options = {"callbacks": [accumulation]}
    history = common.fit(model, x, y, epochs=2, validation_data=(x, y), **options)
    results = trained(model, env)
    assert results["iterations"] == 6
    return results | {"history": history}


def _adam_model() -> keras.Model:
    return common.compiled(common.mlp(), optimizers.Adam(0.01))


@dataclasses.dataclass
class Launches:
    """Group keys of the all-reduces of a graph, by where they are launched."""

    always: list[int] = dataclasses.field(default_factory=list)
    at_boundary: list[int] = dataclasses.field(default_factory=list)
    off_boundary: list[int] = dataclasses.field(default_factory=list)


BRANCHES = {"then_branch": "at_boundary", "else_branch": "off_boundary"}


def launches_of(function: tf.types.experimental.ConcreteFunction) -> Launches:
    """Which collectives a traced step launches, in branches and outside of them."""
    found = Launches()
    for launch in launches(function):
        where = BRANCHES.get(launch.branch, "always")
        getattr(found, where).append(launch.group_key)
    return found


@case("Nothing is communicated off the boundary", compare=False)
def micro_batches_before_the_last_launch_no_collective(env: Env) -> dict:
    with env.scope():
        plain = common.compiled(plans.perceptron(), sgd(clipnorm=0.1))
        optimizer = tfdp.DistributedOptimizer(
            sgd(clipnorm=0.1), accumulation_steps=4, loss_scale="dynamic"
        )
        model = common.compiled(plans.perceptron(), optimizer)
    data = common.regression_data()
    key, local = env.strategy.extended.group.key, env.setup.devices_per_worker
    with plans.bucket_mb(env, plans.SMALL_MB):
        found = launches_of(plans.traced_step(model, data))
    assert found.off_boundary == []
    assert key not in found.always
    buckets = len(env.strategy.communication_plan(model).buckets)
    assert buckets >= 2
    assert found.at_boundary == [key] * (buckets * local)
    # What is left has no part in the gradient: counts of samples, and logs.
    others = [k for k in launches_of(plans.traced_step(plain, data)).always if k != key]
    assert sorted(found.always) == sorted(others), (found.always, others)
    return {"buckets": buckets}


class Unused(layers.Layer):
    """A dense layer with a kernel that has no gradient, and one that has no use."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 3), name="kernel")
        self.unused = self.add_weight(shape=(5,), name="unused")
        self.constant = self.add_weight(shape=(3,), name="constant", trainable=False)

    def call(self, inputs):
        return inputs @ self.kernel + self.constant


def _with_unused() -> keras.Model:
    inputs = keras.Input((common.NUM_FEATURES,))
    return keras.Model(inputs, layers.Dense(1)(Unused()(inputs)))


@case("Variables without a gradient, and not trainable ones")
@registry.same_as("layers_frozen_between_fits_without_recompiling")
def accumulation_leaves_variables_without_gradients_alone(env: Env) -> dict:
    data = common.regression_data(48)
    return train(env, Switches(2), sgd, _with_unused, *data)


def _frozen_between_fits(
    env: Env, *, recompile: bool, and_unfrozen: bool = True
) -> dict:
    data, switches = common.regression_data(40), Switches(2)

    def compile_model() -> None:
        with env.scope():
            common.compiled(model, switches.optimizer(env, adamw))

    def fit() -> dict:
        common.fit(model, *data, callbacks=switches.callbacks(env))
        return trained(model, env)

    model = common.build_in_scope(env, common.mlp)
    compile_model()
    results = {"first": fit()}
    then = {"frozen": False, "unfrozen": True} if and_unfrozen else {"frozen": False}
    for name, is_trained in then.items():
        model.layers[0].trainable = is_trained
        if recompile:
            compile_model()
        else:
            model.make_train_function(force=True)
        results[name] = fit()
    return results


@case("Layers frozen and unfrozen between fits, recompiled")
@registry.same_as("layers_frozen_between_fits_without_recompiling")
def layers_frozen_between_fits_with_recompiling(env: Env) -> dict:
    return _frozen_between_fits(env, recompile=True)


@case("Layers frozen between fits, not recompiled")
def layers_frozen_between_fits_without_recompiling(env: Env) -> dict:
    return _frozen_between_fits(env, recompile=False, and_unfrozen=False)


@case("Layers frozen and unfrozen between fits, not recompiled")
@registry.same_as("layers_frozen_between_fits_without_recompiling")
def layers_unfrozen_between_fits_without_recompiling(env: Env) -> dict:
    return _frozen_between_fits(env, recompile=False)


@case("Accumulation with `steps_per_execution=2`")
@registry.same_as("three_steps_per_execution_and_a_partial_batch")
def accumulation_with_steps_per_execution(env: Env) -> dict:
    # 9 batches: the boundary falls on either step of an execution.
    data = common.regression_data(72)
    options = {"steps_per_execution": 2}
    return train(
        env, Switches(3), adamw, common.mlp, *data, compile_options=options, epochs=2
    )


@case("Accumulation, clipping and loss scaling with `run_eagerly`")
@registry.same_as("run_eagerly_with_embedding")
def accumulation_and_loss_scaling_run_eagerly(env: Env) -> dict:
    def make(**options):
        return sgd(global_clipnorm=0.1, **options)

    data = common.regression_data(40)
    return train(
        env,
        Switches(2, scale=16.0),
        make,
        common.mlp,
        *data,
        compile_options={"run_eagerly": True},
    )


class ScaledPenalty(layers.Layer):
    """Adds a mean to the loss, times a weight whose gradient is that mean."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, inputs):
        self.add_loss(self.scale * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


def _penalized() -> keras.Model:
    hidden, head = layers.Dense(4, activation="tanh"), layers.Dense(1)
    inputs = keras.Input((common.NUM_FEATURES,))
    return keras.Model(inputs, head(ScaledPenalty()(hidden(inputs))))


@case("A partial batch and empty replicas within a window")
@registry.same_as("partial_last_batch_of_unequal_shares")
def window_with_an_empty_replica_has_the_mean_of_its_batches(env: Env) -> dict:
    # Batches of 8, 8, 8 and 1: all replicas but one have none of the last, and the
    # mean that `ScaledPenalty` takes of nothing is NaN.
    data = common.regression_data(25)
    results = train(env, Switches(3), sgd, _penalized, *data, epochs=3)
    for path, value in results["weights"].items():
        assert np.isfinite(value).all(), path
    return results


def _tokens() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((common.LENGTH,), dtype="int32"),
            layers.Embedding(common.NUM_TOKENS, 3),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )


def _sparse_case(clip: str, limit: float) -> None:
    def function(env: Env) -> dict:
        def make(**options):
            return sgd(**{clip: limit}, **options)

        switches = Switches(3, scale=16.0, growth_steps=2)
        return train(env, switches, make, _tokens, *common.token_data(72))

    registry.register(
        f"embedding_with_accumulation_and_loss_scaling_and_{clip}",
        function,
        f"Sparse gradients with accumulation, loss scaling and `{clip}`",
        same_as="embedding_with_adam",
    )


for _clip, _limit in {
    "clipnorm": 0.02,
    "clipvalue": 0.01,
    "global_clipnorm": 0.05,
}.items():
    _sparse_case(_clip, _limit)


@case("Accumulation of variables of several dtypes")
@registry.same_as("float16_gradients_are_accumulated_in_float32")
def accumulation_of_several_dtypes(env: Env) -> dict:
    def build():
        return keras.Sequential(
            [
                keras.Input((common.NUM_FEATURES,)),
                layers.Dense(4, activation="tanh", dtype="float64"),
                layers.Dense(1),
            ]
        )

    return train(env, Switches(3), adamw, build, *common.regression_data(72))


@case("float16 gradients are added up in float32", compare=False)
def float16_gradients_are_accumulated_in_float32(env: Env) -> dict:
    """A half and three times 2**-12: in float16 the sum would stay a half."""

    def value(y_true, y_pred):
        return y_pred

    with env.scope():
        dense = layers.Dense(1, use_bias=False, dtype="float16")
        model = keras.Sequential([keras.Input((1,)), dense])
        inner = optimizers.SGD(1.0)
        model.compile(tfdp.DistributedOptimizer(inner, accumulation_steps=4), value)
    dense.kernel.assign([[0.125]])
    x = np.full((16, 1), 2.0**-12, "float16")
    x[:4] = 0.5
    common.fit(model, x, x, batch_size=4)
    # The mean less 0.125, rounded to float16 once, at the end.
    np.testing.assert_array_equal(dense.kernel.numpy(), [[-(2.0**-12)]])
    return {}


if hasattr(optimizers, "MultiOptimizer"):

    @case("Accumulation of a MultiOptimizer")
    @registry.same_as("odd_variables_with_lamb_in_stage_2")
    def accumulation_of_a_multi_optimizer(env: Env) -> dict:
        def make(**options):
            chosen = {"dense/.*": optimizers.Adam(0.01, **options)}
            default = sgd(**options)
            return optimizers.MultiOptimizer(optimizers.OptimizerMap(default, chosen))

        data = common.regression_data(72)
        results = train(env, Switches(3), make, common.mlp, *data)
        # Keras's own counts batches here, and updates everywhere else.
        expected = 9 if env.is_reference else 3
        assert results.pop("iterations") == expected
        return results


@case("Keras's `gradient_accumulation_steps` is taken over")
@registry.same_as("gradient_accumulation_steps")
def accumulation_given_to_the_wrapped_optimizer(env: Env) -> dict:
    def build():
        optimizer = adamw(gradient_accumulation_steps=3)
        if not env.is_reference:
            optimizer = tfdp.DistributedOptimizer(optimizer)
            assert optimizer.accumulation_steps == 3
        return common.compiled(common.mlp(), optimizer)

    model = common.build_in_scope(env, build)
    history = common.fit(model, *common.regression_data(64))
    return {"history": history, **trained(model, env)}
