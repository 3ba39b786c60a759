"""Communication inside the backward pass, and no retracing."""

from __future__ import annotations

import statistics

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework import tensor_util

from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as
from tests.reduction.cases_plans import bucket_mb, traced_step
from tfdp.communication.collectives.timing import Recorder

layers = keras.layers
WIDTH, LENGTH, BLOCKS, BATCH = 128, 64, 4, 16
BUCKET_MB = 0.4


def transformer() -> keras.Model:
    """About a million parameters, so that reducing them takes a while."""
    inputs = keras.Input((LENGTH, WIDTH), batch_size=BATCH)
    x = inputs
    for _ in range(BLOCKS):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 32)(x, x))
        x = x + layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, activation="relu")(x))
    return keras.Model(inputs, layers.Dense(1)(x))


def overlap(intervals: list[tuple[float, float]]) -> float:
    """Share of the time under way that lies before the last one can begin.

    A collective begins when its gradients are there; the backward pass ends
    when the last bucket's are.
    """
    backward_end = max(begin for begin, _ in intervals)
    inside = total = until = 0.0
    for begin, end in sorted(intervals):
        start = max(begin, until)
        total += max(0.0, end - start)
        inside += max(0.0, min(end, backward_end) - start)
        until = max(until, end)
    return inside / total


@case(
    "overlap: half of the communication lies inside the backward pass",
    compare=False,
    side_by_side=False,
)
@same_as("collectives_begin_in_the_order_of_the_plan")
def half_of_the_communication_is_in_the_backward_pass(env: Env) -> dict:
    with env.scope():
        model = transformer()
        optimizer = keras.optimizers.SGD(0.01)
        optimizer.build(model.trainable_variables)
    data = np.random.default_rng(0).normal(size=(BATCH, LENGTH, WIDTH))
    x = tf.constant(data, "float32")

    def replica_step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        variables = model.trainable_variables
        values = [variable.value for variable in variables]
        optimizer.apply(tape.gradient(loss, values), variables)

    @tf.function(autograph=False)
    def step():
        env.strategy.run(replica_step)

    shares = []
    with bucket_mb(env, BUCKET_MB), Recorder() as recorder:
        for _ in range(15):
            step()
            times = [
                tuple(collective.values.numpy()[:2])
                for collective in recorder.collectives
                if collective.kind == "all_reduce" and collective.replica == 0
            ]
            shares.append(overlap(times))
        plan = env.strategy.communication_plan(model)
    assert len(plan.buckets) >= 8
    assert len(times) == len(plan.buckets)
    # The first step allocates; the median is not moved by other processes.
    share = statistics.median(shares[1:])
    assert share >= 0.5, shares
    return {"local": {"share": share}}


@case("overlap: first bucket's all-reduce is ready before the last", compare=False)
def collectives_begin_in_the_order_of_the_plan(env: Env) -> dict:
    """The graph lets each all-reduce wait for its own gradients only."""
    with bucket_mb(env, 1024 / 2**20):
        with env.scope():
            model = common.compiled(_deep())
        step = traced_step(model, common.regression_data())
        plan = env.strategy.communication_plan(model)
    assert len(plan.buckets) >= 8
    reduces = _all_reduces(step, env.strategy.extended.group)
    assert [_num_bytes(op) for op in reduces] == [
        bucket.num_bytes for bucket in plan.buckets
    ]
    for position, op in enumerate(reduces):
        waits_for = _ancestors(op)
        for later in reduces[position + 1 :]:
            assert later.inputs[0].op.name not in waits_for
        for other in reduces:
            assert other is op or other.name not in waits_for
    assert len(_ancestors(reduces[0])) < len(_ancestors(reduces[-1]))
    return {}


def _deep() -> keras.Model:
    hidden = [layers.Dense(24, activation="tanh") for _ in range(10)]
    inputs = [keras.Input((common.NUM_FEATURES,))]
    return keras.Sequential([*inputs, *hidden, layers.Dense(1)])


def _all_reduces(step, group) -> list[tf.Operation]:
    """The first local replica's, over gradients, in the order of the trace."""
    call = next(o for o in step.graph.get_operations() if "PartitionedCall" in o.type)
    inner = step.graph._get_function(call.get_attr("f").name).graph
    return [
        op
        for op in inner.get_operations()
        if _is_all_reduce(op, group.key)
        and _num_bytes(op) > tf.float32.size
        and _index(op.device) == _index(group.devices[0])
    ]


def _is_all_reduce(op: tf.Operation, group_key: int) -> bool:
    if op.type == "CollectiveReduceV2":
        return tensor_util.constant_value(op.inputs[2]) == group_key
    return f"Collective_all_reduce_float32_{group_key}" in op.name and (
        op.type == "StatefulPartitionedCall"
    )


def _num_bytes(op: tf.Operation) -> int:
    return op.inputs[0].shape.num_elements() * op.inputs[0].dtype.size


def _index(device: str) -> int | None:
    return tf.DeviceSpec.from_string(device).device_index


def _ancestors(op: tf.Operation) -> set[str]:
    """Names of the operations that have to run before one of the backward pass.

    Collectives before it on its channel are not counted.
    """
    seen: set[str] = set()
    queue = [tensor.op for tensor in op.inputs]
    while queue:
        current = queue.pop()
        if current.name not in seen:
            seen.add(current.name)
            queue.extend(tensor.op for tensor in current.inputs)
    return seen


@case("overlap: fifty steps and another fit trace nothing again", compare=False)
def fifty_steps_trace_nothing_again(env: Env) -> dict:
    traces = []

    class Counter(keras.layers.Layer):
        def call(self, inputs):
            traces.append(1)
            return inputs

    with env.scope():
        inputs = keras.Input((common.NUM_FEATURES,))
        model = keras.Model(inputs, layers.Dense(1)(Counter()(inputs)))
        common.compiled(model, metrics=["mae"])
    x, y = common.regression_data(num_samples=50 * common.BATCH_SIZE)
    common.fit(model, x, y)
    model.evaluate(x[:8], y[:8], verbose=0)
    before = len(traces)
    assert before > 0
    common.fit(model, x, y)
    model.evaluate(x[:8], y[:8], verbose=0)
    assert len(traces) == before
    return {}
