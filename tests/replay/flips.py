"""Bits that flip in what a replica computes."""

from __future__ import annotations

import contextlib
import typing
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tests.harness.env import Env
from tfdp.features.replay import replay_group
from tfdp.ground._compat import runtime, tf_distribute
from tfdp.training.keras_hooks import optimizer_hooks
from tfdp.training.optimizer import distributed
from tfdp.training.program.builder import Builder
from tfdp.training.reduction.gradient_reducer import ReplicaReducer
from tfdp.training.step import path

FLIPPED_IN = 5  # the step of `fit`, from 1
AS_STAND_IN, OF_OWN_ROWS, ALWAYS = (1, 1), (2, 2), (1, 99)


class Flips(keras.callbacks.Callback):
    """Flips a bit of what one replica computes, from a step on.

    Args:
        env: The set-up.
        replica: Rank of the replica.
        calls: First and last computation in which the bit flips, from 1.
        varies: Whether each computation has another bit flipped.
    """

    def __init__(self, env: Env, replica: int, calls: tuple, *, varies: bool = False):
        super().__init__()
        num_local = env.setup.devices_per_worker
        self.worker, self.local = divmod(replica, num_local)
        self.is_here = self.worker == env.rank
        self.calls, self.varies = calls, varies
        # All replicas have the operations of a flip, so that their plans are alike.
        # Numbers of computations; far below zero until bits flip.
        self.counts = [
            runtime.plain_variable(-1000, tf.int32, "CPU:0") for _ in range(num_local)
        ]
        self.weights_before: list[np.ndarray] = []
        self.step = 0

    def on_train_batch_begin(self, batch, logs=None):
        self.step += 1
        if self.step == FLIPPED_IN:
            self.weights_before = self.model.get_weights()
            if self.is_here:
                self.counts[self.local].assign(0)

    def flipped(self, local: int, values: tf.Tensor, bit: int) -> tf.Tensor:
        """Returns a local replica's values, with a bit of the first flipped if due."""
        count = self.counts[local].assign_add(1).read_value()
        first, last = self.calls
        if self.varies:
            bit += count % 3
        bits = tf.bitcast(tf.reshape(values, [-1]), tf.int32)
        is_due = (count >= first) & (count <= last)
        mask = tf.where(is_due, tf.bitwise.left_shift(1, bit), 0)
        mask *= tf.one_hot(0, tf.size(bits), dtype="int32")
        changed = tf.bitcast(tf.bitwise.bitwise_xor(bits, mask), values.dtype)
        result = tf.reshape(changed, tf.shape(values))
        result.set_shape(values.shape)
        return result


def local_replica() -> int:
    return tf_distribute.local_replica_id(tf.distribute.get_replica_context())


@contextlib.contextmanager
def in_gradient(flips: Flips) -> typing.Iterator[None]:
    def take_step(step: typing.Any, gradients: list) -> None:
        first = flips.flipped(local_replica(), gradients[0], 0)
        path.take_step(step, [first, *gradients[1:]])

    with (
        mock.patch.object(distributed, "take_step", take_step),
        mock.patch.object(optimizer_hooks, "take_step", take_step),
    ):
        yield


@contextlib.contextmanager
def in_kernel(flips: Flips) -> typing.Iterator[None]:
    """In the first matrix product of the forward pass."""
    original = Builder._build_operation

    def build(builder: Builder, op: typing.Any) -> None:
        original(builder, op)
        operations = builder.plan.graph.get_operations()
        products = [other for other in operations if other.type == "MatMul"]
        if products and op is products[0]:
            key, local = id(op.outputs[0]), builder.replica.local_id
            builder.tensors[key] = flips.flipped(local, builder.tensors[key], 20)

    with mock.patch.object(Builder, "_build_operation", build):
        yield


@contextlib.contextmanager
def in_sum(flips: Flips) -> typing.Iterator[None]:
    original = ReplicaReducer.reduce_gradients

    def reduce(reducer: ReplicaReducer, *args: typing.Any, **options) -> typing.Any:
        found = original(reducer, *args, **options)
        found.flats[-1] = flips.flipped(local_replica(), found.flats[-1], 0)
        return found

    with mock.patch.object(ReplicaReducer, "reduce_gradients", reduce):
        yield


@contextlib.contextmanager
def in_statistics(flips: Flips) -> typing.Iterator[None]:
    """In a sum over replicas within the step, as a replica receives it."""
    original = replay_group._OrderedSums.sum

    def add(sums: typing.Any, parts: list) -> list:
        first, *others = original(sums, parts)
        return [flips.flipped(local_replica(), first, 20), *others]

    with mock.patch.object(replay_group._OrderedSums, "sum", add):
        yield
