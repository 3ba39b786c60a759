"""Thread that runs the collectives of a graph: tensors out of a step and back.

    graph:   enqueue(tensor, number) ------> dequeue(result, number)
    thread:              dequeue -> collective -> enqueue

Both operations of the graph are asynchronous: while the thread works, they occupy no
thread of TensorFlow, and other operations run. Neither copies: the thread reads the
memory of the tensor, and the result is a tensor whose memory the thread has filled.

A call of a graph that ends with an error leaves requests and results in the queues,
which differ between replicas. A new *generation* of numbers begins after it, the same
on all replicas that have seen the same number of errors, so that no collective takes
data of an earlier generation.
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

from tfdp.communication.collectives import calls
from tfdp.communication.coordination.watch import COLLECTIVE_FAILED, NotConnected
from tfdp.ground._compat import runtime

_CLOSE_SECONDS = 2.0
# A queue has room for one pending collective besides the elements that cancelled steps
# have left, which must not block the next step.
_CAPACITY = 4
# An element of a queue has two components: the data as bytes, and a head with the
# numbers of the traced collective and of the request. A result must have the head of
# its request.
_COMPONENTS = [tf.uint8, tf.int64]
# The lower bits of a request's number, this many, count requests. The bits above them
# are the generation: how many graph calls had failed before. So requests from before a
# failure have smaller numbers.
_COUNT_BITS = 32
_OUTDATED_REQUEST = (
    "An earlier step ended with an error on some replicas of a worker only"
)
_log = logging.getLogger("tfdp.transport")
# The queues that a failed call has used are found by its inputs: every function that
# uses queues has the handle of their counter as an input. The keys are the `id`s of
# these handles.
_queues_by_handle: weakref.WeakValueDictionary[int, Queues] = (
    weakref.WeakValueDictionary()
)

# Function that runs one collective. It takes the number of the traced collective, the
# number of the request, and the data of the local replicas. It returns a result for
# each replica.
Run = Callable[[int, int, list[np.ndarray]], list[tf.Tensor]]


class StepEnded(RuntimeError):
    """Error of a collective that ends only the current step, not later ones."""


class Failure(NamedTuple):
    """Reason that a collective has no result.

    It does not keep the frames of a traceback alive, as the error would.

    Args:
        reason: String, the message of the error.
        has_connected: Bool, whether all workers could be reached. Defaults to `True`.
        ends_step_only: Bool, whether later steps may succeed. Defaults to `False`.
    """

    reason: str
    has_connected: bool = True
    ends_step_only: bool = False

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Log an error of a collective, and convert it to a `Failure`."""
        _log.info("%s: %s", COLLECTIVE_FAILED, error)
        return cls(str(error), not isinstance(error, NotConnected))


class _Request(NamedTuple):
    """Request of a replica for one collective: its data, and a head of two numbers.

    Args:
        data: Tensor of shape `[num_bytes]`, uint8.
        head: Tensor of shape `[2]`, int64: `operation_index` and `number`.
        operation_index: Int, number of the traced collective, the first of the head.
        number: Int, number of the request, whose upper bits are its generation.
    """

    data: tf.Tensor
    head: tf.Tensor
    operation_index: int
    number: int

    @property
    def generation(self) -> int:
        """Int, number of graph calls that had failed before the request."""
        return generation_of(self.number)


def generation_of(number: int) -> int:
    """Return the generation of a request, from the request's number.

    The generation is the number of graph calls that had failed before the request.
    """
    return number >> _COUNT_BITS


def end_call(inputs: Sequence[Any]) -> Failure | None:
    """Clean up after a call of a traced function has failed; return why it has.

    It is called only after calls that raised an error. Results of collectives that the
    call has left in queues are discarded.

    Args:
        inputs: Sequence of the input tensors of the function, including captured ones.

    Returns:
        `Failure` of a collective in the call; or `None` if no collective has failed, so
        the call's error has another cause.
    """
    found = [_queues_by_handle.get(id(tensor)) for tensor in inputs]
    failures = [queues.end_call() for queues in found if queues is not None]
    return next(filter(None, failures), None)


