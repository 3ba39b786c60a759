"""The threads that run the collectives of a graph."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import tensorflow as tf

from tests.harness import forks
from tests.harness.pool import ClusterPool
from tests.harness.registry import Case
from tfdp.communication.collectives import (
    LaunchOrder,
    Member,
    ProcessGroup,
    ProcessTransport,
    process_collectives,
)

CASE_MODULES = ("collectives.cases_bridge",)
DEADLINE_SECONDS = 60.0
NUM_BUCKETS = 4


@pytest.mark.core
def test_collective_thread(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)


class Together:
    """An all-reduce that begins when as many others are under way."""

    def __init__(self, count: int):
        self._barrier = threading.Barrier(count)

    def __call__(
        self, arrays: list[np.ndarray], source: int, tag: int
    ) -> list[tf.Tensor]:
        self._barrier.wait(DEADLINE_SECONDS / 2)
        return [tf.constant(array.view(np.uint8)) for array in arrays]


def reduce_with_one_thread() -> None:
    """Reduces buckets that wait for each other, one on each channel."""
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    together = Together(NUM_BUCKETS)
    collectives = process_collectives.ProcessCollectives
    collectives.all_reduce = lambda self, *given: together(*given)  # type: ignore[method-assign]
    transport = ProcessTransport("direct", 0, None)
    order = LaunchOrder(["/cpu:0"], transport.num_channels)
    group = ProcessGroup(order, 2, transport, positions=[0], workers=[0, 0])

    @tf.function(autograph=False)
    def step() -> list:
        buckets = [tf.fill([100], float(n)) for n in range(NUM_BUCKETS)]
        return [
            Member(group, 0, channel=n).all_reduce(b) for n, b in enumerate(buckets)
        ]

    for number, bucket in enumerate(step()):
        np.testing.assert_array_equal(bucket, np.full(100, number))


@pytest.mark.full
def test_with_one_inter_op_thread_four_buckets_are_under_way_at_once():
    (answer,) = forks.run([forks.Start(reduce_with_one_thread)], DEADLINE_SECONDS)
    assert not answer.error, answer
