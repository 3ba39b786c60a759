"""Bridge between a graph and a thread: tensors out of a step, and back into it.

    graph:   enqueue(tensor, number) ------> dequeue(result, number)
    thread:              dequeue -> collective -> enqueue

Both operations of the graph are asynchronous: while the thread works, they hold no
thread of TensorFlow's, and other operations run. Neither copies: the thread reads the
memory of the tensor, and the result is a tensor whose memory the thread has filled.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp import _compat
from tfdp.coordination.watch import COLLECTIVE_FAILED

_CLOSE_SECONDS = 2.0
# One collective of a replica is under way at a time; a cancelled step leaves one more.
_CAPACITY = 4
# Bytes, and the head: ticket and number.
_COMPONENTS = [tf.uint8, tf.int64]
_log = logging.getLogger("tfdp.transport")

# Runs one collective: its ticket, number and the local replicas' data; returns a
# result for each.
Run = Callable[[int, int, list[np.ndarray]], list[tf.Tensor]]


class Bridge:
    """Thread that runs the collectives of some local replicas, one after the other.

    Args:
        name: String, of the thread.
        devices: Sequence of strings, the device of each of these replicas.
        run: Callable, see `Run`, called on the thread.
        close: Callable of a reason, called as soon as `run` has raised.
    """

    def __init__(
        self,
        name: str,
        devices: Sequence[str],
        run: Run,
        close: Callable[[str], None],
    ) -> None:
        self._run = run
        self._close = close
        self._crossings = [_Crossing(device) for device in devices]
        self._is_closed = self._has_failed = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def exchange(self, index: int, data: tf.Tensor, ticket: int) -> tf.Tensor:
        """Hand data to the thread, and return its result.

        Args:
            index: Int, which of the replicas calls.
            data: Tensor of shape `[num_bytes]`, uint8.
            ticket: Int, what the collective is.

        Returns:
            Tensor of shape `[num_result_bytes]`, uint8.
        """
        return self._crossings[index].exchange(data, tf.constant(ticket, tf.int64))

    def close(self, *, waits: bool = True) -> None:
        """End the thread. Steps that wait end with an error.

        Args:
            waits: Bool, whether to wait until it has ended. Defaults to `True`.
        """
        self._is_closed = True
        for crossing in self._crossings:
            crossing.close()
        if waits and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)

    def _serve(self) -> None:
        # The queues are closed: nobody waits any more.
        with contextlib.suppress(tf.errors.CancelledError, tf.errors.OutOfRangeError):
            while not self._is_closed:
                requests = [crossing.take() for crossing in self._crossings]
                results = self._results(requests)
                for crossing, request, result in zip(
                    self._crossings, requests, results, strict=True
                ):
                    crossing.give(result, request[1])

    def _results(self, requests: list[tuple[Any, Any]]) -> Sequence[tf.Tensor | None]:
        """Run a collective, or return `None`s, now and from now on, if it fails."""
        if not self._has_failed:
            try:
                return self._collective(requests)
            except Exception as error:  # noqa: BLE001 the step has to end, not the thread
                self._has_failed = True
                _log.info("%s: %s", COLLECTIVE_FAILED, error)
                self._close(str(error))
        return [None] * len(requests)

    def _collective(self, requests: list[tuple[Any, Any]]) -> list[tf.Tensor]:
        heads = {tuple(head.numpy().tolist()) for _, head in requests}
        if len(heads) > 1:
            raise RuntimeError(
                "replicas of one process are at different collectives: an earlier step "
                "ended with an error on some of them"
            )
        ((ticket, number),) = heads
        return self._run(ticket, number, [array_of(data) for data, _ in requests])


class _Crossing:
    """The two queues of one replica."""

    def __init__(self, device: str) -> None:
        with tf.init_scope(), tf.device(device):
            self._requests = tf.queue.FIFOQueue(_CAPACITY, _COMPONENTS)
            self._results = tf.queue.FIFOQueue(_CAPACITY, _COMPONENTS)
        # Numbers tell the result of a step from one that a cancelled step has left.
        self._number = _compat.plain_variable(0, tf.int64, device)
        self.exchange = tf.function(
            self._exchange,
            input_signature=[
                tf.TensorSpec([None], tf.uint8),
                tf.TensorSpec([], tf.int64),
            ],
            autograph=False,
        )

    def _exchange(self, data: tf.Tensor, ticket: tf.Tensor) -> tf.Tensor:
        number = self._number.assign_add(1, read_value=True)
        head = tf.stack([ticket, tf.convert_to_tensor(number)])  # [2], int64
        with tf.control_dependencies([self._requests.enqueue([data, head])]):
            result, answered = self._results.dequeue()
        is_answer = tf.reduce_all(tf.equal(answered, head))
        checked = tf.raw_ops.Assert(
            condition=is_answer, data=[tf.constant(COLLECTIVE_FAILED)]
        )
        with tf.control_dependencies([checked]):
            return tf.identity(result)

    def take(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Wait for the replica's next request."""
        # The raw operations take half of the time, and run where their queue is.
        data, head = tf.raw_ops.QueueDequeueV2(
            handle=self._requests.queue_ref, component_types=_COMPONENTS
        )
        return data, head

    def give(self, result: tf.Tensor | None, head: tf.Tensor) -> None:
        """Answer a request, or let its step fail where there is no result."""
        if result is None:
            result, head = tf.zeros([0], tf.uint8), tf.zeros_like(head)
        tf.raw_ops.QueueEnqueueV2(
            handle=self._results.queue_ref, components=[result, head]
        )

    def close(self) -> None:
        """End what waits at the queues with an error."""
        for queue in self._requests, self._results:
            queue.close(cancel_pending_enqueues=True)


def array_of(tensor: tf.Tensor) -> np.ndarray:
    """Return a view of an eager tensor's memory, `[num_bytes]`, uint8.

    The caller keeps the tensor, and writes only to one that nobody else has.
    """
    own = np.frombuffer(memoryview(tensor), np.uint8)
    if own.size == 0:
        return np.empty(0, np.uint8)
    view = (ctypes.c_uint8 * own.size).from_address(own.ctypes.data)
    return np.ctypeslib.as_array(view)


def new_tensor(num_bytes: int) -> tuple[tf.Tensor, np.ndarray]:
    """Return an eager tensor of some bytes, and the view through which it is filled."""
    tensor = tf.raw_ops.Empty(shape=_shape_of(num_bytes), dtype=tf.uint8, init=False)
    return tensor, array_of(tensor)


@functools.lru_cache(maxsize=1024)
def _shape_of(num_bytes: int) -> tf.Tensor:
    """A shape as a tensor: to make one takes longer than all the rest."""
    with tf.device("CPU:0"):
        return tf.constant([num_bytes], tf.int32)