class CollectiveThread:
    """Thread that runs the collectives of some local replicas, one after another.

    Args:
        name: String, name of the thread.
        devices: Sequence of strings, the device of each of these replicas.
        run: Callable, called on the thread with the number of a traced collective, the
            number of the request and a list of the replicas' uint8 arrays; returns a
            list of tensors, their results. It is no longer called once it has raised an
            error other than `StepEnded`.
        close: Callable, called with the error's message after such an error.

    Attributes:
        failure: `Failure` of such an error, or `None`.
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
        self._replica_queues = [_CollectiveQueues(device) for device in devices]
        self._is_closed = False
        self.failure: Failure | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def exchange(self, index: int, data: tf.Tensor, operation_index: int) -> tf.Tensor:
        """Pass data to the thread and return its result, in the graph.

        Args:
            index: Int, index of the calling replica in `devices`.
            data: Tensor of shape `[num_bytes]`, uint8.
            operation_index: Int, number of the traced collective.

        Returns:
            Tensor of shape `[num_result_bytes]`, uint8.
        """
        number = tf.constant(operation_index, tf.int64)
        with calls.concurrent_calls():
            return self._replica_queues[index].exchange(data, number)

    def close(self, *, waits: bool = True) -> None:
        """End the thread; waiting steps end with an error.

        Args:
            waits: Bool, whether to wait until the thread has ended. Defaults to `True`.
        """
        self._is_closed = True
        for queues in self._replica_queues:
            queues.close()
        if waits and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)

    def is_over(self, number: int) -> bool:
        """Return whether the step that has sent a request has ended with an error.

        The step then no longer waits for the result.

        Args:
            number: Int, number of the request.
        """
        generation = generation_of(number)
        return any(generation < each.generation for each in self._replica_queues)

    def _serve(self) -> None:
        """Run the thread: answer requests until the queues are closed."""
        # `CancelledError` and `OutOfRangeError` mean that the queues are closed. No
        # step waits any more, so the thread ends without an error.
        with contextlib.suppress(tf.errors.CancelledError, tf.errors.OutOfRangeError):
            while not self._is_closed:
                self._serve_requests()

    def _serve_requests(self) -> None:
        """Wait for a request of each replica, run the collective, and answer them.

        Tensors are local variables here, so the thread keeps none while it waits for
        the next requests.
        """
        requests = self._take()
        results = self._results(requests)
        for queues, request, result in zip(
            self._replica_queues, requests, results, strict=True
        ):
            queues.give(result, request)

    def _take(self) -> list[_Request]:
        """Wait for a request of each replica; fail requests of calls that have ended.

        Returns:
            List of `_Request`, one of each replica, all sent after the same number of
            failed graph calls.
        """
        requests = [queues.take() for queues in self._replica_queues]
        while len({request.generation for request in requests}) > 1:
            newest = max(request.generation for request in requests)
            for index, queues in enumerate(self._replica_queues):
                if requests[index].generation < newest:
                    queues.give(Failure(_OUTDATED_REQUEST), requests[index])
                    requests[index] = queues.take()
        return requests

    def _results(self, requests: list[_Request]) -> Sequence[tf.Tensor | Failure]:
        """Run a collective; return a result, or the failure, for each replica.

        An error other than `StepEnded` is stored in `failure` and passed to `close`.
        From then on no collective runs: the result is that failure.

        Args:
            requests: List of `_Request`, one of each local replica.
        """
        failure = self.failure
        if failure is None:
            try:
                return self._run_collective(requests)
            except StepEnded as error:
                failure = Failure(str(error), ends_step_only=True)
            except Exception as error:  # noqa: BLE001 any error goes to the waiting steps
                self.failure = failure = Failure.of(error)
                self._close(failure.reason)
        return [failure] * len(requests)

    def _run_collective(self, requests: list[_Request]) -> list[tf.Tensor]:
        """Run the collective that all local replicas request; return their results.

        Args:
            requests: List of `_Request`, one of each local replica.

        Raises:
            RuntimeError: If the requests are for different collectives.
        """
        heads = {(request.operation_index, request.number) for request in requests}
        if len(heads) > 1:
            raise RuntimeError("replicas of one process are at different collectives")
        ((operation_index, number),) = heads
        return self._run(operation_index, number, [array_of(r.data) for r in requests])


class Queues:
    """Two queues of one replica: of requests to a thread, and of its results.

    Args:
        device: String, the CPU that holds the queues.
        requests: `tf.queue.FIFOQueue`, from the graph to the thread.
        results: `tf.queue.FIFOQueue`, from the thread to the graph.
    """

    def __init__(
        self, device: str, requests: tf.queue.FIFOQueue, results: tf.queue.FIFOQueue
    ) -> None:
        self._requests, self._results = requests, results
        # A count of requests matches each result with its request. Local replicas run
        # the same program, so their counts agree.
        self._number = runtime.plain_variable(0, tf.int64, device)
        # TensorFlow's error says only that a collective has failed, so the failure is
        # kept here, with its reason, until the call has ended.
        self._failure: Failure | None = None
        # `end_call` finds the queues of a failed graph call by this handle, since every
        # function that uses the queues has the counter as an input.
        _queues_by_handle[id(self._number.handle)] = self
        calls.mark(self._number.handle)

    def end_call(self) -> Failure | None:
        """Return why a collective in a graph call has failed; called after the call.

        Pending requests are kept, since another call may have launched them.

        Returns:
            `Failure`, or `None` if no collective has failed.
        """
        return self._failure

    def close(self) -> None:
        """Close the queues; operations that wait on them end with an error."""
        with tf.init_scope():  # closes the queues at once, even while a step is traced
            for queue in self._requests, self._results:
                queue.close(cancel_pending_enqueues=True)


class _CollectiveQueues(Queues):
    """Queues of one replica: of its requests for collectives, and of their results.

    The lower bits of a request's number count the requests since the last graph call
    that has failed. The bits above them are its generation, the number of failed calls.

    Args:
        device: String, the CPU that holds the queues.
    """

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

    def _exchange(self, data: tf.Tensor, operation_index: tf.Tensor) -> tf.Tensor:
        """Enqueue a request and dequeue its answer, in the graph.

        Args:
            data: Tensor of shape `[num_bytes]`, uint8.
            operation_index: Scalar int64 tensor, number of the traced collective.
        """
        number = self._number.assign_add(1, read_value=True)
        head = tf.stack([operation_index, tf.convert_to_tensor(number)])
        with tf.control_dependencies([self._requests.enqueue([data, head])]):
            result, answered = self._results.dequeue()
        is_answer = tf.reduce_all(tf.equal(answered, head))
        checked = tf.raw_ops.Assert(
            condition=is_answer, data=[tf.constant(COLLECTIVE_FAILED)]
        )
        with tf.control_dependencies([checked]):
            return tf.identity(result)

    def take(self) -> _Request:
        """Wait for the replica's next request, and take it from the queue."""
        # A raw operation takes half the time of the queue's `dequeue`.
        data, head = tf.raw_ops.QueueDequeueV2(
            handle=self._requests.queue_ref, component_types=_COMPONENTS
        )
        return _Request(data, head, *head.numpy().tolist())

    def give(self, result: tf.Tensor | Failure, request: _Request) -> None:
        """Enqueue a request's result, or its failure, unless the step has ended."""
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
        """Clean up after a graph call has failed; return why a collective has failed.

        Queued results are dropped. Later requests get numbers of the next generation,
        the number of failed calls, and earlier ones are no longer answered.

        Returns:
            `Failure` of a collective in the call, or `None` if none has failed.
        """
        with self._lock, tf.init_scope():
            self.generation += 1
            self._number.assign(self.generation << _COUNT_BITS)
            # The graph call has ended, so no step waits for results that are still in
            # the queue: they are dropped.
            while self._results.size() > 0:
                self._results.dequeue()
            failure, self._failure = self._failure, None
            return failure


