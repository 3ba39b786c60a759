"""Functions of all local replicas' tensors that run on a thread during the steps.

    step:      launch(tensors)                           a later step: collect()
    thread:         take of all local replicas -> function -> give

Both operations use a queue: a step that launches continues at once, and a step that
collects waits only until the function has returned.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdp.communication.collectives import calls
from tfdp.communication.collectives.collective_thread import Failure, Queues
from tfdp.communication.coordination.watch import COLLECTIVE_FAILED
from tfdp.ground import forks
from tfdp.ground.base.finalizers import finalizers
from tfdp.ground.base.threads import start_thread

_CLOSE_SECONDS = 2.0
# A queue has room for two calls, so that a step can launch the next call before the
# results of the last one are collected.
_CAPACITY = 2
# The results of a failed call have this number in place of the call's own. No call has
# it, so the step that collects the results finds a wrong number, and fails.
_FAILED = tf.int64.max

_backgrounds: weakref.WeakSet[BackgroundThread] = weakref.WeakSet()

# Type of the function that a `BackgroundThread` runs. It takes a list with the tensors
# that each local replica has launched, and returns the results of each local replica.
Function = Callable[[list[list[tf.Tensor]]], Sequence[Sequence[tf.Tensor]]]


class BackgroundThread:
    """Thread that runs a function on tensors of traced steps, while steps continue.

    A step launches a call with its tensors, and a later step collects the results.

    Args:
        name: String, name of the thread.
        devices: Sequence of strings, the CPU that holds the queues of each local
            replica.
        specs: Sequence of `tf.TensorSpec`, the tensors that a replica launches.
        result_specs: Sequence of `tf.TensorSpec`, the results that it collects.
        function: Callable, from a list of the tensors of each local replica to the
            results of each; called on the thread.
    """

    def __init__(
        self,
        name: str,
        devices: Sequence[str],
        specs: Sequence[tf.TensorSpec],
        result_specs: Sequence[tf.TensorSpec],
        function: Function,
    ) -> None:
        self._replica_queues = [
            _ReplicaQueues(device, specs, result_specs) for device in devices
        ]
        self._num_served = _CallCount()
        self._owner = forks.Owner()
        self._thread = start_thread(
            name, _serve, self._replica_queues, function, self._num_served
        )
        # The thread keeps the queues alive until they are closed, so they are closed
        # when this object is deleted.
        finalizers.register(self, _close, self._replica_queues)
        _backgrounds.add(self)

    def launch(self, replica: int, tensors: Sequence[tf.Tensor]) -> None:
        """Pass the tensors of a local replica to the thread, in the graph of a step."""
        self._replica_queues[replica].launch(tensors)

    def collect(self, replica: int) -> list[tf.Tensor]:
        """Return the results of a replica's last launch, in the graph of a step.

        The step waits until all local replicas have launched and the function has
        returned.
        """
        return self._replica_queues[replica].collect()

    def end(self) -> None:
        """Close the queues, and wait up to two seconds until the thread has ended."""
        if not self._owner.is_current:
            return
        _close(self._replica_queues)
        self._thread.join(_CLOSE_SECONDS)

    def wait(self) -> None:
        """Wait, outside of a step, until all launched calls have ended.

        A call that a failed step launched on only some local replicas does not count.
        """
        self._num_served.wait_for(
            min(each.num_launched for each in self._replica_queues)
        )


class _CallCount:
    """Number of calls that have ended; threads can wait until it reaches a value.

    A call ends with its results or with a failure.
    """

    def __init__(self) -> None:
        self._number = 0
        self._changed = threading.Condition()

    def set(self, number: int) -> None:
        """Set the number of calls that have ended, and wake waiting threads."""
        with self._changed:
            self._number = number
            self._changed.notify_all()

    def wait_for(self, number: int) -> None:
        """Wait until at least `number` calls have ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._number >= number)


