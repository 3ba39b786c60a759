"""Gradient accumulation: one update from the gradients of several micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp.ground._compat import keras_optimizer, optimizer_state, tf_distribute
from tfdp.ground.base.param_groups import path_of
from tfdp.training.reduction.fusion import weighted, wide_dtype
from tfdp.training.step.state_layout import reduce_groups


@dataclasses.dataclass(frozen=True)
class Totals:
    """Gradients that were accumulated since the last update.

    Args:
        gradients: List of this replica's tensors and `tf.IndexedSlices`, one for each
            variable of the step; or `None` if the gradients are reduced already.
        sums: List of gradients summed over replicas, one item for each parameter group;
            or `None` if the gradients are not reduced yet.
        count: Scalar int tensor, the number of micro-batches, or `None` for one.
        weight: Scalar tensor, a factor that the gradients are not multiplied by yet, or
            `None` for 1.
    """

    gradients: list | None = None
    sums: list | None = None
    count: tf.Tensor | None = None
    weight: tf.Tensor | None = None


class Accumulator:
    """First stage of a step: accumulates gradients until an update is due.

    Args:
        weight: Scalar tensor, a factor of this replica's gradients, or `None` for 1.
    """

    # `_is_due` reads these sums by default. A subclass with other sums does not set
    # them, and overrides `_is_due`.
    _state: AccumulationState

    def __init__(self, weight: tf.Tensor | None) -> None:
        self._weight = weight

    def accumulate(
        self, gradients: list | None
    ) -> tuple[Callable[[], Totals], tf.Tensor | None]:
        """Add the gradients of a micro-batch, times the replica's weight.

        Args:
            gradients: List of gradients, one for each variable of the step, or `None`
                to update with the gradients accumulated so far.

        Returns:
            Tuple of a callable and a scalar bool tensor. The callable returns `Totals`
            and resets the sums. The tensor, equal on all replicas, is whether an update
            is due; it is `None` if an update is always due.
        """
        if gradients is None:
            return self._release, None
        # The rows of sparse gradients differ between micro-batches, so their sums are
        # dense tensors.
        added = [tf.convert_to_tensor(gradient) for gradient in gradients]
        if self._weight is not None:
            added = [weighted(gradient, self._weight) for gradient in added]
        self._add(added)
        return self._release, self._is_due()

    def handle_empty_step(self) -> tuple[Callable[[], Any], tf.Tensor | bool]:
        """Return what to do in Keras's empty step, a step without data.

        Keras makes it at the end of data of unknown length, see
        `tfdp.training.step.empty_step`.

        Returns:
            Tuple of a callable that resets the sums, and a bool or scalar bool tensor,
            whether Keras makes an update without gradients in this step.
            `take_empty_step` then calls the callable, and makes that update. By default
            there is none, and accumulated gradients are kept for the next batches.
        """
        return lambda: None, False

    def _add(self, gradients: list[tf.Tensor]) -> None:
        """Add weighted gradients, one for each variable of the step, to the sums."""
        raise NotImplementedError

    def _is_due(self) -> tf.Tensor:
        """Return a scalar bool tensor: whether this micro-batch completes an update."""
        return self._state.is_complete()

    def _release(self) -> Totals:
        """Return the accumulated gradients as `Totals`, and reset the sums."""
        raise NotImplementedError


class NoAccumulation(Accumulator):
    """Accumulator for updates of one micro-batch: each micro-batch has an update."""

    def accumulate(self, gradients: list | None) -> tuple[Callable[[], Totals], None]:
        """Pass on the gradients of a micro-batch, for an update of them alone.

        Args:
            gradients: List of gradients, one for each variable of the step. It is never
                `None` here, since no earlier gradients are accumulated.

        Returns:
            Tuple of a callable that returns `Totals` of the gradients, with the weight
            of the replica, which the reduction applies; and `None`: an update is due.
        """
        return lambda: Totals(gradients, weight=self._weight), None

    def handle_empty_step(self) -> tuple[Callable[[], Any], bool]:
        """Return what to do in a step without data: reset nothing, and update.

        Returns:
            Tuple of a callable that does nothing, and `True`: an update is always due.
        """
        return lambda: None, True


class AccumulationState:
    """Sums of gradients since the last update, stored as variables of the optimizer.

    Args:
        make_variable: Callable that creates a Keras variable of the optimizer.
        variables: Sequence of objects with a path or name, a shape and a dtype: one for
            each sum, such as the trained variables.
        steps: Int, the number of micro-batches of an update.
    """

    def __init__(
        self, make_variable: Any, variables: Sequence[Any], steps: int
    ) -> None:
        self.steps = make_variable(
            shape=(),
            dtype="int",
            # An assignment in place of the initializer would become a part of the step
            # that is being traced, if any.
            initializer=keras.initializers.Constant(steps),
            name="accumulation_steps",
        )
        self.count = make_variable(
            shape=(), dtype="int", initializer="zeros", name="accumulated_steps"
        )
        self.sums = wide_zeros(make_variable, variables, "gradient_sum")

    @property
    def variables(self) -> list:
        """List of Keras variables: `steps`, the micro-batches so far, and the sums."""
        return [self.steps, self.count, *self.sums]

    def add(self, gradients: Sequence[Any], positions: Sequence[int]) -> None:
        """Add the gradients of a micro-batch to the sums, and count the micro-batch.

        Args:
            gradients: Sequence of dense tensors.
            positions: Sequence of ints, the position of each gradient's sum.
        """
        for gradient, position in zip(gradients, positions, strict=True):
            total = tf_distribute.local_part(self.sums[position])
            total.assign_add(tf.cast(gradient, total.dtype), read_value=False)
        tf_distribute.local_part(self.count).assign_add(1, read_value=False)

    def is_complete(self) -> tf.Tensor:
        """Return whether all micro-batches of an update are accumulated: scalar, bool.

        The counters are equal on all replicas, so all replicas agree.
        """
        return read(self.count) >= read(self.steps)

    def release(self, positions: Sequence[int]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Return sums and the number of micro-batches; reset the state on this replica.

        Args:
            positions: Sequence of ints, the positions of the sums to return. All other
                sums are reset without being returned.

        Returns:
            Tuple of the list of sums and a scalar int tensor.
        """
        sums = [read(self.sums[position]) for position in positions]
        count = read(self.count)
        with tf.control_dependencies([*sums, count]):
            self.reset()
        return sums, count

    def rescale(self, factor: float) -> None:
        """Multiply all replicas' sums, outside a step, when the loss scale changes.

        Args:
            factor: Float, the factor of the sums.
        """
        for variable in self.sums:
            tf_distribute.copy_local_parts(variable, variable, factor)

    def rescale_own(self, factor: tf.Tensor) -> None:
        """Multiply this replica's sums, within a step, when its loss scale changes.

        Args:
            factor: Scalar tensor, the factor of the sums.
        """
        for variable in self.sums:
            part = tf_distribute.local_part(variable)
            value = part.read_value() * tf.cast(factor, part.dtype)
            part.assign(value, read_value=False)

    def reset(self) -> None:
        """Set this replica's sums, and its count of micro-batches, to zero."""
        for variable in (*self.sums, self.count):
            set_to_zero(variable)


