"""When collectives begin and end, recorded inside the graph.

Off, which is the default, nothing is added to the graph. Functions traced
inside `Recorder` write a time stamp before and after each collective into a
variable on the host; GPU collectives are asynchronous to the host, so there
the device's own profile is the place to look.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import tensorflow as tf

from tfdp import _compat


@dataclasses.dataclass(frozen=True)
class Collective:
    """One traced collective and the variable that holds its times."""

    kind: str
    num_bytes: int
    replica: int
    times: tf.Variable  # [2], float64: begin and end, seconds


class Recorder:
    """Records the collectives of the functions that are traced inside it.

    Example:

    >>> with Recorder() as recorder:
    ...     pass
    >>> recorder.collectives
    []
    """

    def __init__(self) -> None:
        self.collectives: list[Collective] = []

    def __enter__(self) -> Recorder:
        _active.append(self)
        return self

    def __exit__(self, *unused_error: object) -> None:
        _active.remove(self)

    def busy_seconds(self, replica: int = 0) -> float:
        """Time in which at least one collective of the last step was under way.

        Args:
            replica: Int, index among the local replicas. Defaults to `0`.

        Returns:
            Float, seconds; waiting for slower replicas counts.
        """
        total, until = 0.0, 0.0
        for _, begin, end in sorted(
            self.intervals(replica), key=lambda interval: interval[1]
        ):
            total += max(0.0, end - max(begin, until))
            until = max(until, end)
        return total

    def intervals(self, replica: int = 0) -> list[tuple[Collective, float, float]]:
        """Begin and end of the last execution of each collective, in seconds."""
        rows = [c for c in self.collectives if c.replica == replica]
        found = [(c, c.times.numpy()) for c in rows]
        return [(c, float(times[0]), float(times[1])) for c, times in found]


_active: list[Recorder] = []


@contextlib.contextmanager
def measured(
    kind: str, tensor: tf.Tensor, replica: int
) -> Iterator[Callable[[tf.Tensor], tf.Tensor]]:
    """Wraps one collective; the body passes its result through what it is given."""
    if not _active or tf.executing_eagerly():
        yield lambda result: result
        return

    count = tensor.shape.num_elements() or 0
    with tf.init_scope():
        times = _compat.plain_variable([0.0, 0.0], tf.float64, "CPU:0")
    record = Collective(kind, count * tensor.dtype.size, replica, times)
    for recorder in _active:
        recorder.collectives.append(record)

    def stamp(index: int) -> tf.Tensor:
        # TensorFlow runs all operations with side effects in the order of the
        # program, also those of different replicas: the first replica's second
        # stamp would come before the second replica's first, and both wait. A
        # function that takes a resource is ordered by that resource only.
        return tf.function(lambda: times[index].assign(tf.timestamp()).read_value())()

    with tf.control_dependencies([tensor]):
        begin = stamp(0)

    def done(result: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([result]):
            end = stamp(1)
        with tf.control_dependencies([end]):
            return tf.identity(result)

    with tf.control_dependencies([begin]):
        yield done
