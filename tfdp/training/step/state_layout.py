"""Layout of variables and slots on the replicas: the seam for sharded state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.ground import _compat
from tfdp.ground.base.param_groups import ParamGroup, is_linear
from tfdp.training.parameters.sharded_parameter import check_reader
from tfdp.training.step.grouped_update import decay_and_update, decay_without_gradients
from tfdp.training.step.loss_scale import not_finite


def reduce_groups(
    layout: StateLayout,
    param_groups: Sequence[ParamGroup],
    variables: list,
    gradients: list,
    weight: tf.Tensor | None = None,
) -> list:
    """Sum the gradients of each parameter group over all replicas.

    Args:
        layout: `StateLayout`.
        param_groups: Sequence of `ParamGroup`.
        variables: List of Keras variables, those of the gradients.
        gradients: List of tensors and `tf.IndexedSlices`, this replica's own.
        weight: Scalar tensor by which they count, or `None` for one. Defaults to
            `None`.

    Returns:
        List of what `StateLayout.reduce` returns, one for each parameter group.
    """
    return [
        layout.reduce(
            group,
            group.of(gradients),
            group.of(variables),
            may_sum=is_linear(group.optimizer),
            weight=weight,
        )
        for group in param_groups
    ]


class StateLayout:
    """Operations of a step on gradients, wherever variables and slots lie.

    By itself every replica holds each of them, as Keras makes them.

    Args:
        reducer: `GradientReducer`.
    """

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def reduce(
        self,
        group: ParamGroup,
        gradients: list,
        variables: list,
        *,
        may_sum: bool,
        weight: tf.Tensor | None,
    ) -> Any:
        """Sum the gradients of a group over all replicas, bucket by bucket.

        Returns:
            `ReducedGradients`, or what else has `divided_by`.
        """
        del group
        check_reader(variables, None)
        return self._reducer.reduce_gradients(
            gradients, variables, may_sum=may_sum, weight=weight
        )

    def examine(
        self, groups: Sequence[ParamGroup], sums: list, *, checks: bool, measures: bool
    ) -> GradientStatistics:
        """Compute norms and finite flags of the sums of all groups.

        Args:
            groups: Sequence of `ParamGroup`.
            sums: List of what `reduce` returned for each.
            checks: Bool, whether it matters if they are finite.
            measures: Bool, whether their norm matters.
        """
        del groups, checks, measures
        return GradientStatistics(sums)

    def own_squares(self, groups: Sequence[ParamGroup], sums: list) -> tf.Tensor:
        """This replica's part of the squared norm: all replicas' add up to it.

        Args:
            groups: Sequence of `ParamGroup`.
            sums: List of what `reduce` returned for each.

        Returns:
            Scalar float32 tensor.
        """
        del groups
        gradients = [item for reduced in sums for item in reduced.gradients()]
        return squared_norm(gradients) / self._reducer.num_replicas

    def clip(self, group: ParamGroup, sums: Any, statistics: Any) -> Any:
        """Clip the gradients of a group as Keras does, on the sums of all replicas."""
        del statistics
        return _compat.clip_gradients(group.optimizer, sums.gradients())

    def scale_momentum(self, group: ParamGroup, factor: Any) -> None:
        """Multiply every momentum of a group that contains the learning rate.

        Source: Goyal et al. 2017, https://arxiv.org/abs/1706.02677, remark 2.
        """
        slots = [_compat.local_part(m) for m in self._momentums(group) if m is not None]

        def scale() -> tf.Tensor:
            for slot in slots:
                slot.assign(slot * tf.cast(factor, slot.dtype), read_value=False)
            return tf.constant(True)

        # After the warmup it costs nothing.
        tf.cond(tf.equal(factor, 1.0), lambda: tf.constant(False), scale)

    def update(
        self, group: ParamGroup, gradients: Any, variables: list, rate: Any
    ) -> None:
        """Decay and update as Keras does, small variables together."""
        decay_and_update(group.optimizer, gradients, variables, rate)

    def update_without_gradients(
        self, group: ParamGroup, variables: list, rate: Any
    ) -> None:
        """Do of an update what needs no gradients: decay weights, say."""
        decay_without_gradients(group.optimizer, variables, rate, {})

    def average(self, group: ParamGroup) -> None:
        """Move the averages of a group's variables towards their values."""
        _compat.update_moving_average(group.optimizer)

    def overwrite_with_average(self, group: ParamGroup) -> None:
        """Give the variables of a group the values of their averages."""
        _compat.overwrite_with_moving_average(group.optimizer)

    def constrain(self, variable: Any) -> None:
        """Apply the constraint of a variable."""
        part = _compat.local_part(variable)
        part.assign(variable.constraint(part), read_value=False)

    def _momentums(self, group: ParamGroup) -> list:
        return group.optimizer.momentums


class GradientStatistics:
    """Norms and finite flags of the sums, alike on all replicas.

    They are computed on demand: a norm that nobody needs costs nothing.

    Args:
        sums: List of what `StateLayout.reduce` returned.
    """

    def __init__(self, sums: list) -> None:
        self._sums = sums

    def is_finite(self) -> tf.Tensor:
        """Scalar bool tensor, whether no element is infinite or NaN."""
        return tf.reduce_all([item.all_finite() for item in self._sums])

    def squared_norm(self) -> tf.Tensor:
        """Scalar tensor, the sum of the squares of all elements."""
        return squared_norm(self._gradients())

    def non_finite(self) -> list[tf.Tensor]:
        """Scalar bool tensors, whether a variable's gradient is not finite."""
        return [not_finite(gradient) for gradient in self._gradients()]

    def _gradients(self) -> list:
        return [item for sums in self._sums for item in sums.gradients()]


def squared_norm(gradients: Sequence[Any]) -> tf.Tensor:
    """Sum the squares of all elements: a scalar float32 tensor.

    Args:
        gradients: Sequence of tensors and `tf.IndexedSlices`, whose rows of one
            index are added up first.
    """
    squares = [
        tf.square(tf.cast(tf.convert_to_tensor(g), tf.float32)) for g in gradients
    ]
    return tf.add_n([tf.reduce_sum(square) for square in squares])
