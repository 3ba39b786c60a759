"""Counts of the batches that steps ask for, in the graph, where somebody watches them.

Nothing is added to the graph otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.communication.collectives import timing
from tfdp.communication.coordination.data_wait import ReadCounts, data_wait
from tfdp.ground import _compat

# Batches asked for, and given; of this process.
_counts: list[Any] = []


def count_reads() -> None:
    """Count the reads of what is traced from now on."""
    if not _counts:
        _counts.extend(
            _compat.plain_variable(np.int64(0), tf.int64, "CPU:0") for _ in range(2)
        )
        data_wait.read_counts = _read


def is_counting() -> bool:
    """Return whether reads are counted."""
    return bool(_counts)


class Read:
    """A read of a batch, as a context manager around it.

    The end of the data is an error of TensorFlow, after which nothing is counted: so
    a read takes its number from the batches asked for, and is not one more.
    """

    def __enter__(self) -> Read:
        if _counts:
            asked = _counts[0]
            self._number = _write(asked, lambda: asked.assign_add(1))
            self._order = tf.control_dependencies([self._number])
            self._order.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if _counts:
            self._order.__exit__(*error)

    def given(self, batch: Any) -> None:
        """Count that the batch is there.

        Args:
            batch: Nest of tensors, as it was read.
        """
        if _counts:
            given = _counts[1]
            with tf.control_dependencies(tf.nest.flatten(batch, True)):
                _write(given, lambda: given.assign(self._number))


def _write(count: Any, assign: Callable[[], Any]) -> tf.Tensor:
    if tf.executing_eagerly():
        assign()
        return count.read_value()
    return timing.write(count, assign)


def _read() -> ReadCounts:
    return ReadCounts(
        *(
            # Without a function: that would wake other threads, and cost more.
            int(tf.raw_ops.ReadVariableOp(resource=count.handle, dtype=tf.int64))
            for count in _counts
        )
    )
