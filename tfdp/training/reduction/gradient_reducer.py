"""The reducer of a step's gradients, as the running replica or one device sees it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import Member, ProcessGroup, timing
from tfdp.ground import _compat
from tfdp.ground.base import batch_weight
from tfdp.ground.base.context import replica_context
from tfdp.training.reduction.fusion import ReducedGradients, unbucketed, weighted
from tfdp.training.reduction.reducer import Reducer
from tfdp.training.reduction.sparse import reduce_indexed_slices


class GradientReducer:
    """Reducer of the gradients of a step: by itself that of one device.

    It is also that of a replica that steps alone.
    """

    # Over how many it sums.
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

        Adasum combines them instead, each times the number of those that it combines:
        a replica's gradient, as it adds to a mean, is a part of its own mean.

        Args:
            gradients: List of tensors and `tf.IndexedSlices`, one for each
                variable.
            variables: List of Keras variables.
            may_sum: Bool, whether rows of one index may be added up, see
                `tfdp.training.reduction.sparse`.
            weight: Scalar tensor by which this replica's gradients count, or
                `None` for one.

        Returns:
            `ReducedGradients`, alike on all replicas.
        """
        del variables, may_sum
        if weight is not None:
            gradients = [weighted(gradient, weight) for gradient in gradients]
        return unbucketed(gradients)

    def gradient_weight(self) -> tf.Tensor | None:
        """Factor of this replica's gradients before they are reduced, or `None`."""
        return None

    def prepare(self, gradients: list) -> list:
        """Bring gradients into the form in which they are reduced."""
        return gradients

    def sum(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sum tensors that are no gradients over all replicas."""
        return tensors

    def gather_rows(
        self, gradients: list, variables: list[Any], *, may_sum: bool
    ) -> list:
        """Put the rows of sparse gradients of all replicas together.

        Args:
            gradients: List of `tf.IndexedSlices`.
            variables: List of Keras variables, one for each.
            may_sum: Bool, whether rows of one index may be added up.

        Returns:
            List of `tf.IndexedSlices`, alike on all replicas.
        """
        del variables, may_sum
        return gradients


class ReplicaReducer(GradientReducer):
    """The reducer as one replica sees it.

    Args:
        reducer: `Reducer` of the strategy, or of a group that the replica is in.
        context: The replica context, or `None` in a graph outside of `strategy.run`.
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
        """`ProcessGroup` of the replicas that it sums over."""
        return self._reducer.group

    def reduce_gradients(
        self,
        gradients: list,
        variables: list[Any],
        *,
        may_sum: bool,
        weight: tf.Tensor | None,
    ) -> ReducedGradients:
        """See `GradientReducer`."""
        self._check_graph()
        reducer = self._reducer
        if self._meets_first():
            reducer.warn_of_momentum(
                "eager steps of several replicas in one process are not compressed"
            )
            if weight is not None:
                gradients = [weighted(gradient, weight) for gradient in gradients]
            return unbucketed(self.sum(gradients))
        reducer.check(variables, self._replica)
        if self.num_replicas == 1:
            reducer.warn_of_momentum("with one replica nothing is compressed")
        elif any(isinstance(item, tf.IndexedSlices) for item in gradients):
            reducer.warn_of_momentum("rows of sparse gradients are not compressed")
        if reducer.combines_means:
            # Gradients are parts of a mean, and what is combined are means.
            members = tf.constant(reducer.num_means, tf.float64)
            weight = members if weight is None else weight * members
        return reducer.all_reduce(gradients, variables, self._replica, may_sum, weight)

    def gradient_weight(self) -> tf.Tensor | None:
        """Factor that makes gradients add up to those of the global batch.

        For Adasum they add up to the mean of what is combined: of the means of nodes,
        or of replicas, over their own rows, however many these are.

        Returns:
            Scalar float64 tensor, or `None` for one.
        """
        self._check_graph()
        share = batch_weight.current()
        if not self._reducer.combines_means or share is None:
            return None
        num_means = self._reducer.num_means
        if num_means < self.num_replicas:
            whole = Member(self.group, self._replica)
            member = whole.inside(self.group.split(self.group.nodes))
            device = self.group.devices[self._replica]
            with timing.labelled("weights"), tf.device(device):
                share = member.all_reduce(share[tf.newaxis])[0]
        return tf.math.divide_no_nan(tf.ones([], tf.float64), share * num_means)

    def prepare(self, gradients: list) -> list:
        """Make tensors of sparse gradients for Adasum; leave others as they are."""
        if not self._reducer.combines_means:
            return gradients
        return [tf.convert_to_tensor(gradient) for gradient in gradients]

    def sum(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """See `GradientReducer`."""
        if self._meets_first():
            return list(self._context.strategy.extended.sum_over_replicas(tensors))
        return list(self._reducer.reduce("SUM", tensors, self._replica))

    def gather_rows(
        self, gradients: list, variables: list[Any], *, may_sum: bool
    ) -> list:
        """See `GradientReducer`."""
        if not gradients:
            return []
        if self._meets_first():
            return self.sum(gradients)
        self._reducer.check(variables, self._replica)
        with timing.labelled(timing.ROWS):
            return [
                reduce_indexed_slices(item, self.group, self._replica, may_sum=may_sum)
                for item in gradients
            ]

    @property
    def _replica(self) -> int:
        """Index of the replica among the local ones."""
        if self._local_id is not None:
            return self._local_id
        return _compat.local_replica_id(self._context)

    def _check_graph(self) -> None:
        """Raise where Adasum has not the gradient of each replica by itself."""
        is_whole = tf.executing_eagerly() and batch_weight.is_part_of_sum()
        if self._reducer.combines_means and (is_whole or self._meets_first()):
            raise ValueError(
                "Adasum needs all replicas at once, and eager steps run one after the "
                "other, or on the whole batch. Leave out `run_eagerly=True`, and "
                "call `strategy.run` in a `tf.function`."
            )

    def _meets_first(self) -> bool:
        # Eager replicas of a process run one after the other: a collective would wait
        # for one that has not started.
        return tf.executing_eagerly() and len(self._reducer.group.devices) > 1


def replica_reducer() -> GradientReducer:
    """The reducer of the replica that is running, or of a single device."""
    context = replica_context()
    if context is None:
        return GradientReducer()
    return ReplicaReducer(tf.distribute.get_strategy().extended.reducer, context)
