"""The reducer as one replica's step sees it: the seam for other ways to reduce."""

from __future__ import annotations

from typing import Any, Protocol

import tensorflow as tf

from tfdp import _compat
from tfdp.reduction.fusion import weighted
from tfdp.reduction.reduced_gradients import ReducedGradients, unbucketed
from tfdp.reduction.reducer import Reducer, gradients_of


class GradientReducer(Protocol):
    """What a step hands its gradients to: the seam for other ways to reduce."""

    @property
    def num_replicas(self) -> int:
        """Int, over how many replicas it sums."""

    def reduce_gradients(
        self,
        gradients: list,
        variables: list[Any],
        *,
        may_sum: bool,
        weight: tf.Tensor | None,
    ) -> ReducedGradients:
        """Sums gradients over all replicas, see `Reducer.reduce_gradients`."""

    def sum(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums tensors that are no gradients over all replicas."""

    def gather_rows(
        self, gradients: list, variables: list[Any], *, may_sum: bool
    ) -> list:
        """Puts sparse gradients together, see `Reducer.gather_rows`."""


class LocalReducer:
    """The reducer of a single device, which has nobody to share with."""

    num_replicas = 1

    def reduce_gradients(
        self,
        gradients: list,
        variables: list[Any],
        *,
        may_sum: bool,
        weight: tf.Tensor | None,
    ) -> ReducedGradients:
        """Leaves gradients as they are."""
        del variables, may_sum, weight
        return unbucketed(gradients)

    def sum(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Leaves them as they are."""
        return tensors

    def gather_rows(
        self, gradients: list, variables: list[Any], *, may_sum: bool
    ) -> list:
        """Leaves them as they are."""
        del variables, may_sum
        return gradients


class ReplicaReducer:
    """The reducer as one replica sees it.

    Args:
        reducer: `Reducer` of the strategy.
        context: The replica context.
    """

    def __init__(self, reducer: Reducer, context: Any) -> None:
        self.num_replicas = reducer.group.size
        self._reducer = reducer
        self._context = context

    def reduce_gradients(
        self,
        gradients: list,
        variables: list[Any],
        *,
        may_sum: bool,
        weight: tf.Tensor | None,
    ) -> ReducedGradients:
        """Sums gradients over all replicas, see `Reducer.reduce_gradients`."""
        if tf.executing_eagerly():
            # Eager replicas run one after the other and have to meet first.
            if weight is not None:
                gradients = [weighted(gradient, weight) for gradient in gradients]
            with gradients_of(variables, is_linear=may_sum):
                sums = self._context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
            return unbucketed(list(sums))
        return self._reducer.reduce_gradients(
            gradients,
            variables,
            _compat.local_replica_id(self._context),
            may_sum=may_sum,
            weight=weight,
        )

    def sum(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums tensors that are no gradients over all replicas."""
        return self._context.all_reduce(tf.distribute.ReduceOp.SUM, tensors)

    def gather_rows(
        self, gradients: list, variables: list[Any], *, may_sum: bool
    ) -> list:
        """Puts sparse gradients together, see `Reducer.gather_rows`."""
        if tf.executing_eagerly():
            with gradients_of(variables, is_linear=may_sum):
                return self.sum(gradients) if gradients else []
        return self._reducer.gather_rows(
            gradients,
            variables,
            _compat.local_replica_id(self._context),
            may_sum=may_sum,
        )
