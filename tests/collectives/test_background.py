"""Functions that run on a thread beside the steps."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from tfdp.communication.collectives.background import BackgroundThread
from tfdp.training.keras_hooks import install

DEVICE = "CPU:0"
SPEC = [tf.TensorSpec([2], tf.float32)]
_SECONDS = 30.0


class Steps:
    """Steps of two replicas on one device, which launch or collect."""

    def __init__(self, function) -> None:
        install.install()
        self.background = BackgroundThread("test", [DEVICE] * 2, SPEC, SPEC, function)

        @tf.function(autograph=False)
        def launch(value: tf.Tensor) -> None:
            for replica in range(2):
                own = tf.fill([2], value * (replica + 1.0))
                self.background.launch(replica, [own])

        @tf.function(autograph=False)
        def collect(limit: tf.Tensor) -> list[tf.Tensor]:
            check = tf.debugging.assert_less(0.0, limit)
            with tf.control_dependencies([check]):
                found = [self.background.collect(replica) for replica in range(2)]
            return [own[0] for own in found]

        self.launch, self._collect = launch, collect

    def collect(self, limit: float = 1.0) -> list[np.ndarray]:
        return [found.numpy() for found in self._collect(tf.constant(limit))]


def add_up(parts: list[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
    total = tf.add_n([tensors[0] for tensors in parts])
    return [[total], [-total]]


def add_up_after(event: threading.Event) -> Callable:
    """The sum, which waits until the event is set."""

    def later(parts: list[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        assert event.wait(_SECONDS)
        return add_up(parts)

    return later


def test_a_step_that_launches_does_not_wait_and_a_later_one_collects():
    may_go_on = threading.Event()
    steps = Steps(add_up_after(may_go_on))
    steps.launch(tf.constant(1.0))  # would not return
    may_go_on.set()
    for number in (1.0, 2.0):
        if number > 1.0:
            steps.launch(tf.constant(number))
        steps.background.wait()
        first, second = steps.collect()
        np.testing.assert_array_equal(first, [3.0 * number] * 2)
        np.testing.assert_array_equal(second, -first)


def test_what_only_some_replicas_have_launched_is_not_waited_for():
    steps = Steps(add_up)
    steps.background.launch(0, [tf.zeros([2])])
    steps.background.wait()  # would not return


def test_what_is_under_way_outlives_a_step_that_fails():
    steps = Steps(add_up)
    steps.launch(tf.constant(1.0))
    with pytest.raises(tf.errors.InvalidArgumentError):
        steps.collect(limit=-1.0)
    np.testing.assert_array_equal(steps.collect()[0], [3.0, 3.0])


def test_what_was_launched_before_the_end_is_not_waited_for():
    may_go_on = threading.Event()
    steps = Steps(add_up_after(may_go_on))
    steps.launch(tf.constant(1.0))
    steps.background.end()
    may_go_on.set()
    steps.background.wait()  # would not return


def test_the_step_that_collects_ends_with_the_reason_of_a_failure():
    def fail(parts: list[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        raise RuntimeError("worker 1 has left")

    steps = Steps(fail)
    for _ in range(2):
        steps.launch(tf.constant(1.0))
        with pytest.raises(tf.errors.UnavailableError, match="worker 1 has left"):
            steps.collect()


def test_one_that_is_garbage_leaves_nothing_in_a_graph_that_is_traced():
    made = [BackgroundThread("test", [DEVICE], SPEC, SPEC, add_up)]

    @tf.function(autograph=False)
    def traced() -> None:
        made.clear()
        gc.collect()

    graph = traced.get_concrete_function().graph
    assert not [op for op in graph.get_operations() if "Queue" in op.type]
