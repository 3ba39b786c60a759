"""Bridge between a graph and a thread: tensors out of a step, and back into it.

    graph:   enqueue(tensor, number) ------> dequeue(result, number)
    thread:              dequeue -> collective -> enqueue

Both operations of the graph are asynchronous: while the thread works, they hold no
thread of TensorFlow's, and other operations run. Neither copies: the thread reads the
memory of the tensor, and the result is a tensor whose memory the thread has filled.

A call of a graph that ends with an error leaves requests and results behind, on each
replica others. After it a new *generation* of numbers begins, the same on all replicas
that have seen as many errors: no collective takes what an earlier generation has left.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdp.communication.coordination.watch import COLLECTIVE_FAILED, NotConnected
from tfdp.ground import _compat

_CLOSE_SECONDS = 2.0
# One collective of a replica is under way at a time; a cancelled step leaves one more.
_CAPACITY = 4
# Bytes, and the head: ticket and number.
_COMPONENTS = [tf.uint8, tf.int64]
# Above these bits of a number is its generation.
_COUNT_BITS = 32
_LEFT_BEHIND = "An earlier step ended with an error on some replicas of a worker only"
_log = logging.getLogger("tfdp.transport")
# By the id of a tensor that every function has as an input in which they are.
_crossings: weakref.WeakValueDictionary[int, Queues] = weakref.WeakValueDictionary()

# Runs one collective: its ticket, number and the local replicas' data; returns a
# result for each.
Run = Callable[[int, int, list[np.ndarray]], list[tf.Tensor]]


class StepEnded(RuntimeError):
    """What the step that waits for a collective ends with; later steps may go on."""


class Failure(NamedTuple):
    """Why a collective has no result, without the frames that the error has kept."""

    reason: str
    has_connected: bool = True

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Return what an error means for the steps that wait, and log it."""
        _log.info("%s: %s", COLLECTIVE_FAILED, error)
        return cls(str(error), not isinstance(error, NotConnected))


class _Request(NamedTuple):
    """What a replica gives to the thread."""

    data: tf.Tensor  # [num_bytes], uint8
    head: tf.Tensor  # [2], int64
    ticket: int
    number: int

    @property
    def generation(self) -> int:
        return generation_of(self.number)


def generation_of(number: int) -> int:
    """Return the number of calls that had ended with an error before a request."""
    return number >> _COUNT_BITS


def end_call(inputs: Sequence[Any]) -> Failure | None:
    """Forget what a call of a graph that ended with an error has left behind.

    Args:
        inputs: Sequence of the tensors that the function was called with, those that
            it captures among them.

    Returns:
        Why a collective in it has failed, or `None` if none has.
    """
    found = [_crossings.get(id(tensor)) for tensor in inputs]
    failures = [crossing.end_call() for crossing in found if crossing is not None]
    return next(filter(None, failures), None)


