"""Training by Adasum equals its definition: one device, and NumPy between replicas."""

from __future__ import annotations

import collections.abc
import functools
import itertools
import typing

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.collectives import adasum_definition as definition
from tests.harness import common, registry
from tests.harness.env import Env
from tests.harness.registry import case, same_as
from tests.reduction.cases_selection import SLOW, routed
from tfdp.communication.collectives import timing
from tfdp.training.reduction.fusion import make_plan

OUTER = {"outer": "adasum"}
UNITS = 40


def sgd() -> keras.optimizers.Optimizer:
    """Clipping and momentum come after what replicas have combined."""
    return keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5)


def perceptron() -> keras.Model:
    keras.utils.set_random_seed(3)
    return common.mlp(UNITS)


def with_embedding() -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [
        keras.Input((common.LENGTH,), dtype="int32"),
        keras.layers.Embedding(common.NUM_TOKENS, 8),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(1),
    ]
    return keras.Sequential(layers)


def members_of(env: Env, *, by_node: bool) -> list[list[int]]:
    """The ranks whose gradients are one mean: those of a node, half of all, or one."""
    size = env.num_replicas // 2 if by_node else 1
    return [list(range(f, f + size)) for f in range(0, env.num_replicas, size)]


def define(
    env: Env,
    build: collections.abc.Callable[[], keras.Model],
    data: tuple,
    *,
    by_node: bool = False,
    steps: int = 1,
    batch_size: int = common.BATCH_SIZE,
) -> list[np.ndarray]:
    """Weights after an epoch by definition, on one device."""
    model, optimizer = build(), sgd()
    optimizer.build(model.trainable_variables)
    members = members_of(env, by_node=by_node)
    waiting: list[list[list[np.ndarray]]] = []
    for begin in range(0, len(data[0]), batch_size):
        rows = [
            np.array_split(a[begin : begin + batch_size], env.num_replicas)
            for a in data
        ]
        found = []
        for ranks in members:
            x, y = (np.concatenate([own[rank] for rank in ranks]) for own in rows)
            found.append(_mean_gradient(model, x, y))
        waiting.append(found)
        if len(waiting) == steps:
            means = [
                [sum(parts) / steps for parts in zip(*of_member, strict=True)]
                for of_member in zip(*waiting, strict=True)
            ]
            combined = definition.combined_each(means)
            optimizer.apply([tf.constant(g, tf.float32) for g in combined])
            waiting = []
    return [np.asarray(v) for v in model.get_weights()]


def _mean_gradient(
    model: keras.Model, x: np.ndarray, y: np.ndarray
) -> list[np.ndarray]:
    if not len(x):
        return [np.zeros(v.shape) for v in model.trainable_variables]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
    values = [v.value for v in model.trainable_variables]
    return [tf.convert_to_tensor(g).numpy() for g in tape.gradient(loss, values)]


def check(
    env: Env,
    algorithm: typing.Any,
    build: collections.abc.Callable[[], keras.Model] = perceptron,
    data: tuple = (),
    *,
    tolerance: float = 1e-5,
    batch_size: int = common.BATCH_SIZE,
    communication: dict | None = None,
    **options: typing.Any,
) -> dict:
    """Trains, and compares with the definition; all workers get the same bits."""
    if env.is_reference:
        return {}
    data = data or common.regression_data()
    wanted = define(
        env,
        build,
        data,
        by_node=algorithm == OUTER,
        steps=options.get("accumulation_steps", 1),
        batch_size=batch_size,
    )
    with routed(env, algorithm=algorithm, links=SLOW, **communication or {}):
        with env.scope():
            model, optimizer = build(), sgd()
            if options:
                optimizer = tfdp.DistributedOptimizer(optimizer, **options)
            common.compiled(model, optimizer)
        common.fit(model, *data, batch_size=batch_size)
        found = model.get_weights()
    for own, defined in zip(found, wanted, strict=True):
        allowed = tolerance * max(abs(defined).max(), 1e-3)
        np.testing.assert_allclose(own, defined, rtol=0, atol=allowed)
    return {str(index): weight for index, weight in enumerate(found)}


# For cases of these names the quick tier runs others.
SAME_AS = {
    "between_nodes": "between_replicas",
    "between_nodes_with_both": "between_replicas",
    "with_accumulation": "between_replicas",
    "with_a_loss_scale": "between_replicas",
    "of_sharded_gradients": "of_a_sharded_optimizer",
    "of_sharded_parameters": "of_a_sharded_optimizer",
    "in_bfloat16_on_the_wire": "between_replicas",
    "in_float16_between_nodes": "between_replicas",
}


