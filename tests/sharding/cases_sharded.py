"""Sharded optimizer state trains as one device does, whatever is switched on."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env
from tests.step import cases_accumulation as accumulation
from tests.step import cases_loss_scale as loss_scaling
from tests.step.cases_accumulation import Make, Switches, adamw, sgd, trained
from tfdp.training.step.loss_scale import LossScaling

case = registry.case
layers, optimizers = keras.layers, keras.optimizers
STAGES = {1: "optimizer", 2: "gradients"}
# The stage that stands for all others, see `in_stage_3`.
_forced: list[int] = []


@contextlib.contextmanager
def in_stage_3() -> Iterator[None]:
    """Shards parameters too wherever a case shards anything, see `cases_stage_3`."""
    _forced.append(3)
    try:
        yield
    finally:
        _forced.pop()


def sharding_of(name: str) -> str:
    """The value of `sharding` for a case that asks for one."""
    return "parameters" if _forced and name != "none" else name


@dataclasses.dataclass(frozen=True)
class Sharded(Switches):
    """The same switches with sharded state, of which one device knows nothing.

    Args:
        stage: 1 or 2.
        scope: Who shares one state.
        by_callback: Whether callbacks switch everything on; else the constructor
            of the optimizer that is given to `compile` does.
    """

    stage: int = 1
    scope: str = "all"
    by_callback: bool = True

    def optimizer(self, env: Env, make: Make) -> optimizers.Optimizer:
        """See `Switches`."""
        if env.is_reference or self.by_callback:
            return super().optimizer(env, make)
        scaling = None
        if self.scale is not None:
            scaling = LossScaling(
                initial_scale=self.scale, growth_steps=self.growth_steps
            )
        return tfdp.DistributedOptimizer(
            make(),
            accumulation_steps=self.steps,
            loss_scale=scaling,
            sharding=sharding_of(STAGES[self.stage]),
            shard_scope=self.scope,
        )

    def callbacks(self, env: Env) -> list[keras.callbacks.Callback]:
        """See `Switches`."""
        if env.is_reference or not self.by_callback:
            return []
        own = sharded_by_callback(self.stage, self.scope)
        return [*super().callbacks(env), own]


def sharded_by_callback(stage: int, scope: str = "all") -> keras.callbacks.Callback:
    """The callback that shards in a stage."""
    chosen = _forced[-1] if _forced else stage
    return tfdp.callbacks.ShardedOptimizer(chosen, scope)


def compiled(
    env: Env, switches: Switches, make: Make, build: common.Build, **options: Any
) -> keras.Model:
    """Builds in scope and compiles; on one device the optimizer is built first.

    One that `fit` builds there would lose what its slots start with.
    """
    with env.scope():
        model = build()
        optimizer = switches.optimizer(env, make)
        if env.is_reference:
            optimizer.build(model.trainable_variables)
        return common.compiled(model, optimizer, **options)


def fit(model: keras.Model, env: Env, switches: Switches, *data: Any, **options: Any):
    """Fits with what is switched on; returns the history without tfdp's own logs."""
    chosen = [*switches.callbacks(env), *options.pop("callbacks", [])]
    history = common.fit(model, *data, callbacks=chosen, **options)
    if not env.is_reference:
        assert model.optimizer.is_sharded
    for name in "loss_scale", "skipped_steps":
        history.pop(name, None)
    return history


def train(
    env: Env,
    switches: Switches,
    make: Make,
    build: common.Build,
    *data: Any,
    compile_options: dict | None = None,
    **options: Any,
) -> dict:
    """Trains a model; returns history, weights and the number of updates."""
    model = compiled(env, switches, make, build, **(compile_options or {}))
    history = fit(model, env, switches, *data, **options)
    return {"history": history, **trained(model, env)}


def make(kind: type, rate: float = 0.01, **options: Any) -> Make:
    """A function that makes an optimizer."""
    return lambda **more: kind(rate, **options, **more)


# How it is switched on.


def _everything(stage: int, by_callback: bool) -> None:
    def function(env: Env) -> dict:
        # 11 batches of 8: two of each epoch wait for the next.
        switches = Sharded(
            3, scale=16.0, growth_steps=2, stage=stage, by_callback=by_callback
        )
        chosen = make(optimizers.AdamW, global_clipnorm=0.1)
        data = common.regression_data(88)
        return train(env, switches, chosen, common.mlp, *data, epochs=2)

    way = "callback" if by_callback else "constructor"
    name = "stage_{}_by_{}_with_accumulation_and_loss_scaling"
    is_quick = stage == 1 and not by_callback
    registry.register(
        name.format(stage, way),
        function,
        f"ZeRO-{stage} by {way}, accumulation, loss scaling, clipping",
        same_as="" if is_quick else name.format(1, "constructor"),
    )


