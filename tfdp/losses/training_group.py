"""Replicas that train together in a step: all, or between exchanges those of a node.

A loss or a layer that needs sums over the rows of several replicas takes them over
these.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp.base import batch_weight, loops
from tfdp.base.context import replica_context
from tfdp.reduction.gradient_reducer import GradientReducer, LocalReducer


class TrainingGroup:
    """The replicas that train together with the one that runs, as their context.

    Args:
        reducer: `GradientReducer` that sums over them.
        share: Scalar float64 tensor, the part of their rows that this replica has.
    """

    def __init__(self, reducer: GradientReducer, share: tf.Tensor) -> None:
        self._reducer = reducer
        self.share = share

    @property
    def is_alone(self) -> bool:
        """Bool, whether no other replica trains together with this one."""
        return isinstance(self._reducer, LocalReducer)

    def all_reduce(self, reduce_op: Any, value: Any) -> Any:
        """Sum tensors; gradients are passed back as by `loss_hooks.all_reduce`.

        Args:
            reduce_op: `tf.distribute.ReduceOp.SUM`.
            value: Nest of tensors of floats.
        """
        assert reduce_op == tf.distribute.ReduceOp.SUM
        if self.is_alone:
            return value
        results = self._sum(*tf.nest.flatten(value))
        return tf.nest.pack_sequence_as(value, tf.nest.flatten(results))

    def _sum(self, *tensors: tf.Tensor) -> Any:
        reducer, share = self._reducer, self.share

        @tf.custom_gradient
        def reduce(*inputs: tf.Tensor) -> Any:
            def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
                parts = [x * tf.cast(share, x.dtype) for x in upstream]
                totals = reducer.sum(parts)
                return [
                    tf.math.divide_no_nan(t, tf.cast(share, t.dtype)) for t in totals
                ]

            return tuple(reducer.sum(list(inputs))), gradient

        return reduce(*tensors)


def group_that_steps_alone() -> TrainingGroup | None:
    """Return the replicas that train together, or `None` where all do.

    In the step of a replica, in Keras's loops.
    """
    weight, loop = batch_weight.current(), loops.current()
    if replica_context() is None or loop is None or not loop.steps_alone:
        return None
    local_steps = loop.model.optimizer.features.local_steps
    reducer = local_steps.reducer()
    share = local_steps.weight(weight, reducer)
    return TrainingGroup(reducer, tf.ones([], tf.float64) if share is None else share)


def context_and_share() -> tuple[Any, tf.Tensor | None]:
    """Return the context over which a step sums, and this replica's part of its rows.

    Returns:
        Tuple of an object with `all_reduce`, or `None` outside of a replica, and a
        scalar float64 tensor, or `None` where rows are not counted.
    """
    context, share = replica_context(), batch_weight.current()
    if share is not None and (group := group_that_steps_alone()) is not None:
        return group, group.share
    return context, share
