"""Replicas that train together in a step: all, or between exchanges those of a node.

A loss or a layer that needs sums over the rows of several replicas takes them over
these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        """Sum tensors, see `reduced`.

        Args:
            reduce_op: `tf.distribute.ReduceOp.SUM`.
            value: Nest of tensors of floats.
        """
        assert reduce_op == tf.distribute.ReduceOp.SUM
        if self.is_alone:
            return value
        results = reduced(tf.nest.flatten(value), self._reducer.sum, lambda: self.share)
        return tf.nest.pack_sequence_as(value, results)


def reduced(
    tensors: Sequence[tf.Tensor],
    reduce: Callable[[list[tf.Tensor]], Sequence[tf.Tensor]],
    weight_of_upstream: Callable[[], tf.Tensor | None],
) -> list[tf.Tensor]:
    """All-reduce tensors; pass gradients back so that each loss counts by its rows.

    What replicas have together, such as synchronized moments, carries the gradients of
    all their losses to each replica, whose optimizer multiplies them by its own weight.

    Args:
        tensors: Sequence of tensors of floats.
        reduce: Callable that all-reduces a list of tensors.
        weight_of_upstream: Callable that returns this replica's weight in the backward
            pass, a scalar tensor, or `None` where the loss has it already.
    """

    @tf.custom_gradient
    def forward(*inputs: tf.Tensor) -> Any:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            weight = weight_of_upstream()
            if weight is None:
                return list(reduce(list(upstream)))
            totals = reduce([x * tf.cast(weight, x.dtype) for x in upstream])
            return [tf.math.divide_no_nan(t, tf.cast(weight, t.dtype)) for t in totals]

        return tuple(reduce(list(inputs))), gradient

    return tf.nest.flatten(forward(*tensors))


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