for _stage in STAGES:
    for _by_callback in True, False:
        _everything(_stage, _by_callback)


@case("Neither accumulation nor scaling: both stages")
@registry.same_as("adagrad_with_clipvalue_in_float32_and_sharded_optimizer")
def sharded_state_alone_trains_like_one_device(env: Env) -> dict:
    results = {}
    for stage in STAGES:
        keras.utils.set_random_seed(stage)
        switches = Sharded(stage=stage, by_callback=stage == 1)
        data = common.regression_data(64)
        results[str(stage)] = train(env, switches, adamw, common.mlp, *data)
    return results


@case("An inf on the last replica only, in stage 2")
@registry.same_as("overflow_on_last_replica_skips_the_step_everywhere")
def overflow_is_skipped_by_all_owners(env: Env) -> dict:
    return _skipped(env, 2)


@case("An inf on the last replica only, in stage 1")
@registry.same_as("overflow_on_last_replica_skips_the_step_everywhere")
def overflow_is_skipped_by_all_owners_in_stage_1(env: Env) -> dict:
    return _skipped(env, 1)


def _skipped(env: Env, stage: int) -> dict:
    """Slots and averages stay as they are, wherever they lie.

    Keras would skip a micro-batch and not the window, so that one device has the
    callbacks too.
    """
    x, y = common.regression_data(56)
    bad = loss_scaling.with_an_overflow(x[24:40], y[24:40], row=7)
    averages = {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 2}
    chosen = [
        tfdp.callbacks.GradientAccumulation(2),
        tfdp.callbacks.LossScaling(16.0, 4),
        sharded_by_callback(stage),
    ]
    model = common.build_in_scope(
        env,
        lambda: common.compiled(common.mlp(), optimizers.AdamW(0.01, **averages)),
    )
    common.fit(model, x[:16], y[:16], callbacks=chosen)
    before = model.get_weights()
    common.fit(model, *bad, callbacks=chosen)
    assert model.optimizer.is_sharded == (not env.is_reference)
    # They are their own averages now, which follow every micro-batch.
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_allclose(old, new, rtol=1e-6)
    assert model.optimizer.skipped_steps == 1
    assert model.optimizer.loss_scale == 8.0
    common.fit(model, x[40:], y[40:], callbacks=chosen)
    assert model.optimizer.iterations.numpy() == 2
    return {"weights": env.weights(model)}


@case("LearningRateWarmup, whose momentum follows the rate")
@registry.same_as("momentum_follows_the_rate_in_warmup")
def warmup_scales_sharded_momentum(env: Env) -> dict:
    """The callback works on one device too, so that this is the same warmup."""
    results = {}
    for name, kind in {"slices": optimizers.SGD, "whole": UserMomentum}.items():
        keras.utils.set_random_seed(1)
        warmup = tfdp.callbacks.LearningRateWarmup(
            steps=5, initial_factor=0.25, scale_with_replicas=False
        )
        chosen = make(kind, 0.05, momentum=0.9)
        data = common.regression_data(64)
        results[name] = train(
            env, Sharded(), chosen, common.mlp, *data, callbacks=[warmup]
        )
    return results


class UserMomentum(optimizers.SGD):
    """A subclass, of which nobody knows that it treats elements alike."""


@case("Switched on between fits, while micro-batches wait")
@registry.same_as("backup_restores_sharded_state")
def state_that_is_there_is_shared_out_within_a_window(env: Env) -> dict:
    # 11 batches: two updates, and 3 micro-batches wait when it is switched on.
    data = common.regression_data(88)
    results = {}
    for stage in STAGES:
        keras.utils.set_random_seed(stage)
        before, after = Switches(4, scale=16.0), Sharded(4, scale=16.0, stage=stage)
        model = compiled(env, before, make(optimizers.Nadam, clipnorm=0.1), common.mlp)
        common.fit(model, *data, callbacks=before.callbacks(env))
        fit(model, env, after, *data)
        results[str(stage)] = trained(model, env)
    return results


@case('`flush="epoch"`: leftovers, in both stages')
@registry.same_as("flush_applies_leftovers_with_their_true_number")
def flush_of_sharded_sums_applies_leftovers(env: Env) -> dict:
    # 11 micro-batches of 8: updates from 32, 32 and 24 samples.
    data = common.regression_data(88)
    results = {}
    for stage in STAGES:
        keras.utils.set_random_seed(stage)
        # On one device larger batches stand for the windows.
        model = compiled(env, Sharded(), adamw, common.mlp)
        options: dict[str, Any] = {"batch_size": 32}
        if not env.is_reference:
            flush = tfdp.callbacks.GradientAccumulation(4, flush="epoch")
            options = {"callbacks": [flush]}
        fit(model, env, Sharded(stage=stage), *data, epochs=2, **options)
        results[str(stage)] = trained(model, env)
    return results


