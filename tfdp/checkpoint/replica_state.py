"""Tensors of variables whose values differ between replicas, for backups.

A backup holds the value of every replica, so that a run with the same number of
replicas continues bit for bit. With another number of replicas, the first one restores
the merged values of all saved replicas.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.ground._compat import tf_distribute
from tfdp.ground.base.context import strategy_of
from tfdp.training.sharding.state_tensors import LocalShard, StateTensor

# A run with another number of replicas merges the saved values, two at a time, by the
# function that `PerReplicaVariable.merge` names.
_MERGES: dict[str, Callable] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


@dataclasses.dataclass(frozen=True)
class PerReplicaVariable:
    """Variable whose value differs between replicas.

    Args:
        name: String, unique in the backup.
        variable: Keras variable, or another mirrored variable.
        merge: String, the function that merges the values of all replicas: `"sum"`,
            `"max"` or `"min"`. Defaults to `"sum"`.
    """

    name: str
    variable: Any
    merge: str = "sum"


@dataclasses.dataclass(frozen=True)
class LocalReplicas:
    """Ranks of the replicas of this process.

    Args:
        first: Int, rank of the first local replica.
        num_local: Int, number of local replicas.
        count: Int, number of replicas on all workers.
    """

    first: int = 0
    num_local: int = 1
    count: int = 1


def local_replicas(model: Any) -> LocalReplicas:
    """Return the ranks of this process's replicas among those of a model's strategy.

    Without a strategy there is one replica, of rank 0.
    """
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
    """Return a state tensor for each variable and replica.

    Args:
        items: Iterable of `PerReplicaVariable`.
        replicas: `LocalReplicas`.
        saved_count: Int, number of replicas in the backup to read, or `None`, the
            current number. If they differ, the values of all saved replicas are merged
            into replica 0. Defaults to `None`.

    Returns:
        List of `StateTensor`, equal on every worker except for the local shards.
    """
    count = replicas.count if saved_count is None else saved_count
    # With another number of replicas, saved values do not belong to single replicas of
    # this run, so all of them are merged into the first replica.
    merges = count != replicas.count
    return [
        tensor_of_replica(
            f"{item.name}/replica{rank}",
            tuple(item.variable.shape),
            str(item.variable.dtype),
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
    """Return the state tensor of one replica's value, which that replica's worker owns.

    Args:
        name: String, unique in the backup.
        shape: Tuple of ints.
        dtype: String, name of the dtype.
        rank: Int, rank of the replica.
        replicas: `LocalReplicas`.
        make_shard: Callable that takes the index of a local replica and returns the
            `LocalShard` of its value.
    """
    local = rank - replicas.first
    shards = (make_shard(local),) if 0 <= local < replicas.num_local else ()
    return StateTensor(name, shape, dtype, shards, shards)


def zero_local_values(variable: Any, replicas: LocalReplicas) -> None:
    """Set a mirrored variable to zero on each replica of this process."""
    for replica in range(replicas.num_local):
        component = tf_distribute.local_value(variable, replica)
        with tf.device(component.device):
            component.assign(tf.zeros(component.shape, component.dtype))


def _shard_of(item: PerReplicaVariable, local: int, *, merges: bool) -> LocalShard:
    """Return the local shard of a variable's value on one local replica.

    Args:
        item: `PerReplicaVariable`.
        local: Int, index of the local replica.
        merges: Bool, whether a write merges the written value into the current one, by
            the function `item.merge`; otherwise it replaces the current value.
    """
    component = tf_distribute.local_value(item.variable, local)

    def read() -> np.ndarray:
        """Return the value of the replica as a flat array."""
        return component.numpy().reshape(-1)

    def write(values: Any) -> None:
        """Set the value of the local replica; with `merges`, merge into it.

        Args:
            values: Array, the elements of one saved replica's value.
        """
        values = np.reshape(values, component.shape)
        if merges:
            values = _MERGES[item.merge](component.numpy(), values)
        with tf.device(component.device):
            component.assign(values)

    size = int(np.prod(tuple(item.variable.shape), dtype=np.int64))
    return LocalShard(0, size, read, write)
