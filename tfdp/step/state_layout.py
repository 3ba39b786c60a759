"""How variables and slots lie on the replicas: the seam for sharded state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfdp import _compat
from tfdp.base.ownership import own_step
from tfdp.base.param_groups import ParamGroup
from tfdp.reduction.gradient_noise import squared_norm
from tfdp.reduction.reduced_gradients import ReducedGradients
from tfdp.step.grouped_update import decay_and_update
from tfdp.step.loss_scale import not_finite


class Sums(Protocol):
    """Gradients of one part, summed over all replicas."""

    def divided_by(self, divisor: tf.Tensor) -> Any:
        """The same, each element divided by a scalar."""


class GradientStatistics(Protocol):
    """What a step has to know of the sums before it updates, alike on all replicas."""

    def is_finite(self) -> tf.Tensor:
        """Scalar bool tensor, whether no element is infinite or NaN."""

    def squared_norm(self) -> tf.Tensor:
        """Scalar tensor, the sum of the squares of all elements."""

    def non_finite(self) -> list[tf.Tensor]:
        """Scalar bool tensors, whether a variable's gradient is not finite."""


class StateLayout(Protocol):
    """What a step does with gradients, wherever the state lies."""

    def reduce(
        self,
        part: ParamGroup,
        gradients: list,
        variables: list,
        *,
        may_sum: bool,
        weight: tf.Tensor | None,
    ) -> Any:
        """Sums the gradients of a part over all replicas; returns `Sums`."""

    def examine(
        self, parts: Sequence[ParamGroup], sums: list, *, checks: bool, measures: bool
    ) -> GradientStatistics:
        """Looks at the sums of all parts.

        Args:
            parts: Sequence of `ParamGroup`.
            sums: List of what `reduce` returned for each.
            checks: Bool, whether it matters if they are finite.
            measures: Bool, whether their norm matters.
        """

    def own_squares(self, parts: Sequence[ParamGroup], sums: list) -> tf.Tensor:
        """This replica's part of the squared norm: all replicas' add up to it.

        Args:
            parts: Sequence of `ParamGroup`.
            sums: List of what `reduce` returned for each.

        Returns:
            Scalar float32 tensor.
        """

    def clip(self, part: ParamGroup, sums: Any, statistics: Any) -> Any:
        """Clips the gradients of a part as its optimizer was asked to."""

    def scale_momentum(self, part: ParamGroup, growth: Any) -> None:
        """Multiplies the momentum of a part that contains the learning rate."""

    def update(
        self, part: ParamGroup, gradients: Any, variables: list, rate: Any
    ) -> None:
        """Decays and updates the variables of a part."""

    def average(self, part: ParamGroup) -> None:
        """Moves the averages of a part's variables towards their values."""

    def overwrite_with_average(self, part: ParamGroup) -> None:
        """Gives the variables of a part the values of their averages."""


class SlicedLayout(Protocol):
    """What a step asks besides where it accumulates slices of sums (ZeRO-2)."""

    def held(
        self, parts: Sequence[ParamGroup], sums: list
    ) -> tuple[list[tf.Tensor], list[int]]:
        """What is accumulated of sums, and which accumulators take it."""

    def with_held(
        self,
        parts: Sequence[ParamGroup],
        variables: Sequence[Any],
        tensors: list[tf.Tensor],
    ) -> list:
        """Sums made of what was accumulated, the inverse of `held`."""


class WholeVariables:
    """Every replica holds every variable and slot, as Keras makes them.

    Args:
        reducer: `GradientReducer`.
    """

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def reduce(
        self,
        part: ParamGroup,
        gradients: list,
        variables: list,
        *,
        may_sum: bool,
        weight: tf.Tensor | None,
    ) -> ReducedGradients:
        """By an all-reduce of each bucket."""
        del part
        return self._reducer.reduce_gradients(
            gradients, variables, may_sum=may_sum, weight=weight
        )

    def examine(
        self, parts: Sequence[ParamGroup], sums: list, *, checks: bool, measures: bool
    ) -> GradientStatistics:
        """Every replica has all sums; what is asked for is computed then."""
        del parts, checks, measures
        return _WholeGradientStatistics(sums)

    def own_squares(self, parts: Sequence[ParamGroup], sums: list) -> tf.Tensor:
        """An equal part: every replica has all sums."""
        del parts
        gradients = [item for part in sums for item in part.gradients()]
        return squared_norm(gradients) / self._reducer.num_replicas

    def clip(self, part: ParamGroup, sums: ReducedGradients, statistics: Any) -> list:
        """Clips as Keras does, on the sums of all replicas."""
        del statistics
        with own_step():
            return _compat.clip_gradients(part.optimizer, sums.gradients())

    def scale_momentum(self, part: ParamGroup, growth: Any) -> None:
        """Multiplies every momentum.

        Source: Goyal et al. 2017, https://arxiv.org/abs/1706.02677, remark 2.
        """
        slots = [
            _compat.local_part(m) for m in part.optimizer.momentums if m is not None
        ]

        def scale() -> tf.Tensor:
            for slot in slots:
                slot.assign(slot * tf.cast(growth, slot.dtype), read_value=False)
            return tf.constant(True)

        # After the warmup it costs nothing.
        tf.cond(tf.equal(growth, 1.0), lambda: tf.constant(False), scale)

    def update(
        self, part: ParamGroup, gradients: list, variables: list, rate: Any
    ) -> None:
        """Decays and updates as Keras does, small variables together."""
        decay_and_update(part.optimizer, gradients, variables, rate)

    def average(self, part: ParamGroup) -> None:
        """As Keras does."""
        _compat.update_moving_average(part.optimizer)

    def overwrite_with_average(self, part: ParamGroup) -> None:
        """As Keras does."""
        _compat.overwrite_with_moving_average(part.optimizer)


class _WholeGradientStatistics:
    """Computed where it is asked for: a norm that nobody needs costs nothing."""

    def __init__(self, sums: list[ReducedGradients]) -> None:
        self._sums = sums

    def is_finite(self) -> tf.Tensor:
        return tf.reduce_all([item.all_finite() for item in self._sums])

    def squared_norm(self) -> tf.Tensor:
        return squared_norm(self._gradients())

    def non_finite(self) -> list[tf.Tensor]:
        return [not_finite(gradient) for gradient in self._gradients()]

    def _gradients(self) -> list:
        return [item for sums in self._sums for item in sums.gradients()]
