"""When collectives begin and end, recorded inside the graph.

Off, which is the default, nothing is added to the graph. Functions traced
inside `Recorder` write a time stamp before and after each collective into a
variable on the host; GPU collectives are asynchronous to the host, so there
the device's own profile is the place to look.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp import _compat
from tfdp.base.active_hooks import ActiveHooks

# What the labels of a bucket's collectives begin with, and that of sparse gradients.
GRADIENTS, PARAMETERS, ROWS = "bucket", "parameters", "rows"


@dataclasses.dataclass(frozen=True)
class Collective:
    """One traced collective and the variable that holds its times.

    `num_bytes` is -1 where only the step knows the length of the tensor.
    """

    kind: str
    num_bytes: int
    replica: int
    notes: tf.Variable  # [3], float64: begin and end in seconds, bytes
    label: str
    group_size: int
    # Collectives of one chain run one after the other.
    chain: int = 0

    @property
    def is_of_gradients(self) -> bool:
        """Whether the backward pass makes what it is given."""
        return self.label.split()[0] in (GRADIENTS, ROWS)

    @property
    def wire_bytes(self) -> float:
        """Bytes that each replica of the group sends, the mean of all.

        Source: nccl-tests, https://github.com/NVIDIA/nccl-tests, PERFORMANCE.md.
        """
        others = self.group_size - 1
        if self.kind == "all_gather":
            return others * self.num_bytes
        passes = 2 if self.kind == "all_reduce" else 1
        return passes * others / self.group_size * self.num_bytes


@dataclasses.dataclass(frozen=True)
class Mark:
    """Two numbers that a traced step notes besides, such as when it began."""

    name: str
    replica: int
    notes: tf.Variable  # [3], float64; the third is not used


Row = Collective | Mark


class Recorder:
    """Records the collectives of the functions that are traced inside it.

    Args:
        norm_every: Int, after how many steps the gradient's norm is noted again, or
            `None` for never. Defaults to `None`.

    Example:

    >>> with Recorder() as recorder:
    ...     pass
    >>> recorder.collectives
    []
    """

    def __init__(self, norm_every: int | None = None, *, stamps: bool = True) -> None:
        self.norm_every = norm_every
        self.stamps = stamps
        self.rows: list[Row] = []
        self._table: tf.Variable | None = None

    def __enter__(self) -> Recorder:
        recorders.on(self)
        return self

    def __exit__(self, *unused_error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Records nothing that is traced from now on; again has no effect."""
        recorders.off(self)

    @property
    def collectives(self) -> list[Collective]:
        """Those that were traced, in order."""
        return [row for row in self.rows if isinstance(row, Collective)]

    def intervals(self, replica: int = 0) -> list[tuple[Collective, float, float]]:
        """Begin and end of the last execution of each collective, in seconds."""
        rows = [c for c in self.collectives if c.replica == replica]
        found = [(c, c.notes.numpy()) for c in rows]
        return [(c, float(times[0]), float(times[1])) for c, times in found]

    def gather(self) -> None:
        """Ends a traced step: puts its rows into one table.

        One variable is read by Python in the time of one, not of one per row.
        """
        if not self.rows:
            return
        if self._table is None:
            self._table = _new_variable(np.zeros([0, 3]), shape=[None, 3])
        self._table.assign(tf.stack([row.notes.read_value() for row in self.rows]))

    def read(self) -> np.ndarray:
        """All that the last step noted.

        Returns:
            Array of shape `[num_rows, 3]`, float64: the first rows of `rows`, up to
            the last one that was known when the step was traced.
        """
        if self._table is None:
            return np.zeros([0, 3])
        # Without a function: that would wake other threads, and cost more.
        handle = self._table.handle
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64).numpy()


recorders: ActiveHooks[Recorder] = ActiveHooks()
_thread = threading.local()


def is_active() -> bool:
    """Whether what is traced now is recorded."""
    return bool(recorders) and not tf.executing_eagerly()


def is_timing() -> bool:
    """Whether the time of what is traced now is recorded."""
    return is_active() and any(recorder.stamps for recorder in recorders.active())


def gather() -> None:
    """Called at the end of a step that is traced, when all its rows are known."""
    if is_active():
        for recorder in recorders.active():
            recorder.gather()


@contextlib.contextmanager
def labelled(label: str) -> Iterator[None]:
    """Says what the collectives that a thread traces inside are for."""
    outer = getattr(_thread, "label", None)
    _thread.label = label
    try:
        # An error of TensorFlow names the operation.
        with tf.name_scope(label.replace(" ", "_")):
            yield
    finally:
        _thread.label = outer


@contextlib.contextmanager
def measured(
    kind: str, tensor: tf.Tensor, replica: int, group_size: int, chain: int = 0
) -> Iterator[Callable[[tf.Tensor], tf.Tensor]]:
    """Wraps one collective; the body passes its result through what it is given."""
    if not is_timing():
        yield lambda result: result
        return

    count = tensor.shape.num_elements()
    label = getattr(_thread, "label", None) or kind
    times = _new_variable([0.0] * 3)
    num_bytes = -1 if count is None else count * tensor.dtype.size
    record = Collective(kind, num_bytes, replica, times, label, group_size, chain)
    for recorder in recorders.active():
        recorder.rows.append(record)

    with tf.control_dependencies([tensor]):
        begin = stamp(times, 0)
        if count is None:
            size = tf.size(tensor, tf.int64) * tensor.dtype.size
            write(times, lambda: times[2].assign(tf.cast(size, tf.float64)))

    def done(result: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([result]):
            stamp(times, 1)
        return result

    with tf.control_dependencies([begin]):
        yield done


def mark(name: str, replica: int) -> tf.Variable:
    """Numbers that a traced step may write; all recorders read them."""
    for recorder in recorders.active():
        for row in recorder.rows:
            if isinstance(row, Mark) and (row.name, row.replica) == (name, replica):
                return row.notes
    made = Mark(name, replica, _new_variable([0.0] * 3))
    for recorder in recorders.active():
        recorder.rows.append(made)
    return made.notes


def stamp(notes: tf.Variable, index: int) -> tf.Tensor:
    """Writes the time into one of several numbers."""
    return write(notes, lambda: notes[index].assign(tf.timestamp()))


def write(notes: tf.Variable, assign: Callable[[], Any]) -> tf.Tensor:
    """Runs an assignment that is ordered by its own variable and nothing else.

    TensorFlow runs all operations with side effects in the order of the program,
    also those of different replicas: the first replica's second stamp would come
    before the second replica's first, and both wait. A function that takes a
    resource is ordered by that resource only.
    """

    def assign_and_read() -> tf.Tensor:
        assign()
        return notes.read_value()

    return tf.function(assign_and_read, autograph=False)()


def _new_variable(value: Any, shape: list | None = None) -> tf.Variable:
    return _compat.plain_variable(value, tf.float64, "CPU:0", shape)