# What is trained.


class Tied(layers.Layer):
    """Uses the kernel of another layer, transposed."""

    def __init__(self, source: layers.Layer) -> None:
        super().__init__()
        self.source = source

    def call(self, inputs):
        return inputs @ keras.ops.transpose(self.source.kernel)


def odd_model() -> keras.Model:
    """A frozen layer, one without gradients, a tied one, two dtypes, odd sizes."""
    inputs = keras.Input((common.NUM_FEATURES,))
    x = layers.Dense(5, activation="tanh", trainable=False, name="frozen")(inputs)
    shared = layers.Dense(7, activation="tanh", name="shared")
    x = Tied(shared)(shared(x))
    x = accumulation.Unused(name="unused")(x)
    x = layers.Dense(3, activation="tanh", dtype="float64", name="wide")(x)
    return keras.Model(inputs, layers.Dense(1, name="head")(x))


def _odd(name: str, kind: type, stage: int, steps: int) -> None:
    def function(env: Env) -> dict:
        switches = Sharded(steps, stage=stage, by_callback=False)
        data = common.regression_data(72)
        return train(env, switches, make(kind, clipnorm=0.1), odd_model, *data)

    registry.register(
        f"odd_variables_with_{name}",
        function,
        "Frozen, tied, without gradients, two dtypes, not divisible, " + name,
        same_as="odd_variables_with_lamb_in_stage_2" if stage == 1 else "",
    )


_odd("adam_in_stage_1", optimizers.Adam, 1, 1)
_odd("lamb_in_stage_2", optimizers.Lamb, 2, 3)


def _half(policy: str, tolerance: float) -> None:
    def function(env: Env) -> dict:
        keras.utils.set_random_seed(5)
        with _policy(policy):
            found = train(env, Sharded(), sgd, mlp, *common.regression_data(64))
        weights = found["weights"]
        # Halves would be compared bit by bit.
        found["weights"] = {p: w.astype("float32") for p, w in weights.items()}
        return found

    def mlp() -> keras.Model:
        return common.mlp(units=5)

    registry.register(
        f"policy_{policy}_of_sharded_variables",
        function,
        f"Policy {policy}",
        tol=tolerance,
        same_as="" if policy == "float16" else "policy_float16_of_sharded_variables",
    )


@contextlib.contextmanager
def _policy(name: str):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


for _name, _tolerance in {"float16": 0.01, "bfloat16": 0.08}.items():
    # Under `mixed_...` the variables are float32; else they are halves too.
    _half(_name, _tolerance)
    _half(f"mixed_{_name}", _tolerance)


@case(
    "More replicas than variables, and than elements",
    setups=("twelve_devices", "eight_devices", "mirrored", "two_workers", "two_by_two"),
)
@registry.same_as("sharded_step_has_two_collectives_for_each_bucket")
def more_replicas_than_variables(env: Env) -> dict:
    def tiny() -> keras.Model:
        dense = layers.Dense(1, activation="tanh")
        return keras.Sequential([keras.Input((3,)), dense, accumulation.Unused()])

    x, y = common.regression_data(128)
    data, results = (x[:, :3], y), {}
    for stage, kind in (1, optimizers.Adam), (2, optimizers.Lamb):
        keras.utils.set_random_seed(stage)
        switches = Sharded(2, stage=stage, by_callback=False)
        chosen = make(kind, global_clipnorm=0.1)
        results[str(stage)] = train(env, switches, chosen, tiny, *data, batch_size=16)
    return results


def _frozen_between_fits(env: Env, recompile: bool, stage: int) -> dict:
    data, switches = common.regression_data(40), Sharded(2, stage=stage)

    def compile_model() -> None:
        with env.scope():
            common.compiled(model, switches.optimizer(env, adamw))

    model = common.build_in_scope(env, common.mlp)
    compile_model()
    fit(model, env, switches, *data)
    results = {"first": trained(model, env)}
    for name, is_trained in ("frozen", False), ("unfrozen", True):
        model.layers[0].trainable = is_trained
        if recompile:
            compile_model()
        else:
            model.make_train_function(force=True)
        fit(model, env, switches, *data)
        results[name] = trained(model, env)
    return results


@case("Layers frozen and unfrozen between fits, recompiled")
@registry.same_as("layers_frozen_between_fits_without_recompiling")
def sharded_layers_frozen_between_fits_with_recompiling(env: Env) -> dict:
    return _frozen_between_fits(env, recompile=True, stage=1)


@case("Layers frozen and unfrozen between fits, not recompiled")
@registry.same_as("layers_frozen_between_fits_without_recompiling")
def sharded_layers_frozen_between_fits_without_recompiling(env: Env) -> dict:
    # 5 batches: one waits for the next fit, where less is trained.
    return _frozen_between_fits(env, recompile=False, stage=1)


