"""The batch of the running step, kept so that the step can be made again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class KeptBatch:
    """Queue with the arguments of the running step, on the host; nothing is copied.

    The step puts them in before it computes, and Python removes them after it.
    """

    def __init__(self) -> None:
        self._queue: Any = None
        self._args: tuple = ()

    def keep(self, args: tuple, rows: tf.Tensor) -> tuple:
        """Keep the arguments of a step, in its graph; return them after it.

        Args:
            args: Tuple of nests of tensors and distributed values.
            rows: Scalar int32 tensor, the most rows of a local replica.
        """
        flat = tf.nest.flatten(args, expand_composites=True)
        tensors = [part for part in flat if tf.is_tensor(part)]
        dtypes = [tf.int32, *(tensor.dtype for tensor in tensors)]
        if self._queue is None or self._queue.dtypes != dtypes:
            with tf.init_scope(), tf.device("CPU:0"):
                self._queue = tf.queue.FIFOQueue(2, dtypes)
        self._args = args
        with tf.control_dependencies([self._queue.enqueue([rows, *tensors])]):
            return self._packed([tf.identity(tensor) for tensor in tensors])

    def take(self) -> list:
        """Return the kept batch as data for a step that is made again."""
        _, *tensors = tf.nest.flatten(self._queue.dequeue())
        return list(self._packed(tensors))

    def num_rows(self) -> int | None:
        """Return the most rows of a local replica, or `None` if no batch is kept."""
        if self._queue is None or not int(self._queue.size()):
            return None
        parts = tf.nest.flatten(self._queue.dequeue())
        self._queue.enqueue(parts)
        return int(parts[0])

    def drop(self) -> None:
        """Remove the kept batch, if any."""
        while self._queue is not None and int(self._queue.size()):
            self._queue.dequeue()

    def _packed(self, tensors: Sequence[tf.Tensor]) -> tuple:
        """Return arguments like those that were kept, with other tensors."""
        remaining = iter(tensors)
        flat = [
            next(remaining) if tf.is_tensor(part) else part
            for part in tf.nest.flatten(self._args, expand_composites=True)
        ]
        return tf.nest.pack_sequence_as(self._args, flat, expand_composites=True)
