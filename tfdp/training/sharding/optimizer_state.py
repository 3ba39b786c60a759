"""Conversion of sharded optimizer state to and from the state tensors of files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.communication.collectives.collective_thread import from_bytes, new_tensor
from tfdp.ground._compat import optimizer_state, runtime, tf_distribute
from tfdp.ground.plans.shards import Segment
from tfdp.training.parameters.sharded_parameter import ShardedParameter
from tfdp.training.sharding.element_shards import ElementShards
from tfdp.training.sharding.sharded_param_group import OptimizerShard, ShardedParamGroup
from tfdp.training.sharding.state_tensors import (
    READ_ELEMENTS,
    LocalShard,
    StateTensor,
    reshaped,
    slot_name,
    slot_names,
)
from tfdp.training.sharding.variable_shards import VariableShards


def param_group_state(
    group: ShardedParamGroup, is_first_copy: Callable[[int], bool], rank: int
) -> list[StateTensor]:
    """Return the state tensors of an inner optimizer, in the order of its variables.

    Args:
        group: `ShardedParamGroup`.
        is_first_copy: Callable that returns whether a local replica, by its index, is
            the first of all replicas with its slices.
        rank: Int, rank of the first local replica.

    Returns:
        List of `StateTensor`.
    """
    template = optimizer_state.built_without_memory(group.optimizer, group.variables)
    shards: dict[str, list[tuple[bool, LocalShard]]] = {}
    for replica, state in enumerate(group.replicas):
        for name, shard in _named_shards(group, state):
            single = name in state.singles
            is_owned = rank + replica == 0 if single else is_first_copy(replica)
            shards.setdefault(name, []).append((is_owned, shard))
    return [
        _tensor(name, slot.shape, str(slot.dtype), shards.get(name, []))
        for name, slot in slot_names(template, group.variables)
    ]


def accumulator_state(
    sums: Sequence[Any],
    group: ShardedParamGroup,
    is_first_copy: Callable[[int], bool],
) -> list[StateTensor]:
    """Return the state tensors of gradients that are accumulated in shards.

    Args:
        sums: Sequence of Keras variables, one for each bucket of the group's plan.
        group: `ShardedParamGroup`.
        is_first_copy: Callable that returns whether a local replica, by its index, is
            the first of all replicas with its slices.

    Returns:
        List of `StateTensor`, one for each variable of the group.
    """
    shards: list[list[tuple[bool, LocalShard]]] = [[] for _ in group.variables]
    dtypes = {}
    for total, bucket in zip(sums, group.plan.buckets, strict=True):
        dtypes.update(dict.fromkeys(bucket.indices, str(total.dtype)))
        for replica, state in enumerate(group.replicas):
            local = tf_distribute.local_value(total, replica)
            buffer = _buffer_of(local)
            for segment, begin, _ in bucket.places(state.owner):
                shard = _range_shard(local, begin, segment, buffer)
                shards[segment.index].append((is_first_copy(replica), shard))
    return [
        _tensor(
            slot_name("accumulated", index, group.variables),
            variable.shape,
            dtypes.get(index, str(variable.dtype)),
            shards[index],
        )
        for index, variable in enumerate(group.variables)
    ]


def parameter_state(name: str, parameter: ShardedParameter) -> StateTensor:
    """Return the state tensor of a sharded parameter.

    Args:
        name: String, unique among all state tensors.
        parameter: `ShardedParameter`.

    Returns:
        `StateTensor`.
    """
    reader = parameter.reader

    def on_write() -> None:
        """Drop the gathered values of the parameter, which are stale now."""
        reader.forget(parameter)

    shards = []
    for replica, part in enumerate(parameter.values):
        start, stop = parameter.ranges[reader.groups.owner(replica)]
        if start == stop:
            continue
        is_owned = reader.groups.is_first_copy(replica)
        shards.append((is_owned, _full_shard(part, start, on_write)))
    return _tensor(name, parameter.whole_shape, parameter.dtype.name, shards)


def shard_full_slots(tensors: Sequence[StateTensor], slots: Sequence[Any]) -> None:
    """Copy the elements that the local replicas own from full slots to their shards.

    Args:
        tensors: Sequence of `StateTensor`.
        slots: Sequence of Keras variables, one for each tensor.
    """
    for tensor, slot in zip(tensors, slots, strict=True):
        whole = np.asarray(tf_distribute.local_value(slot, 0).numpy()).ravel()
        for shard in tensor.local_shards:
            shard.write(whole[shard.start : shard.stop])


def _tensor(
    name: str, shape: Any, dtype: str, shards: Sequence[tuple[bool, LocalShard]]
) -> StateTensor:
    """Create a state tensor from the shards of the local replicas.

    Owned shards are split into smaller ones, so that reads need little memory.

    Args:
        name: String, unique among all state tensors.
        shape: Shape of the whole tensor.
        dtype: String.
        shards: Sequence of pairs: whether this process owns a shard, and the shard.
    """
    owned = [
        chunk
        for is_owned, shard in shards
        if is_owned
        for chunk in shard.split(READ_ELEMENTS)
    ]
    local_shards = tuple(shard for _, shard in shards)
    return StateTensor(name, tuple(shape), dtype, tuple(owned), local_shards)


def _named_shards(
    group: ShardedParamGroup, state: OptimizerShard
) -> list[tuple[str, LocalShard]]:
    """Return the shards of an inner optimizer's state on one replica, with names.

    Args:
        group: `ShardedParamGroup` of the optimizer.
        state: `OptimizerShard` of the replica.

    Returns:
        List of pairs: name of a state tensor, and a `LocalShard` of it.
    """
    shards = [(name, _full_shard(item)) for name, item in state.singles.items()]
    if isinstance(state, VariableShards):
        return shards + _named_shards_of_variables(group, state)
    assert isinstance(state, ElementShards)
    for attribute, slots in state.slots.items():
        for number, slot in zip(state.buckets, slots, strict=True):
            variable = slot.value
            buffer = _buffer_of(variable)
            for segment, begin, _ in group.plan.buckets[number].places(state.owner):
                name = slot_name(attribute, segment.index, group.variables)
                shards.append((name, _range_shard(variable, begin, segment, buffer)))
    return shards


def _named_shards_of_variables(
    group: ShardedParamGroup, state: VariableShards
) -> list[tuple[str, LocalShard]]:
    """Return the slots of whole variables on one replica as shards, with names.

    Args:
        group: `ShardedParamGroup` of the optimizer.
        state: `VariableShards` of the replica.

    Returns:
        List of pairs: name of a state tensor, and a `LocalShard` with all its elements.
    """
    names = {
        id(slot): slot_name(attribute, index, group.variables)
        for attribute, slots in state.slots.items()
        for index, slot in zip(state.owned, slots, strict=True)
        if slot is not None
    }
    singles = {id(item) for item in state.singles.values()}
    return [
        (names.get(id(slot), f"variable/{slot.path}"), _full_shard(slot))
        for slot in state.variables
        if id(slot) not in singles
    ]


def _full_shard(
    variable: Any, start: int = 0, on_write: Callable[[], None] = lambda: None
) -> LocalShard:
    """Return the shard that consists of all elements of a variable.

    Args:
        variable: `tf.Variable` or Keras variable.
        start: Int, its first element in the flattened state tensor. Defaults to 0.
        on_write: Callable without arguments, called after a write. Defaults to one
            that does nothing.
    """
    shape = tuple(variable.shape)
    size = int(np.prod(shape, dtype=np.int64))
    read = functools.partial(tf_distribute.elements_of, variable)

    def write(values: Any) -> None:
        """Assign a flat array or tensor to the whole variable, and call `on_write`."""
        variable.assign(reshaped(values, shape))
        on_write()

    read_range = None if tf_distribute.is_read_as_view(variable) else read
    return LocalShard(start, start + size, lambda: read(0, size), write, read_range)


class _FlatBuffer:
    """Memory of a flat `tf.Variable` on a CPU, written in ranges.

    After the assignment of a slice, TensorFlow copies the whole variable at every read.
    So the first write assigns a new tensor, whose memory the variable takes, and later
    writes go to this memory.

    Args:
        variable: `tf.Variable`.
    """

    def __init__(self, variable: Any) -> None:
        self._variable = variable
        self._data: np.ndarray | None = None
        # The position at which each range begins, of all ranges and of those that are
        # not written yet. Once all are written, the buffer drops its reference to the
        # variable's memory.
        self.begins: set[int] = set()
        self._unwritten: set[int] = set()
        self._is_copied = False

    def write(self, begin: int, values: np.ndarray) -> None:
        """Write a range of elements.

        Args:
            begin: Int, position of the first one in the variable.
            values: Flat array.
        """
        stop = begin + len(values)
        if self._is_copied:
            self._variable[begin:stop].assign(values)
            return
        if self._data is None or not self._is_of_variable():
            self._give_memory(begin, values)
        else:
            self._data[begin:stop] = values
        self._unwritten.discard(begin)
        if self._is_copied or not self._unwritten:
            self._data = None

    def _is_of_variable(self) -> bool:
        """Return whether the variable still has the memory that the buffer writes to.

        A step may have replaced it.
        """
        own = tf_distribute.elements_of(self._variable, 0, 1)
        return self._data is not None and np.shares_memory(self._data, own)

    def _give_memory(self, begin: int, values: np.ndarray) -> None:
        """Assign a new tensor to the variable: its value, with a range replaced.

        The memory of the tensor is kept for later writes.

        Args:
            begin: Int, position of the range's first element in the variable.
            values: Flat array, the new elements of the range.
        """
        variable, dtype = self._variable, self._variable.dtype
        with tf.device(variable.device):
            tensor, data = new_tensor(variable.shape.num_elements() * dtype.size)
            self._data = data.view(dtype.as_numpy_dtype)
            self._data[:] = tf_distribute.elements_of(variable, 0, len(self._data))
            self._data[begin : begin + len(values)] = values
            variable.assign(from_bytes(tensor, dtype))
        self._unwritten = set(self.begins)
        # If steps write to slices of the variable, TensorFlow copies a tensor that is
        # assigned to it. Writes to the buffer's memory would then be lost, so later
        # ranges are assigned as slices.
        self._is_copied = not self._is_of_variable()


def _buffer_of(variable: Any) -> _FlatBuffer | None:
    """Return a buffer that writes ranges of a flat variable to its memory.

    Returns:
        `_FlatBuffer`; or `None` for a variable on another device than a CPU, or with
        elements of one byte, whose ranges are assigned as slices instead.
    """
    on_cpu = runtime.device_type(variable.device) == "CPU"
    return _FlatBuffer(variable) if on_cpu and variable.dtype.size > 1 else None


def _range_shard(
    variable: Any, begin: int, segment: Segment, buffer: _FlatBuffer | None
) -> LocalShard:
    """Return the shard of a segment of a flat `tf.Variable`.

    Args:
        variable: `tf.Variable`.
        begin: Int, position of the segment in the variable.
        segment: `Segment`.
        buffer: `_FlatBuffer` of the variable, or `None` to assign slices.
    """
    size = segment.size

    def read(first: int, last: int) -> np.ndarray:
        """Return elements `first` to `last - 1` of the segment as a flat array."""
        if not getattr(variable, "had_slice_assigned", False):
            return tf_distribute.elements_of(variable, begin + first, begin + last)
        # After `write` has assigned a slice, TensorFlow copies the whole variable on
        # every read. `tf.gather` copies only the elements that are read, but one by
        # one.
        with tf.device(variable.device):
            places = tf.range(begin + first, begin + last, dtype=tf.int64)
            return tf.gather(variable, places).numpy()

    def write(values: Any) -> None:
        """Assign a flat array or tensor to all elements of the segment."""
        if buffer is not None:
            array = tf_distribute.view_of(values) if tf.is_tensor(values) else values
            buffer.write(begin, array)
            return
        is_whole = not getattr(variable, "had_slice_assigned", False)
        if is_whole and np.array_equal(read(0, size), values):
            # An assignment to a slice makes later reads slow, so values that the slice
            # already has, such as the zeros of a new optimizer, are not assigned.
            return
        variable[begin : begin + size].assign(values)
        variable.had_slice_assigned = True

    if buffer is not None:
        buffer.begins.add(begin)

    # With a buffer, reading only a range saves no memory: a read is a view of the
    # variable's memory, or copies the whole variable.
    read_range = read if buffer is None else None
    return LocalShard(
        segment.start, segment.stop, lambda: read(0, size), write, read_range
    )
