"""Gradient accumulation: the gradients of several micro-batches make one update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp.ground import _compat
from tfdp.ground.base.param_groups import path_of
from tfdp.training.reduction.fusion import weighted, wide_dtype
from tfdp.training.step.state_layout import reduce_groups


@dataclasses.dataclass(frozen=True)
class Totals:
    """Gradients that were taken in since the last update.

    Args:
        gradients: List of tensors and `tf.IndexedSlices`, this replica's own, one for
            each variable of the step; or `None` where they are reduced already.
        sums: List of reduced gradients, one for each parameter group, or `None`.
        count: Scalar int tensor, the micro-batches that are in them, or `None` for one.
        weight: Scalar tensor that the gradients are still to be multiplied by, or
            `None`.
    """

    gradients: list | None = None
    sums: list | None = None
    count: tf.Tensor | None = None
    weight: tf.Tensor | None = None


class Accumulator:
    """Stage 1 of a step: takes in gradients until an update is due.

    Args:
        weight: Scalar tensor, the weight of this replica, or `None`.
    """

    # By default gradients are added up there.
    _state: AccumulationState

    def __init__(self, weight: tf.Tensor | None) -> None:
        self._weight = weight

    def take(
        self, gradients: list | None
    ) -> tuple[Callable[[], Totals], tf.Tensor | None]:
        """Take in the gradients of a micro-batch, each with the replica's weight.

        Args:
            gradients: List, one for each variable of the step, or `None` to make an
                update of what was accumulated.

        Returns:
            Tuple of a callable, which returns `Totals` and starts again from zero, and
            a scalar bool tensor, whether an update is due; `None` if it always is.
            The tensor is alike on all replicas.
        """
        if gradients is None:
            return self._release, None
        # Rows of different micro-batches have no common form.
        added = [tf.convert_to_tensor(gradient) for gradient in gradients]
        if self._weight is not None:
            added = [weighted(gradient, self._weight) for gradient in added]
        self._add(added)
        return self._release, self._is_due()

    def take_nothing(self) -> tuple[Callable[[], Any], tf.Tensor | bool]:
        """Take in no data, see `tfdp.training.step.empty_step`.

        Returns:
            Tuple of a callable, which starts again from zero, and a scalar bool tensor,
            whether Keras would make an update without gradients. By default what waits
            is kept for the batches that follow.
        """
        return lambda: None, False

    def _add(self, gradients: list[tf.Tensor]) -> None:
        raise NotImplementedError

    def _is_due(self) -> tf.Tensor:
        return self._state.is_complete()

    def _release(self) -> Totals:
        raise NotImplementedError


class NoAccumulation(Accumulator):
    """Each micro-batch makes an update."""

    def take(self, gradients: list | None) -> tuple[Callable[[], Totals], None]:
        """Hand the gradients on; buckets are weighted when they are reduced."""
        return lambda: Totals(gradients, weight=self._weight), None

    def take_nothing(self) -> tuple[Callable[[], Any], bool]:
        """An update is always due."""
        return lambda: None, True


class AccumulationState:
    """Sums of gradients since the last update, as variables of the optimizer.

    Args:
        make_variable: Callable that creates a Keras variable of the optimizer.
        variables: Sequence of what is accumulated for: a path or a name, shape and
            dtype each.
        steps: Int, micro-batches of an update.
    """

    def __init__(
        self, make_variable: Any, variables: Sequence[Any], steps: int
    ) -> None:
        self.steps = make_variable(
            shape=(),
            dtype="int",
            # No assignment: the first step may be under way, being traced.
            initializer=keras.initializers.Constant(steps),
            name="accumulation_steps",
        )
        self.count = make_variable(
            shape=(), dtype="int", initializer="zeros", name="accumulated_steps"
        )
        self.sums = wide_zeros(make_variable, variables, "gradient_sum")

    @property
    def variables(self) -> list:
        """Its Keras variables."""
        return [self.steps, self.count, *self.sums]

    def add(self, gradients: Sequence[Any], positions: Sequence[int]) -> None:
        """Add the gradients of a micro-batch.

        Args:
            gradients: Sequence of dense tensors.
            positions: Sequence of ints, the position of each one's sum.
        """
        for gradient, position in zip(gradients, positions, strict=True):
            total = _compat.local_part(self.sums[position])
            total.assign_add(tf.cast(gradient, total.dtype), read_value=False)
        _compat.local_part(self.count).assign_add(1, read_value=False)

    def is_complete(self) -> tf.Tensor:
        """Scalar bool tensor, whether the micro-batches of an update are there.

        The counters are alike on all replicas, so that all agree.
        """
        return _read(self.count) >= _read(self.steps)

    def release(self, positions: Sequence[int]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Read the sums and the number of micro-batches; start again from zero."""
        sums = [_read(self.sums[position]) for position in positions]
        count = _read(self.count)
        with tf.control_dependencies([*sums, count]):
            self.reset()
        return sums, count

    def rescale(self, factor: float) -> None:
        """Multiply the sums, outside a step, when the loss scale is changed."""
        for variable in self.sums:
            _compat.copy_local_parts(variable, variable, factor)

    def rescale_own(self, factor: tf.Tensor) -> None:
        """Multiply this replica's sums, within a step, when its loss scale changes.

        Args:
            factor: Scalar tensor.
        """
        for variable in self.sums:
            part = _compat.local_part(variable)
            value = part.read_value() * tf.cast(factor, part.dtype)
            part.assign(value, read_value=False)

    def reset(self) -> None:
        """Set sums and counter to zero."""
        for variable in (*self.sums, self.count):
            _set_to_zero(variable)


