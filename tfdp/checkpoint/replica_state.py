"""Variables with a value of their own on each replica, as tensors of a backup.

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
from tfdp.sharding.state_tensors import LocalShard, StateTensor

_MERGES: dict[str, Callable] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


@dataclasses.dataclass(frozen=True)
class PerReplicaVariable:
    """Variable with a value of its own on each replica.

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
class LocalReplicas:
    """Replicas of this process among all.

    Args:
        first: Int, the rank of its first one.
        num_local: Int, how many it has.
        count: Int, how many there are on all workers.
    """

    first: int = 0
    num_local: int = 1
    count: int = 1


def local_replicas(model: Any) -> LocalReplicas:
    """Replicas of this process in a model's strategy."""
    strategy = strategy_of(model)
    if strategy is None:
        return LocalReplicas()
    extended = strategy.extended
    return LocalReplicas(
        extended.first_rank, extended.num_local, strategy.num_replicas_in_sync
    )


def per_replica_tensors(
    items: Iterable[PerReplicaVariable],
    replicas: LocalReplicas,
    saved_count: int | None = None,
) -> list[StateTensor]:
    """One state tensor for each replica's value of each variable.

    Args:
        items: Iterable of `PerReplicaVariable`.
        replicas: `LocalReplicas`.
        saved_count: Int, how many replicas had saved them, to be read by those that
            there are now. Defaults to `None`: as many.

    Returns:
        List of `StateTensor`, the same on every worker but for its shards.
    """
    count = replicas.count if saved_count is None else saved_count
    make_shard = _shard_of_replica if count == replicas.count else _merged_shard
    return [
        _tensor(item, rank, make_shard(item, rank, replicas))
        for item in items
        for rank in range(count)
    ]


def zero_local_values(
    items: Iterable[PerReplicaVariable], replicas: LocalReplicas
) -> None:
    """Set the value of each local replica to zero."""
    for item in items:
        for replica in range(replicas.num_local):
            component = _compat.local_value(item.variable, replica)
            with tf.device(component.device):
                component.assign(tf.zeros(component.shape, component.dtype))


def _tensor(
    item: PerReplicaVariable, rank: int, local: LocalShard | None
) -> StateTensor:
    local_shards = () if local is None else (local,)
    shape, dtype = tuple(item.variable.shape), str(item.variable.dtype)
    return StateTensor(
        f"{item.name}/replica{rank}", shape, dtype, local_shards, local_shards
    )


def _shard_of_replica(
    item: PerReplicaVariable, rank: int, replicas: LocalReplicas
) -> LocalShard | None:
    """Local shard of the replica of that rank, if this process has it."""
    local = rank - replicas.first
    if not 0 <= local < replicas.num_local:
        return None
    component = _compat.local_value(item.variable, local)

    def read() -> np.ndarray:
        return component.numpy().reshape(-1)

    def write(values: Any) -> None:
        with tf.device(component.device):
            component.assign(np.reshape(values, component.shape))

    return LocalShard(0, _size(item), read, write)


def _merged_shard(
    item: PerReplicaVariable, rank: int, replicas: LocalReplicas
) -> LocalShard | None:
    """Local shard of the first replica, into which all values are merged."""
    del rank
    if replicas.first:
        return None
    component = _compat.local_value(item.variable, 0)

    def read() -> np.ndarray:
        return component.numpy().reshape(-1)

    def write(values: Any) -> None:
        merged = _MERGES[item.merge](
            component.numpy(), np.reshape(values, component.shape)
        )
        with tf.device(component.device):
            component.assign(merged)

    return LocalShard(0, _size(item), read, write)


def _size(item: PerReplicaVariable) -> int:
    return int(np.prod(tuple(item.variable.shape), dtype=np.int64))
