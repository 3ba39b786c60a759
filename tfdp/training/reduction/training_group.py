"""Replicas whose steps are one program: all, those of a node, or one alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import ProcessGroup
from tfdp.communication.collectives.gather import gather_first_axis
from tfdp.ground import _compat
from tfdp.ground.base import loops
from tfdp.training.reduction.gradient_reducer import (
    GradientReducer,
    ReplicaReducer,
    replica_reducer,
)


@dataclasses.dataclass(frozen=True)
class TrainingGroup:
    """The replicas that train together with the one that runs.

    Args:
        ranks: Tuple of ints, the ranks of its replicas among all, ascending.
        own_rank: Int, the rank of the running replica among all.
        replica: Int, the index of the running replica among the local ones.
        reducer: `GradientReducer` that sums over the group.
        is_all: Bool, whether it has all replicas.
    """

    ranks: tuple[int, ...]
    own_rank: int
    replica: int
    reducer: GradientReducer
    is_all: bool

    @property
    def size(self) -> int:
        """Int, the number of replicas."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """Int, the rank of the running replica within the group."""
        return self.ranks.index(self.own_rank)

    def gather(self, rows: tf.Tensor) -> tf.Tensor:
        """Gather the rows of its replicas along the first axis, in order of ranks."""
        if not isinstance(self.reducer, ReplicaReducer):
            return rows
        group = self.reducer.group
        return gather_first_axis(rows, group, self.replica, self.own_rank)[0]


def training_group(strategy: Any) -> TrainingGroup:
    """Return the replicas that train together with the one that runs.

    Args:
        strategy: A tfdp strategy, in whose replica context this is called.
    """
    replica = _compat.local_replica_id(tf.distribute.get_replica_context())
    own_rank = strategy.extended.first_rank + replica
    for ranks in groups_of_ranks(strategy):
        if own_rank in ranks:
            break
    is_all = len(ranks) == strategy.num_replicas_in_sync
    reducer = replica_reducer() if is_all else _alone().reducer()
    return TrainingGroup(tuple(ranks), own_rank, replica, reducer, is_all)


def groups_of_ranks(strategy: Any) -> Sequence[Sequence[int]]:
    """Return the ranks of the replicas of each group that trains together."""
    if not loops.in_steps_alone():
        return [range(strategy.num_replicas_in_sync)]
    return _alone().groups_of_ranks(strategy)


def merging_group(strategy: Any) -> ProcessGroup:
    """Return the workers, one member each, over which the logs of a step are merged.

    These are all, or with local steps those that train together anyway.
    """
    extended = strategy.extended
    if not loops.in_steps_alone():
        return extended.host_group
    parts: list[set[int]] = []
    for ranks in groups_of_ranks(strategy):
        workers = {rank // extended.num_local for rank in ranks}
        linked = [part for part in parts if part & workers]
        parts = [part for part in parts if part not in linked]
        parts.append(workers.union(*linked))
    position_of = list(extended.host_group.workers).index
    (group,) = extended.host_group.split(
        [sorted(map(position_of, part)) for part in sorted(parts, key=min)]
    )
    assert group is not None
    return group


def _alone() -> Any:
    return loops.current().model.optimizer.features.alone  # type: ignore[union-attr]
