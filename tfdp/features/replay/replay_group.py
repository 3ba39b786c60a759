"""A group whose replicas may compute each other's parts, with the same bits.

Rows, random numbers and parts of sums belong to ranks. So a replica that has the rank
of another one computes what the other one does. In-step sums are formed from gathered
parts, in the order of ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.training.reduction.fusion import pack, unpack
from tfdp.training.reduction.training_group import TrainingGroup


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayGroup(TrainingGroup):
    """Group of replicas in a step that is computed twice; it records what they send.

    When each replica stands in for the next one, `ranks` has the rank of the replica
    whose part it computes.

    Args:
        inner: `TrainingGroup` of the same replicas.
        record: Callable, called with each tensor that a replica gives to a collective.
    """

    inner: TrainingGroup
    record: Callable[[tf.Tensor], None]

    def gather(self, rows: tf.Tensor) -> tf.Tensor:
        """All-gather rows of the group's replicas along the first axis, by rank."""
        self.record(rows)
        joined = self.inner.gather(rows)
        if self.ranks == self.inner.ranks:
            return joined
        # When each replica stands in for the next one, the last replica computes the
        # rows of rank 0. They are gathered last, but belong in front.
        counts = self.inner.gather(tf.shape(rows)[:1])
        return tf.ensure_shape(tf.roll(joined, counts[-1], 0), joined.shape)


class _OrderedSums:
    """Reducer of a `ReplayGroup`, which adds the replicas' parts in order of rank.

    Of a `GradientReducer`'s methods it has only `sum`.

    Args:
        gather: Callable that all-gathers rows of all replicas, by rank.
    """

    def __init__(self, gather: Callable[[tf.Tensor], tf.Tensor]) -> None:
        self._gather = gather

    def sum(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sum tensors over all replicas in rank order, by one gather for each dtype."""
        totals: dict[int, tf.Tensor] = {}
        for dtype in dict.fromkeys(part.dtype for part in parts):
            places = [i for i, part in enumerate(parts) if part.dtype == dtype]
            own = [parts[place] for place in places]
            total = tf.reduce_sum(self._gather(pack(own)[tf.newaxis]), axis=0)
            totals |= zip(places, unpack(total, own), strict=True)
        return [totals[place] for place in range(len(parts))]


def replay_group(
    group: TrainingGroup, record: Callable[[tf.Tensor], None], *, is_stand_in: bool
) -> ReplayGroup:
    """Return a group in which replicas have their own ranks, or those of the next ones.

    Args:
        group: `TrainingGroup`.
        record: Callable, called with each tensor that a replica gives to a collective.
        is_stand_in: Bool, whether each replica has the rank of the next one.
    """
    ranks = (group.ranks[-1], *group.ranks[:-1]) if is_stand_in else group.ranks
    fields: dict[str, Any] = {
        field.name: getattr(group, field.name) for field in dataclasses.fields(group)
    }
    gathering = ReplayGroup(**fields | {"ranks": ranks}, inner=group, record=record)
    sums: Any = _OrderedSums(gathering.gather)
    return dataclasses.replace(gathering, reducer=sums)
