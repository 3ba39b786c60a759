"""Reducers of a step's gradients, for the running replica or a single device."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import Member, ProcessGroup, timing
from tfdp.ground._compat import tf_distribute
from tfdp.ground.base import batch_weight, loops
from tfdp.ground.base.context import replica_context
from tfdp.training.reduction.fusion import ReducedGradients, unbucketed, weighted
from tfdp.training.reduction.reducer import Reducer
from tfdp.training.reduction.sparse import reduce_indexed_slices


class GradientReducer:
    """Base class of reducers; by itself the reducer of a single device, without sums.

    It also serves a replica that updates its variables without the other replicas.
    """

    # Gradients are summed over this many replicas: one, since this base class is the
    # reducer of a single device.
    num_replicas = 1

    def reduce_gradients(
        self,
        gradients: list,
        variables: list[Any],
        *,
        may_sum: bool,
        weight: tf.Tensor | None,
    ) -> ReducedGradients:
        """Sum the gradients of variables over all replicas, bucket by bucket.

        In this class, for a single device, gradients are only multiplied by `weight`.

        Adasum combines means of gradients instead. A replica's gradient is its share of
        the global mean, so it is multiplied by the number of combined gradients first.

        Args:
            gradients: List of tensors and `tf.IndexedSlices`, one for each
                variable.
            variables: List of Keras variables.
            may_sum: Bool, whether rows with the same index may be added up, see
                `tfdp.training.reduction.sparse`.
            weight: Scalar tensor, factor of this replica's gradients, or `None` for 1.

        Returns:
            `ReducedGradients`, the same on all replicas.
        """
        del variables, may_sum
        if weight is not None:
            gradients = [weighted(gradient, weight) for gradient in gradients]
        return unbucketed(gradients)

    def gradient_weight(self) -> tf.Tensor | None:
        """Return the factor of this replica's gradients in the sum: `None`, which is 1.

        `ReplicaReducer` overrides it for Adasum.
        """
        return None

    def prepare(self, gradients: list) -> list:
        """Return gradients as they will be reduced; unchanged on one device.

        `ReplicaReducer` converts sparse gradients to dense tensors for Adasum.
        """
        return gradients

    def sum(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sum tensors other than gradients over replicas; unchanged on one device."""
        return tensors

    def gather_rows(
        self, gradients: list, variables: list[Any], *, may_sum: bool
    ) -> list:
        """Gather rows of sparse gradients from all replicas; unchanged on one device.

        Args:
            gradients: List of `tf.IndexedSlices`.
            variables: List of Keras variables, one for each gradient.
            may_sum: Bool, whether rows with the same index may be added up.

        Returns:
            List of `tf.IndexedSlices`, the same on all replicas.
        """
        del variables, may_sum
        return gradients


