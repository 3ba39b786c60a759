"""Drift detection inside the steps of `fit`.

By default no probe is active and the graph stays unchanged. An active `DriftProbe`
computes a checksum of each replica's weights at the beginning of every N-th step,
in parallel with the forward pass. The checksums are reduced with the logs, which each
step merges anyway.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.ground._compat import graphs, runtime
from tfdp.training.replicas.assigned_values import (
    checksum_of_text,
    num_assigned,
    recorded_weights,
)
from tfdp.training.replicas.checksum import checksums, combine_checksums
from tfdp.training.replicas.drift import replicated_weights
from tfdp.training.step.step import LoopFeature, active

# Checksums are reduced together with the logs, in float64, which represents integers of
# up to 53 bits exactly; a checksum has 33.
_DTYPE = tf.float64


class DriftProbe(LoopFeature):
    """Hooks that compute a checksum of each replica's weights at an interval of steps.

    `read` returns the last checksums: if they differ, so do the weights.

    Args:
        strategy: A tfdp strategy of several replicas.
        model: Keras model.
        every: Int, the number of steps from one check to the next.
    """

    def __init__(self, strategy: Any, model: Any, every: int) -> None:
        self._model = model
        self._extended = strategy.extended
        self._num_replicas = strategy.num_replicas_in_sync
        self._every = every
        self._host = self._extended.host_group.devices[0]
        self._steps = runtime.plain_variable(0, tf.int64, self._host)
        self._result = runtime.plain_variable(
            np.zeros([1 + self._num_replicas]), _DTYPE, self._host
        )
        # A traced step cannot see assignments outside of steps, so it reads their
        # checksum from a variable. `_num_assigned` is the number of assignments in this
        # checksum: after further ones, it is computed again.
        self._assigned = runtime.plain_variable(0, tf.int64, self._host)
        self._num_assigned = -1
        self._step: tf.Tensor | None = None
        self._is_due: tf.Tensor | None = None
        # For each local replica of the step being traced, a vector `[num_replicas]` of
        # zeros with its checksum at its rank: their sum has all replicas' checksums.
        self._rows: list[tf.Tensor] = []

    def start(self) -> None:
        """Activate the probe for steps that are traced from now on."""
        active.activate(self)

    def update_assigned(self) -> None:
        """Let the next check cover what this worker assigned outside of steps so far.

        A checksum of all assignments to sharded weights is stored in a variable, which
        the check adds to the checksum of each local replica's weights. Call it before
        each step; it does nothing without new assignments.
        """
        if self._num_assigned == num_assigned():
            return
        self._num_assigned = num_assigned()
        records = [weight.value.assigned for weight in recorded_weights(self._model)]
        digest = "".join(record.digest for record in records)
        self._assigned.assign(checksum_of_text(digest))

    def read(self) -> tuple[int, list[float]]:
        """Return the result of the last check.

        Returns:
            Tuple of an int, the step of the check, and a list with a float for each
            replica, by rank: the checksum of its weights, or 0 if this replica was not
            checked in this step.
        """
        handle = self._result.handle
        result = tf.raw_ops.ReadVariableOp(resource=handle, dtype=_DTYPE).numpy()
        return int(result[0]), result[1:].tolist()

    def begin_batch(self, model: Any, batch: list) -> None:
        """Implements `LoopFeature.begin_batch`: add the checksums to the traced step.

        They are those of the weights after the previous step, and are computed once
        the tensors of `batch`, a list of nests, are available. At the end of the step,
        they would delay its logs until the update.
        """
        if model is not self._model:
            return
        parts = tf.nest.flatten(batch, expand_composites=True)
        data = [part for part in parts if tf.is_tensor(part)]
        with tf.device(self._host), tf.control_dependencies(data):
            self._step = self._steps.assign_add(1).read_value()
            self._is_due = tf.equal(self._step % self._every, 0)
        values = tf.cond(self._is_due, self._checksums, self._no_checksums)
        with tf.device(self._host):
            self._rows = [
                tf.one_hot(
                    self._extended.first_rank + replica,
                    self._num_replicas,
                    on_value=values[replica],
                    off_value=tf.zeros([], _DTYPE),
                )
                for replica in range(self._extended.num_local)
            ]

    def values_to_sum(self, model: Any) -> list[tf.Tensor]:
        """Implements `LoopFeature.values_to_sum`: return the checksums of the step.

        Returns:
            List with a vector `[num_replicas]` for each local replica, its checksum at
            its rank and zeros elsewhere; empty for another model.
        """
        return self._rows if model is self._model and self._is_pending() else []

    def _is_pending(self) -> bool:
        """Return whether the step being traced has checksums for `take_sum`."""
        if not self._rows:
            return False
        # `_rows` may be left over from an earlier graph or from eager execution: they
        # are cleared when logs are reduced, and steps outside of Keras's loops have no
        # logs.
        in_graph = tf.is_symbolic_tensor(self._rows[0])
        if tf.executing_eagerly():
            return not in_graph
        return in_graph and self._rows[0].graph is tf.compat.v1.get_default_graph()

    def take_sum(self, total: tf.Tensor) -> None:
        """Implements `LoopFeature.take_sum`: store a check's result on the host.

        In a step without a check, the previous result stays.

        Args:
            total: Tensor of shape `[num_replicas]`, the checksums of all replicas.
        """
        with tf.device(self._host):
            result = tf.concat([tf.cast(self._step, _DTYPE)[tf.newaxis], total], axis=0)
            before = self._result.read_value()
            self._result.assign(tf.where(self._is_due, result, before))
        self._rows = []

    def _checksums(self) -> tf.Tensor:
        """Compute a float64 checksum of each local replica's weights: `[num_local]`.

        The checksum of assignments outside of steps is added to each.
        """
        weights = [weight.value for weight in replicated_weights(self._model)]
        numbers = []
        for replica, device in enumerate(self._extended.group.devices):
            parts = [weight.values[replica] for weight in weights]
            with tf.device(device):
                checksum = functools.partial(_checksum, parts)
                numbers.append(graphs.as_one_operation(checksum))
        with tf.device(self._host):
            # The checksums of the weights and of the assignments have 33 bits each:
            # their sum, of 34 bits, is exact in float64.
            assigned = tf.cast(self._assigned.read_value(), _DTYPE)
            return tf.stack([tf.cast(number, _DTYPE) + assigned for number in numbers])

    def _no_checksums(self) -> tf.Tensor:
        """Return zeros, which mean that a step has no check: `[num_local]`."""
        with tf.device(self._host):
            return tf.zeros([self._extended.num_local], _DTYPE)


def _checksum(parts: list[tf.Variable]) -> tf.Tensor:
    """Return 1 plus the checksum of a replica's weights, a scalar: 0 means no check."""
    return combine_checksums(checksums([part.read_value() for part in parts])) + 1
