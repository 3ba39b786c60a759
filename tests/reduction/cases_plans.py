"""The communication plan, and the collectives that a step's graph really has."""

from __future__ import annotations

import collections.abc
import contextlib
import inspect
import typing

import keras
import pytest
import tensorflow as tf

import tfdp
from tests.harness import common
from tests.harness.env import Env
from tests.harness.launches import launches
from tests.harness.registry import case, same_as
from tfdp.training.reduction.communication_plan import CommunicationPlan

layers = keras.layers
# Small, so that small models have several.
SMALL_MB = 1024 / 2**20


@contextlib.contextmanager
def bucket_mb(env: Env, size: float) -> collections.abc.Iterator[None]:
    """Plans buckets of another size, under the one strategy of the process."""
    reducer = env.strategy.extended.reducer
    options = reducer.options
    reducer.options = tfdp.CommunicationOptions(bucket_mb=size, first_bucket_mb=size)
    try:
        yield
    finally:
        reducer.options = options


def transformer(num_blocks: int = 3, width: int = 16, vocabulary: int = 12):
    """A small transformer over tokens; its embedding's gradient is sparse."""
    inputs = keras.Input((common.LENGTH,), dtype="int32")
    x = layers.Embedding(vocabulary, width, name="tokens")(inputs)
    for block in range(num_blocks):
        attended = layers.MultiHeadAttention(2, width // 2, name=f"attention{block}")
        x = layers.LayerNormalization(name=f"first_norm{block}")(x + attended(x, x))
        hidden = layers.Dense(4 * width, activation="relu", name=f"up{block}")(x)
        x = x + layers.Dense(width, name=f"down{block}")(hidden)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(1, name="head")(x))


