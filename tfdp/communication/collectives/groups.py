"""Process groups, the launch order of their collectives, and the transport protocol.

The primitives call the transport of a group; no code above them depends on which one.

TensorFlow matches the members of a collective by a group key, a group size and an
instance key, see `instance_keys.py`. Group keys here start far above TensorFlow's
own, and all strategies of a process draw from one counter, so that two strategies
never collide.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfdp.communication.collectives import calls
from tfdp.communication.collectives.instance_keys import InstanceKeys
from tfdp.ground._compat import runtime
from tfdp.ground.text import pluralize

# Group keys here must not collide with TensorFlow's own, which count sets of devices
# from 1, so the first one is far above them.
_FIRST_GROUP_KEY = 1 << 24
_KEYS_PER_STRATEGY = 1 << 18
# The index of the next strategy, in a list so that functions can change it without a
# `global` statement.
_next_index = [0]

# Partition of a group into subgroups: for each subgroup, the positions of its members.
# It consists of tuples because it is a key of the dict of existing subgroups.
Partition = tuple[tuple[int, ...], ...]

# A collective of `ProcessTransport` is a function call in a graph. `is_collective`
# recognizes it by this prefix of its name scope.
SCOPE = "Collective"


def is_collective(op: Any) -> bool:
    """Return whether an operation of a graph is a collective.

    Args:
        op: `tf.Operation`.

    Returns:
        Bool; true for the call of a function that is one collective, and not for the
        operations inside the function.
    """
    if op.type.startswith("Collective"):
        return True
    return op.type.endswith("PartitionedCall") and f"/{SCOPE}_" in f"/{op.name}"


@dataclasses.dataclass(frozen=True)
class CollectiveCall:
    """Call of a collective: its group, its replica and its chain of the launch order.

    Args:
        group: `ProcessGroup` of at least two replicas.
        replica: Int, index of the calling replica among the local ones.
        channel: Int, index of the chain of `LaunchOrder` that the call belongs to.
        size: Scalar int32 tensor, the index of the tensor's length in
            `instance_keys.SIZES` if it is known only at run time; else `None`, the
            default.
        is_alone: Bool, whether hardly any other collective runs at the same time: a
            ring of TensorFlow then sends smaller pieces, so the network is not idle.
            Defaults to `True`.
    """

    group: ProcessGroup
    replica: int
    channel: int
    size: tf.Tensor | None = None
    is_alone: bool = True

    def key(self, kind: str, tensor: tf.Tensor) -> int | tf.Tensor:
        """Return TensorFlow's instance key of this call, which is equal on all workers.

        Args:
            kind: String, the kind of the collective, as in `Transport.run`.
            tensor: Tensor that is sent.

        Returns:
            Int, or a scalar int32 tensor if the call has a `size`.
        """
        keys = self.group.instance_keys
        return keys.next_key(kind, tensor, self.replica, self.size)


class Transport(Protocol):
    """Interface of collectives over non-empty tensors, in groups of two or more.

    Each replica of the group calls a collective on its device, at the same point of its
    program.

    Attributes:
        name: String, such as `"direct"`.
        num_channels: Int, number of chains per device; collectives of different chains
            may overlap.
        has_reduce_scatter: Bool; if false, an all-to-all and a local sum replace a
            reduce-scatter, with the same bytes.
        rounds_sums_once: Bool, whether a sum of float16 or bfloat16 over workers is
            added in float32, and rounded once.
    """

    name: str
    num_channels: int
    has_reduce_scatter: bool
    rounds_sums_once: bool

    def open(self, group: ProcessGroup) -> Sequence[int | None]:
        """Connect the members of a new group, unless its first collective does so.

        Returns:
            Sequence with the position of each local replica in the group, as the
            transport orders it; `None` for one of another group.
        """

    def sums_as_sent(self, group: ProcessGroup) -> bool:
        """Return whether a reduce-scatter adds elements in the dtype that is sent.

        If not, an all-to-all can replace it with the same bytes, after which each
        replica adds in the tensor's own dtype.
        """

    def run(
        self, kind: str, tensor: tf.Tensor, call: CollectiveCall, source: int = 0
    ) -> tf.Tensor:
        """Run a collective.

        Args:
            kind: String: `"all_reduce"` sums tensors of equal shape; `"all_gather"`
                concatenates them along the first axis, by position; `"all_to_all"`
                sends slice i of the first axis, of length `group.size`, to position i;
                `"reduce_scatter"` sums, and keeps the slice at the replica's position;
                `"broadcast"` copies the tensor of the source.
            tensor: Tensor that is not empty.
            call: `CollectiveCall`.
            source: Int, the position of a broadcast's source. Defaults to `0`.

        Returns:
            Tensor, the result on the calling replica.
        """


@dataclasses.dataclass(frozen=True)
class SplitId:
    """Identity of a group among all groups that the same series of splits creates.

    Args:
        path: Tuple, the key of the first group, then the partition of each split.
        index: Int, index of the group among all groups of that path.
        count: Int, number of groups of that path, on all workers.
    """

    path: tuple
    index: int
    count: int

    def of_subgroup(self, parts: Partition, index: int) -> SplitId:
        """Return the identity of a subgroup of this group.

        Every group of the same path must be split into the same parts.

        Args:
            parts: `Partition` of the group into its subgroups.
            index: Int, index of the subgroup in `parts`.
        """
        return SplitId(
            (*self.path, parts),
            self.index * len(parts) + index,
            self.count * len(parts),
        )


def device_positions(devices: Sequence[str]) -> list[int]:
    """Return the position of each device in a group of all of them.

    TensorFlow sorts the members of a group by the name of the task as text, with task
    10 before task 2, and in a task by the number of the device.

    Args:
        devices: Sequence of strings, full names of devices.

    Returns:
        List of ints.

    Example:

    >>> device_positions(["/task:1/CPU:0", "/task:10/CPU:10", "/task:10/CPU:9"])
    [0, 2, 1]
    """
    positions = {name: i for i, name in enumerate(sorted(devices, key=_sort_key))}
    return [positions[name] for name in devices]


def _sort_key(device: str) -> tuple[str, int, str, str, int]:
    """Return the key by which TensorFlow sorts a device in a group.

    Returns:
        Tuple of job, replica, task as text, type and number of the device.
    """
    spec = tf.DeviceSpec.from_string(device)
    task = str(spec.task or 0)
    return spec.job or "", spec.replica or 0, task, spec.device_type, spec.device_index


def align_group_keys(all_gather: Callable[[int], list[int]]) -> None:
    """Give the next strategy the same index, and so equal group keys, on all workers.

    One worker may have created more strategies than another before: in a notebook, for
    example, or for a model of its own. All continue from the largest index.

    Args:
        all_gather: Callable that takes the next index of this worker, and returns those
            of all workers.
    """
    _next_index[0] = max(all_gather(_next_index[0]))


class LaunchOrder:
    """Order in which collectives start on the devices of this process.

    A channel is a chain: collectives of one channel on one device run one after
    another, in the order in which they were traced. NCCL needs one order for all
    communicators of a device, so all groups share one channel; on CPUs, buckets on
    different channels overlap.

    Args:
        devices: Sequence of strings, the local devices.
        num_channels: Int, chains per device. Defaults to `1`.

    Raises:
        ValueError: If `num_channels` is less than one.
    """

    def __init__(self, devices: Sequence[str], num_channels: int = 1) -> None:
        if num_channels < 1:
            raise ValueError(
                "`num_channels` must be at least 1. "
                f"Received: num_channels={num_channels}"
            )
        self.devices = tuple(devices)
        self.num_channels = num_channels
        # Automatic control dependencies order operations with the same resource, here
        # one small variable per device and channel. Otherwise TensorFlow would chain
        # the collectives of two devices of a process, and the step would deadlock.
        self._tokens = [
            [
                runtime.plain_variable(0.0, tf.float32, device)
                for _ in range(num_channels)
            ]
            for device in self.devices
        ]
        for tokens in self._tokens:
            for token in tokens:
                calls.mark(token.handle)
        self.strategy_index = _next_index[0]
        _next_index[0] += 1
        self._group_counter = itertools.count()
        self._num_keys = 0
        self._ranges: dict[tuple, range] = {}
        self._lock = threading.Lock()

    def token(self, replica: int, channel: int) -> tf.Tensor:
        """Return the ordering token of a channel on a local replica's device.

        It is the handle of a variable, an input of TensorFlow's collectives there.
        """
        return self._tokens[replica][channel % self.num_channels].handle

    def new_group_key(self) -> int:
        """Return a group key that no other group of this process has."""
        return self.group_keys((next(self._group_counter),), 1)[0]

    def group_keys(self, path: tuple, count: int) -> range:
        """Return the keys of all groups that a series of splits creates.

        The count includes groups of other workers, so that two nodes that split
        themselves in the same way get different keys.

        Args:
            path: Tuple, the path of splits, as in `SplitId`.
            count: Int, number of groups.

        Returns:
            Range of ints, always the same for a path.
        """
        with self._lock:
            if path not in self._ranges:
                if self._num_keys + count > _KEYS_PER_STRATEGY:
                    limit = _KEYS_PER_STRATEGY
                    raise ValueError(f"A strategy has at most {limit} groups.")
                base = _FIRST_GROUP_KEY + self.strategy_index * _KEYS_PER_STRATEGY
                first = base + self._num_keys
                self._ranges[path] = range(first, first + count)
                self._num_keys += count
            return self._ranges[path]


class ProcessGroup:
    """Replicas that reduce, gather or broadcast together.

    Every worker must create groups in the same order, since their keys are counted.
    A replica's position in its group is the one of TensorFlow, see `device_positions`:
    all-gather concatenates and reduce-scatter splits by position.

    Args:
        launch_order: A `LaunchOrder`, shared by all groups of these devices.
        size: Int, the number of replicas in the group, on all workers.
        transport: `Transport` that runs the collectives.
        positions: Sequence with the position of each local replica, or `None`
            for a replica of another group. Defaults to `None`, for a group of all
            replicas of a single process.
        nodes: Tuple of tuples, the positions on each node, for hierarchical
            algorithms. Defaults to `()`.
        workers: Sequence of ints, the rank of the worker of each position, or `None`
            if the transport does not need it. Defaults to `None`.
        split_id: `SplitId` of a group that `split` creates. Defaults to `None`.
    """

    def __init__(
        self,
        launch_order: LaunchOrder,
        size: int,
        transport: Transport,
        *,
        positions: Sequence[int | None] | None = None,
        nodes: Partition = (),
        workers: Sequence[int] | None = None,
        split_id: SplitId | None = None,
    ) -> None:
        self.launch_order = launch_order
        self.size = size
        self.transport = transport
        self.nodes = nodes
        self.workers = workers
        if split_id is None:
            self.key = launch_order.new_group_key()
            split_id = SplitId((self.key,), 0, 1)
        else:
            keys = launch_order.group_keys(split_id.path, split_id.count)
            self.key = keys[split_id.index]
        self._split_id = split_id
        if positions is None and size == len(launch_order.devices):
            positions = device_positions(launch_order.devices)
        self._positions = positions
        self._splits: dict[Partition, tuple[ProcessGroup | None, ...]] = {}
        local = [p for p in self.local_positions if p is not None]
        # If all members are replicas of this process, no other worker has to agree on
        # instance keys, so each traced function gets keys of its own.
        self.is_local = len(local) == size
        self.instance_keys = InstanceKeys(is_local=self.is_local)
        self._split_lock = threading.Lock()
        self._positions = transport.open(self)

    @property
    def backend(self) -> str:
        """String, the name of the transport that runs the collectives."""
        return self.transport.name

    @property
    def devices(self) -> tuple[str, ...]:
        """Tuple of strings, the device of each local replica."""
        return self.launch_order.devices

    @property
    def local_positions(self) -> Sequence[int | None]:
        """Sequence: position of each local replica; `None` for one of another group."""
        return self._positions or [None] * len(self.devices)

    def position(self, replica: int) -> int:
        """Return the position of a local replica in the group.

        Args:
            replica: Int, index among the local replicas.

        Returns:
            Int from 0 to `size - 1`; the replica must be in the group.
        """
        position = self.local_positions[replica]
        assert position is not None
        return position

    def split(self, parts: Sequence[Sequence[int]]) -> tuple[ProcessGroup | None, ...]:
        """Split the group into subgroups, created once for each partition.

        Every replica of the group and of its sibling groups must call it in the same
        order, including a replica that is in no part.

        Args:
            parts: Sequence of sequences of positions in this group, each
                position at most once.

        Returns:
            Tuple with the new group of each local replica, or `None` for one
            that is in no part.

        Raises:
            ValueError: If a position is not in the group or in two parts.
        """
        ordered: Partition = tuple(tuple(sorted(part)) for part in parts)
        with self._split_lock:
            if ordered not in self._splits:
                self._splits[ordered] = self._create_subgroups(ordered)
            return self._splits[ordered]

    def _create_subgroups(self, parts: Partition) -> tuple[ProcessGroup | None, ...]:
        """Create the subgroup of each local replica.

        Args:
            parts: `Partition` of the group, as in `split`.

        Returns:
            Tuple with the subgroup of each local replica, `None` for one that is in no
            part.
        """
        members = [position for part in parts for position in part]
        if len(set(members)) < len(members) or not set(members) <= set(
            range(self.size)
        ):
            raise ValueError(
                f"The parts of a group of {pluralize(self.size, 'replica')} must hold "
                f"each position from 0 to {self.size - 1} at most once. "
                f"Received: {parts}"
            )
        local = list(self.local_positions)
        groups: list[ProcessGroup | None] = [None] * len(local)
        for index, part in enumerate(parts):
            split_id = self._split_id.of_subgroup(parts, index)
            # Group keys are taken even for a part without local replicas, so that all
            # workers count the same number of keys.
            self.launch_order.group_keys(split_id.path, split_id.count)
            positions = [part.index(p) if p in part else None for p in local]
            if positions.count(None) == len(local):
                continue
            group = ProcessGroup(
                self.launch_order,
                len(part),
                self.transport,
                positions=positions,
                workers=self.workers and [self.workers[p] for p in part],
                split_id=split_id,
            )
            for replica, position in enumerate(positions):
                groups[replica] = groups[replica] if position is None else group
        return tuple(groups)
