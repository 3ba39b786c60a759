"""Functions of all local replicas' tensors that run on a thread, beside the steps.

    step:      launch(tensors)                           a later step: collect()
    thread:         take of all local replicas -> function -> give

Both operations are those of a queue: a step that launches goes on at once, and one that
collects waits only if the function is not through.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdp.communication.collectives.bridge import Failure, Queues
from tfdp.communication.coordination.watch import COLLECTIVE_FAILED
from tfdp.ground import forks
from tfdp.ground.base.finalizers import finalizers

_CLOSE_SECONDS = 2.0
# One call is under way, and the next may be launched while its results are taken.
_CAPACITY = 2
# Answers a call that has failed: no call has this number.
_FAILED = tf.int64.max

_backgrounds: weakref.WeakSet[Background] = weakref.WeakSet()

# Takes the tensors of each local replica, and returns results for each.
Function = Callable[[list[list[tf.Tensor]]], Sequence[Sequence[tf.Tensor]]]


class Background:
    """Thread that runs one function, call by call.

    Args:
        name: String, of the thread.
        devices: Sequence of strings, the CPU that holds the queues of each local
            replica.
        specs: Sequence of `tf.TensorSpec`, what a replica launches.
        result_specs: Sequence of `tf.TensorSpec`, what it collects.
        function: Callable, see `Function`, called on the thread.
    """

    def __init__(
        self,
        name: str,
        devices: Sequence[str],
        specs: Sequence[tf.TensorSpec],
        result_specs: Sequence[tf.TensorSpec],
        function: Function,
    ) -> None:
        self._boxes = [_Boxes(device, specs, result_specs) for device in devices]
        self._served = _Count()
        self._owner = forks.Owner()
        thread = threading.Thread(
            target=_serve,
            args=(self._boxes, function, self._served),
            name=name,
            daemon=True,
        )
        thread.start()
        self._thread = thread
        # Its thread would keep the queues for ever.
        finalizers.register(self, _close, self._boxes)
        _backgrounds.add(self)

    def launch(self, replica: int, tensors: Sequence[tf.Tensor]) -> None:
        """Hand the tensors of a local replica over, in the graph of a step."""
        self._boxes[replica].launch(tensors)

    def collect(self, replica: int) -> list[tf.Tensor]:
        """Return the results of the last launch, in the graph of a step.

        They come once all local replicas have launched, and the function is through.
        """
        return self._boxes[replica].collect()

    def end(self) -> None:
        """End the thread, and wait until it has."""
        if not self._owner.is_current:
            return
        _close(self._boxes)
        self._thread.join(_CLOSE_SECONDS)

    def wait(self) -> None:
        """Wait, outside of a step, until what all local replicas launched has results.

        What a step that failed has launched for some of them is not waited for.
        """
        self._served.wait_for(min(own.num_launched for own in self._boxes))


class _Count:
    """The number of calls that have been answered."""

    def __init__(self) -> None:
        self._number = 0
        self._changed = threading.Condition()

    def set(self, number: int) -> None:
        with self._changed:
            self._number = number
            self._changed.notify_all()

    def wait_for(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._number >= number)


class _Boxes(Queues):
    """The queues of one replica, with tensors of its own dtypes and shapes."""

    def __init__(
        self,
        device: str,
        specs: Sequence[tf.TensorSpec],
        result_specs: Sequence[tf.TensorSpec],
    ) -> None:
        self._device = device
        with tf.init_scope():
            queues = [new_queue(device, each) for each in (specs, result_specs)]
        super().__init__(device, *queues)

    def launch(self, tensors: Sequence[tf.Tensor]) -> None:
        with tf.device(self._device):
            number = self._number.assign_add(1, read_value=True)
            number = tf.convert_to_tensor(number)
            self._requests.enqueue([number, *map(tf.identity, tensors)])

    def collect(self) -> list[tf.Tensor]:
        with tf.device(self._device):
            own = self._number.read_value()
            answered, *results = self._results.dequeue()
            checked = tf.raw_ops.Assert(
                condition=tf.equal(answered, own), data=[tf.constant(COLLECTIVE_FAILED)]
            )
            with tf.control_dependencies([checked]):
                return [tf.identity(result) for result in results]

    @property
    def num_launched(self) -> int:
        return int(self._number.numpy())

    def take(self) -> list[tf.Tensor]:
        """Wait for the replica's next launch: its number, and its tensors."""
        return self._requests.dequeue()

    def give(self, number: tf.Tensor, results: Sequence[tf.Tensor]) -> None:
        self._results.enqueue([number, *results])

    def fail(self, failure: Failure) -> None:
        """Let the step that collects fail."""
        self._failure = failure
        nothing = [
            tf.zeros(shape, dtype)
            for dtype, shape in zip(
                self._results.dtypes[1:], self._results.shapes[1:], strict=True
            )
        ]
        self._results.enqueue([tf.constant(_FAILED, tf.int64), *nothing])


def new_queue(device: str, specs: Sequence[tf.TensorSpec]) -> tf.queue.FIFOQueue:
    """Make a queue whose elements are a number and tensors.

    Args:
        device: String, the CPU that holds it.
        specs: Sequence of `tf.TensorSpec`.
    """
    with tf.device(device):
        return tf.queue.FIFOQueue(
            _CAPACITY,
            [tf.int64, *(spec.dtype for spec in specs)],
            [[], *(spec.shape for spec in specs)],
        )


def _serve(boxes: Sequence[_Boxes], function: Function, served: _Count) -> None:
    """Run the function, call by call, until the queues are closed."""
    # Nobody waits any more then.
    with contextlib.suppress(tf.errors.CancelledError, tf.errors.OutOfRangeError):
        failure: Failure | None = None
        while True:
            failure = _serve_call(boxes, function, served, failure)


def _serve_call(
    boxes: Sequence[_Boxes],
    function: Function,
    served: _Count,
    failure: Failure | None,
) -> Failure | None:
    """Wait for a call and answer it; return why all later ones fail, if they do.

    Tensors are freed on return, and not kept while the thread waits for the next.
    """
    requests = [own.take() for own in boxes]
    number = int(requests[0][0])
    if failure is None:
        try:
            results = function([tensors for _, *tensors in requests])
        except Exception as error:  # noqa: BLE001 the step has to end, not the thread
            failure = Failure.of(error)
    if failure is not None:
        for own in boxes:
            own.fail(failure)
    else:
        for own, request, given in zip(boxes, requests, results, strict=True):
            own.give(request[0], given)
    served.set(number)
    return failure


def _close(boxes: Sequence[_Boxes]) -> None:
    for own in boxes:
        own.close()


@atexit.register
def _end_all() -> None:
    """End the threads before the interpreter does."""
    for background in list(_backgrounds):
        background.end()
