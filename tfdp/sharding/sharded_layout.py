"""Sharded state in a step: each replica updates what it owns, all get the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp import _compat
from tfdp.base.ownership import own_step
from tfdp.base.param_groups import ParamGroup, is_elementwise
from tfdp.reduction.fusion import weighted
from tfdp.sharding.gradient_statistics import ShardedGradientStatistics, own_squares
from tfdp.sharding.shard_collectives import ShardCollectives
from tfdp.sharding.sharded_gradients import ShardedGradients
from tfdp.sharding.sharded_param_group import ShardedParamGroup


class ShardedLayout:
    """What a step does with gradients where the state is sharded, on one replica.

    Args:
        parts: Dict from the `id` of an inner optimizer to its `ShardedParamGroup`.
        replica: Int, index of the calling replica among the local ones.
        collectives_of: Callable from a `ShardedParamGroup` to its `ShardCollectives`.
        reducer: `GradientReducer`, for rows of sparse gradients.
    """

    def __init__(
        self,
        parts: dict[int, ShardedParamGroup],
        replica: int,
        collectives_of: Callable[[ShardedParamGroup], ShardCollectives],
        reducer: Any,
    ) -> None:
        self._parts = parts
        self._replica = replica
        self._collectives_of = collectives_of
        self._reducer = reducer

    def reduce(
        self,
        part: ParamGroup,
        gradients: list,
        variables: list,
        *,
        may_sum: bool,
        weight: tf.Tensor | None,
    ) -> ShardedGradients:
        """By a reduce-scatter of each bucket; rows of sparse gradients go to all."""
        own = self._part(part)
        positions = [_compat.index_in(part.optimizer, v) for v in variables]
        sparse = {
            position: (gradient, variable)
            for position, gradient, variable in zip(
                positions, gradients, variables, strict=True
            )
            if isinstance(gradient, tf.IndexedSlices)
        }
        dense = {
            position: tf.ensure_shape(gradient, variable.shape)
            for position, gradient, variable in zip(
                positions, gradients, variables, strict=True
            )
            if position not in sparse
        }
        slices = self._collectives_of(own).scatter(own.plan, dense, weight)
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
            tuple(positions),
        )

    def held(
        self, parts: Sequence[ParamGroup], sums: list[ShardedGradients]
    ) -> tuple[list[tf.Tensor], list[int]]:
        """What is accumulated of sums: slices, and which accumulators take them."""
        tensors, places = [], []
        for part, item in zip(parts, sums, strict=True):
            first = self._first_slice(part)
            for number, piece in enumerate(item.slices):
                if piece is not None:
                    tensors.append(piece)
                    places.append(first + number)
        return tensors, places

    def with_held(
        self,
        parts: Sequence[ParamGroup],
        variables: Sequence[Any],
        tensors: list[tf.Tensor],
    ) -> list[ShardedGradients]:
        """Sums made of what was accumulated, the inverse of `held`.

        Args:
            parts: Sequence of `ParamGroup`.
            variables: Sequence of the step's variables.
            tensors: List of slices, one for each accumulator.
        """
        found = []
        for part in parts:
            own = self._part(part)
            first = self._first_slice(part)
            order = [
                _compat.index_in(part.optimizer, v) for v in part.of(list(variables))
            ]
            slices: list[tf.Tensor | None] = [
                tensors[first + number] if bucket.indices & set(order) else None
                for number, bucket in enumerate(own.plan.buckets)
            ]
            found.append(ShardedGradients(slices, frozenset(order), {}, tuple(order)))
        return found

    def _first_slice(self, part: ParamGroup) -> int:
        """The place of a part's first bucket among those of all parts."""
        first = 0
        for key, own in self._parts.items():
            if key == id(part.optimizer):
                break
            first += len(own.plan.buckets)
        return first

    def examine(
        self,
        parts: Sequence[ParamGroup],
        sums: list[ShardedGradients],
        *,
        checks: bool,
        measures: bool,
    ) -> ShardedGradientStatistics:
        """By one small all-reduce, if anybody asks."""
        needed = checks or measures or any(_clips_by_norm(p.optimizer) for p in parts)
        own = [self._part(part) for part in parts]
        return ShardedGradientStatistics(
            own, sums, self._collectives_of(own[0]), is_needed=needed
        )

    def own_squares(
        self, parts: Sequence[ParamGroup], sums: list[ShardedGradients]
    ) -> tf.Tensor:
        """Those of the own slices, of which there may be copies on other nodes."""
        own = [self._part(part) for part in parts]
        collectives = self._collectives_of(own[0])
        pairs = zip(own, sums, strict=True)
        squares = [own_squares(part, item, collectives.owner) for part, item in pairs]
        return tf.add_n(squares) / collectives.num_copies

    def clip(
        self,
        part: ParamGroup,
        sums: ShardedGradients,
        statistics: ShardedGradientStatistics,
    ) -> ShardedGradients:
        """Clips by norms of whole variables, of which the replica has slices."""
        optimizer = part.optimizer
        if not _clips_by_norm(optimizer):
            limit = optimizer.clipvalue
            if not limit or limit <= 0:
                return sums
            return sums.map(lambda values: tf.clip_by_value(values, -limit, limit))
        own = self._part(part)
        owner = self._state(own).owner
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

    def scale_momentum(self, part: ParamGroup, growth: Any) -> None:
        """See `WholeVariables`."""
        state = self._state(self._part(part))

        def scale() -> tf.Tensor:
            state.scale_momentum(growth)
            return tf.constant(True)

        tf.cond(tf.equal(growth, 1.0), lambda: tf.constant(False), scale)

    def update(
        self, part: ParamGroup, gradients: ShardedGradients, variables: list, rate: Any
    ) -> None:
        """Updates what the replica owns; all-gathers the new values by bucket."""
        own = self._part(part)
        optimizer = part.optimizer
        if rate is None:
            rate = tf.convert_to_tensor(optimizer.learning_rate)
        else:
            optimizer = _compat.with_rate(optimizer, rate)
        if is_elementwise(part.optimizer):
            optimizer = _compat.with_counter_read(optimizer)
        with own_step():
            news = self._state(own).update(optimizer, gradients, own.variables, rate)
        self._spread(own, news, gradients.present)

    def average(self, part: ParamGroup) -> None:
        """Each replica those of what it owns."""
        own = self._part(part)
        self._state(own).average(part.optimizer, own.variables)

    def overwrite_with_average(self, part: ParamGroup) -> None:
        """All-gathers the averages by bucket."""
        own = self._part(part)
        everything = frozenset(range(len(own.variables)))
        self._spread(own, self._state(own).averages(), everything)

    def swap_with_average(self, part: ParamGroup) -> None:
        """Gives variables the values of their averages, and the other way round."""
        own = self._part(part)
        state = self._state(own)
        values = state.own_values(own.variables)
        self.overwrite_with_average(part)
        state.set_averages(values)

    def restart_average(self, part: ParamGroup) -> None:
        """Gives averages the values of their variables."""
        own = self._part(part)
        state = self._state(own)
        state.set_averages(state.own_values(own.variables))

    def _spread(
        self, own: ShardedParamGroup, slices: list, present: frozenset[int]
    ) -> None:
        wholes = self._collectives_of(own).gather(own.plan, slices)
        for index in sorted(present & wholes.keys()):
            part = _compat.local_part(own.variables[index])
            value = tf.reshape(wholes[index], part.shape)
            part.assign(tf.cast(value, part.dtype), read_value=False)

    def _part(self, part: ParamGroup) -> ShardedParamGroup:
        return self._parts[id(part.optimizer)]

    def _state(self, own: ShardedParamGroup) -> Any:
        return own.replicas[self._replica]


def _clips_by_norm(optimizer: Any) -> bool:
    limits = (optimizer.clipnorm, optimizer.global_clipnorm)
    return any(limit is not None and limit > 0 for limit in limits)


def _factors(norms: tf.Tensor, limit: float) -> tf.Tensor:
    """What `tf.clip_by_norm` multiplies a tensor of each norm with."""
    bound = tf.constant(limit, norms.dtype)
    return bound / tf.maximum(norms, bound)
