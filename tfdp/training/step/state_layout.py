"""Layout of variables and slots on the replicas; sharded state has a subclass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.ground._compat import keras_optimizer, tf_distribute
from tfdp.ground.base.conditions import run_if
from tfdp.ground.base.param_groups import ParamGroup, is_linear
from tfdp.training.parameters.sharded_parameter import check_reader
from tfdp.training.reduction.carried_scalar import CarriedScalar
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
        layout: `StateLayout`, which reduces the gradients of a group.
        param_groups: Sequence of `ParamGroup`, the variables of one optimizer each.
        variables: List of the Keras variables of the gradients.
        gradients: List of this replica's tensors and `tf.IndexedSlices`.
        weight: Scalar tensor, a factor of the gradients, or `None` for 1. Defaults to
            `None`.

    Returns:
        List of reduced gradients, one item of `StateLayout.reduce` for each group.
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
    """Operations of a step that depend on where variables and slots are stored.

    In this class every replica holds all variables and slots, as Keras creates them.
    Methods for one parameter group receive the `ParamGroup`, `sums` as `reduce` returns
    them, the Keras `variables` that have gradients, and `rate`, a scalar tensor or
    `None` for the optimizer's own learning rate.

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
        """Sum the gradients of a parameter group over all replicas, bucket by bucket.

        Args:
            group: `ParamGroup`.
            gradients: List of this replica's tensors and `tf.IndexedSlices`.
            variables: List of their Keras variables.
            may_sum: Bool, whether rows of sparse gradients with the same index may be
                summed before the update.
            weight: Scalar tensor, a factor of the gradients, or `None` for 1.

        Returns:
            `ReducedGradients`, or another class with `divided_by`.
        """
        del group
        check_reader(variables, None)
        return self._reducer.reduce_gradients(
            gradients, variables, may_sum=may_sum, weight=weight
        )

    def examine(
        self,
        groups: Sequence[ParamGroup],
        sums: list,
        *,
        checks: bool,
        measures: bool,
        loss: CarriedScalar | None = None,
    ) -> GradientStatistics:
        """Return norms and finite flags of the reduced gradients of all groups.

        Here they are computed when they are read, whatever `checks` and `measures` say.
        A subclass may compute them at once.

        Args:
            groups: Sequence of `ParamGroup`.
            sums: List of the reduced gradients of each group.
            checks: Bool, whether the step needs to know if the sums are finite.
            measures: Bool, whether the step needs their norm.
            loss: `CarriedScalar`, the loss, if the step needs it. Defaults to `None`.
        """
        del groups, checks, measures
        return GradientStatistics(sums, self._total_of(loss))

    def _total_of(self, loss: CarriedScalar | None) -> tf.Tensor | None:
        """Return the sum of the loss over replicas, or `None` without a loss.

        A bucket of gradients may have carried the loss to other replicas; the sum is
        then known. Otherwise it takes a reduction here.
        """
        if loss is None or loss.total is not None:
            return None if loss is None else loss.total
        return self._reducer.sum([loss.value])[0]

    def local_squared_norm(self, groups: Sequence[ParamGroup], sums: list) -> tf.Tensor:
        """Compute this replica's addend of the squared norm of all reduced gradients.

        The sum of the addends over all replicas is the squared norm.

        Args:
            groups: Sequence of `ParamGroup`.
            sums: List of the reduced gradients of each group.

        Returns:
            Scalar float32 tensor.
        """
        del groups
        gradients = [item for reduced in sums for item in reduced.gradients()]
        return squared_norm(gradients) / self._reducer.num_replicas

    def clip(self, group: ParamGroup, sums: Any, statistics: Any) -> Any:
        """Return the reduced gradients of a group, clipped as its optimizer is set to.

        `statistics` are the `GradientStatistics` of all groups.
        """
        del statistics
        return keras_optimizer.clip_gradients(group.optimizer, sums.gradients())

    def scale_momentum(self, group: ParamGroup, factor: Any) -> None:
        """Multiply the momentum slots of a group, since they contain the learning rate.

        Source: Goyal et al. 2017, https://arxiv.org/abs/1706.02677, remark 2.

        Args:
            group: `ParamGroup`.
            factor: Scalar tensor, the new learning rate divided by the previous one.
        """
        slots = [
            tf_distribute.local_part(m) for m in self._momentums(group) if m is not None
        ]

        def scale() -> None:
            """Assign to each momentum slot its product with `factor`."""
            for slot in slots:
                slot.assign(slot * tf.cast(factor, slot.dtype), read_value=False)

        # A factor of 1, as after the warmup, changes nothing. So most steps skip the
        # multiplication of all slots.
        run_if(tf.not_equal(factor, 1.0), scale)

    def update(
        self, group: ParamGroup, gradients: Any, variables: list, rate: Any
    ) -> None:
        """Decay a group's variables, and update them by a list of clipped gradients.

        Small variables are updated together, as one flat tensor.
        """
        decay_and_update(group.optimizer, gradients, variables, rate)

    def update_without_gradients(
        self, group: ParamGroup, variables: list, rate: Any
    ) -> None:
        """Run the parts of a group's update without gradients, such as weight decay."""
        decay_without_gradients(group.optimizer, variables, rate, {})

    def average(self, group: ParamGroup) -> None:
        """Update the moving averages (EMA) of a group's variables once."""
        keras_optimizer.update_moving_average(group.optimizer)

    def overwrite_with_average(self, group: ParamGroup) -> None:
        """Set the variables of a group to their moving averages."""
        keras_optimizer.overwrite_with_moving_average(group.optimizer)

    def constrain(self, variable: Any) -> None:
        """Apply the constraint of a Keras variable to its value on this replica."""
        part = tf_distribute.local_part(variable)
        part.assign(variable.constraint(part), read_value=False)

    def _momentums(self, group: ParamGroup) -> list:
        """Return a list of a group's momentum slots, with `None` for missing ones."""
        return group.optimizer.momentums


