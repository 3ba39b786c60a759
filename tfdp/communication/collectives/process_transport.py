"""Collectives by a communicator between processes: shared memory, TCP or MPI.

    replicas' tensors -> bridge -> [sum of the local ones] -> communicator -> bridge

The replicas of one process meet in its memory, so that the communicator sees one
member for each process.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.communication.collectives.bridge import (
    Bridge,
    StepEnded,
    end_call,
    generation_of,
)
from tfdp.communication.collectives.groups import SCOPE, Call, ProcessGroup
from tfdp.communication.collectives.process_collectives import ProcessCollectives
from tfdp.communication.coordination.watch import COLLECTIVE_FAILED, NotConnected
from tfdp.communication.transport import (
    Communicator,
    Connection,
    TransportClosed,
    new_tag,
    steps_ahead,
)
from tfdp.ground.base.finalizers import finalizers

# Chains of a device: buckets of different ones are under way at the same time.
_CHANNELS = 4


def end_failed_call(inputs: Sequence[Any], error: tf.errors.OpError) -> Exception:
    """Make a call of a graph that ended with an error the end of its collectives.

    Args:
        inputs: Sequence of the tensors that the function was called with, those that
            it captures among them.
        error: The error.

    Returns:
        The error, or one that says why a collective has failed where TensorFlow only
        says that one has: `NotConnected` if another worker could not be reached, or
        `tf.errors.UnavailableError`, as if it were one of TensorFlow's.
    """
    failure = end_call(inputs)
    if failure is None or COLLECTIVE_FAILED not in str(error):
        return error
    if not failure.has_connected:
        return NotConnected(None, None, failure.reason)
    # With its text, which names the operation.
    return tf.errors.UnavailableError(None, None, f"{failure.reason}\n\n{error}")


@dataclasses.dataclass(frozen=True)
class _Operation:
    """What one traced collective is."""

    kind: str
    dtype: np.dtype
    key: int  # the same on all workers
    source: int  # position of the source of a broadcast
    # Where it is in the graph, which differs between replicas.
    scope: str = dataclasses.field(compare=False)


class ProcessTransport:
    """Transport over a communicator for each group and channel, see `Transport`.

    Args:
        name: String, `"direct"` or `"mpi"`.
        rank: Int, this worker's.
        new_communicator: Callable of the ranks of a group's workers and a name of the
            group, the same on all, which returns a `Communicator`; or `None` in a
            process that has all replicas.
        connect: Callable of another worker's rank and a name, the same on both, which
            returns a `Connection`; or `None` where there is no such thing. Defaults to
            `None`.
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
        self._new_communicator = new_communicator
        self._lanes: weakref.WeakKeyDictionary[ProcessGroup, dict[int, _Lane]]
        self._lanes = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def run(
        self, kind: str, tensor: tf.Tensor, call: Call, source: int = 0
    ) -> tf.Tensor:
        """See `Transport`."""
        lane = self._lane(call.group, call.channel % self.num_channels)
        named = f"{kind} from {source}" if kind == "broadcast" else kind
        key = dataclasses.replace(call, size=None).key(named, tensor)
        dtype = np.dtype(tensor.dtype.as_numpy_dtype)
        # Names the operation in errors, and for who counts them.
        name = f"{SCOPE}_{kind}_{dtype.name}_{call.group.key}"
        with tf.name_scope(name) as scope:
            shape = _shape_of_result(kind, tensor, call.group.size)
            operation = _Operation(kind, dtype, int(key), source, scope)
            flat = tf.reshape(_to_bytes(tensor), [-1])
            result = lane.exchange(flat, call.replica, operation)
            return tf.reshape(_from_bytes(result, tensor.dtype), shape)

    def abort(self, reason: str) -> None:
        """End what waits for other workers, with a reason that they are told."""
        for lane in self._all_lanes():
            lane.abort(reason)

    def close(self) -> None:
        """End all threads, and what waits for them with an error."""
        for lane in self._all_lanes():
            lane.end()

    @property
    def failure(self) -> str:
        """String, why a collective has failed for good, or `""`."""
        return next((lane.failure for lane in self._all_lanes() if lane.failure), "")

    def _all_lanes(self) -> list[_Lane]:
        with self._lock:
            return [lane for own in self._lanes.values() for lane in own.values()]

    def _lane(self, group: ProcessGroup, channel: int) -> _Lane:
        with self._lock:
            lanes = self._lanes.setdefault(group, {})
            if channel not in lanes:
                name = f"{group.key}/{channel}"
                lane = _Lane(name, group, self._rank, self._new_communicator)
                lanes[channel] = lane
                # Its thread would keep it for ever.
                finalizers.register(group, lane.end, waits=False)
            return lanes[channel]


