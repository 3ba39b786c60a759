"""Loss scaling: an overflow anywhere skips the step everywhere."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env
from tests.step.cases_accumulation import Switches, sgd, train, trained

case = registry.case
optimizers = keras.optimizers
# What a skipped step may change: the scale and what is counted.
COUNTERS = (
    "*/loss_scale",
    "*/skipped_steps",
    "*/good_steps",
    "*/non_finite",
    "*/skips_at_minimum",
)


def with_an_overflow(*data: Any, row: int) -> tuple:
    """Data whose gradients overflow in one row."""
    x, y = (array.copy() for array in data)
    x[row], y[row] = 1e30, 3e38
    return x, y


def _all_values(model: keras.Model, env: Env) -> dict[str, np.ndarray]:
    """All weights and the optimizer's variables."""
    own = model.optimizer
    # A count of calls, of no use to anybody.
    skipped = {id(own._iterations)} - {id(own.iterations)}
    chosen = [v for v in own.variables if id(v) not in skipped]
    return env.weights(model) | env.read(chosen)


def _momentum_with_averages(**options: Any) -> optimizers.Optimizer:
    return sgd(
        use_ema=True,
        ema_momentum=0.8,
        ema_overwrite_frequency=2,
        weight_decay=0.01,
        global_clipnorm=0.5,
        **options,
    )


@case("An inf on the last replica only: nothing changes but scale and counters")
def skipped_step_changes_nothing_but_the_scale_and_counters(env: Env) -> dict:
    switches = Switches(scale=16.0, growth_steps=3)
    x, y = common.regression_data(40)
    with env.scope():
        optimizer = switches.optimizer(env, _momentum_with_averages)
        model = common.compiled(common.mlp(), optimizer)

    def fit(*data: Any) -> dict:
        return common.fit(model, *data, callbacks=switches.callbacks(env))

    grown = fit(x[:24], y[:24])
    before = _all_values(model, env)
    history = fit(*with_an_overflow(x[:8], y[:8], row=7))
    after = _all_values(model, env)
    if not env.is_reference:
        assert history["skipped_steps"] == [1]
        assert (grown["loss_scale"], history["loss_scale"]) == ([32.0], [16.0])
        assert model.optimizer.skipped_steps == 1
        changed = [p for p in before if not np.array_equal(before[p], after[p])]
        allowed = [p for p in changed if any(fnmatch.fnmatch(p, c) for c in COUNTERS)]
        assert changed == allowed
        assert any("velocity" in path or "momentum" in path for path in before)
        assert any("average" in path for path in before)
    fit(x[24:], y[24:])
    return trained(model, env) | {"scale": _scale(model)}


def _scale(model: keras.Model) -> float:
    optimizer = model.optimizer
    if isinstance(optimizer, optimizers.LossScaleOptimizer):
        return float(optimizer.dynamic_scale.numpy())
    return optimizer.loss_scale


@case("The scale doubles after `growth_steps`, and is logged")
@registry.same_as("skipped_step_changes_nothing_but_the_scale_and_counters")
def loss_scale_grows_as_in_keras(env: Env) -> dict:
    switches = Switches(scale=16.0, growth_steps=3)
    with env.scope():
        model = common.compiled(common.mlp(), switches.optimizer(env, sgd))
    data = common.regression_data(64)
    history = common.fit(model, *data, epochs=2, callbacks=switches.callbacks(env))
    if not env.is_reference:
        # 8 updates an epoch: after 3, 6, 9, 12 and 15.
        assert history.pop("loss_scale") == [64.0, 512.0]
        assert history.pop("skipped_steps") == [0, 0]
    return trained(model, env) | {"history": history, "scale": _scale(model)}


@case(
    "Ten skips at the smallest scale: one error on every worker",
    quick_setup="two_workers",
    compare=False,
)
def ten_skips_at_the_smallest_scale_stop_every_worker(env: Env) -> dict:
    x, y = common.regression_data(160)
    for batch in range(20):
        # In the share of the last replica only.
        x, y = with_an_overflow(x, y, row=8 * batch + 7)
    with env.scope():
        model = common.compiled(common.mlp(), sgd())
    before = model.get_weights()
    scaling = tfdp.callbacks.LossScaling(8.0, min_scale=2.0)
    with pytest.raises(
        RuntimeError, match=r"overflowed in 1\d steps in a row"
    ) as caught:
        common.fit(model, x, y, callbacks=[scaling])
    assert "dense/kernel" in str(caught.value)
    assert "scale, 2," in str(caught.value)
    # Two skips on the way down from 8 to 2, then at least ten at 2.
    assert 12 <= model.optimizer.skipped_steps <= 20
    assert model.optimizer.iterations.numpy() == 0
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    return {"text": str(caught.value)}


@case("Only variables without finite gradients are named", compare=False)
def error_names_the_variables_without_finite_gradients(env: Env) -> dict:
    def infinite_for_the_head(y_true, y_pred):
        return y_pred[:, :1] * 1e30 * 1e30 + y_pred[:, 1:]

    with env.scope():
        inputs = keras.Input((common.NUM_FEATURES,))
        heads = [keras.layers.Dense(1, name=name)(inputs) for name in ("bad", "good")]
        model = keras.Model(inputs, keras.layers.Concatenate()(heads))
        optimizer = tfdp.DistributedOptimizer(sgd(), loss_scale=1.0)
        common.compiled(model, optimizer, infinite_for_the_head)
    with pytest.raises(RuntimeError, match=r"bad/kernel, bad/bias\."):
        common.fit(model, *common.regression_data())
    return {}


