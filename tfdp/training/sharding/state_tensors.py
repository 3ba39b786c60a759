"""State tensors: named tensors whose elements may be spread over processes."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.ground._compat import optimizer_state
from tfdp.ground.base.param_groups import path_of

# If reading a shard makes a copy, at most this many elements are read at a time: the
# copy then has a few megabytes, so a save needs little memory.
READ_ELEMENTS = 2**20


@dataclasses.dataclass(frozen=True)
class LocalShard:
    """Elements of a state tensor that a variable of this process holds.

    Elements are counted in the flattened tensor.

    Args:
        start: Int, the first element.
        stop: Int, one after the last.
        read: Callable that returns the elements as a flat array of `stop - start`
            elements.
        write: Callable that assigns such an array, or a flat tensor.
        read_range: Callable that takes two ints and returns the elements between
            them, counted from `start`, without copying the others. `None` if `read`
            copies nothing, or if a part cannot be read alone. Defaults to `None`.
    """

    start: int
    stop: int
    read: Callable[[], np.ndarray]
    write: Callable[[Any], None]
    read_range: Callable[[int, int], np.ndarray] | None = None

    def split(self, max_elements: int) -> list[LocalShard]:
        """Split into smaller shards, which can be read one after another.

        Smaller shards cannot be written.

        Args:
            max_elements: Int, the largest number of elements of a shard.

        Returns:
            List of `LocalShard`; this one alone if it has no `read_range`; none if it
            is empty.
        """
        if self.read_range is None:
            return [self] * (self.start < self.stop)
        return [
            LocalShard(
                first,
                min(first + max_elements, self.stop),
                functools.partial(
                    self.read_range,
                    first - self.start,
                    min(first + max_elements, self.stop) - self.start,
                ),
                _not_written,
            )
            for first in range(self.start, self.stop, max_elements)
        ]


def reshaped(values: Any, shape: Sequence[int]) -> Any:
    """Return flat values, which a shard's `write` receives, in its variable's shape.

    Args:
        values: Flat array or tensor.
        shape: Sequence of ints.
    """
    return tf.reshape(values, shape) if tf.is_tensor(values) else values.reshape(shape)


def _not_written(values: Any) -> None:
    """Raise an error: a part of a split shard can be read, but not written."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class StateTensor:
    """Named tensor of the training state, whole or in shards on the replicas.

    Args:
        name: String, unique among all state tensors, and the same on every worker.
        shape: Tuple of ints.
        dtype: String.
        owned_shards: Tuple of the `LocalShard`s that this process writes into a
            checkpoint. The owned shards of all processes hold every element once.
        local_shards: Tuple of the `LocalShard`s that this process reads from a
            checkpoint. Several may hold the same elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    owned_shards: tuple[LocalShard, ...]
    local_shards: tuple[LocalShard, ...]

    @property
    def size(self) -> int:
        """Int, number of elements of the whole tensor."""
        return math.prod(self.shape)


def renamed(tensor: StateTensor, name: str) -> StateTensor:
    """Return a copy of a state tensor with another name."""
    return dataclasses.replace(tensor, name=name)


# Keras makes the name of a layer unique by a numeric suffix. The suffix may differ
# between runs, so the names of state tensors do not have it.
_NUMBER = re.compile(r"_\d+$")


def slot_names(optimizer: Any, variables: Sequence[Any]) -> list[tuple[str, Any]]:
    """Name a built optimizer's variables, except for counter and learning rate.

    The name of a slot consists of the optimizer's attribute and the trained variable.
    A variable that belongs to no trained variable is named after its attribute, or its
    path if no attribute holds it. Names are the same with and without sharding.

    Args:
        optimizer: Keras optimizer without inner optimizers.
        variables: Sequence of the variables that it was built for.

    Returns:
        List of tuples of a string and a Keras variable, in Keras's order.
    """
    names: dict[int, str] = {}
    for attribute, slots in optimizer_state.slots_of(optimizer).items():
        for index, slot in enumerate(slots):
            if slot is not None:
                names.setdefault(id(slot), slot_name(attribute, index, variables))
    for attribute, single in optimizer_state.single_variables(optimizer).items():
        names.setdefault(id(single), attribute)
    return [
        (names.get(id(slot), f"variable/{slot.path}"), slot)
        for slot in optimizer_state.state_variables(optimizer)
    ]


def variable_name(index: int, variables: Sequence[Any]) -> str:
    """Name one of several variables by its index, its layer and its own name.

    The index and the names without numbers are stable. Keras's full path is not: it
    numbers layers over all models of a process, and may begin with the model's name.

    Args:
        index: Int, index of the variable.
        variables: Sequence of Keras variables.

    Returns:
        String, such as `"0/dense/kernel"`.
    """
    names = path_of(variables[index]).split("/")[-2:]
    return "/".join([str(index), *(_NUMBER.sub("", name) for name in names)])


def slot_name(attribute: str, index: int, variables: Sequence[Any]) -> str:
    """Name the slot that an attribute holds for one of several variables.

    Args:
        attribute: String, name of the optimizer's attribute.
        index: Int, index of the variable.
        variables: Sequence of Keras variables.

    Returns:
        String, such as `"momentums/0/dense/kernel"`.
    """
    return f"{attribute.strip('_')}/{variable_name(index, variables)}"
