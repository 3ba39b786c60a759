"""Gradients of a model's shapes, reduced as `python -m tools.bench models` does."""

from __future__ import annotations

import tensorflow as tf

from tests.harness.env import Env
from tests.harness.registry import case, same_as
from tools.bench.barrier import barrier
from tools.bench.gradients_worker import GradientReduction, make_gradients

SHAPES = {"first/kernel": (300_000,), "last/kernel": (1000, 1000), "last/bias": (8,)}


@case(
    "sums of gradients are right, and what is wrong is counted",
    setups=("mirrored", "two_by_two"),
    compare=False,
)
@same_as("step_has_one_all_reduce_for_each_bucket")
def a_wrong_gradient_on_one_replica_is_counted_on_all(env: Env) -> dict:
    group = env.strategy.extended.group
    gradients = make_gradients(group, SHAPES)
    reduction = GradientReduction(env.strategy, gradients, barrier(env.strategy))
    found = reduction.counts(1)
    assert found["num_wrong"] == 0
    # The last layer's are ready first.
    assert found["bucket_bytes"] == [32, 4_000_000, 1_200_000]
    num_bytes = sum(found["bucket_bytes"])
    fraction = (group.size - 1) / group.size
    assert found["payload_bytes"] == round(2 * fraction * num_bytes)
    assert reduction.seconds(2) > 0
    if group.position(0) == 0:
        last = gradients[0][1]
        last.assign(tf.tensor_scatter_nd_update(last, [[3, 4], [5, 6]], [0.0, 0.0]))
    assert reduction.counts(1)["num_wrong"] == 2 * len(group.devices)
    return {}
