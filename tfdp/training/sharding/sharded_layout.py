"""Step on sharded state: each replica updates its shard, then all gather the result."""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from typing import Any

import tensorflow as tf

from tfdp.ground._compat import keras_optimizer, tf_distribute
from tfdp.ground.base.param_groups import ParamGroup
from tfdp.training.parameters.sharded_parameter import parameter_of, sharded_parameter
from tfdp.training.reduction.carried_scalar import CarriedScalar
from tfdp.training.reduction.fusion import weighted
from tfdp.training.sharding.shard_collectives import ShardCollectives
from tfdp.training.sharding.sharded_gradients import (
    ShardedGradients,
    ShardedGradientStatistics,
    local_squared_norm,
)
from tfdp.training.sharding.sharded_param_group import ShardedParamGroup
from tfdp.training.step.grouped_update import decay_without_gradients, with_schedule
from tfdp.training.step.state_layout import StateLayout


class ShardedLayout(StateLayout):
    """Reduction, clipping, update and averaging on one replica, with sharded state.

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
        # Accumulated slices have one numbering over the buckets of all groups, so each
        # group needs the number of its first bucket, found by its optimizer's `id`.
        sizes = [len(group.plan.buckets) for group in groups.values()]
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
        """Reduce-scatter each bucket; all-gather the rows of sparse gradients.

        The arguments are those of `StateLayout.reduce`: `weight` multiplies gradients;
        `may_sum` says whether rows of one index may be summed in a sparse gradient.
        """
        sharded_group = self._sharded(group)
        positions = keras_optimizer.positions_in(group.optimizer, variables)
        pairs = zip(gradients, variables, strict=True)
        by_position = dict(zip(positions, pairs, strict=True))
        sparse = {
            position: pair
            for position, pair in by_position.items()
            if isinstance(pair[0], tf.IndexedSlices)
        }
        dense = {
            position: _with_static_shape(gradient, variable.shape)
            for position, (gradient, variable) in by_position.items()
            if position not in sparse
        }
        slices = self._collectives.reduce_scatter(sharded_group, dense, weight)
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
            tuple(by_position),
        )

    def slices_of(
        self, groups: Sequence[ParamGroup], sums: list[ShardedGradients]
    ) -> tuple[list[tf.Tensor], list[int]]:
        """Return the slices of reduced gradients, and the position of each accumulator.

        Args:
            groups: Sequence of `ParamGroup`.
            sums: List of `ShardedGradients`, one for each group.

        Returns:
            Tuple of the list of slices, and a list of ints, the position of each one's
            accumulator: the number of its bucket among those of all groups.
        """
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
        """Create reduced gradients from accumulated slices, the inverse of `slices_of`.

        Args:
            groups: Sequence of `ParamGroup`.
            variables: Sequence of the step's variables.
            tensors: List of slices, one for each accumulator.
        """
        reduced = []
        for group in groups:
            sharded_group = self._sharded(group)
            first = self._first_slices[id(group.optimizer)]
            own = group.of(list(variables))
            order = keras_optimizer.positions_in(group.optimizer, own)
            slices: list[tf.Tensor | None] = [
                tensors[first + number] if bucket.indices & set(order) else None
                for number, bucket in enumerate(sharded_group.plan.buckets)
            ]
            reduced.append(ShardedGradients(slices, frozenset(order), {}, tuple(order)))
        return reduced

    def examine(
        self,
        groups: Sequence[ParamGroup],
        sums: list[ShardedGradients],
        *,
        checks: bool,
        measures: bool,
        loss: CarriedScalar | None = None,
    ) -> ShardedGradientStatistics:
        """Measure the norms and finiteness of gradients by one small all-reduce.

        The all-reduce also sums the loss, unless a bucket of gradients has done so. If
        several replicas have the same slices, another all-reduce sums it. Each runs
        only if the step needs its result.

        Args:
            groups: Sequence of `ParamGroup`.
            sums: List of `ShardedGradients`, the reduced gradients of each group.
            checks: Bool, whether the step needs to know if the sums are finite.
            measures: Bool, whether the step needs their norm.
            loss: `CarriedScalar`, this replica's part of the loss, if the step needs
                its sum; or `None`. Defaults to `None`.
        """
        needed = checks or measures or any(_clips_by_norm(p.optimizer) for p in groups)
        sharded_groups = [self._sharded(group) for group in groups]
        if loss is not None and self._collectives.groups.num_copies > 1:
            loss.total = self._total_of(loss)
        return ShardedGradientStatistics(
            sharded_groups, sums, self._collectives, is_needed=needed, loss=loss
        )

    def local_squared_norm(
        self, groups: Sequence[ParamGroup], sums: list[ShardedGradients]
    ) -> tf.Tensor:
        """Return the sum of squares of the gradients in this replica's slices.

        It is divided by the number of replicas with the same slices, so that the sum
        over all replicas is the squared norm of all gradients. `sums` has the
        `ShardedGradients` of each group.
        """
        collectives = self._collectives
        squares = [
            local_squared_norm(self._sharded(group), item, collectives.owner)
            for group, item in zip(groups, sums, strict=True)
        ]
        return tf.add_n(squares) / collectives.groups.num_copies

    def clip(
        self,
        group: ParamGroup,
        sums: ShardedGradients,
        statistics: ShardedGradientStatistics,
    ) -> ShardedGradients:
        """Return the gradients of a group, clipped as its optimizer is configured.

        Norms are those of the gradients of whole variables, not of this replica's
        slices.

        The arguments are those of `StateLayout.clip`: the group, its reduced gradients,
        and the statistics of the gradients of all groups.
        """
        optimizer = group.optimizer
        if not _clips_by_norm(optimizer):
            limit = optimizer.clipvalue
            if not limit or limit <= 0:
                return sums
            return sums.map(lambda values: tf.clip_by_value(values, -limit, limit))
        sharded_group = self._sharded(group)
        owner = self._collectives.owner
        norms = statistics.squared_norms(sharded_group)
        if optimizer.clipnorm and optimizer.clipnorm > 0:
            # A replica has only slices of a gradient, so it cannot call
            # `tf.clip_by_norm`. It multiplies the slices by the same factor.
            bound = tf.constant(optimizer.clipnorm, norms.dtype)
            factors = bound / tf.maximum(tf.sqrt(norms), bound)
            return sums.scaled_by(factors, sharded_group.plan, owner)
        norm = tf.sqrt(tf.reduce_sum(norms))
        # `tf.cast` would round the Python float to float32 before it converts the
        # limit to the dtype of the norm; `tf.constant` does not.
        limit = tf.constant(optimizer.global_clipnorm, norm.dtype)
        # `norm - norm` makes the factor NaN for an infinite norm, as in Keras.
        factor = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        # The product with the factor makes a sparse gradient dense, as in Keras, so
        # sparse gradients are added to the slices first.
        whole = sums.without_rows(sharded_group.plan, owner)
        return whole.map(lambda values: values * tf.cast(factor, values.dtype))

    def update(
        self, group: ParamGroup, gradients: ShardedGradients, variables: list, rate: Any
    ) -> None:
        """Update the elements that this replica owns, and assign the new values.

        The new values of variables that are not sharded are all-gathered to every
        replica.

        Args:
            group: `ParamGroup`.
            gradients: `ShardedGradients`, the reduced gradients of the group.
            variables: List of Keras variables; not used, since the group's state has
                its own list.
            rate: Scalar tensor, the learning rate, or `None` for the optimizer's own.
        """
        sharded_group = self._sharded(group)
        optimizer, rate = with_schedule(group.optimizer, rate)
        news = self._state(sharded_group).update(
            optimizer, gradients, sharded_group.variables, rate
        )
        self._assign_gathered(sharded_group, news, gradients.present)

    def update_without_gradients(
        self, group: ParamGroup, variables: list, rate: Any
    ) -> None:
        """Run the parts of an update that need no gradients, in a step without data.

        Weights decay on every replica, and state that belongs to no trained variable
        advances, such as the product of momenta of Nadam.

        Args:
            group: `ParamGroup`.
            variables: List of the Keras variables of the group.
            rate: Scalar tensor, the learning rate, or `None` for the optimizer's own.
        """
        singles = self._state(self._sharded(group)).singles
        decay_without_gradients(group.optimizer, variables, rate, singles)

    def average(self, group: ParamGroup) -> None:
        """Move the moving averages that the replica owns towards their variables."""
        sharded_group = self._sharded(group)
        self._state(sharded_group).average(group.optimizer, sharded_group.variables)

    def overwrite_with_average(
        self, group: ParamGroup, chosen: Container[int] | None = None
    ) -> None:
        """Overwrite variables with their moving averages.

        A replica has the averages of its own shard only, so the averages of variables
        that are not sharded are all-gathered.

        Args:
            group: `ParamGroup`.
            chosen: Container of the `id`s of the variables to overwrite, or `None` for
                all. Defaults to `None`.
        """
        sharded_group = self._sharded(group)
        present = frozenset(
            index
            for index, variable in enumerate(sharded_group.variables)
            if chosen is None or id(variable) in chosen
        )
        self._assign_gathered(
            sharded_group, self._state(sharded_group).averages(), present
        )

    def swap_with_average(self, group: ParamGroup) -> None:
        """Exchange the values of variables and their moving averages."""
        sharded_group = self._sharded(group)
        state = self._state(sharded_group)
        values = state.own_values(sharded_group.variables)
        self.overwrite_with_average(group)
        state.set_averages(values)

    def restart_average(self, group: ParamGroup) -> None:
        """Set the moving averages to the current values of their variables."""
        sharded_group = self._sharded(group)
        state = self._state(sharded_group)
        state.set_averages(state.own_values(sharded_group.variables))

    def _assign_gathered(
        self, group: ShardedParamGroup, slices: list, present: frozenset[int]
    ) -> None:
        """Assign new values: all-gathered, or only the own slice of sharded parameters.

        Args:
            group: `ShardedParamGroup`.
            slices: List with this replica's new values of each bucket, or `None` for a
                bucket without new values.
            present: Frozen set of ints, the positions of the variables to assign.
        """
        if sharded_parameter(group.variables[0]) is not None:
            self._assign_parts(group, slices, present)
            return
        gathered = self._collectives.all_gather(group.plan, slices)
        for index in sorted(present & gathered.keys()):
            variable = tf_distribute.local_part(group.variables[index])
            value = tf.reshape(gathered[index], variable.shape)
            variable.assign(tf.cast(value, variable.dtype), read_value=False)

    def _assign_parts(
        self, group: ShardedParamGroup, slices: list, present: frozenset[int]
    ) -> None:
        """Assign new values to this replica's parts of sharded parameters.

        Args:
            group: `ShardedParamGroup`.
            slices: List with this replica's new values of each bucket, or `None` for a
                bucket without new values.
            present: Frozen set of ints, the positions of the variables to assign.
        """
        owner = self._collectives.owner
        for bucket, piece in zip(group.plan.buckets, slices, strict=True):
            for segment, begin, end in (
                bucket.places(owner) if piece is not None else ()
            ):
                if segment.index in present:
                    parameter = parameter_of(group.variables[segment.index])
                    parameter.assign_part(piece[begin:end])
        for index in present:
            # Gathered copies are stale after the update: the next read gathers again.
            parameter = parameter_of(group.variables[index])
            parameter.reader.forget(parameter)

    def constrain(self, variable: Any) -> None:
        """Apply a variable's constraint to its whole value, and assign the result."""
        parameter = sharded_parameter(variable)
        if parameter is None:
            super().constrain(variable)
        else:
            parameter.assign(variable.constraint(parameter.read_value()))

    def _momentums(self, group: ParamGroup) -> list:
        """Return a list of this replica's momentum slots; empty without momentum."""
        return self._state(self._sharded(group)).slots.get("momentums", [])

    def _sharded(self, group: ParamGroup) -> ShardedParamGroup:
        """Return the `ShardedParamGroup` of the optimizer of a `ParamGroup`."""
        return self._groups[id(group.optimizer)]

    def _state(self, group: ShardedParamGroup) -> Any:
        """Return this replica's `OptimizerShard` of a group."""
        return group.replicas[self._collectives.replica]


def _with_static_shape(gradient: Any, shape: Any) -> Any:
    """Return a gradient with a static shape; unchanged if it has that shape already."""
    return gradient if gradient.shape == shape else tf.ensure_shape(gradient, shape)


def _clips_by_norm(optimizer: Any) -> bool:
    """Return whether an optimizer has `clipnorm` or `global_clipnorm` above 0."""
    limits = (optimizer.clipnorm, optimizer.global_clipnorm)
    return any(limit is not None and limit > 0 for limit in limits)
