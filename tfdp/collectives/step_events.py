"""What a monitor sees of a step: noted inside the graph, where one is switched on.

Off, which is the default, none of these adds anything to the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp import _compat
from tfdp.base.ownership import in_replica_thread
from tfdp.collectives import timing

# Names of what is noted, see `tfdp.collectives.timing.Mark`.
TIMES = "times"  # of a replica: when its step began, when its loss was there
BATCH = "batch"  # of a worker: samples of the global batch, steps so far
NORM = "norm"  # of a replica: its part of the squared norm, at which step


def step_begins(data: list[tf.Tensor]) -> list[tf.Tensor]:
    """Notes when the data of a replica's step is there.

    Args:
        data: List of tensors.

    Returns:
        List of tensors that the step waits for.
    """
    if not timing.is_timing():
        return data
    notes = timing.mark(TIMES, _compat.local_replica_id_in_force())
    with tf.control_dependencies(data):
        return [timing.stamp(notes, 0)]


def loss_is_ready(loss: tf.Tensor) -> None:
    """Notes when the forward pass of a replica is through."""
    if timing.is_timing() and in_replica_thread():
        notes = timing.mark(TIMES, _compat.local_replica_id_in_force())
        with tf.control_dependencies([tf.convert_to_tensor(loss)]):
            timing.stamp(notes, 1)


def batch(samples: tf.Tensor | None) -> None:
    """Notes the samples of a global batch, and counts the step.

    Args:
        samples: Scalar tensor, or `None` where that is unknown.
    """
    if not timing.is_active():
        return
    count = float("nan") if samples is None else samples
    notes = timing.mark(BATCH, 0)

    def assign() -> Any:
        samples = tf.cast(count, tf.float64)
        return notes.assign(tf.stack([samples, notes[1] + 1.0, 0.0]))

    timing.write(notes, assign)


def squared_norm(compute: Callable[[], tf.Tensor], replica: int | None = None) -> None:
    """Notes a replica's part of the squared norm of the gradient, once in a while.

    Args:
        compute: Callable that returns a scalar tensor.
        replica: Int, index of the calling replica among the local ones, or `None`
            for the one in force. Defaults to `None`.
    """
    if not timing.is_active():
        return
    wanted = [
        r.norm_every for r in timing.recorders.active() if r.norm_every is not None
    ]
    if not wanted:
        return
    if replica is None:
        replica = _compat.local_replica_id_in_force()
    step = timing.mark(BATCH, 0)[1]
    notes = timing.mark(NORM, replica)

    def note() -> tf.Tensor:
        squares = tf.cast(compute(), tf.float64)
        # Another optimizer may have noted its part of the same step.
        before = tf.where(tf.equal(notes[1], step), notes[0], 0.0)
        notes.assign(tf.stack([before + squares, step, 0.0]))
        return tf.constant(True)

    age = step - notes[1]
    is_due = tf.logical_or(tf.equal(age, 0.0), age >= float(min(wanted)))
    tf.cond(is_due, note, lambda: tf.constant(False))