class _ReplicaQueues(Queues):
    """Queues of one replica: of tensors for the thread, and of results from it.

    Args:
        device: String, the CPU that holds the queues.
        specs: Sequence of `tf.TensorSpec`, the tensors that the replica launches.
        result_specs: Sequence of `tf.TensorSpec`, the results that it collects.
    """

    def __init__(
        self,
        device: str,
        specs: Sequence[tf.TensorSpec],
        result_specs: Sequence[tf.TensorSpec],
    ) -> None:
        self._device, self._result_specs = device, result_specs
        with tf.init_scope():
            queues = [new_queue(device, each) for each in (specs, result_specs)]
        super().__init__(device, *queues)

    def launch(self, tensors: Sequence[tf.Tensor]) -> None:
        """Enqueue the replica's tensors with the number of the call, in the graph."""
        with tf.device(self._device):
            number = self._number.assign_add(1, read_value=True)
            number = tf.convert_to_tensor(number)
            self._requests.enqueue([number, *map(tf.identity, tensors)])

    def collect(self) -> list[tf.Tensor]:
        """Dequeue the results of the last launch, in the graph.

        The step waits for the results, and fails if the call has failed.
        """
        with tf.device(self._device):
            expected = self._number.read_value()
            answered, *results = self._results.dequeue()
            checked = tf.raw_ops.Assert(
                condition=tf.equal(answered, expected),
                data=[tf.constant(COLLECTIVE_FAILED)],
            )
            with tf.control_dependencies([checked]):
                return [
                    tf.ensure_shape(result, spec.shape)
                    for result, spec in zip(results, self._result_specs, strict=True)
                ]

    @property
    def num_launched(self) -> int:
        """Int, number of calls that the replica has launched."""
        return int(self._number.numpy())

    def take(self) -> list[tf.Tensor]:
        """Wait for the replica's next launch, and dequeue it.

        Returns:
            List of tensors: the number of the launch, a scalar int64, and the tensors
            that the replica passed to `launch`.
        """
        return self._requests.dequeue()

    def give(self, number: tf.Tensor, results: Sequence[tf.Tensor]) -> None:
        """Enqueue the results of a call, together with the call's number."""
        self._results.enqueue([number, *results])

    def fail(self, failure: Failure) -> None:
        """Record a failure, and enqueue results that make the collecting step fail."""
        self._failure = failure
        zeros = [
            tf.zeros([size or 0 for size in spec.shape], spec.dtype)
            for spec in self._result_specs
        ]
        self._results.enqueue([tf.constant(_FAILED, tf.int64), *zeros])


def new_queue(device: str, specs: Sequence[tf.TensorSpec]) -> tf.queue.FIFOQueue:
    """Create a FIFO queue whose elements are an int64 number and tensors.

    Args:
        device: String, the CPU that holds the queue.
        specs: Sequence of `tf.TensorSpec`, of the tensors.
    """
    # A TensorFlow queue declares the shapes of all components of its elements or none,
    # so a single unknown shape means that it declares none.
    is_known = all(spec.shape.is_fully_defined() for spec in specs)
    with tf.device(device):
        return tf.queue.FIFOQueue(
            _CAPACITY,
            [tf.int64, *(spec.dtype for spec in specs)],
            [[], *(spec.shape for spec in specs)] if is_known else None,
        )


def _serve(
    replica_queues: Sequence[_ReplicaQueues], function: Function, num_served: _CallCount
) -> None:
    """Run the function for each call until the queues are closed.

    Args:
        replica_queues: Sequence of `_ReplicaQueues`, of the local replicas.
        function: Callable, as in `BackgroundThread`.
        num_served: `_CallCount`, updated after each call.
    """
    # `CancelledError` and `OutOfRangeError` mean that the queues are closed. No step
    # waits any more, so the thread ends without an error.
    closed = tf.errors.CancelledError, tf.errors.OutOfRangeError
    try:
        with contextlib.suppress(*closed), calls.concurrent_calls():
            failure: Failure | None = None
            while True:
                failure = _serve_call(replica_queues, function, num_served, failure)
    finally:
        # Calls that were launched, but not answered, count as ended:
        # `BackgroundThread.wait` would otherwise never return.
        num_served.set(sys.maxsize)


def _serve_call(
    replica_queues: Sequence[_ReplicaQueues],
    function: Function,
    num_served: _CallCount,
    failure: Failure | None,
) -> Failure | None:
    """Wait for a call and answer it; return the failure of all calls from now on.

    After a failure the function is not called again: later calls fail with the same
    failure. Without one the result is `None`.

    Tensors are local variables here, so the thread keeps none while it waits for a
    call.

    Args:
        replica_queues: Sequence of `_ReplicaQueues`, of the local replicas.
        function: Callable, as in `BackgroundThread`.
        num_served: `_CallCount`, updated after the call.
        failure: `Failure` of an earlier call, or `None`.
    """
    requests = [each.take() for each in replica_queues]
    number = int(requests[0][0])
    if failure is None:
        try:
            results = function([tensors for _, *tensors in requests])
        except Exception as error:  # noqa: BLE001 any error goes to the waiting steps
            failure = Failure.of(error)
    if failure is not None:
        for each in replica_queues:
            each.fail(failure)
    else:
        for each, request, result in zip(
            replica_queues, requests, results, strict=True
        ):
            each.give(request[0], result)
    num_served.set(number)
    return failure


def _close(replica_queues: Sequence[_ReplicaQueues]) -> None:
    """Close the queues of all local replicas, which ends the thread."""
    for each in replica_queues:
        each.close()


@atexit.register
def _end_all() -> None:
    """End all background threads before the interpreter exits."""
    for background in list(_backgrounds):
        background.end()
