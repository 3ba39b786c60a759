"""Choice of the collectives by which a step reduces and gathers sharded state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfdp.parameters.shard_groups import Compression, ReduceDtypes, ShardGroups
from tfdp.plans.shards import ShardBucket
from tfdp.reduction.gradient_reducer import ReplicaReducer
from tfdp.sharding.shard_collectives import (
    EagerShardCollectives,
    GraphShardCollectives,
    ShardCollectives,
    WholeGradientCollectives,
)
from tfdp.sharding.sharded_param_group import ShardedParamGroup


@dataclasses.dataclass(frozen=True)
class StepCollectives:
    """Callable from a parameter group to its collectives, on one replica.

    Args:
        extended: Extended class of a tfdp strategy.
        groups: `ShardGroups`.
        replica: Int, index of the calling replica among the local ones.
        reducer: `ReplicaReducer`.
        around: Dict with `before_bucket` and `after_bucket`, see
            `GraphShardCollectives`, or without.
        may_sum_everything: Bool, whether all-reduces may take the place of all
            collectives of an optimizer.
    """

    extended: Any
    groups: ShardGroups
    replica: int
    reducer: ReplicaReducer
    around: Mapping[str, Callable]
    may_sum_everything: bool

    def __call__(self, part: ShardedParamGroup) -> ShardCollectives:
        """Return the `ShardCollectives` of a parameter group.

        Raises:
            ValueError: In eager mode, where gradients are combined by Adasum.
        """
        selector = self.extended.algorithm_selector
        if selector.combines_means and tf.executing_eagerly():
            raise ValueError(
                "Adasum with sharded state needs a graph. Leave out "
                "`run_eagerly=True`, and call `strategy.run` in a `tf.function`."
            )
        is_lopsided = part.plan.shards_variables and part.plan.is_lopsided
        sums_everything = self.may_sum_everything and not selector.combines_means
        if tf.executing_eagerly() or (sums_everything and is_lopsided):
            return EagerShardCollectives(self.groups, self.replica, self.reducer.sum)
        if selector.needs_whole_buckets:
            return WholeGradientCollectives(
                self.groups,
                self.replica,
                functools.partial(self._sum_gradients, part.variables),
                **self.around,
            )
        return GraphShardCollectives(
            self.groups,
            self.replica,
            self._reduce_dtypes_of,
            functools.partial(self._compression_of, part.variables),
            **self.around,
        )

    def _sum_gradients(
        self,
        variables: list[Any],
        tensors: Mapping[int, tf.Tensor],
        weight: tf.Tensor | None,
    ) -> dict[int, tf.Tensor]:
        """Sum gradients of variables by position, in the buckets of an all-reduce."""
        reduced = self.reducer.reduce_gradients(
            list(tensors.values()),
            [variables[index] for index in tensors],
            may_sum=False,
            weight=weight,
        )
        return dict(zip(tensors, reduced.gradients(), strict=True))

    def _compression_of(
        self, variables: list[Any], number: int, bucket: ShardBucket, flat: tf.Tensor
    ) -> Compression | None:
        """How a bucket of gradients is compressed, or `None` where it is not."""
        route = self._route_of(flat).compressed
        if route is None:
            return None
        members = [variables[index] for index in sorted(bucket.indices)]
        return route, self.extended.reducer.residuals.of_bucket(
            "reduce-scatter", number, members, self.replica
        )

    def _reduce_dtypes_of(self, flat: tf.Tensor) -> ReduceDtypes:
        """The dtypes that gradients travel in, as an all-reduce of them would."""
        route = self._route_of(flat)
        inner, outer = (
            None if name is None else tf.as_dtype(name)
            for name in (route.inner_dtype, route.outer_dtype)
        )
        return inner, outer

    def _route_of(self, flat: tf.Tensor) -> Any:
        num_bytes = flat.shape.num_elements() * flat.dtype.size
        return self.extended.algorithm_selector.select(num_bytes, flat.dtype.name)
