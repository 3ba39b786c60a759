"""Variables of which each replica has a value of its own, as tensors of a backup.

A backup holds every replica's value, so that as many replicas go on bit for bit.
Where there are more or fewer, the first one gets what all of them had together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp import _compat
from tfdp.base.context import strategy_of
from tfdp.sharding.state_tensors import Piece, StateTensor

_MERGES: dict[str, Callable] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


@dataclasses.dataclass(frozen=True)
class OwnValues:
    """A variable of which each replica has a value of its own.

    Args:
        name: String, unique among all.
        variable: Keras variable, or what is mirrored like one.
        merge: String, how the values of all replicas make one: `"sum"`, `"max"` or
            `"min"`. Defaults to `"sum"`.
    """

    name: str
    variable: Any
    merge: str = "sum"


@dataclasses.dataclass(frozen=True)
class Replicas:
    """Which of all replicas this process has.

    Args:
        first: Int, the rank of its first one.
        num_local: Int, how many it has.
        count: Int, how many there are on all workers.
    """

    first: int = 0
    num_local: int = 1
    count: int = 1


def replicas_of(model: Any) -> Replicas:
    """The replicas of a model's strategy."""
    strategy = strategy_of(model)
    if strategy is None:
        return Replicas()
    extended = strategy.extended
    return Replicas(
        extended.first_rank, extended.num_local, strategy.num_replicas_in_sync
    )


def own_tensors(
    items: Iterable[OwnValues], replicas: Replicas, saved_count: int | None = None
) -> list[StateTensor]:
    """A tensor for each replica's value of each variable.

    Args:
        items: Iterable of `OwnValues`.
        replicas: `Replicas`.
        saved_count: Int, how many replicas had saved them, to be read by those that
            there are now. Defaults to `None`: as many.

    Returns:
        List of `StateTensor`, the same on every worker but for what is owned and
        held.
    """
    count = replicas.count if saved_count is None else saved_count
    place = _own_place if count == replicas.count else _merged_place
    return [
        _tensor(item, rank, place(item, rank, replicas))
        for item in items
        for rank in range(count)
    ]


def clear(items: Iterable[OwnValues], replicas: Replicas) -> None:
    """Sets the value of each local replica to zero."""
    for item in items:
        for replica in range(replicas.num_local):
            part = _compat.local_value(item.variable, replica)
            with tf.device(part.device):
                part.assign(tf.zeros(part.shape, part.dtype))


def _tensor(item: OwnValues, rank: int, piece: Piece | None) -> StateTensor:
    pieces = () if piece is None else (piece,)
    shape, dtype = tuple(item.variable.shape), str(item.variable.dtype)
    return StateTensor(f"{item.name}/replica{rank}", shape, dtype, pieces, pieces)


def _own_place(item: OwnValues, rank: int, replicas: Replicas) -> Piece | None:
    """The replica of that rank, if it is here."""
    local = rank - replicas.first
    if not 0 <= local < replicas.num_local:
        return None
    part = _compat.local_value(item.variable, local)

    def read() -> np.ndarray:
        return part.numpy().reshape(-1)

    def write(values: Any) -> None:
        with tf.device(part.device):
            part.assign(np.reshape(values, part.shape))

    return Piece(0, _size(item), read, write)


def _merged_place(item: OwnValues, rank: int, replicas: Replicas) -> Piece | None:
    """The first replica of all, which takes what each one had."""
    del rank
    if replicas.first:
        return None
    part = _compat.local_value(item.variable, 0)

    def read() -> np.ndarray:
        return part.numpy().reshape(-1)

    def write(values: Any) -> None:
        merged = _MERGES[item.merge](part.numpy(), np.reshape(values, part.shape))
        with tf.device(part.device):
            part.assign(merged)

    return Piece(0, _size(item), read, write)


def _size(item: OwnValues) -> int:
    return int(np.prod(tuple(item.variable.shape), dtype=np.int64))