@case("`DistributedOptimizer(loss_scale=...)`: dynamic, a number")
@registry.same_as("skipped_step_changes_nothing_but_the_scale_and_counters")
def loss_scale_of_the_constructor_changes_no_result(env: Env) -> dict:
    x, y = common.regression_data(32)
    results = {}
    for name, scale in ("dynamic", "dynamic"), ("fixed", 64.0):
        with env.scope():
            optimizer = sgd()
            if not env.is_reference:
                optimizer = tfdp.DistributedOptimizer(optimizer, loss_scale=scale)
            keras.utils.set_random_seed(1)
            model = common.compiled(common.mlp(), optimizer)
        common.fit(model, x, y)
        if not env.is_reference:
            common.fit(model, *with_an_overflow(x[:8], y[:8], row=0))
            assert optimizer.skipped_steps == 1
            assert optimizer.loss_scale == (2.0**14 if scale == "dynamic" else 64.0)
        common.fit(model, x, y)
        values = {str(i): w.numpy() for i, w in enumerate(model.weights)}
        results[name] = {"weights": values, "iterations": optimizer.iterations.numpy()}
    return results


@case("An overflow in one micro-batch skips the whole window")
@registry.same_as("overflow_on_last_replica_skips_the_step_everywhere")
def overflow_in_a_micro_batch_skips_its_window(env: Env) -> dict:
    x, y = common.regression_data(96)
    if env.is_reference:
        # Windows of 32 samples, of which the second is left out.
        keep = np.r_[0:32, 64:96]
        model = common.compiled(common.mlp(), sgd())
        common.fit(model, x[keep], y[keep], batch_size=32)
        return trained(model, env)
    with env.scope():
        model = common.compiled(common.mlp(), sgd())
    data = with_an_overflow(x, y, row=32 + 8 + 7)
    switches = Switches(4, scale=16.0)
    history = common.fit(model, *data, callbacks=switches.callbacks(env))
    assert history["skipped_steps"] == [1]
    assert model.optimizer.accumulated_steps == 0
    return trained(model, env)


@contextlib.contextmanager
def _policy(name: str) -> Iterator[None]:
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy("float32")


def _mixed(env: Env, policy: str, *ways: str) -> dict:
    """Trains with Keras's policy; `compile` may put a scaler around the optimizer."""
    # Plain sums of float16 on one device would round away what replicas keep.
    data = common.regression_data(64)
    results = {}
    with _policy(policy):
        for name in ways:
            keras.utils.set_random_seed(2)
            optimizer = sgd(gradient_accumulation_steps=2)
            with env.scope():
                if name == "constructor" and not env.is_reference:
                    optimizer = tfdp.DistributedOptimizer(optimizer)
                model = common.compiled(common.mlp(), optimizer)
            switches = Switches(2)
            history = common.fit(model, *data, callbacks=switches.callbacks(env))
            if not env.is_reference:
                _check_unwrapped(model.optimizer, policy)
            values = {str(i): w.numpy() for i, w in enumerate(model.weights)}
            results[name] = {"history": history, "weights": values}
    return results


def _check_unwrapped(optimizer: Any, policy: str) -> None:
    """Keras's settings are kept: 2**15, doubled every 2000 updates."""
    assert isinstance(optimizer, tfdp.DistributedOptimizer)
    assert isinstance(optimizer.inner_optimizer, optimizers.SGD)
    scaling = optimizer.features.scaling
    if policy == "mixed_bfloat16":
        assert scaling is None
        return
    assert (scaling.initial_scale, scaling.growth_steps) == (2.0**15, 2000)
    # Both sides skip alike or not at all.
    assert optimizer.skipped_steps == 0


# Sums of products of 11 and of 8 bits.
@case(
    "Policy `mixed_float16`: the scaler of `compile` is taken over",
    tol=4e-3,
)
def mixed_float16_policy_scales_as_compile_says(env: Env) -> dict:
    return _mixed(env, "mixed_float16", "callback")


@case(
    "Policy `mixed_float16`: the scaler of `compile` around tfdp's optimizer",
    tol=4e-3,
)
@registry.same_as("mixed_float16_policy_scales_as_compile_says")
def mixed_float16_policy_scales_what_is_distributed_already(env: Env) -> dict:
    return _mixed(env, "mixed_float16", "constructor")


@case("Policy `mixed_bfloat16`", tol=3e-2)
@registry.same_as("mixed_float16_policy_scales_as_compile_says")
def mixed_bfloat16_policy_needs_no_scale(env: Env) -> dict:
    return _mixed(env, "mixed_bfloat16", "callback", "constructor")


@case("A LossScaleOptimizer that was used goes on with its scale")
@registry.same_as("mixed_float16_policy_scales_as_compile_says")
def loss_scale_optimizer_is_taken_over_with_its_state(env: Env) -> dict:
    """A callback finds it around the optimizer after a fit without callbacks."""
    with env.scope():
        outer = optimizers.LossScaleOptimizer(
            sgd(), initial_scale=16.0, dynamic_growth_steps=3
        )
        model = common.compiled(common.mlp(), outer)
    data = common.regression_data(32)
    common.fit(model, *data)
    callbacks = []
    if not env.is_reference:
        callbacks = [tfdp.callbacks.GradientAccumulation({0: 1, 9: 2})]
    common.fit(model, *data, callbacks=callbacks)
    if not env.is_reference:
        assert model.optimizer.features.scaling.growth_steps == 3
    return {"weights": env.weights(model), "scale": _scale(model)}


@case("An Embedding with loss scaling")
@registry.same_as("embedding_with_adam")
def embedding_with_loss_scaling(env: Env) -> dict:
    from tests.optimizer.cases_optimizers import token_model

    data = common.token_data(48)
    return train(env, Switches(scale=16.0), sgd, token_model, *data)