def _register(name: str, *args: typing.Any, **options: typing.Any) -> None:
    registry.register(
        f"adasum_{name}",
        lambda env: check(env, *args, **options),
        f"Adasum: {name.replace('_', ' ')}",
        same_as=f"adasum_{SAME_AS[name]}" if name in SAME_AS else "",
        compare=False,
    )


# The last batch is of one row: one replica has it, and the others none.
UNEVEN = {"data": common.regression_data(29), "batch_size": 7}

_register("between_replicas", "adasum", **UNEVEN)
_register("between_nodes", OUTER, **UNEVEN)
_register("with_accumulation", "adasum", accumulation_steps=3)
_register("with_a_loss_scale", "adasum", **UNEVEN, loss_scale=64.0)
_register("between_nodes_with_both", OUTER, accumulation_steps=2, loss_scale=64.0)
_register("of_a_sharded_optimizer", "adasum", **UNEVEN, sharding="optimizer")
_register("of_sharded_gradients", OUTER, sharding="gradients")
_register("of_sharded_parameters", "adasum", sharding="parameters")
_register("of_sparse_gradients", "adasum", with_embedding, common.token_data())
_register(
    "in_bfloat16_on_the_wire",
    "adasum",
    tolerance=0.02,
    communication={"compression": "bf16"},
)
_register(
    "in_float16_between_nodes",
    OUTER,
    tolerance=0.01,
    communication={"compression": {"outer": "fp16"}},
)


@case(
    "Adasum on eight replicas",
    setups=("eight_devices",),
    compare=False,
)
@same_as("adasum_is_what_its_definition_says")
def adasum_on_eight_replicas(env: Env) -> dict:
    return {
        str(algorithm): check(env, algorithm, data=common.regression_data(24))
        for algorithm in ("adasum", OUTER)
    }


@case("Adasum in a loop of one's own", compare=False)
@same_as("adasum_between_replicas")
def adasum_in_a_loop_of_ones_own(env: Env) -> dict:
    if env.is_reference:
        return {}
    size = env.num_replicas
    shapes = ((5, 7), (7,))
    random = np.random.default_rng(0)
    means = [
        [random.normal(size=s).astype("float32") for s in shapes] for _ in range(size)
    ]
    # As for any sum: what a replica gives is its part of the global mean.
    parts = [np.stack(of_variable) / size for of_variable in zip(*means, strict=True)]
    wanted = definition.combined_each(means)

    def take_step(optimizer: tfdp.DistributedOptimizer, variables: list) -> None:
        def replica() -> None:
            rank = tf.distribute.get_replica_context().replica_id_in_sync_group
            optimizer.apply([tf.constant(p)[rank] for p in parts], variables)

        env.strategy.run(replica)

    # Eager replicas of one worker cannot meet, and are refused.
    runs = [True] if env.setup.devices_per_worker > 1 else [True, False]
    for sharding, is_traced in itertools.product(("none", "optimizer"), runs):
        with routed(env, algorithm="adasum"):
            with env.scope():
                variables = [keras.Variable(tf.zeros(shape)) for shape in shapes]
                optimizer = keras.optimizers.SGD(1.0)
                optimizer = tfdp.DistributedOptimizer(optimizer, sharding=sharding)
                optimizer.build(variables)
            step = functools.partial(take_step, optimizer, variables)
            tf.function(lambda step=step: step())() if is_traced else step()
        for variable, defined in zip(variables, wanted, strict=True):
            np.testing.assert_allclose(-variable.numpy(), defined, rtol=0, atol=1e-5)
    return {}


@case("an overflow on one replica under Adasum", compare=False)
@same_as("adasum_between_replicas")
def adasum_skips_an_overflow_of_one_replica(env: Env) -> dict:
    if env.is_reference:
        return {}
    x, y = common.regression_data(8)
    y[-1] = np.inf
    with routed(env, algorithm="adasum"):
        with env.scope():
            optimizer = tfdp.DistributedOptimizer(sgd(), loss_scale="dynamic")
            model = common.compiled(perceptron(), optimizer)
        before = model.get_weights()
        common.fit(model, x, y)
    assert optimizer.skipped_steps == 1
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    return {}


