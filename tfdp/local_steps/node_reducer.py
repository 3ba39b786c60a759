"""Sums over the replicas of a node, which train synchronously between outer steps."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp import _compat
from tfdp.reduction.fusion import ReducedGradients
from tfdp.reduction.gradient_reducer import GradientReducer, LocalReducer
from tfdp.reduction.reducer import Reducer


class NodeReducer:
    """The reducer of a replica's node.

    Args:
        reducer: `Reducer` over the node's replicas.
        context: The replica context.
    """

    def __init__(self, reducer: Reducer, context: Any) -> None:
        self.num_replicas = reducer.group.size
        self._reducer = reducer
        self._replica = _compat.local_replica_id(context)

    def reduce_gradients(
        self,
        gradients: list,
        variables: list[Any],
        *,
        may_sum: bool,
        weight: tf.Tensor | None,
    ) -> ReducedGradients:
        """Sum gradients over the node, see `Reducer.reduce_gradients`."""
        return self._reducer.reduce_gradients(
            gradients, variables, self._replica, may_sum=may_sum, weight=weight
        )

    def sum(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sum tensors that are no gradients over the node."""
        return list(self._reducer.reduce("SUM", tensors, self._replica))

    def gather_rows(
        self, gradients: list, variables: list[Any], *, may_sum: bool
    ) -> list:
        """Put sparse gradients together, see `Reducer.gather_rows`."""
        return self._reducer.gather_rows(
            gradients, variables, self._replica, may_sum=may_sum
        )


def node_reducer(strategy: Any, context: Any) -> GradientReducer:
    """The reducer over the node of the replica that is running.

    Args:
        strategy: A tfdp strategy.
        context: The replica context.

    Raises:
        ValueError: In eager mode, with several replicas in this process.
    """
    whole = strategy.extended.reducer
    nodes = [sorted(positions) for positions in whole.group.nodes]
    group = whole.group.split(nodes)[_compat.local_replica_id(context)]
    if group is None or group.size == 1:
        return LocalReducer()
    if tf.executing_eagerly() and len(group.devices) > 1:
        raise ValueError(
            "Replicas of one process cannot reduce within their node while they run "
            "eagerly, one after the other. Leave out `run_eagerly=True`."
        )
    extended = strategy.extended
    reducer = Reducer(group, whole.first_rank, whole.options, extended.worker_group)
    return NodeReducer(reducer, context)