class Bridge:
    """Thread that runs the collectives of some local replicas, one after the other.

    Args:
        name: String, of the thread.
        devices: Sequence of strings, the device of each of these replicas.
        run: Callable, see `Run`, called on the thread.
        close: Callable of a reason, called as soon as `run` has raised anything but
            `StepEnded`. It is not called any more then.

    Attributes:
        failure: `Failure` of what `run` has raised then, or `None`.
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
        self._is_closed = False
        self.failure: Failure | None = None
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

    def is_over(self, number: int) -> bool:
        """Whether nobody waits for the result of a number any more."""
        generation = generation_of(number)
        return any(generation < crossing.generation for crossing in self._crossings)

    def _serve(self) -> None:
        # The queues are closed: nobody waits any more.
        with contextlib.suppress(tf.errors.CancelledError, tf.errors.OutOfRangeError):
            while not self._is_closed:
                self._serve_requests()

    def _serve_requests(self) -> None:
        """Wait for a request of each replica, and answer them.

        Tensors are freed on return, and not kept while the thread waits for the next.
        """
        requests = self._take()
        results = self._results(requests)
        for crossing, request, result in zip(
            self._crossings, requests, results, strict=True
        ):
            crossing.give(result, request)

    def _take(self) -> list[_Request]:
        """Wait for a request of each replica, all of one generation."""
        requests = [crossing.take() for crossing in self._crossings]
        while len({request.generation for request in requests}) > 1:
            newest = max(request.generation for request in requests)
            for index, crossing in enumerate(self._crossings):
                if requests[index].generation < newest:
                    crossing.give(Failure(_LEFT_BEHIND), requests[index])
                    requests[index] = crossing.take()
        return requests

    def _results(self, requests: list[_Request]) -> Sequence[tf.Tensor | Failure]:
        """Run a collective, or return why there are no results."""
        failure = self.failure
        if failure is None:
            try:
                return self._collective(requests)
            except StepEnded as error:
                failure = Failure(str(error))
            except Exception as error:  # noqa: BLE001 the step has to end, not the thread
                self.failure = failure = Failure.of(error)
                self._close(failure.reason)
        return [failure] * len(requests)

    def _collective(self, requests: list[_Request]) -> list[tf.Tensor]:
        heads = {(request.ticket, request.number) for request in requests}
        if len(heads) > 1:
            raise RuntimeError("replicas of one process are at different collectives")
        ((ticket, number),) = heads
        return self._run(ticket, number, [array_of(r.data) for r in requests])


class Queues:
    """The two queues of one replica, to a thread and back.

    Args:
        device: String, the CPU that holds them.
        requests: `tf.queue.FIFOQueue`.
        results: `tf.queue.FIFOQueue`.
    """

    def __init__(
        self, device: str, requests: tf.queue.FIFOQueue, results: tf.queue.FIFOQueue
    ) -> None:
        self._requests, self._results = requests, results
        # Counts the requests, on each replica alike.
        self._number = _compat.plain_variable(0, tf.int64, device)
        # Why this replica's step ends.
        self._failure: Failure | None = None
        # Tells what crosses when a call of a graph has failed: every function in which
        # it is has the counter as an input.
        _crossings[id(self._number.handle)] = self

    def end_call(self) -> Failure | None:
        """Return why a call of a graph with these queues may have failed.

        What is under way stays so: that call need not be the one that has begun it.
        """
        return self._failure

    def close(self) -> None:
        """End what waits at the queues with an error."""
        with tf.init_scope():  # also while a step is traced
            for queue in self._requests, self._results:
                queue.close(cancel_pending_enqueues=True)


class _Crossing(Queues):
    """The queues of one replica, of which the number begins anew in a generation."""

    def __init__(self, device: str) -> None:
        with tf.init_scope(), tf.device(device):
            queues = [tf.queue.FIFOQueue(_CAPACITY, _COMPONENTS) for _ in range(2)]
        super().__init__(device, *queues)
        self.generation = 0
        self._lock = threading.Lock()
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

    def take(self) -> _Request:
        """Wait for the replica's next request."""
        # The raw operations take half of the time, and run where their queue is.
        data, head = tf.raw_ops.QueueDequeueV2(
            handle=self._requests.queue_ref, component_types=_COMPONENTS
        )
        return _Request(data, head, *head.numpy().tolist())

    def give(self, result: tf.Tensor | Failure, request: _Request) -> None:
        """Answer a request, or let its step fail where there is no result."""
        head = request.head
        with self._lock:
            if request.generation < self.generation:
                return
            if isinstance(result, Failure):
                self._failure = result
                result, head = tf.zeros([0], tf.uint8), tf.zeros_like(head)
            tf.raw_ops.QueueEnqueueV2(
                handle=self._results.queue_ref, components=[result, head]
            )

    def end_call(self) -> Failure | None:
        """Begin a generation; return why a collective of the last one has failed."""
        with self._lock, tf.init_scope():
            self.generation += 1
            self._number.assign(self.generation << _COUNT_BITS)
            # The call is over: nobody waits for what is there.
            while self._results.size() > 0:
                self._results.dequeue()
            failure, self._failure = self._failure, None
            return failure


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