class GradientStatistics:
    """Norms and finiteness of reduced gradients, equal on all replicas.

    They are computed on demand: a norm that no caller reads costs nothing.

    Args:
        sums: List of reduced gradients, as `StateLayout.reduce` returns, one item for
            each parameter group.
        loss: Scalar tensor, the loss of the global batch, or `None`. Defaults to
            `None`.
    """

    def __init__(self, sums: list, loss: tf.Tensor | None = None) -> None:
        self.sums = sums
        self.loss = loss

    def is_finite(self) -> tf.Tensor:
        """Return a scalar bool tensor: whether no gradient has infinity or NaN."""
        return tf.reduce_all([item.all_finite() for item in self.sums])

    def squared_norm(self) -> tf.Tensor:
        """Return the sum of the squares of all gradients' elements: scalar, float32."""
        return squared_norm(self._gradients())

    def squared_norm_of_each(self) -> list[tf.Tensor]:
        """Return scalar float32 tensors, the squared norm of each gradient."""
        return [squared_norm([gradient]) for gradient in self._gradients()]

    def non_finite(self) -> list[tf.Tensor]:
        """Return scalar bool tensors: whether each gradient has infinity or NaN."""
        return [not_finite(gradient) for gradient in self._gradients()]

    def _gradients(self) -> list:
        """Return the reduced gradients of all groups in one list."""
        return [item for sums in self.sums for item in sums.gradients()]


def squared_norm(gradients: Sequence[Any]) -> tf.Tensor:
    """Return the sum of the squares of all gradients' elements: scalar, float32.

    Args:
        gradients: Sequence of tensors and `tf.IndexedSlices`; rows with the same index
            are summed before they are squared.
    """
    squares = [
        tf.square(tf.cast(tf.convert_to_tensor(g), tf.float32)) for g in gradients
    ]
    return tf.add_n([tf.reduce_sum(square) for square in squares])