class LocalAccumulation(Accumulator):
    """Accumulation of each replica's gradients, without communication.

    Args:
        state: `AccumulationState`.
        positions: List of ints, the position of each gradient's sum.
        weight: Scalar tensor, a factor of this replica's gradients, or `None` for 1.
        num_groups: Int, the number of groups of replicas that update independently.
            Sums are divided by it, so the sums of all replicas, which files contain,
            add up to the global mean. An update multiplies them by it again. Defaults
            to 1.
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
        """Add this replica's gradients to its own sums."""
        self._state.add(gradients, self._positions)

    def _release(self) -> Totals:
        """Return this replica's accumulated gradients as `Totals`, and reset them.

        They were divided by the number of groups of replicas that update independently,
        so they are multiplied by it here.
        """
        sums, count = self._state.release(self._positions)
        return Totals([total * self._num_groups for total in sums], count=count)


class ShardedAccumulation(Accumulator):
    """Accumulation of each replica's slices of the reduced gradients (ZeRO-2).

    Args:
        state: `AccumulationState` of slices.
        layout: `ShardedLayout`, which reduce-scatters gradients into slices.
        param_groups: List of `ParamGroup`.
        variables: List of the variables of the step.
        weight: Scalar tensor, a factor of this replica's gradients, or `None` for 1.

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
        """Reduce-scatter gradients, and add the slices to the sums."""
        reduced = reduce_groups(
            self._layout, self._param_groups, self._variables, gradients
        )
        self._state.add(*self._layout.slices_of(self._param_groups, reduced))

    def _release(self) -> Totals:
        """Return the summed slices as reduced gradients, and reset the sums."""
        slices, count = self._state.release(range(len(self._state.sums)))
        sums = self._layout.from_slices(self._param_groups, self._variables, slices)
        return Totals(sums=sums, count=count)


class KerasAccumulation(Accumulator):
    """Accumulation in the variables that Keras creates for it in an optimizer.

    Args:
        optimizer: Keras optimizer with `gradient_accumulation_steps`.
        variables: List of the variables of the step.
        weight: Scalar tensor, a factor of this replica's gradients, or `None` for 1.
    """

    def __init__(
        self, optimizer: Any, variables: list, weight: tf.Tensor | None
    ) -> None:
        super().__init__(weight)
        sums = optimizer_state.accumulators_of(optimizer)
        positions = keras_optimizer.positions_in(optimizer, variables)
        self._sums = [tf_distribute.local_part(sums[i]) for i in positions]
        self._all_sums = [variable for variable in sums if variable is not None]
        self._steps = optimizer.gradient_accumulation_steps
        self._scale = optimizer.loss_scale_factor
        self._counter = optimizer_state.micro_batch_counter(optimizer)

    def handle_empty_step(self) -> tuple[Callable[[], Any], tf.Tensor]:
        """Return a callable that resets the sums, and a bool tensor: whether to update.

        If one is due by Keras's counter, the step without data resets the sums.
        """
        return self._release, self._is_due()

    def _add(self, gradients: list[tf.Tensor]) -> None:
        """Add unscaled gradients to the sums, as Keras does."""
        for gradient, total in zip(gradients, self._sums, strict=True):
            added = gradient if self._scale is None else gradient / self._scale
            total.assign_add(tf.cast(added, total.dtype), read_value=False)

    def _is_due(self) -> tf.Tensor:
        """Return whether this micro-batch completes an update, by Keras's counter."""
        return tf.equal((read(self._counter) + 1) % self._steps, 0)

    def _release(self) -> Totals:
        """Return the sums with the number of micro-batches, and reset the sums."""
        sums = [total.read_value() for total in self._sums]
        with tf.control_dependencies(sums):
            for variable in self._all_sums:
                set_to_zero(variable)
        return Totals(sums, count=tf.constant(self._steps))


def read(variable: Any) -> tf.Tensor:
    """Return the value of a variable on the calling replica."""
    return tf_distribute.local_part(variable).read_value()


def set_to_zero(variable: Any) -> None:
    """Set a variable to zeros on the calling replica."""
    part = tf_distribute.local_part(variable)
    part.assign(tf.zeros(part.shape, part.dtype), read_value=False)


def wide_zeros(make_variable: Any, variables: Sequence[Any], suffix: str) -> list:
    """Return a list of new variables of zeros, one for each of `variables`.

    They are in float32, or in the dtype of the given variable if that is wider.

    Args:
        make_variable: Callable that creates a Keras variable of the optimizer.
        variables: Sequence of objects with a path or name, a shape and a dtype.
        suffix: String, the end of the new variables' names.
    """
    return [
        make_variable(
            shape=variable.shape,
            dtype=wide_dtype(variable.dtype),
            initializer="zeros",
            name=f"{path_of(variable).replace('/', '_')}_{suffix}",
        )
        for variable in variables
    ]
