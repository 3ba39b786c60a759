"""Variables with a value of their own on each replica, as tensors of a backup.

A backup holds every replica's value, so that as many replicas go on bit for bit.
Where there are more or fewer, the first one gets what all of them had together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.ground import _compat
from tfdp.ground.base.context import strategy_of
from tfdp.training.sharding.state_tensors import LocalShard, StateTensor

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
    merges = count != replicas.count
    return [
        tensor_of_replica(
            f"{item.name}/replica{rank}",
            tuple(item.variable.shape),
            str(item.variable.dtype),
            # The first replica has all values merged.
            0 if merges else rank,
            replicas,
            functools.partial(_shard_of, item, merges=merges),
        )
        for item in items
        for rank in range(count)
    ]


def tensor_of_replica(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    rank: int,
    replicas: LocalReplicas,
    make_shard: Callable[[int], LocalShard],
) -> StateTensor:
    """State tensor of a replica's value, of which only its own process has elements.

    Args:
        name: String, unique among all.
        shape: Tuple of ints.
        dtype: String.
        rank: Int, the rank of the replica.
        replicas: `LocalReplicas`.
        make_shard: Callable of the number of the local replica.
    """
    local = rank - replicas.first
    shards = (make_shard(local),) if 0 <= local < replicas.num_local else ()
    return StateTensor(name, shape, dtype, shards, shards)


def zero_local_values(variable: Any, replicas: LocalReplicas) -> None:
    """Set a variable's value of each local replica to zero."""
    for replica in range(replicas.num_local):
        component = _compat.local_value(variable, replica)
        with tf.device(component.device):
            component.assign(tf.zeros(component.shape, component.dtype))


def _shard_of(item: PerReplicaVariable, local: int, *, merges: bool) -> LocalShard:
    """Local shard of a local replica, into which several values may be merged."""
    component = _compat.local_value(item.variable, local)

    def read() -> np.ndarray:
        return component.numpy().reshape(-1)

    def write(values: Any) -> None:
        values = np.reshape(values, component.shape)
        if merges:
            values = _MERGES[item.merge](component.numpy(), values)
        with tf.device(component.device):
            component.assign(values)

    size = int(np.prod(tuple(item.variable.shape), dtype=np.int64))
    return LocalShard(0, size, read, write)
