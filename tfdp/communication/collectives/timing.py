"""Begin and end of collectives, recorded inside the graph.

Without a `Recorder`, which is the default, nothing is added to the graph. Functions
traced inside one write a timestamp before and after each collective into a variable
on the host. GPU collectives are asynchronous to the host: their times are in the
device's profile instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.ground._compat import runtime
from tfdp.ground.base import step_context
from tfdp.ground.base.step_context import ActiveHooks

# Monitors tell recorded collectives apart by the first word of their labels: a bucket
# of gradients, parameters, or rows of sparse gradients.
GRADIENTS, PARAMETERS, ROWS = "bucket", "parameters", "rows"
# First words of the labels of a unit's all-gathers. A unit, sharded parameters that are
# gathered together, is gathered for the forward and again for the backward pass.
UNIT, UNIT_AGAIN = "unit", "unit_again"


@dataclasses.dataclass(frozen=True)
class Collective:
    """A traced collective and the variable that holds its times.

    Args:
        kind: String, such as `"all_reduce"`.
        num_bytes: Int, size of the tensor, or -1 if its length is known only at run
            time.
        replica: Int, index of the calling replica among the local ones.
        values: Variable of shape `[3]`, float64: begin and end in seconds; then the
            time of the first use of the result if `is_awaited`, or the bytes of the
            tensor if `num_bytes` is -1, or 0.
        label: String, what is communicated, such as `"bucket 0"`.
        group_size: Int, number of replicas in the group.
        chain: Int that identifies a chain, whose collectives run one after another.
            Defaults to `0`.
        is_awaited: Bool, whether the step records when the result was first needed.
            Defaults to `False`.
        needed_at: Float, seconds, the time at which the result was first needed, or
            `None`. Defaults to `None`.
    """

    kind: str
    num_bytes: int
    replica: int
    values: tf.Variable
    label: str
    group_size: int
    chain: int = 0
    is_awaited: bool = False
    needed_at: float | None = None

    @property
    def is_of_gradients(self) -> bool:
        """Bool, whether this collective reduces gradients of the backward pass."""
        return self.label.split()[0] in (GRADIENTS, ROWS)

    @property
    def wire_bytes(self) -> float:
        """Float, mean bytes that a replica of the group sends.

        Source: nccl-tests, https://github.com/NVIDIA/nccl-tests, PERFORMANCE.md.
        """
        others = self.group_size - 1
        if self.kind == "all_gather":
            return others * self.num_bytes
        passes = 2 if self.kind == "all_reduce" else 1
        return passes * others / self.group_size * self.num_bytes


@dataclasses.dataclass(frozen=True)
class Mark:
    """Variable for two measurements of each step.

    An example is the pair of times at which the step begins and its forward pass ends.

    Args:
        name: String, such as `"times"`, see
            `tfdp.communication.collectives.step_events`.
        replica: Int, index of the replica among the local ones.
        values: Variable of shape `[3]`, float64; the third number is not used.
    """

    name: str
    replica: int
    values: tf.Variable


# An item that a `Recorder` records is called a row, since `Recorder.gather` copies the
# values of each item into one row of a variable.
Row = Collective | Mark


class Recorder:
    """Recorder of the collectives of the functions that are traced inside it.

    Args:
        norm_every: Int, steps between two records of the gradient's norm, or `None`
            for none. Defaults to `None`.
        timestamps: Bool, whether times are recorded. Defaults to `True`.

    Example:

    >>> with Recorder() as recorder:
    ...     pass
    >>> recorder.collectives
    []
    """

    def __init__(
        self, norm_every: int | None = None, *, timestamps: bool = True
    ) -> None:
        self.norm_every = norm_every
        self.timestamps = timestamps
        self.rows: list[Row] = []
        self._table: tf.Variable | None = None

    def __enter__(self) -> Recorder:
        recorders.activate(self)
        return self

    def __exit__(self, *unused_error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop recording: functions that are traced later are not recorded."""
        recorders.deactivate(self)

    @property
    def collectives(self) -> list[Collective]:
        """List of `Collective`, in the order of tracing."""
        return [row for row in self.rows if isinstance(row, Collective)]

    def gather(self) -> None:
        """Copy the values of all `rows` into one variable, at the end of a traced step.

        A row is a recorded collective or mark. `read` then reads one variable per step
        instead of one per row.
        """
        if not self.rows:
            return
        if self._table is None:
            self._table = _new_variable(np.zeros([0, 3]), shape=[None, 3])
        self._table.assign(tf.stack([row.values.read_value() for row in self.rows]))

    def read(self) -> np.ndarray:
        """Return the records of the last step.

        Returns:
            Array of shape `[num_rows, 3]`, float64: the values of `rows`, except rows
            that were added after the step was traced.
        """
        if self._table is None:
            return np.zeros([0, 3])
        # A raw operation reads without a function call, which would wake other threads.
        handle = self._table.handle
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64).numpy()


recorders: ActiveHooks[Recorder] = ActiveHooks("recorders")


def is_active() -> bool:
    """Return whether a recorder is active and a graph is being traced."""
    return bool(recorders) and not tf.executing_eagerly()


