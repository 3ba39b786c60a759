"""The batch of the running step, kept so that the step can be repeated."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


class KeptBatch:
    """Queues with the arguments of the running step, on the host; nothing is copied.

    Batches with other dtypes, such as those with sample weights, have another queue,
    since each trace of the step continues to use the queue of its dtypes.

    The step enqueues its arguments before it computes, and Python dequeues them later.
    """

    def __init__(self) -> None:
        # A queue has fixed dtypes, so arguments with other dtypes need another queue.
        # The keys are dtypes, the values pairs of a queue and the arguments of the
        # latest traced step.
        self._queues_and_args: dict[tuple, tuple[tf.queue.FIFOQueue, tuple]] = {}

    def keep(self, args: tuple, rows: tf.Tensor) -> tuple:
        """Enqueue the arguments of a step in its graph, and return copies of them.

        The step must run with the returned arguments: their tensors wait until the
        arguments are in the queue.

        Args:
            args: Tuple of nests of tensors and distributed values.
            rows: Scalar int32 tensor, the number of rows of the largest local replica.
        """
        flat = tf.nest.flatten(args, expand_composites=True)
        tensors = [part for part in flat if tf.is_tensor(part)]
        dtypes = (tf.int32, *(tensor.dtype for tensor in tensors))
        if dtypes in self._queues_and_args:
            queue, _ = self._queues_and_args[dtypes]
        else:
            with tf.init_scope(), tf.device("CPU:0"):
                queue = tf.queue.FIFOQueue(1, dtypes)
        self._queues_and_args[dtypes] = queue, args
        with tf.control_dependencies([queue.enqueue([rows, *tensors])]):
            return _packed(args, [tf.identity(tensor) for tensor in tensors])

    def take(self) -> list:
        """Remove the kept batch, and return it as data of the repeated step.

        Returns:
            List of the arguments that `keep` received, with the values of that step.

        Raises:
            IndexError: If no batch is kept.
        """
        queue, args = self._filled[0]
        _, *tensors = tf.nest.flatten(queue.dequeue())
        return list(_packed(args, tensors))

    def num_rows(self) -> int | None:
        """Return the rows of the largest local replica; `None` if no batch is kept."""
        if not self._filled:
            return None
        queue, _ = self._filled[0]
        parts = tf.nest.flatten(queue.dequeue())
        queue.enqueue(parts)
        return int(parts[0])

    def drop(self) -> None:
        """Remove the kept batch from its queue, if there is one."""
        for queue, _ in self._filled:
            queue.dequeue()

    @property
    def _filled(self) -> list[tuple[tf.queue.FIFOQueue, tuple]]:
        """List of the queue that has a batch, with its arguments; empty if none has."""
        return [kind for kind in self._queues_and_args.values() if int(kind[0].size())]


def _packed(args: tuple, tensors: Sequence[tf.Tensor]) -> tuple:
    """Return a tuple like `args`, with `tensors` in place of its tensors, in order."""
    remaining = iter(tensors)
    flat = [
        next(remaining) if tf.is_tensor(part) else part
        for part in tf.nest.flatten(args, expand_composites=True)
    ]
    return tf.nest.pack_sequence_as(args, flat, expand_composites=True)