class LocalAccumulation(Accumulator):
    """Each replica adds up its own gradients; nothing is communicated.

    Args:
        state: `AccumulationState`.
        positions: List of ints, the position of each gradient's sum.
        weight: Scalar tensor, the weight of this replica, or `None`.
        num_groups: Int, the replicas or nodes that step alone: what each adds up is a
            part of the mean over all, as files hold it, and an update is of its own
            mean. Defaults to 1.
    """

    def __init__(
        self,
        state: AccumulationState,
        positions: list[int],
        weight: tf.Tensor | None,
        num_groups: int = 1,
    ) -> None:
        if num_groups > 1:
            one = tf.ones([], tf.float64) if weight is None else weight
            weight = one / num_groups
        super().__init__(weight)
        self._state, self._positions = state, positions
        self._num_groups = num_groups

    def _add(self, gradients: list[tf.Tensor]) -> None:
        self._state.add(gradients, self._positions)

    def _release(self) -> Totals:
        sums, count = self._state.release(self._positions)
        return Totals([total * self._num_groups for total in sums], count=count)


class ShardedAccumulation(Accumulator):
    """Each replica adds up its slices of the reduced gradients (ZeRO-2).

    Args:
        state: `AccumulationState` of slices.
        layout: `ShardedLayout`.
        param_groups: List of `ParamGroup`.
        variables: List of the variables of the step.
        weight: Scalar tensor, the weight of this replica, or `None`.

    Source: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054.
    """

    def __init__(
        self,
        state: AccumulationState,
        layout: Any,
        param_groups: list,
        variables: list,
        weight: tf.Tensor | None,
    ) -> None:
        super().__init__(weight)
        self._state, self._layout = state, layout
        self._param_groups, self._variables = param_groups, variables

    def _add(self, gradients: list[tf.Tensor]) -> None:
        reduced = reduce_groups(
            self._layout, self._param_groups, self._variables, gradients
        )
        self._state.add(*self._layout.slices_of(self._param_groups, reduced))

    def _release(self) -> Totals:
        slices, count = self._state.release(range(len(self._state.sums)))
        sums = self._layout.from_slices(self._param_groups, self._variables, slices)
        return Totals(sums=sums, count=count)


class KerasAccumulation(Accumulator):
    """Accumulation by a Keras optimizer's own variables, which files hold.

    Args:
        optimizer: Keras optimizer with `gradient_accumulation_steps`.
        variables: List of the variables of the step.
        weight: Scalar tensor, the weight of this replica, or `None`.
    """

    def __init__(
        self, optimizer: Any, variables: list, weight: tf.Tensor | None
    ) -> None:
        super().__init__(weight)
        sums = _compat.accumulators_of(optimizer)
        positions = [_compat.index_in(optimizer, variable) for variable in variables]
        self._sums = [_compat.local_part(sums[position]) for position in positions]
        self._all = [variable for variable in sums if variable is not None]
        self._steps = optimizer.gradient_accumulation_steps
        self._scale = optimizer.loss_scale_factor
        self._counter = _compat.micro_batch_counter(optimizer)

    def take_nothing(self) -> tuple[Callable[[], Any], tf.Tensor]:
        """Lose what waits where an update is due, as in Keras."""
        return self._release, self._is_due()

    def _add(self, gradients: list[tf.Tensor]) -> None:
        """Add unscaled gradients to the sums, as Keras does."""
        for gradient, total in zip(gradients, self._sums, strict=True):
            added = gradient if self._scale is None else gradient / self._scale
            total.assign_add(tf.cast(added, total.dtype), read_value=False)

    def _is_due(self) -> tf.Tensor:
        return tf.equal((_read(self._counter) + 1) % self._steps, 0)

    def _release(self) -> Totals:
        sums = [total.read_value() for total in self._sums]
        with tf.control_dependencies(sums):
            for variable in self._all:
                _set_to_zero(variable)
        return Totals(sums, count=tf.constant(self._steps))


def _read(variable: Any) -> tf.Tensor:
    return _compat.local_part(variable).read_value()


def _set_to_zero(variable: Any) -> None:
    part = _compat.local_part(variable)
    part.assign(tf.zeros(part.shape, part.dtype), read_value=False)


def wide_zeros(make_variable: Any, variables: Sequence[Any], suffix: str) -> list:
    """Make a variable of zeros for each of others, in a dtype to sum them in."""
    return [
        make_variable(
            shape=variable.shape,
            dtype=wide_dtype(variable.dtype),
            initializer="zeros",
            name=f"{path_of(variable).replace('/', '_')}_{suffix}",
        )
        for variable in variables
    ]
