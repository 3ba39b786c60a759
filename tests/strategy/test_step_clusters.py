"""A step of several XLA clusters: buckets start at the end of theirs."""

from __future__ import annotations

from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.harness import forks
from tfdp.strategy.compiled_step import CompiledStep

DEADLINE_SECONDS = 120
NUM_LAYERS = 3


def _fit(num_clusters: int) -> tuple[list, int, tf.Graph]:
    """Train with a bucket for each layer; returns weights, clusters and the graph."""
    options = tfdp.CommunicationOptions(
        bucket_mb=0.001, first_bucket_mb=0.001, xla_clusters=num_clusters
    )
    strategy = tfdp.MirroredStrategy(
        tfdp.testing.logical_cpus(2), communication=options
    )
    keras.utils.set_random_seed(0)
    with strategy.scope():
        hidden = [keras.layers.Dense(16, activation="relu") for _ in range(NUM_LAYERS)]
        norm = keras.layers.BatchNormalization()
        model = keras.Sequential([keras.Input((16,)), norm, *hidden])
        adam = keras.optimizers.Adam(0.01)
        model.compile(adam, "mse", metrics=["mae"], jit_compile=True)
    graphs: list[tf.Graph] = []
    call = CompiledStep.__call__

    def recorded(self: CompiledStep, *args: Any) -> Any:
        graphs.append(tf.compat.v1.get_default_graph())
        return call(self, *args)

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 44, 16)).astype("float32")
    recording = mock.patch.object(CompiledStep, "__call__", recorded)
    with recording:
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    plan = strategy.communication_plan(model)
    assert plan.is_compiled
    text = f"one of {num_clusters} XLA clusters" if num_clusters > 1 else "one XLA"
    assert text in str(plan)
    return model.get_weights(), plan.num_clusters, graphs[0]


def _clusters_before(op: tf.Operation) -> int:
    """How many XLA clusters have to end before an operation starts."""
    seen, waiting = {op}, [op]
    while waiting:
        each = waiting.pop()
        before = {x.op for x in each.inputs} | set(each.control_inputs)
        waiting += before - seen
        seen |= before
    return sum(_is_cluster(each) for each in seen)


def _is_cluster(op: tf.Operation) -> bool:
    return "_XlaMustCompile" in op.node_def.attr


def _clusters_before_collectives(graph: tf.Graph) -> set[int]:
    found = [op for op in graph.get_operations() if op.type.startswith("Collective")]
    return {_clusters_before(op) for op in found}


def cut_and_whole() -> None:
    """In a process of its own: compare three clusters with one."""
    whole, num_clusters, graph = _fit(1)
    assert num_clusters == 1
    assert _clusters_before_collectives(graph) == {1}
    cut, num_clusters, graph = _fit(3)
    assert num_clusters == 3
    # Buckets of each cluster start when it ends, and do not wait for the next one.
    assert _clusters_before_collectives(graph) == {1, 2, 3}
    for own, other in zip(cut, whole, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)


@pytest.mark.standard
@pytest.mark.processes
def test_buckets_of_a_cut_step_start_at_the_end_of_their_cluster_and_weights_agree():
    (answer,) = forks.run([forks.Start(cut_and_whole)], DEADLINE_SECONDS)
    assert answer.text == ""