def array_of(tensor: tf.Tensor) -> np.ndarray:
    """Return a view of an eager tensor's memory, `[num_bytes]`, uint8.

    The caller must keep the tensor alive, and may only write to a tensor that no other
    code uses.
    """
    read_only = np.frombuffer(memoryview(tensor), np.uint8)
    if read_only.size == 0:
        return np.empty(0, np.uint8)
    view = (ctypes.c_uint8 * read_only.size).from_address(read_only.ctypes.data)
    return np.ctypeslib.as_array(view)


def new_tensor(num_bytes: int) -> tuple[tf.Tensor, np.ndarray]:
    """Create an uninitialized eager tensor of bytes; return it and a writable view."""
    # Without a device, TensorFlow would place the tensor on a GPU that the process
    # sees, and `array_of` would return a view of a copy.
    with tf.device("CPU:0"):
        shape = _shape_of(num_bytes)
        tensor = tf.raw_ops.Empty(shape=shape, dtype=tf.uint8, init=False)
    return tensor, array_of(tensor)


def from_bytes(data: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Reinterpret the bytes of a flat uint8 tensor as a flat tensor of a dtype."""
    if dtype == tf.bool:
        return tf.cast(data, tf.bool)
    if dtype.size == 1:
        return tf.bitcast(data, dtype)
    return tf.bitcast(tf.reshape(data, [-1, dtype.size]), dtype)


@functools.lru_cache(maxsize=1024)
def _shape_of(num_bytes: int) -> tf.Tensor:
    """Return `[num_bytes]` as a tensor; cached, since its creation is slow."""
    with tf.device("CPU:0"):
        return tf.constant([num_bytes], tf.int32)