class ReplicaReducer(GradientReducer):
    """Reducer of the gradients of one replica, over the replicas of a group.

    Args:
        reducer: `Reducer` of the strategy, or of a group that has the replica.
        context: `tf.distribute.ReplicaContext`, or `None` in a graph outside of
            `strategy.run`.
        replica: Int, index of the replica among the local ones, or `None` for that of
            the context. Defaults to `None`.
    """

    def __init__(
        self, reducer: Reducer, context: Any, replica: int | None = None
    ) -> None:
        self.num_replicas = reducer.group.size
        self._reducer = reducer
        self._context = context
        self._local_id = replica

    @property
    def group(self) -> ProcessGroup:
        """`ProcessGroup` of the replicas whose gradients are summed."""
        return self._reducer.group

    def reduce_gradients(
        self,
        gradients: list,
        variables: list[Any],
        *,
        may_sum: bool,
        weight: tf.Tensor | None,
    ) -> ReducedGradients:
        """Sum gradients over the group; arguments are those of `GradientReducer`."""
        self._check_adasum()
        reducer = self._reducer
        if self._must_reduce_across_replicas():
            reducer.warn_of_momentum(
                "eager steps of several replicas in one process are not compressed"
            )
            if weight is not None:
                gradients = [weighted(gradient, weight) for gradient in gradients]
            return unbucketed(self.sum(gradients))
        reducer.check(variables, self._local_index)
        if (exchange := loops.exchange()) is not None:
            return exchange.reduce(gradients, variables, self._local_index)
        if self.num_replicas == 1:
            reducer.warn_of_momentum("with one replica nothing is compressed")
        elif any(isinstance(item, tf.IndexedSlices) for item in gradients):
            reducer.warn_of_momentum("rows of sparse gradients are not compressed")
        if reducer.combines_means:
            # Adasum combines whole means of replicas or nodes, but each gradient is
            # only a share of the global mean: multiplied by the number of means, the
            # share becomes a mean.
            members = tf.constant(reducer.num_means, tf.float64)
            weight = members if weight is None else weight * members
        return reducer.all_reduce(
            gradients, variables, self._local_index, may_sum, weight
        )

    def gradient_weight(self) -> tf.Tensor | None:
        """Return the factor of this replica's gradients before the reduction.

        Only Adasum needs one. It gives each combined mean, of a node or a replica, the
        same weight, whatever its number of rows.

        Returns:
            Scalar float64 tensor, or `None` for 1.
        """
        self._check_adasum()
        share = batch_weight.current()
        if not self._reducer.combines_means or share is None:
            return None
        num_means = self._reducer.num_means
        if num_means < self.num_replicas:
            whole = Member(self.group, self._local_index)
            member = whole.inside(self.group.split(self.group.nodes))
            device = self.group.devices[self._local_index]
            with timing.labelled("weights"), tf.device(device):
                share = member.all_reduce(share[tf.newaxis])[0]
        return tf.math.divide_no_nan(tf.ones([], tf.float64), share * num_means)

    def prepare(self, gradients: list) -> list:
        """Return a list of gradients, all dense tensors if Adasum combines them.

        Without Adasum it is `gradients` itself.
        """
        if not self._reducer.combines_means:
            return gradients
        return [tf.convert_to_tensor(gradient) for gradient in gradients]

    def sum(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sum tensors that are not gradients over the replicas of the group."""
        if self._must_reduce_across_replicas():
            return list(self._context.strategy.extended.sum_over_replicas(tensors))
        return list(self._reducer.reduce("SUM", tensors, self._local_index))

    def gather_rows(
        self, gradients: list, variables: list[Any], *, may_sum: bool
    ) -> list:
        """Gather the rows of sparse gradients from the replicas of the group.

        Args:
            gradients: List of `tf.IndexedSlices`.
            variables: List of Keras variables, one for each gradient.
            may_sum: Bool, whether rows with the same index may be added up, so that
                fewer bytes are sent; the optimizer must be linear in the gradient.

        Returns:
            List of `tf.IndexedSlices` with the rows of all replicas.
        """
        if not gradients:
            return []
        if self._must_reduce_across_replicas():
            return self.sum(gradients)
        self._reducer.check(variables, self._local_index)
        with timing.labelled(timing.ROWS):
            return [
                reduce_indexed_slices(
                    item, self.group, self._local_index, may_sum=may_sum
                )
                for item in gradients
            ]

    @property
    def _local_index(self) -> int:
        """Int, index of the running replica among the local ones."""
        if self._local_id is not None:
            return self._local_id
        return tf_distribute.local_replica_id(self._context)

    def _check_adasum(self) -> None:
        """Raise a `ValueError` if Adasum is to combine the gradients of an eager step.

        Eager replicas of one process run one after another, and an eager step on the
        whole batch has no gradients of single replicas.
        """
        is_whole = tf.executing_eagerly() and batch_weight.is_part_of_sum()
        if self._reducer.combines_means and (
            is_whole or self._must_reduce_across_replicas()
        ):
            raise ValueError(
                "Adasum combines the gradients of all replicas at once, but eager "
                "steps run replicas one after another, or on the whole batch. Remove "
                "`run_eagerly=True`, and call `strategy.run` in a `tf.function`."
            )

    def _must_reduce_across_replicas(self) -> bool:
        """Return whether sums must run in the cross-replica context, not on replicas.

        They must in eager steps of a process with several replicas.
        """
        # Eager replicas of a process run one after another, so a collective of one
        # replica would wait for a replica that has not started.
        return tf.executing_eagerly() and len(self._reducer.group.devices) > 1


def replica_reducer() -> GradientReducer:
    """Return the reducer of the running replica; outside of one, of a single device.

    In a replica it may add an assertion to the graph, which fails once the workers have
    changed, see `assert_same_workers` of the strategy.
    """
    context = replica_context()
    if context is None:
        return GradientReducer()
    extended = tf.distribute.get_strategy().extended
    extended.assert_same_workers()
    return ReplicaReducer(extended.reducer, context)
