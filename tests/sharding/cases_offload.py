"""Sharded state in the memory of the host, and what it takes on each replica."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env
from tests.sharding.cases_sharded import sharding_of

case = registry.case
optimizers = keras.optimizers


def compiled(env: Env, optimizer: keras.Optimizer, **settings: Any) -> keras.Model:
    """A model whose optimizer's state is sharded where there are replicas."""
    keras.utils.set_random_seed(1)
    with env.scope():
        model = common.mlp()
        optimizer.exclude_from_weight_decay(var_list=[model.trainable_variables[0]])
        settings["sharding"] = sharding_of(settings.get("sharding", "none"))
        optimizer = tfdp.DistributedOptimizer(optimizer, **settings)
        model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
        optimizer.build(model.trainable_variables)
    return model


def owned(model: keras.Model) -> list[list[keras.Variable]]:
    """The slots of each local replica."""
    parts = model.optimizer.shards.parts.values()
    return [
        [s for part in states for slots in part.slots.values() for s in slots]
        for states in zip(*(part.replicas for part in parts), strict=True)
    ]


@case("state in host memory, of slices")
def offloaded_state_is_updated_on_the_host(env: Env) -> dict:
    return _offloaded(env, optimizers.AdamW)


@case("state in host memory, of whole variables")
@registry.same_as("offloaded_state_is_updated_on_the_host")
def offloaded_state_of_whole_variables_is_updated_on_the_host(env: Env) -> dict:
    return _offloaded(env, optimizers.Lamb)


def _offloaded(env: Env, kind: type[optimizers.Optimizer]) -> dict:
    options = {} if env.is_reference else {"sharding": "optimizer"}
    if not env.is_reference:
        options["offload"] = "cpu"
    optimizer = kind(0.01, weight_decay=0.1, use_ema=True, ema_momentum=0.9)
    model = compiled(env, optimizer, **options)
    common.fit(model, *common.regression_data(32))
    if not env.is_reference:
        for slots in owned(model):
            devices = {tf.DeviceSpec.from_string(s.value.device) for s in slots}
            assert {(d.device_type, d.device_index) for d in devices} == {("CPU", 0)}
    return env.weights(model)


@case(
    "memory of sharded state",
    setups=(*registry.ALL, "six_devices"),
    quick_setup="six_devices",
    compare=False,
)
def memory_report_is_what_the_variables_hold(env: Env) -> dict:
    _check_memory(
        env,
        ("none", optimizers.Nadam),
        ("optimizer", optimizers.Lamb),
        ("gradients", optimizers.Nadam),
    )
    return {}


@case("memory of sharded state, other stages and optimizers", compare=False)
@registry.same_as("memory_report_is_what_the_variables_hold")
def memory_report_of_other_stages_is_what_the_variables_hold(env: Env) -> dict:
    _check_memory(
        env,
        ("none", optimizers.Lamb),
        ("optimizer", optimizers.Nadam),
        ("gradients", optimizers.Lamb),
    )
    return {}


def _check_memory(env: Env, *choices: tuple[str, type[optimizers.Optimizer]]) -> None:
    if env.is_reference:
        return
    for sharding, make in choices:
        model = compiled(env, make(0.01), sharding=sharding, accumulation_steps=2)
        report = model.optimizer.memory_report()
        weights = sum(w.numpy().nbytes for w in model.trainable_variables)
        assert report.whole.parameters == report.sharded.parameters == weights
        assert report.whole.accumulators == weights
        sums = model.optimizer.features.accumulation.sums
        accumulated = sum(4 * math.prod(item.shape) for item in sums)
        assert report.sharded.accumulators == accumulated
        if sharding == "none":
            assert report.sharded == report.whole
            continue
        held = [sum(_size(s) for s in slots) for slots in owned(model)]
        # Nadam has one number besides, and another replica may hold most.
        assert max(held) <= report.sharded.slots
        is_even = report.sharded.slots <= 1.2 * report.whole.slots / env.num_replicas
        assert make is optimizers.Lamb or is_even
        line = str(env.strategy.communication_plan(model))
        assert f"slots {report.sharded.slots:,} (unsharded" in line


def _size(slot: keras.Variable) -> int:
    return int(np.prod(slot.shape, dtype=np.int64)) * slot.value.dtype.size