# Data and loops.


def _tokens() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((common.LENGTH,), dtype="int32"),
            layers.Embedding(common.NUM_TOKENS, 3),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )


def _embedding(name: str, chosen: Make, **options: Any) -> None:
    def function(env: Env) -> dict:
        # Tokens occur several times in a batch, and on several replicas.
        data = common.token_data(56)
        return train(env, Sharded(**options), chosen, _tokens, *data)

    registry.register(
        f"sparse_gradients_of_sharded_{name}",
        function,
        f"Embedding: sparse gradients with duplicates, {name}",
        same_as="" if name == "adam" else "sparse_gradients_of_sharded_adam",
    )


_embedding("sgd", make(optimizers.SGD, 0.1))
_embedding("adam", make(optimizers.Adam))
_embedding("lamb", make(optimizers.Lamb))
_embedding("adam_clipnorm", make(optimizers.Adam, clipnorm=0.02))
_embedding(
    "lamb_global_clipnorm",
    make(optimizers.Lamb, global_clipnorm=0.05),
    scale=16.0,
    growth_steps=2,
)
_embedding("sgd_clipvalue", make(optimizers.SGD, 0.1, clipvalue=0.01))
_embedding("adam_in_stage_2", make(optimizers.Adam), steps=2, stage=2)


@case("A partial last batch, and replicas without samples, in stage 2")
def partial_batches_of_sharded_state(env: Env) -> dict:
    return _partial(env, 3, 2)


@case("A partial last batch, and replicas without samples, in stage 1")
@registry.same_as("partial_batches_of_sharded_state")
def partial_batches_of_sharded_state_in_stage_1(env: Env) -> dict:
    return _partial(env, 1, 1)


def _partial(env: Env, steps: int, stage: int) -> dict:
    # Batches of 8, 8, 8 and 1: all replicas but one have none of the last.
    data = common.regression_data(25)
    keras.utils.set_random_seed(stage)
    switches = Sharded(steps, stage=stage, by_callback=False)
    found = train(env, switches, sgd, accumulation._penalized, *data, epochs=3)
    for path, value in found["weights"].items():
        assert np.isfinite(value).all(), path
    return found


@case("`run_eagerly`, both stages and both layouts")
@registry.same_as("run_eagerly_with_embedding")
def sharded_state_run_eagerly(env: Env) -> dict:
    data = common.regression_data(32)
    results = {}
    for stage, kind in (1, optimizers.Lamb), (2, optimizers.AdamW):
        keras.utils.set_random_seed(stage)
        results[str(stage)] = train(
            env,
            Sharded(2, scale=16.0, stage=stage),
            make(kind, global_clipnorm=0.1),
            common.mlp,
            *data,
            compile_options={"run_eagerly": True},
        )
    return results


@case("`steps_per_execution=2`")
@registry.same_as("adagrad_with_clipvalue_in_float32_and_sharded_optimizer")
def sharded_state_with_steps_per_execution(env: Env) -> dict:
    # 9 batches: the boundary falls on either step of an execution.
    data, options = common.regression_data(72), {"steps_per_execution": 2}
    switches = Sharded(3, stage=2)
    return train(
        env, switches, adamw, common.mlp, *data, compile_options=options, epochs=2
    )


def _loop(env: Env, build_first: bool) -> dict:
    with env.scope():
        model = common.mlp()
        switches = Sharded(2, scale=16.0, stage=2, by_callback=False)
        optimizer = switches.optimizer(env, make(optimizers.Adam, clipnorm=0.1))
        if build_first or env.is_reference:
            optimizer.build(model.trainable_variables)
    strategy, batch = env.distribution, common.BATCH_SIZE

    def step(x, y):
        with tf.GradientTape() as tape:
            per_sample = keras.losses.mean_squared_error(y, model(x, training=True))
            scaled = optimizer.scale_loss(tf.reduce_sum(per_sample) / batch)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(scaled, variables), variables)

    one_step = tf.function(lambda batch: strategy.run(step, args=batch))
    data = common.batched(*common.regression_data(64))
    for item in strategy.experimental_distribute_dataset(data):
        one_step(item)
    if not env.is_reference:
        assert optimizer.is_sharded
    return {"weights": env.weights(model)}


@case("A loop of one's own, `optimizer.build` beforehand")
@registry.same_as("loop_scales_accumulates_and_clips")
def loop_of_ones_own_with_sharded_state(env: Env) -> dict:
    return _loop(env, build_first=True)


@case("A loop of one's own, built by the first `apply`")
@registry.same_as("loop_scales_accumulates_and_clips")
def loop_of_ones_own_builds_sharded_state(env: Env) -> dict:
    return _loop(env, build_first=False)
