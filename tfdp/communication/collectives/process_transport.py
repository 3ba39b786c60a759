"""Collectives over a communicator of processes: shared memory, TCP or MPI.

    replicas' tensors -> thread -> [sum of the local ones] -> communicator -> thread

The replicas of one process are combined in its memory, so the communicator has one
member for each process.

A *lane* runs the collectives of one process group on one channel, the chain in which
they are launched one after another. It has a thread and a communicator.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.communication.collectives.collective_thread import (
    CollectiveThread,
    StepEnded,
    end_call,
    from_bytes,
    generation_of,
)
from tfdp.communication.collectives.groups import SCOPE, CollectiveCall, ProcessGroup
from tfdp.communication.collectives.process_collectives import ProcessCollectives
from tfdp.communication.coordination.flight_record import (
    CollectiveIdentity,
    collective_ring,
)
from tfdp.communication.coordination.watch import (
    COLLECTIVE_FAILED,
    NotConnected,
    PeerStepFailed,
)
from tfdp.communication.transport import (
    Communicator,
    Connection,
    TransportClosed,
    new_tag,
    steps_ahead,
)
from tfdp.ground.base.finalizers import finalizers

# Collectives on one channel run one after another. Several channels let gradient
# buckets be reduced concurrently.
_CHANNELS = 4


def end_failed_call(inputs: Sequence[Any], error: tf.errors.OpError) -> Exception:
    """Discard results of a failed call of a graph; return the error to raise.

    Args:
        inputs: Sequence of the input tensors of the function, including captured ones.
        error: The error of the call.

    Returns:
        The error; or, if TensorFlow only reports that a collective has failed, an error
        with the reason: `NotConnected` if another worker could not be reached,
        `PeerStepFailed` if its step has failed, else `tf.errors.UnavailableError`, as
        from TensorFlow's collectives.
    """
    failure = end_call(inputs)
    if failure is None or COLLECTIVE_FAILED not in str(error):
        return error
    if not failure.has_connected:
        return NotConnected(None, None, failure.reason)
    kind = PeerStepFailed if failure.ends_step_only else tf.errors.UnavailableError
    # TensorFlow's own message is appended to the reason, since it names the operation.
    return kind(None, None, f"{failure.reason}\n\n{error}")


@dataclasses.dataclass(frozen=True)
class _Operation:
    """A traced collective; equal ones of local replicas run as one.

    Args:
        kind: String, the name of a method of `ProcessCollectives`.
        dtype: `np.dtype` of the elements.
        key: Int, the instance key, the same on all workers.
        source: Int, the position of the source of a broadcast.
        scope: String, the name scope in the graph, which differs between replicas.
    """

    kind: str
    dtype: np.dtype
    key: int
    source: int
    scope: str = dataclasses.field(compare=False)


class ProcessTransport:
    """Transport over one communicator for each group and channel.

    Implements `Transport`.

    Args:
        name: String, `"direct"` or `"mpi"`.
        rank: Int, rank of this worker.
        new_communicator: Callable, from the ranks of a group's workers and a name of
            the group, the same on all, to a `Communicator`; or `None` in a process that
            has all replicas.
        connect: Callable, from another worker's rank and a name, the same on both, to a
            `Connection`; or `None` if the transport has none. Defaults to `None`.
    """

    has_reduce_scatter = True
    rounds_sums_once = True
    num_channels = _CHANNELS

    def __init__(
        self,
        name: str,
        rank: int,
        new_communicator: Callable[[Sequence[int], str], Communicator] | None,
        connect: Callable[[int, str], Connection] | None = None,
    ) -> None:
        self.name = name
        self.connect = connect
        self._rank = rank
        self.new_communicator = new_communicator
        self._lanes: weakref.WeakKeyDictionary[ProcessGroup, dict[int, _Lane]]
        self._lanes = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def open(self, group: ProcessGroup) -> Sequence[int | None]:
        """Return each local replica's position in a group, `None` for a non-member.

        Workers do not connect here: a `_Lane`, which runs the collectives of one
        channel, connects at its first use.

        Args:
            group: `ProcessGroup`.
        """
        return group.local_positions

    def sums_as_sent(self, group: ProcessGroup) -> bool:
        """Return false: elements that are sent in another dtype are added in their own.

        An all-to-all and a local sum replace the reduce-scatter, with the same bytes.
        """
        del group
        return False

    def run(
        self, kind: str, tensor: tf.Tensor, call: CollectiveCall, source: int = 0
    ) -> tf.Tensor:
        """Run a collective on the thread and communicator of its group and channel.

        Args:
            kind: String, such as `"all_reduce"`; `Transport.run` describes all kinds.
            tensor: Tensor that is not empty.
            call: `CollectiveCall`, the group, the calling replica and its channel.
            source: Int, the position of a broadcast's source. Defaults to `0`.

        Returns:
            Tensor, the result on the calling replica.
        """
        lane = self._lane(call.group, call.channel % self.num_channels)
        key_kind = f"{kind} from {source}" if kind == "broadcast" else kind
        key = dataclasses.replace(call, size=None).key(key_kind, tensor)
        dtype = np.dtype(tensor.dtype.as_numpy_dtype)
        # The name scope shows the collective in TensorFlow's errors, and lets
        # `is_collective` recognize it.
        name = f"{SCOPE}_{kind}_{dtype.name}_{call.group.key}"
        with tf.name_scope(name) as scope:
            shape = _shape_of_result(kind, tensor, call.group.size)
            operation = _Operation(kind, dtype, int(key), source, scope)
            flat = tf.reshape(_to_bytes(tensor), [-1])
            result = lane.exchange(flat, call.replica, operation)
            return tf.reshape(from_bytes(result, tensor.dtype), shape)

    def abort(self, reason: str) -> None:
        """Stop all waits for other workers with an error; send them `reason`.

        Later collectives of the groups and channels that were used so far also fail.
        """
        for lane in self._all_lanes():
            lane.abort(reason)

    def close(self) -> None:
        """End all threads; steps that wait for them end with an error."""
        for lane in self._all_lanes():
            lane.end()

    @property
    def failure(self) -> str:
        """String, reason of a failure that ends all later collectives, or `""`."""
        return next((lane.failure for lane in self._all_lanes() if lane.failure), "")

    def _all_lanes(self) -> list[_Lane]:
        """Return the `_Lane` of each group and channel: a thread and a communicator."""
        with self._lock:
            return [lane for lanes in self._lanes.values() for lane in lanes.values()]

    def _lane(self, group: ProcessGroup, channel: int) -> _Lane:
        """Return the `_Lane` of a group and channel: its thread and communicator.

        It is created at the first call.
        """
        with self._lock:
            lanes = self._lanes.setdefault(group, {})
            if channel not in lanes:
                name = f"{group.key}/{channel}"
                lane = _Lane(name, group, self._rank, self.new_communicator)
                lanes[channel] = lane
                # A running thread keeps its lane alive, so the lane cannot end itself:
                # a finalizer of the group ends it.
                finalizers.register(group, lane.end, waits=False)
            return lanes[channel]


class _Lane:
    """Thread and communicator that run the collectives of one group on one channel.

    Args:
        name: String, the same on all workers and unique for the group and the channel.
        group: `ProcessGroup`.
        rank: Int, rank of this worker.
        new_communicator: Callable, as in `ProcessTransport`.
    """

    def __init__(
        self,
        name: str,
        group: ProcessGroup,
        rank: int,
        new_communicator: Callable[[Sequence[int], str], Communicator] | None,
    ) -> None:
        assert group.workers is not None
        self._collectives = ProcessCollectives(group.workers, rank)
        positions = enumerate(group.local_positions)
        # Collectives concatenate and split tensors by position, so the thread takes the
        # tensors of the local replicas in the order of their positions.
        local = sorted((p, replica) for replica, p in positions if p is not None)
        self._index = {replica: index for index, (_, replica) in enumerate(local)}
        self._name = name
        self._new_communicator = new_communicator
        # Discarded communicators are counted, since each new one needs a new name, the
        # same on all workers.
        self._num_discarded = 0
        self._end_reason: str | None = None
        self._operations: list[_Operation] = []
        self._identities: list[CollectiveIdentity] = []
        self._operation_indices: dict[_Operation, int] = {}
        self._lock = threading.Lock()
        devices = [host_of(group.devices[replica]) for _, replica in local]
        self._thread = CollectiveThread(f"tfdp {name}", devices, self._run, self.abort)

    def exchange(
        self, data: tf.Tensor, replica: int, operation: _Operation
    ) -> tf.Tensor:
        """Run an operation on the data of a local replica, in the graph.

        Args:
            data: Tensor of shape `[num_bytes]`, uint8.
            replica: Int, index among the local replicas.
            operation: `_Operation`, equal on all local replicas.

        Returns:
            Tensor of shape `[num_result_bytes]`, uint8.
        """
        with self._lock:
            operation_index = self._operation_indices.setdefault(
                operation, len(self._operations)
            )
            if operation_index == len(self._operations):
                self._identities.append(self._identity(operation))
                self._operations.append(operation)
        return self._thread.exchange(self._index[replica], data, operation_index)

    def end(self, *, waits: bool = True) -> None:
        """Close the communicator and end the thread; steps that wait for it fail.

        Args:
            waits: Bool, whether to wait until the thread has ended, but at most two
                seconds. Defaults to `True`.
        """
        self.abort("")
        self._thread.close(waits=waits)

    def abort(self, reason: str) -> None:
        """Stop all waits for other workers with an error; send them `reason`.

        Later collectives with other workers also fail.
        """
        self._end_reason = reason
        if self._collectives.communicator is not None:
            self._collectives.communicator.close(reason)

    @property
    def failure(self) -> str:
        """String, reason of a failure that ends all later collectives, or `""`."""
        return self._thread.failure.reason if self._thread.failure else ""

    def _run(
        self, operation_index: int, number: int, data: list[np.ndarray]
    ) -> list[tf.Tensor]:
        """Run a traced operation on the thread; connect again after failed steps.

        Args:
            operation_index: Int, index of the traced operation in `_operations`.
            number: Int, the request's number, which includes its generation.
            data: List of the uint8 arrays of the local replicas.

        Returns:
            List of tensors, the result of each local replica.

        Raises:
            StepEnded: If only the current step has failed, on this or another worker.
            RuntimeError: If all later collectives will also fail.
        """
        operation = self._operations[operation_index]
        tag = new_tag(generation_of(number), f"{operation.key} {number}")
        arrays = [array.view(operation.dtype) for array in data]
        run = getattr(self._collectives, operation.kind)
        identity = self._identities[operation_index]
        with collective_ring.entered(identity, number, arrays[0].nbytes):
            while True:
                self._connect()
                try:
                    return run(arrays, operation.source, tag)
                except RuntimeError as error:
                    self._recover_or_raise(error, number, operation)

    def _recover_or_raise(
        self, error: RuntimeError, number: int, operation: _Operation
    ) -> None:
        """Discard the communicator of a failed collective, or raise a final error.

        If no error is raised, the caller repeats the collective with a new
        communicator: the failure was that of an earlier step.

        Args:
            error: `RuntimeError` of the collective.
            number: Int, the request's number, which includes its generation.
            operation: `_Operation`.

        Raises:
            StepEnded: If only the current step has failed, on this or another worker.
            RuntimeError: If all later collectives will also fail.
        """
        ahead = steps_ahead(error, generation_of(number))
        if ahead is None:
            text = f"{error} (operation {operation.scope})"
            raise RuntimeError(text) from error
        # The communicator may still carry bytes of an earlier step, so the next attempt
        # creates a new one.
        self._collectives.communicator = None
        self._num_discarded += 1
        if ahead or self._thread.is_over(number):
            raise StepEnded(str(error)) from error

    def _identity(self, operation: _Operation) -> CollectiveIdentity:
        """Return the identity of a traced operation in flight records."""
        return CollectiveIdentity(
            self._name,
            self._collectives.ranks,
            operation.kind,
            operation.dtype.name,
            str(operation.key),
            operation.scope,
        )

    def _connect(self) -> None:
        """Create the communicator, unless it exists or one worker has all replicas.

        Raises:
            NotConnected: If the first communicator cannot be created.
        """
        collectives = self._collectives
        if collectives.communicator is not None or len(collectives.ranks) == 1:
            return
        assert self._new_communicator is not None
        name = (
            f"{self._name}+{self._num_discarded}" if self._num_discarded else self._name
        )
        try:
            if self._end_reason is not None:
                raise TransportClosed(self._end_reason)
            communicator = self._new_communicator(collectives.ranks, name)
        except Exception as error:
            if self._num_discarded:
                raise
            raise NotConnected(None, None, str(error)) from error
        collectives.communicator = communicator
        # If `abort` was called while the communicator was created, it could not close
        # the communicator, which is therefore closed here.
        if self._end_reason is not None:
            communicator.close(self._end_reason)


def _shape_of_result(kind: str, tensor: tf.Tensor, size: int) -> Any:
    """Return the result's shape, as a list of ints or, if dynamic, as a tensor.

    Args:
        kind: String, the kind of the collective, as in `Transport.run`.
        tensor: Tensor that a replica sends.
        size: Int, number of replicas in the group.
    """
    is_known = tensor.shape.is_fully_defined()
    if kind not in ("all_gather", "reduce_scatter"):
        return tensor.shape.as_list() if is_known else tf.shape(tensor)
    if not is_known:
        return tf.concat([[-1], tf.shape(tensor)[1:]], axis=0)
    rows, *rest = tensor.shape.as_list()
    return [rows * size if kind == "all_gather" else rows // size, *rest]


def _to_bytes(tensor: tf.Tensor) -> tf.Tensor:
    """Convert a tensor to uint8 without copying, except for bool."""
    if tensor.dtype == tf.bool:
        return tf.cast(tensor, tf.uint8)
    return tf.bitcast(tensor, tf.uint8)


def host_of(device: str) -> str:
    """Return the CPU that holds a device's queues: a CPU itself, or a GPU's host CPU.

    Args:
        device: String, name of the device.
    """
    spec = tf.DeviceSpec.from_string(device)
    if spec.device_type == "CPU":
        return device
    return spec.replace(device_type="CPU", device_index=0).to_string()