@case("the plan of Adasum", compare=False)
@same_as("adasum_between_replicas")
def adasum_sends_as_many_bytes_as_planned(env: Env) -> dict:
    return _send_as_planned(env, "none", 2)


@case("the plan of Adasum of a sharded optimizer", compare=False)
@same_as("adasum_between_replicas")
def adasum_of_a_sharded_optimizer_sends_as_many_bytes_as_planned(env: Env) -> dict:
    return _send_as_planned(env, "optimizer", 3)


def _send_as_planned(env: Env, sharding: str, passes: int) -> dict:
    if env.is_reference:
        return {}
    size = env.num_replicas
    with routed(env, algorithm="adasum"):
        with env.scope():
            model = keras.Sequential(
                [
                    keras.Input((64,)),
                    keras.layers.Dense(512),
                    keras.layers.Dense(64),
                ]
            )
            optimizer = tfdp.DistributedOptimizer(sgd(), sharding=sharding)
            common.compiled(model, optimizer)
        x = common.features(8).repeat(11, axis=1)[:, :64]
        with timing.Recorder() as recorder:
            common.fit(model, x, x)
        plan = env.strategy.communication_plan(model)
    wanted = (timing.GRADIENTS, timing.PARAMETERS)
    sent = sum(
        item.wire_bytes
        for item in recorder.collectives
        if item.label.split()[0] in wanted and item.replica == 0
    )
    assert plan.wire_bytes == pytest.approx(sent, rel=0.02)
    exact = passes * (size - 1) / size * plan.num_bytes
    assert plan.wire_bytes == pytest.approx(exact, rel=0.001)
    assert "adasum" in str(plan)
    return {}


@case("sparse gradients in the plan of Adasum", compare=False)
@same_as("adasum_between_replicas")
def adasum_plans_tables_of_sparse_gradients(env: Env) -> dict:
    if env.is_reference:
        return {}
    plans = []
    with routed(env, algorithm="adasum"):
        with env.scope():
            model = common.compiled(with_embedding(), sgd())
        for _ in range(2):
            plans.append(env.strategy.communication_plan(model))
            common.fit(model, *common.token_data(8))
    before, after = plans
    assert (before.traced, after.traced) == (False, True)
    assert before.sparse == after.sparse == ()
    assert before.buckets == after.buckets
    return {}


@case("what Adasum cannot do", compare=False)
def adasum_refuses_what_it_cannot_do(env: Env) -> dict:
    if env.is_reference:
        return {}
    data = common.regression_data(8)

    def fit(*callbacks: keras.callbacks.Callback, eagerly: bool = False) -> None:
        with env.scope():
            model = common.compiled(perceptron(), sgd(), run_eagerly=eagerly)
        common.fit(model, *data, callbacks=list(callbacks))

    with routed(env, algorithm="adasum"):
        with pytest.raises(ValueError, match="which Adasum does not compute"):
            fit(tfdp.callbacks.GradientNoiseScale())
        with pytest.raises(ValueError, match="cannot be combined with Adasum"):
            fit(tfdp.callbacks.LocalSGD(2))
        reducer = env.strategy.extended.reducer
        plan = make_plan([tf.constant([1, 2])], ["counts"], reducer.options)
        with pytest.raises(
            ValueError, match="`algorithm` supports only floating-point"
        ):
            reducer.routes_of(plan)
    # The weights of a node's replicas are added up before their gradients.
    for algorithm in (
        ("adasum", OUTER) if env.setup.devices_per_worker > 1 else ("adasum",)
    ):
        eagerly = pytest.raises(
            ValueError, match="Adasum combines the gradients of all"
        )
        with routed(env, algorithm=algorithm), eagerly:
            fit(eagerly=True)
    return {}


@case(
    "Adasum between nodes that are none",
    setups=("two_by_two",),
    compare=False,
)
def adasum_needs_equal_nodes_and_means_nothing_within_one(env: Env) -> dict:
    if env.is_reference:
        return {}
    uneven = pytest.raises(
        ValueError, match="the same number of replicas on every node"
    )
    with uneven, routed(env, algorithm=OUTER, node_size=3):
        pass
    with routed(env, algorithm=OUTER, node_size=4) as caught:
        selector = env.strategy.extended.algorithm_selector
        assert str(selector.select(100, "float32")) == "ring"
        assert not selector.combines_means
    assert "falls back to a mean: all replicas are on one node" in str(
        caught[0].message
    )
    return {}
