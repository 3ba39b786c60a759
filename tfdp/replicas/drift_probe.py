"""Detection, inside the steps of a `fit`, of replicas that have drifted apart.

Off, which is the default, nothing is added to the graph. A `DriftProbe` lets every so
many steps begin with a checksum of each replica's weights. It is computed beside the
forward pass and travels with the logs, which are merged in each step anyway.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp import _compat
from tfdp.base.active_hooks import ActiveHooks
from tfdp.replicas.checksum import checksums, combined
from tfdp.replicas.drift import weights_alike

# Sums of states travel in it; it holds every checksum, of 33 bits, exactly.
_WIRE = tf.float64


class DriftProbe:
    """Compares the weights of a model's replicas every so many steps.

    Args:
        strategy: A tfdp strategy of several replicas.
        model: Keras model.
        every: Int, steps from one check to the next.
    """

    def __init__(self, strategy: Any, model: Any, every: int) -> None:
        self.model = model
        self._extended = strategy.extended
        self._num_replicas = strategy.num_replicas_in_sync
        self._every = every
        self._host = self._extended.host_group.devices[0]
        self._steps = _compat.plain_variable(0, tf.int64, self._host)
        self._seen = _compat.plain_variable(
            np.zeros([1 + self._num_replicas]), _WIRE, self._host
        )
        self._step: tf.Tensor | None = None
        self._is_due: tf.Tensor | None = None
        # For each local replica, `[num_replicas]`: its number in its own place.
        self.rows: list[tf.Tensor] = []

    def start(self) -> None:
        """What is traced from now on is watched."""
        watches.on(self)

    def read(self) -> tuple[int, list[float]]:
        """The last check: its step, and a number for the weights of each replica.

        A replica that was not checked in this step has 0.
        """
        handle = self._seen.handle
        seen = tf.raw_ops.ReadVariableOp(resource=handle, dtype=_WIRE).numpy()
        return int(seen[0]), seen[1:].tolist()

    def step_begins(self, data: list[tf.Tensor]) -> None:
        """Adds the check to a step that begins.

        The weights are those that the step before left. At the end of this one the
        logs would have to wait for the update, in every step.

        Args:
            data: List of tensors without which there is no step.
        """
        with tf.device(self._host), tf.control_dependencies(data):
            self._step = self._steps.assign_add(1).read_value()
            self._is_due = tf.equal(self._step % self._every, 0)
        values = tf.cond(self._is_due, self._numbers, self._no_numbers)  # [num_local]
        with tf.device(self._host):
            self.rows = [
                tf.one_hot(
                    self._extended.first_rank + replica,
                    self._num_replicas,
                    on_value=values[replica],
                    off_value=tf.zeros([], _WIRE),
                )
                for replica in range(self._extended.num_local)
            ]

    @property
    def is_waiting(self) -> bool:
        """Whether the step that is being made has numbers for `note`."""
        if not self.rows:
            return False
        # A step that was begun outside of Keras's loop has no logs.
        in_graph = tf.is_symbolic_tensor(self.rows[0])
        if tf.executing_eagerly():
            return not in_graph
        return in_graph and self.rows[0].graph is tf.compat.v1.get_default_graph()

    def note(self, row: tf.Tensor) -> None:
        """Keeps what came of a check, until the next one.

        Args:
            row: Tensor of shape `[num_replicas]`, the numbers of all replicas.
        """
        with tf.device(self._host):
            seen = tf.concat([tf.cast(self._step, _WIRE)[tf.newaxis], row], axis=0)
            before = self._seen.read_value()
            self._seen.assign(tf.where(self._is_due, seen, before))
        self.rows = []

    def _numbers(self) -> tf.Tensor:
        weights = [weight.value for weight in weights_alike(self.model)]
        numbers = []
        for replica, device in enumerate(self._extended.group.devices):
            parts = [weight.values[replica] for weight in weights]
            with tf.device(device):
                numbers.append(
                    _compat.as_one_operation(functools.partial(_number, parts))
                )
        with tf.device(self._host):
            return tf.stack([tf.cast(number, _WIRE) for number in numbers])

    def _no_numbers(self) -> tf.Tensor:
        with tf.device(self._host):
            return tf.zeros([self._extended.num_local], _WIRE)


def _number(parts: list[tf.Variable]) -> tf.Tensor:
    """A number for the weights of one replica; zero stands for no check."""
    return combined(checksums([part.read_value() for part in parts])) + 1


watches: ActiveHooks[DriftProbe] = ActiveHooks()


def step_begins(model: Any, batch: Any) -> None:
    """Called when a step of a model begins, with its data on the local replicas."""
    if not watches:
        return
    data = tf.nest.flatten(batch, expand_composites=True)
    data = [item for item in data if tf.is_tensor(item)]
    # What is run without data, such as an optimizer's flush, is no step.
    for watch in watches.active() if data else ():
        if watch.model is model:
            watch.step_begins(data)


def waiting(model: Any) -> list[DriftProbe]:
    """The watches for which the logs of a model's step take something along."""
    return [
        watch for watch in watches.active() if watch.model is model and watch.is_waiting
    ]