class _Lane:
    """The collectives of one group on one channel, in the order of their launch."""

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
        # In the order of positions, as the parts of a tensor are.
        local = sorted((p, replica) for replica, p in positions if p is not None)
        self._index = {replica: index for index, (_, replica) in enumerate(local)}
        self._name = name
        self._new_communicator = new_communicator
        # How many others were there before it.
        self._num_left = 0
        self._end_reason: str | None = None
        self._operations: list[_Operation] = []
        self._tickets: dict[_Operation, int] = {}
        self._lock = threading.Lock()
        devices = [host_of(group.devices[replica]) for _, replica in local]
        self._bridge = Bridge(f"tfdp {name}", devices, self._run, self.abort)

    def exchange(
        self, data: tf.Tensor, replica: int, operation: _Operation
    ) -> tf.Tensor:
        """Run an operation on the data of a local replica, in the graph."""
        with self._lock:
            ticket = self._tickets.setdefault(operation, len(self._operations))
            if ticket == len(self._operations):
                self._operations.append(operation)
        return self._bridge.exchange(self._index[replica], data, ticket)

    def end(self, *, waits: bool = True) -> None:
        """End the thread, and wait until it has if `waits`."""
        self.abort("")
        self._bridge.close(waits=waits)

    def abort(self, reason: str) -> None:
        """End what waits for other workers, with a reason that they are told."""
        self._end_reason = reason
        if self._collectives.communicator is not None:
            self._collectives.communicator.close(reason)

    @property
    def failure(self) -> str:
        """String, why a collective has failed for good, or `""`."""
        return self._bridge.failure.reason if self._bridge.failure else ""

    def _run(self, ticket: int, number: int, data: list[np.ndarray]) -> list[tf.Tensor]:
        operation, generation = self._operations[ticket], generation_of(number)
        tag = new_tag(generation, f"{operation.key} {number}")
        arrays = [array.view(operation.dtype) for array in data]
        run = getattr(self._collectives, operation.kind)
        while True:
            self._connect()
            try:
                return run(arrays, operation.source, tag)
            except RuntimeError as error:
                ahead = steps_ahead(error, generation)
                if ahead is None:
                    text = f"{error} (operation {operation.scope})"
                    raise RuntimeError(text) from error
                # Bytes of an earlier step may be under way in this one.
                self._collectives.communicator = None
                self._num_left += 1
                if ahead or self._bridge.is_over(number):
                    raise StepEnded(str(error)) from error

    def _connect(self) -> None:
        """Make the communicator of the group, unless it is of one process."""
        collectives = self._collectives
        if collectives.communicator is not None or len(collectives.ranks) == 1:
            return
        assert self._new_communicator is not None
        name = f"{self._name}+{self._num_left}" if self._num_left else self._name
        try:
            if self._end_reason is not None:
                raise TransportClosed(self._end_reason)
            communicator = self._new_communicator(collectives.ranks, name)
        except Exception as error:
            if self._num_left:
                raise
            raise NotConnected(None, None, str(error)) from error
        collectives.communicator = communicator
        if self._end_reason is not None:  # meanwhile
            communicator.close(self._end_reason)


def _shape_of_result(kind: str, tensor: tf.Tensor, size: int) -> Any:
    """The shape as a list of ints, or as a tensor where it is not known."""
    is_known = tensor.shape.is_fully_defined()
    if kind not in ("all_gather", "reduce_scatter"):
        return tensor.shape.as_list() if is_known else tf.shape(tensor)
    if not is_known:
        return tf.concat([[-1], tf.shape(tensor)[1:]], axis=0)
    rows, *rest = tensor.shape.as_list()
    return [rows * size if kind == "all_gather" else rows // size, *rest]


def _to_bytes(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype == tf.bool:
        return tf.cast(tensor, tf.uint8)
    return tf.bitcast(tensor, tf.uint8)


def _from_bytes(data: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype == tf.bool:
        return tf.cast(data, tf.bool)
    if dtype.size == 1:
        return tf.bitcast(data, dtype)
    return tf.bitcast(tf.reshape(data, [-1, dtype.size]), dtype)


def host_of(device: str) -> str:
    """Return the CPU that holds the queues of a device: its own, or its host's.

    Args:
        device: String.
    """
    spec = tf.DeviceSpec.from_string(device)
    if spec.device_type == "CPU":
        return device
    return spec.replace(device_type="CPU", device_index=0).to_string()