def convolutional():
    """Two synchronized BatchNormalization layers between convolutions."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, name="conv0"),
            layers.BatchNormalization(synchronized=True, name="norm0"),
            layers.Conv2D(4, 3, name="conv1"),
            layers.BatchNormalization(synchronized=True, name="norm1"),
            layers.Flatten(),
            layers.Dense(1, name="head"),
        ]
    )


def perceptron():
    return common.mlp(units=40)


def tokens_in_dense_layers():
    """Sparse gradients and dense ones, in few operations."""
    return keras.Sequential(
        [
            keras.Input((common.LENGTH,), dtype="int32"),
            layers.Embedding(common.NUM_TOKENS, 16, name="tokens"),
            layers.GlobalAveragePooling1D(),
            layers.Dense(40, activation="tanh"),
            layers.Dense(40, activation="tanh"),
            layers.Dense(1, name="head"),
        ]
    )


DATA = {
    perceptron: common.regression_data,
    transformer: common.token_data,
    convolutional: lambda: (
        common.features(96, 3)[:, :1].repeat(64, 1).reshape(-1, 8, 8, 1),
        common.targets(common.features(96, 3)),
    ),
}


def collectives(
    function: tf.types.experimental.ConcreteFunction, kind: str, group_key: int
) -> int:
    """How often one call launches a kind of collective, in all inner functions."""
    found = launches(function)
    return sum(one.kind == kind and one.group_key == group_key for one in found)


def traced_step(model: keras.Model, data: tuple):
    """The concrete function of the train step that a fit has traced."""
    x, y = data
    common.fit(model, x[:8], y[:8])
    return step_of(model.train_function)


def step_of(train_function: typing.Any):
    """The one concrete function that a train function of Keras has been traced to."""
    # Keras wraps the function that takes the iterator in a plain one.
    function = inspect.unwrap(train_function)
    cells = [cell.cell_contents for cell in function.__closure__]
    (step,) = [
        cell
        for cell in cells
        if hasattr(cell, "get_concrete_function")
        and "iterator" in cell.python_function.__name__
    ]
    (concrete,) = step._list_all_concrete_functions()
    return concrete


def compiled_in_scope(env: Env, build: collections.abc.Callable) -> keras.Model:
    with env.scope():
        return common.compiled(build(), keras.optimizers.AdamW(0.01))


def shown(plan) -> list:
    return [
        (bucket.dtype, [entry.name for entry in bucket.entries], bucket.num_bytes)
        for bucket in plan.buckets
    ]


@case("plan: predicted and traced", compare=False)
@same_as("step_has_one_all_reduce_for_each_bucket")
def predicted_plan_is_the_one_traced(env: Env) -> dict:
    with bucket_mb(env, SMALL_MB):
        for build, data in DATA.items():
            model = compiled_in_scope(env, build)
            predicted = env.strategy.communication_plan(model)
            assert not predicted.traced
            x, y = data()
            model.train_on_batch(x[:8], y[:8])
            traced = env.strategy.communication_plan(model)
            assert traced.traced
            assert len(traced.buckets) >= 2
            assert shown(predicted) == shown(traced)
            assert predicted.sparse == traced.sparse
    return {}


@case("plan: it holds every trained variable once", compare=False)
def plan_holds_every_variable_once(env: Env) -> dict:
    for build in DATA:
        model = compiled_in_scope(env, build)
        model.layers[-1].bias.trainable = True
        plan = env.strategy.communication_plan(model)
        entries = [entry for bucket in plan.buckets for entry in bucket.entries]
        names = [entry.name for entry in entries] + list(plan.sparse)
        assert sorted(names) == sorted(v.path for v in model.trainable_variables)
        by_path = {v.path: v for v in model.trainable_variables}
        for entry in entries:
            variable = by_path[entry.name]
            assert (entry.shape, entry.dtype) == (variable.shape, variable.dtype)
        assert plan.num_bytes == sum(entry.num_bytes for entry in entries)
        ring = 2 * (env.num_replicas - 1) / env.num_replicas
        assert plan.wire_bytes == round(ring * plan.num_bytes)
        assert plan.num_replicas == env.num_replicas
    return {}


@case("plan: frozen variables are not in it", compare=False)
def frozen_variables_are_not_planned(env: Env) -> dict:
    model = compiled_in_scope(env, perceptron)
    model.layers[0].trainable = False
    plan = env.strategy.communication_plan(model)
    names = [entry.name for bucket in plan.buckets for entry in bucket.entries]
    assert sorted(names) == sorted(v.path for v in model.layers[-1].variables)
    return {}


@case("plan: the last layer's gradients come first", compare=False)
def buckets_follow_the_backward_pass(env: Env) -> dict:
    with bucket_mb(env, SMALL_MB):
        model = compiled_in_scope(env, transformer)
        plan = env.strategy.communication_plan(model)
    names = [" ".join(entry.name for entry in b.entries) for b in plan.buckets]
    # Large kernels travel alone; small gradients may wait for others.
    order = [
        f"{layer}{block}/kernel" for block in (2, 1, 0) for layer in ("down", "up")
    ]
    positions = [names.index(name) for name in order]
    assert positions == sorted(positions)
    (first,) = [name for name in names if "head" in name]
    assert first.startswith("head"), "the head's gradients are the first of all"
    assert plan.sparse == ("tokens/embeddings",)
    return {"buckets": [bucket.num_bytes for bucket in plan.buckets]}


@case("plan: printed, it is a table", compare=False)
def plan_prints_as_a_table(env: Env) -> dict:
    with bucket_mb(env, SMALL_MB):
        model = compiled_in_scope(env, lambda: transformer(num_blocks=1))
        plan = env.strategy.communication_plan(model)
    text = str(plan)
    title = text.splitlines()[:2]
    assert f"{len(plan.buckets)} all-reduces of {plan.num_bytes:,} bytes" in title[0]
    for column in ("order", "dtype", "bytes", "variables"):
        assert column in text
    for bucket in plan.buckets:
        assert f"{bucket.num_bytes:,}" in text
    assert "tokens/embeddings" in text
    in_notebook = plan._repr_html_()
    assert in_notebook.count("<tr>") == 1 + len(plan.buckets) + len(plan.sparse)
    for entry in plan.buckets[0].entries:
        assert entry.name in in_notebook
    return {"local": {"text": text}}


@case("plan: a step has as many all-reduces as buckets", compare=False)
def step_has_one_all_reduce_for_each_bucket(env: Env) -> dict:
    plan = _checked_plan(env, tokens_in_dense_layers, SMALL_MB, common.token_data())
    assert len(plan.buckets) >= 2
    assert len(plan.sparse) == 1
    return {"counts": len(plan.buckets)}


@case("plan: as many all-reduces as buckets, of any size", compare=False)
@same_as("step_has_one_all_reduce_for_each_bucket")
def step_has_one_all_reduce_for_each_bucket_of_any_size(env: Env) -> dict:
    counts = [
        len(_checked_plan(env, build, size, DATA[build]()).buckets)
        for build, size in [
            (perceptron, SMALL_MB),
            (perceptron, 25),
            (transformer, 4e-3),
        ]
    ]
    assert counts[0] >= 2
    assert counts[1] == 1
    assert counts[2] >= 4
    return {"counts": counts}


def _checked_plan(
    env: Env, build: common.Build, size: float, data: tuple
) -> CommunicationPlan:
    """The plan of a model, whose step launches the collectives that it lists."""
    key, local = env.strategy.extended.group.key, env.setup.devices_per_worker
    with bucket_mb(env, size):
        model = compiled_in_scope(env, build)
        step = traced_step(model, data)
        plan = env.strategy.communication_plan(model)
    assert plan.traced
    reduces = collectives(step, "all_reduce", key)
    assert reduces == local * len(plan.buckets), (reduces, shown(plan))
    # For rows: how many there are, their indices and their values.
    gathers = collectives(step, "all_gather", key)
    assert gathers == 3 * local * len(plan.sparse)
    return plan


@case(
    "plan: counts of samples",
    setups=("two_workers", "two_by_two"),  # one worker has nobody to merge logs with
    compare=False,
)
def counts_of_uneven_batches_need_no_collective(env: Env) -> dict:
    x, y = DATA[perceptron]()
    _check_counts(env, common.batched(x[:13], y[:13]))
    return {}


@case(
    "plan: counts of samples of arrays",
    setups=("two_workers", "two_by_two"),
    compare=False,
)
@same_as("counts_of_uneven_batches_need_no_collective")
def counts_of_batches_of_arrays_need_no_collective(env: Env) -> dict:
    x, y = DATA[perceptron]()
    _check_counts(env, x[:8], y[:8])
    return {}


def _check_counts(env: Env, *data: typing.Any) -> None:
    host, merged_logs = env.strategy.extended.host_group.key, 1
    # A batch of arrays or of a dataset may be partial, so that its size is known at run
    # time only. Workers compare before the loop what determines it.
    model = compiled_in_scope(env, perceptron)
    common.fit(model, *data)
    step = step_of(model.train_function)
    found = collectives(step, "all_reduce", host)
    assert found == merged_logs, found


@case("plan: fused BatchNormalization", compare=False)
def batch_normalization_reduces_once_a_layer_and_direction(env: Env) -> dict:
    key, local = env.strategy.extended.group.key, env.setup.devices_per_worker
    model = compiled_in_scope(env, convolutional)
    x, y = DATA[convolutional]()
    forward = tf.function(
        lambda: env.strategy.run(lambda: model(tf.constant(x[:4]), training=True))
    )
    function = forward.get_concrete_function()
    assert collectives(function, "all_reduce", key) == 2 * local
    step = traced_step(model, (x, y))
    buckets = len(env.strategy.communication_plan(model).buckets)
    reduces = collectives(step, "all_reduce", key)
    assert reduces == local * (buckets + 2 + 2), (reduces, buckets)
    return {}


@case("plan: a model without variables or order", compare=False)
def plan_of_a_model_that_is_not_built_is_refused(env: Env) -> dict:
    with env.scope():
        model = keras.Sequential([layers.Dense(2)], name="empty")
    with pytest.raises(ValueError, match="no variables yet") as caught:
        env.strategy.communication_plan(model)
    assert str(caught.value).endswith("Received: 'empty', not built")

    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__(name="subclassed")
            self.dense = layers.Dense(2)

        def call(self, inputs):
            return self.dense(inputs)

    with env.scope():
        model = Subclassed()
        model(tf.zeros([1, 3]))
    with pytest.raises(ValueError, match="Train one step first"):
        env.strategy.communication_plan(model)
    common.compiled(model)
    model.train_on_batch(tf.zeros([4, 3]), tf.zeros([4, 2]))
    assert env.strategy.communication_plan(model).traced
    return {}
