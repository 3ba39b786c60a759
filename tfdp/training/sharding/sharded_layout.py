"""Sharded state in a step: each replica updates what it owns, all get the result."""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from typing import Any

import tensorflow as tf

from tfdp.ground import _compat
from tfdp.ground.base.param_groups import ParamGroup
from tfdp.training.parameters.sharded_parameter import parameter_of, sharded_parameter
from tfdp.training.reduction.fusion import weighted
from tfdp.training.sharding.shard_collectives import ShardCollectives
from tfdp.training.sharding.sharded_gradients import (
    ShardedGradients,
    ShardedGradientStatistics,
    own_squares,
)
from tfdp.training.sharding.sharded_param_group import ShardedParamGroup
from tfdp.training.step.grouped_update import decay_without_gradients, with_schedule
from tfdp.training.step.state_layout import StateLayout


class ShardedLayout(StateLayout):
    """Operations of a step on one replica where the state is sharded.

    Args:
        groups: Dict from the `id` of an inner optimizer to its `ShardedParamGroup`.
        collectives: `ShardCollectives` of the calling replica.
    """

    def __init__(
        self, groups: dict[int, ShardedParamGroup], collectives: ShardCollectives
    ) -> None:
        super().__init__(collectives.reducer)
        self._groups = groups
        self._collectives = collectives
        # The place of each group's first bucket among those of all groups.
        sizes = [len(own.plan.buckets) for own in groups.values()]
        firsts = itertools.accumulate(sizes, initial=0)
        self._first_slices = dict(zip(groups, firsts, strict=False))

    def reduce(
        self,
        group: ParamGroup,
        gradients: list,
        variables: list,
        *,
        may_sum: bool,
        weight: tf.Tensor | None,
    ) -> ShardedGradients:
        """Reduce-scatter each bucket; all-gather the rows of sparse gradients."""
        own = self._sharded(group)
        given = {
            _compat.index_in(group.optimizer, variable): (gradient, variable)
            for gradient, variable in zip(gradients, variables, strict=True)
        }
        sparse = {
            position: pair
            for position, pair in given.items()
            if isinstance(pair[0], tf.IndexedSlices)
        }
        dense = {
            position: _of_shape(gradient, variable.shape)
            for position, (gradient, variable) in given.items()
            if position not in sparse
        }
        slices = self._collectives.reduce_scatter(own, dense, weight)
        if self._collectives.backward is not None:
            self._collectives.backward.gather_rest()
        rows = self._reducer.gather_rows(
            [
                gradient if weight is None else weighted(gradient, weight)
                for gradient, _ in sparse.values()
            ],
            [variable for _, variable in sparse.values()],
            may_sum=may_sum,
        )
        return ShardedGradients(
            slices,
            frozenset(dense),
            dict(zip(sparse, rows, strict=True)),
            tuple(given),
        )

    def slices_of(
        self, groups: Sequence[ParamGroup], sums: list[ShardedGradients]
    ) -> tuple[list[tf.Tensor], list[int]]:
        """Slices of reduced gradients to accumulate, and the position of each."""
        tensors, positions = [], []
        for group, item in zip(groups, sums, strict=True):
            first = self._first_slices[id(group.optimizer)]
            for number, piece in enumerate(item.slices):
                if piece is not None:
                    tensors.append(piece)
                    positions.append(first + number)
        return tensors, positions

    def from_slices(
        self,
        groups: Sequence[ParamGroup],
        variables: Sequence[Any],
        tensors: list[tf.Tensor],
    ) -> list[ShardedGradients]:
        """Make reduced gradients of accumulated slices, the inverse of `slices_of`.

        Args:
            groups: Sequence of `ParamGroup`.
            variables: Sequence of the step's variables.
            tensors: List of slices, one for each accumulator.
        """
        found = []
        for group in groups:
            own = self._sharded(group)
            first = self._first_slices[id(group.optimizer)]
            order = [
                _compat.index_in(group.optimizer, v) for v in group.of(list(variables))
            ]
            slices: list[tf.Tensor | None] = [
                tensors[first + number] if bucket.indices & set(order) else None
                for number, bucket in enumerate(own.plan.buckets)
            ]
            found.append(ShardedGradients(slices, frozenset(order), {}, tuple(order)))
        return found

    def examine(
        self,
        groups: Sequence[ParamGroup],
        sums: list[ShardedGradients],
        *,
        checks: bool,
        measures: bool,
    ) -> ShardedGradientStatistics:
        """Compute them by one small all-reduce, if anybody asks."""
        needed = checks or measures or any(_clips_by_norm(p.optimizer) for p in groups)
        own = [self._sharded(group) for group in groups]
        return ShardedGradientStatistics(own, sums, self._collectives, is_needed=needed)

    def own_squares(
        self, groups: Sequence[ParamGroup], sums: list[ShardedGradients]
    ) -> tf.Tensor:
        """Squares of the own slices, of which there may be copies on other nodes."""
        collectives = self._collectives
        squares = [
            own_squares(self._sharded(group), item, collectives.owner)
            for group, item in zip(groups, sums, strict=True)
        ]
        return tf.add_n(squares) / collectives.groups.num_copies

    def clip(
        self,
        group: ParamGroup,
        sums: ShardedGradients,
        statistics: ShardedGradientStatistics,
    ) -> ShardedGradients:
        """Clip by norms of whole variables, of which the replica has slices."""
        optimizer = group.optimizer
        if not _clips_by_norm(optimizer):
            limit = optimizer.clipvalue
            if not limit or limit <= 0:
                return sums
            return sums.map(lambda values: tf.clip_by_value(values, -limit, limit))
        own = self._sharded(group)
        owner = self._collectives.owner
        norms = statistics.squared_norms(own)  # [num_variables]
        if optimizer.clipnorm and optimizer.clipnorm > 0:
            factors = _factors(tf.sqrt(norms), optimizer.clipnorm)
            return sums.scaled_by(factors, own.plan, owner)
        norm = tf.sqrt(tf.reduce_sum(norms))
        # Not `tf.cast`, which would round a float to float32 first.
        limit = tf.constant(optimizer.global_clipnorm, norm.dtype)
        # NaN where the norm is infinite, as in Keras.
        factor = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        # Keras multiplies by a scalar, and what was rows becomes a tensor.
        whole = sums.without_rows(own.plan, owner)
        return whole.map(lambda values: values * tf.cast(factor, values.dtype))

    def update(
        self, group: ParamGroup, gradients: ShardedGradients, variables: list, rate: Any
    ) -> None:
        """Update what the replica owns; all-gather the new values by bucket."""
        own = self._sharded(group)
        optimizer, rate = with_schedule(group.optimizer, rate)
        news = self._state(own).update(optimizer, gradients, own.variables, rate)
        self._spread(own, news, gradients.present)

    def update_without_gradients(
        self, group: ParamGroup, variables: list, rate: Any
    ) -> None:
        """Decay weights on every replica, and move on what belongs to no variable."""
        singles = self._state(self._sharded(group)).singles
        decay_without_gradients(group.optimizer, variables, rate, singles)

    def average(self, group: ParamGroup) -> None:
        """Average what the replica owns."""
        own = self._sharded(group)
        self._state(own).average(group.optimizer, own.variables)

    def overwrite_with_average(
        self, group: ParamGroup, chosen: Container[int] | None = None
    ) -> None:
        """All-gathers the averages by bucket.

        Args:
            group: `ParamGroup`.
            chosen: Container of the `id`s of the variables that are overwritten, or
                `None` for all. Defaults to `None`.
        """
        own = self._sharded(group)
        present = frozenset(
            index
            for index, variable in enumerate(own.variables)
            if chosen is None or id(variable) in chosen
        )
        self._spread(own, self._state(own).averages(), present)

    def swap_with_average(self, group: ParamGroup) -> None:
        """Give variables the values of their averages, and the other way round."""
        own = self._sharded(group)
        state = self._state(own)
        values = state.own_values(own.variables)
        self.overwrite_with_average(group)
        state.set_averages(values)

    def restart_average(self, group: ParamGroup) -> None:
        """Give averages the values of their variables."""
        own = self._sharded(group)
        state = self._state(own)
        state.set_averages(state.own_values(own.variables))

    def _spread(
        self, own: ShardedParamGroup, slices: list, present: frozenset[int]
    ) -> None:
        """Give the variables new values, of which the replica has its slices."""
        if sharded_parameter(own.variables[0]) is not None:
            self._keep(own, slices, present)
            return
        gathered = self._collectives.all_gather(own.plan, slices)
        for index in sorted(present & gathered.keys()):
            variable = _compat.local_part(own.variables[index])
            value = tf.reshape(gathered[index], variable.shape)
            variable.assign(tf.cast(value, variable.dtype), read_value=False)

    def _keep(
        self, own: ShardedParamGroup, slices: list, present: frozenset[int]
    ) -> None:
        """Give sharded parameters new values: each replica keeps its own."""
        owner = self._collectives.owner
        for bucket, piece in zip(own.plan.buckets, slices, strict=True):
            for segment, begin, end in (
                bucket.places(owner) if piece is not None else ()
            ):
                if segment.index in present:
                    parameter = parameter_of(own.variables[segment.index])
                    parameter.assign_part(piece[begin:end])
        for index in present:
            # What is gathered next has the new values of other replicas, too.
            parameter = parameter_of(own.variables[index])
            parameter.reader.forget(parameter)

    def constrain(self, variable: Any) -> None:
        """Apply it to the whole, gathered for it: a norm, say, is that of the whole."""
        parameter = sharded_parameter(variable)
        if parameter is None:
            super().constrain(variable)
        else:
            parameter.assign(variable.constraint(parameter.read_value()))

    def _momentums(self, group: ParamGroup) -> list:
        return self._state(self._sharded(group)).slots.get("momentums", [])

    def _sharded(self, group: ParamGroup) -> ShardedParamGroup:
        return self._groups[id(group.optimizer)]

    def _state(self, own: ShardedParamGroup) -> Any:
        return own.replicas[self._collectives.replica]


def _of_shape(gradient: Any, shape: Any) -> Any:
    """A gradient of known shape; the operation that made it, where it has one."""
    return gradient if gradient.shape == shape else tf.ensure_shape(gradient, shape)


def _clips_by_norm(optimizer: Any) -> bool:
    limits = (optimizer.clipnorm, optimizer.global_clipnorm)
    return any(limit is not None and limit > 0 for limit in limits)


def _factors(norms: tf.Tensor, limit: float) -> tf.Tensor:
    """Factor of `tf.clip_by_norm` for a tensor of each norm."""
    bound = tf.constant(limit, norms.dtype)
    return bound / tf.maximum(norms, bound)