def is_timing() -> bool:
    """Return whether a recorder of times is active and a graph is being traced."""
    return is_active() and any(recorder.timestamps for recorder in recorders.active())


def gather() -> None:
    """At the end of a traced step, have each active recorder copy its rows.

    The rows are the times of collectives and other values that the step has recorded,
    each in its own variable. They are copied into one variable, which `Recorder.read`
    reads. Without a recorder, or outside of tracing, this does nothing.
    """
    if is_active():
        for recorder in recorders.active():
            recorder.gather()


@contextlib.contextmanager
def labelled(label: str) -> Iterator[None]:
    """Label the collectives that this thread traces in the block.

    Args:
        label: String, such as `"bucket 0"`: what the collectives communicate.
    """
    # The name scope puts the label into TensorFlow's errors, which name the operation.
    with step_context.using(label=label), tf.name_scope(label.replace(" ", "_")):
        yield


def current_label() -> str | None:
    """Return the label of the collectives that this thread traces, or `None`.

    `labelled` sets it for a block, to a string such as `"bucket 0"`.
    """
    return step_context.current().label


def needed_after(
    ops: Sequence[tf.Operation],
) -> contextlib.AbstractContextManager[None]:
    """Record when the results of collectives traced in the block are needed.

    Args:
        ops: Sequence of operations, the last ones that run without the results; empty
            if the results are needed at once.
    """
    return step_context.using(ops_before_need=list(ops))


@contextlib.contextmanager
def measured(
    kind: str, tensor: tf.Tensor, replica: int, group_size: int, chain: int = 0
) -> Iterator[Callable[[tf.Tensor], tf.Tensor]]:
    """Record the times of a collective; the block calls the yielded `done(result)`.

    Args:
        kind: String, such as `"all_reduce"`.
        tensor: Tensor that is sent.
        replica: Int, index of the calling replica among the local ones.
        group_size: Int, number of replicas in the group.
        chain: Int that identifies a chain, whose collectives run one after another.
            Defaults to `0`.

    Yields:
        Callable that takes the result, records the end, and returns the result.
    """
    if not is_timing():
        yield lambda result: result
        return

    count = tensor.shape.num_elements()
    context = step_context.current()
    label = context.label or kind
    times = _new_variable([0.0] * 3)
    num_bytes = -1 if count is None else count * tensor.dtype.size
    ops = context.ops_before_need
    is_awaited = bool(ops) and count is not None
    record = Collective(
        kind, num_bytes, replica, times, label, group_size, chain, is_awaited
    )
    for recorder in recorders.active():
        recorder.rows.append(record)
    if is_awaited:
        with tf.control_dependencies(ops):
            stamp(times, 2)

    with tf.control_dependencies([tensor]):
        begin = stamp(times, 0)
        if count is None:
            size = tf.size(tensor, tf.int64) * tensor.dtype.size
            write(times, lambda: times[2].assign(tf.cast(size, tf.float64)))

    def done(result: tf.Tensor) -> tf.Tensor:
        """Record the time at which the collective ends, and return its `result`."""
        with tf.control_dependencies([result]):
            stamp(times, 1)
        return result

    with tf.control_dependencies([begin]):
        yield done


def mark_variable(name: str, replica: int) -> tf.Variable:
    """Return the variable of a replica's `Mark`; create the mark if it is missing.

    Args:
        name: String, name of the mark, such as `"times"`.
        replica: Int, index of the replica among the local ones.
    """
    for recorder in recorders.active():
        for row in recorder.rows:
            if isinstance(row, Mark) and (row.name, row.replica) == (name, replica):
                return row.values
    mark = Mark(name, replica, _new_variable([0.0] * 3))
    for recorder in recorders.active():
        recorder.rows.append(mark)
    return mark.values


def stamp(values: tf.Variable, index: int) -> tf.Tensor:
    """Write the current time into an element of a variable.

    Args:
        values: Variable of shape `[3]`, float64.
        index: Int, index of the element.

    Returns:
        Tensor, the value of the variable after the assignment.
    """
    return write(values, lambda: values[index].assign(tf.timestamp()))


def write(values: tf.Variable, assign: Callable[[], Any]) -> tf.Tensor:
    """Run an assignment that waits only for earlier uses of its own variable.

    TensorFlow runs all operations with side effects in program order, even those of
    different replicas: the second replica's first stamp would wait for the first
    replica's second stamp, a deadlock. A function with a resource as its input is
    ordered only by that resource.

    Args:
        values: Variable that the assignment changes.
        assign: Callable that assigns to `values`.

    Returns:
        Tensor, the value after the assignment.
    """

    def assign_and_read() -> tf.Tensor:
        """Run the assignment, and return the new value of the variable."""
        assign()
        return values.read_value()

    return tf.function(assign_and_read, autograph=False)()


def _new_variable(value: Any, shape: list | None = None) -> tf.Variable:
    """Create a float64 variable in host memory.

    Args:
        value: Initial value.
        shape: List of ints or `None` for unknown sizes; or `None` for that of the
            value. Defaults to `None`.
    """
    return runtime.plain_variable(value, tf.float64, "CPU:0", shape)
