"""Groups of replicas that share one program: all, those of a node, or one alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import ProcessGroup
from tfdp.communication.collectives.gather import gather_first_axis
from tfdp.ground._compat import tf_distribute
from tfdp.ground.base import loops
from tfdp.ground.plans.topology import join_overlapping
from tfdp.training.reduction.gradient_reducer import (
    GradientReducer,
    ReplicaReducer,
    replica_reducer,
)


@dataclasses.dataclass(frozen=True)
class TrainingGroup:
    """Group of replicas that train together, as seen by the running replica.

    Args:
        ranks: Tuple of ints, global ranks of the group's replicas, ascending.
        own_rank: Int, global rank of the running replica.
        replica: Int, index of the running replica among the local ones.
        reducer: `GradientReducer` that sums over the group.
        is_all: Bool, whether the group has all replicas.
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
        """All-gather the rows of the group's replicas, concatenated by rank.

        `rows` may have different numbers of rows on the replicas.
        """
        if not isinstance(self.reducer, ReplicaReducer):
            return rows
        group = self.reducer.group
        return gather_first_axis(rows, group, self.replica, self.own_rank)[0]


def training_group(strategy: Any) -> TrainingGroup:
    """Return the group of replicas that trains together with the running replica.

    Args:
        strategy: A tfdp strategy. The caller runs in one of its replica contexts.
    """
    replica = tf_distribute.local_replica_id(tf.distribute.get_replica_context())
    own_rank = strategy.extended.first_rank + replica
    ranks = next(group for group in groups_of_ranks(strategy) if own_rank in group)
    is_all = len(ranks) == strategy.num_replicas_in_sync
    reducer = replica_reducer() if is_all else loops.independent_groups().reducer()
    return TrainingGroup(tuple(ranks), own_rank, replica, reducer, is_all)


def groups_of_ranks(strategy: Any) -> Sequence[Sequence[int]]:
    """Return the ranks of each group of replicas that trains together.

    By default all replicas are one group. A loop of Keras may train with several
    groups, each of which updates its replicas independently, as in local SGD.

    Args:
        strategy: A tfdp strategy.
    """
    if (groups := loops.independent_groups()) is None:
        return [range(strategy.num_replicas_in_sync)]
    return groups.groups_of_ranks(strategy)


def merging_group(strategy: Any) -> ProcessGroup:
    """Return the group of workers over which the logs of a step are merged.

    The group has one member for each worker whose replicas train together with this
    worker's. Where steps do not wait for all workers, each worker is alone.
    """
    extended = strategy.extended
    if loops.exchange() is not None:
        parts = [{rank} for rank in extended.host_group.workers]
    else:
        parts = join_overlapping(
            {rank // extended.num_local for rank in ranks}
            for ranks in groups_of_ranks(strategy)
        )
    if len(parts) == 1:
        return extended.host_group
    position_of = list(extended.host_group.workers).index
    (group,) = extended.host_group.split(
        [sorted(map(position_of, part)) for part in sorted(parts, key=min)]
    )
    assert group is not None
    return group
