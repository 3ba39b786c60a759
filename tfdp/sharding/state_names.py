"""Sharded optimizer state as the whole tensors that files hold."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp import _compat
from tfdp.base.param_groups import path_of
from tfdp.sharding.sharded_param_group import Owned, ShardedParamGroup
from tfdp.sharding.state_tensors import READ_ELEMENTS, Piece, StateTensor
from tfdp.sharding.variable_shards import VariableShards

# What Keras puts behind the name of a layer to make it unique.
_NUMBER = re.compile(r"_\d+$")


def slot_names(optimizer: Any, variables: Sequence[Any]) -> list[tuple[str, Any]]:
    """A built optimizer's variables but for counter and rate, each with a name.

    The name says the attribute and the trained variable that it belongs to, and is
    the same however the state lies.

    Args:
        optimizer: Keras optimizer that is no wrapper.
        variables: Sequence of the variables that it was built for.

    Returns:
        List of tuples of a string and a Keras variable, in Keras's order.
    """
    names: dict[int, str] = {}
    for attribute, slots in _compat.slots_of(optimizer).items():
        for index, slot in enumerate(slots):
            if slot is not None:
                names.setdefault(id(slot), _slot_name(attribute, index, variables))
    for attribute, single in _compat.single_variables(optimizer).items():
        names.setdefault(id(single), attribute)
    return [
        (names.get(id(slot), f"variable/{slot.path}"), slot)
        for slot in _compat.state_variables(optimizer)
    ]


def state_of_part(
    part: ShardedParamGroup, is_first_copy: Callable[[int], bool], rank: int
) -> list[StateTensor]:
    """The state of one inner optimizer, in the order of Keras's variables.

    Args:
        part: `ShardedParamGroup`.
        is_first_copy: Callable, whether a local replica is the first with its
            slices.
        rank: Int, rank of the first local replica.

    Returns:
        List of `StateTensor`.
    """
    template = _compat.built_without_memory(part.optimizer, part.variables)
    pieces: dict[str, list[tuple[bool, Piece]]] = {}
    for replica, state in enumerate(part.replicas):
        for name, piece in _pieces(part, state):
            single = name in state.singles
            is_owned = rank + replica == 0 if single else is_first_copy(replica)
            pieces.setdefault(name, []).append((is_owned, piece))
    return [
        StateTensor(
            name,
            tuple(slot.shape),
            str(slot.dtype),
            tuple(
                part
                for is_owned, piece in pieces.get(name, [])
                if is_owned
                for part in piece.cut(READ_ELEMENTS)
            ),
            tuple(piece for _, piece in pieces.get(name, [])),
        )
        for name, slot in slot_names(template, part.variables)
    ]


def state_of_sums(
    sums: Sequence[Any],
    part: ShardedParamGroup,
    is_first_copy: Callable[[int], bool],
    prefix: str,
) -> list[StateTensor]:
    """What is accumulated of each variable, where slices of sums are.

    Args:
        sums: Sequence of Keras variables, one for each bucket of the part's plan.
        part: `ShardedParamGroup`.
        is_first_copy: Callable, as for `state_of_part`.
        prefix: String, before every name.

    Returns:
        List of `StateTensor`, one for each variable of the part.
    """
    owned: list[list[Piece]] = [[] for _ in part.variables]
    held: list[list[Piece]] = [[] for _ in part.variables]
    dtypes = {}
    for total, bucket in zip(sums, part.plan.buckets, strict=True):
        dtypes.update(dict.fromkeys(bucket.indices, str(total.dtype)))
        for replica, state in enumerate(part.replicas):
            local = _compat.local_value(total, replica)
            begin = 0
            for segment in bucket.rows[state.owner]:
                piece = _range(local, begin, segment.start, segment.size)
                held[segment.index].append(piece)
                if is_first_copy(replica):
                    owned[segment.index] += piece.cut(READ_ELEMENTS)
                begin += segment.size
    names = [_slot_name(prefix, i, part.variables) for i in range(len(part.variables))]
    return [
        StateTensor(
            names[index],
            tuple(variable.shape),
            dtypes.get(index, str(variable.dtype)),
            tuple(owned[index]),
            tuple(held[index]),
        )
        for index, variable in enumerate(part.variables)
    ]


def take_over(tensors: Sequence[StateTensor], slots: Sequence[Any]) -> None:
    """Copies what the local replicas own out of full slots.

    Args:
        tensors: Sequence of `StateTensor`.
        slots: Sequence of Keras variables, one for each tensor.
    """
    for tensor, slot in zip(tensors, slots, strict=True):
        whole = np.asarray(_compat.local_value(slot, 0).numpy()).ravel()
        for piece in tensor.held:
            piece.write(whole[piece.start : piece.stop])


def _pieces(part: ShardedParamGroup, state: Owned) -> list[tuple[str, Piece]]:
    found = [(name, _whole(item)) for name, item in state.singles.items()]
    if isinstance(state, VariableShards):
        return found + _pieces_of_variables(part, state)
    for attribute, slots in state.slots.items():
        for number, slot in zip(state.buckets, slots, strict=True):
            begin = 0
            for segment in part.plan.buckets[number].rows[state.owner]:
                name = _slot_name(attribute, segment.index, part.variables)
                found.append(
                    (name, _range(slot.value, begin, segment.start, segment.size))
                )
                begin += segment.size
    return found


def _pieces_of_variables(
    part: ShardedParamGroup, state: VariableShards
) -> list[tuple[str, Piece]]:
    names = {
        id(slot): _slot_name(attribute, index, part.variables)
        for attribute, slots in state.slots.items()
        for index, slot in zip(state.owned, slots, strict=True)
        if slot is not None
    }
    singles = {id(item) for item in state.singles.values()}
    return [
        (names.get(id(slot), f"variable/{slot.path}"), _whole(slot))
        for slot in state.variables
        if id(slot) not in singles
    ]


def place(index: int, variables: Sequence[Any]) -> str:
    """The name of one of several variables: its number, layer and own name.

    Keras numbers layers through all models of a process, and puts the name of a
    model before them or not; the order of variables stays.
    """
    names = path_of(variables[index]).split("/")[-2:]
    return "/".join([str(index), *(_NUMBER.sub("", name) for name in names)])


def _slot_name(attribute: str, index: int, variables: Sequence[Any]) -> str:
    return f"{attribute.strip('_')}/{place(index, variables)}"


def _whole(variable: Any) -> Piece:
    shape = tuple(variable.shape)
    size = int(np.prod(shape, dtype=np.int64))
    read = functools.partial(_compat.elements_of, variable)

    def write(values: Any) -> None:
        variable.assign(np.asarray(values).reshape(shape))

    return Piece(0, size, lambda: read(0, size), write, read)


def _range(variable: Any, begin: int, start: int, size: int) -> Piece:
    """Elements of a flat `tf.Variable` that are elements `start`... of a tensor."""

    def read(first: int, last: int) -> np.ndarray:
        # Elements only: TensorFlow copies the whole of what `write` has written to.
        with tf.device(variable.device):
            places = tf.range(begin + first, begin + last, dtype=tf.int64)
            return tf.gather(variable, places).numpy()

    def write(values: Any) -> None:
        variable[begin : begin + size].assign(values)

    return Piece(start, start + size, lambda: read(0, size), write, read)
