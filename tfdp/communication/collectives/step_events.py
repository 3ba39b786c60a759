"""Measurements of a step for a monitor, recorded inside the graph.

Without an active recorder, which is the default, nothing is added to the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import timing
from tfdp.ground._compat import runtime, tf_distribute
from tfdp.ground.base import loops, xla
from tfdp.ground.base.conditions import run_if
from tfdp.ground.base.context import in_replica_thread
from tfdp.ground.base.step_context import ActiveHooks

# A monitor finds the two measurements of a `Mark` (in `timing`) by the mark's name:
# - TIMES, of each replica: when its step begins, and when its forward pass ends;
# - BATCH, of a worker: samples of the global batch, and the number of steps;
# - NORM, of each replica: its part of the gradient's squared norm, and the step.
TIMES = "times"
BATCH = "batch"
NORM = "norm"


class StepDataWaits:
    """Sum of the times that the steps of `fit` wait for data, of one worker.

    Steps that are traced while it is active get two time stamps. Python reads the sum
    when it needs it, not in each step.

    Attributes:
        num_traces: Int, steps that were traced with it.
    """

    def __init__(self) -> None:
        self.num_traces = 0
        # Python reads only the sum of waits. The begin of the last step is a variable
        # because TensorFlow orders the function that assigns it only by this variable.
        self._begin = runtime.plain_variable(0.0, tf.float64, "CPU:0")
        self._sum = runtime.plain_variable(0.0, tf.float64, "CPU:0")

    def record(self, data: list[tf.Tensor]) -> tf.Tensor:
        """Trace operations that add a step's wait for its data to the sum.

        Args:
            data: List of tensors, the data.

        Returns:
            Tensor, computed when the data is available.
        """
        self.num_traces += 1

        # Each function changes one variable, since TensorFlow then orders the function
        # only by that variable; see `timing.write`.
        @tf.function(autograph=False)
        def begin() -> tf.Tensor:
            """Return the current time in seconds, and store it as the step's begin."""
            now = tf.timestamp()
            self._begin.assign(now, read_value=False)
            return now

        @tf.function(autograph=False)
        def add(begun_at: tf.Tensor) -> tf.Tensor:
            """Add the time since `begun_at` to the sum; return the current time."""
            now = tf.timestamp()
            self._sum.assign_add(now - begun_at, read_value=False)
            return now

        begun_at = begin()
        with tf.control_dependencies(data):
            return add(begun_at)

    def read_seconds(self) -> float:
        """Return the sum of waits in seconds; it shrinks if the clock is set back."""
        handle = self._sum.handle
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64)
        return float(value.numpy())


data_waits: ActiveHooks[StepDataWaits] = ActiveHooks("data waits")


def record_step_begin(data: list[tf.Tensor]) -> list[tf.Tensor]:
    """Record the time at which the data of a replica's step is ready.

    Args:
        data: List of tensors, the data.

    Returns:
        List of tensors, which the step must have as control inputs: `data` if nothing
        is recorded.
    """
    stamps = [] if tf.executing_eagerly() else _record_waits(data)
    if timing.is_timing():
        values = timing.mark_variable(TIMES, tf_distribute.active_local_replica_id())
        with tf.control_dependencies(data):
            stamps.append(timing.stamp(values, 0))
    return stamps or data


def _record_waits(data: list[tf.Tensor]) -> list[tf.Tensor]:
    """Record how long a step of `fit` waits for data, on the first local replica.

    Args:
        data: List of tensors, the data of a replica's step.

    Returns:
        List of tensors, which the step must have as control inputs.
    """
    loop = loops.current()
    is_fit = loop is not None and loop.name == "fit" and not loops.is_nested()
    if not is_fit or tf_distribute.active_local_replica_id() != 0:
        return []
    return [wait.record(data) for wait in data_waits.active()]


def record_loss(loss: tf.Tensor) -> None:
    """Record the time at which the forward pass of a replica ends.

    XLA has no clock: in a step that it compiles, the time is recorded only after the
    backward pass.

    Args:
        loss: Tensor, which is computed at the end of the forward pass.
    """
    if xla.is_tracing():
        return
    if timing.is_timing() and in_replica_thread():
        values = timing.mark_variable(TIMES, tf_distribute.active_local_replica_id())
        with tf.control_dependencies([tf.convert_to_tensor(loss)]):
            timing.stamp(values, 1)


def record_batch(samples: tf.Tensor | None) -> None:
    """Record the number of samples of a global batch, and count the step.

    Args:
        samples: Scalar tensor, or `None` if unknown.
    """
    if not timing.is_active():
        return
    count = float("nan") if samples is None else samples
    values = timing.mark_variable(BATCH, 0)

    def assign() -> Any:
        """Assign the number of samples, and add one to the number of steps.

        Returns:
            The result of `tf.Variable.assign`.
        """
        samples = tf.cast(count, tf.float64)
        return values.assign(tf.stack([samples, values[1] + 1.0, 0.0]))

    timing.write(values, assign)


def record_squared_norm(compute: Callable[[], tf.Tensor]) -> None:
    """Record this replica's part of the gradient's squared norm, every few steps.

    The number of steps is the least `norm_every` of the active recorders.

    Args:
        compute: Callable that returns a scalar tensor, this part.
    """
    if not timing.is_active():
        return
    wanted = [
        r.norm_every for r in timing.recorders.active() if r.norm_every is not None
    ]
    if not wanted:
        return
    step = timing.mark_variable(BATCH, 0)[1]
    values = timing.mark_variable(NORM, tf_distribute.active_local_replica_id())

    def record() -> None:
        """Record this optimizer's part of the squared norm.

        It is added to the parts of other optimizers in the same step.
        """
        squares = tf.cast(compute(), tf.float64)
        # If another optimizer of the same step has recorded its part of the norm, this
        # part is added to it.
        before = tf.where(tf.equal(values[1], step), values[0], 0.0)
        values.assign(tf.stack([before + squares, step, 0.0]))

    age = step - values[1]
    is_due = tf.logical_or(tf.equal(age, 0.0), age >= float(min(wanted)))
    run_if(is_due, record)
