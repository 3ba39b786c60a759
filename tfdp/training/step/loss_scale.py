"""Loss scaling: keeps small float16 gradients above zero and skips overflows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp.ground._compat import tf_distribute
from tfdp.ground.arguments import checked_integer, checked_number
from tfdp.ground.base.context import replica_context
from tfdp.training.reduction.gradient_reducer import GradientReducer

# If gradients overflow at the smallest scale, no other scale helps. After this many
# consecutive skipped steps an error says that training has failed.
MAX_SKIPS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScaling:
    """Settings of loss scaling.

    Args:
        initial_scale: Float, the initial scale. Defaults to `2**15`.
        growth_steps: Int, the number of updates without overflow after which the scale
            doubles, or `None` for a scale that never changes. Defaults to 2000.
        min_scale: Float, the smallest scale that halving may reach. Defaults to 1.

    Raises:
        ValueError: If a value is not positive, or `min_scale` is above `initial_scale`.

    Example:

    >>> LossScaling(initial_scale=1024.0).growth_steps
    2000

    Source: Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740.
    """

    initial_scale: float = 2.0**15
    growth_steps: int | None = 2000
    min_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("initial_scale", "min_scale"):
            argument = getattr(self, name)
            value = checked_number(name, argument, "a positive number", above=0)
            object.__setattr__(self, name, value)
        if self.min_scale > self.initial_scale:
            raise ValueError(
                "`min_scale` must not be above `initial_scale`. Received: "
                f"min_scale={self.min_scale}, initial_scale={self.initial_scale}"
            )
        if self.growth_steps is not None:
            steps = checked_integer("growth_steps", self.growth_steps, 1)
            object.__setattr__(self, "growth_steps", steps)

    @property
    def is_dynamic(self) -> bool:
        """Bool, whether the scale changes during training."""
        return self.growth_steps is not None


class LossScale:
    """Loss scale of an optimizer with its counters, stored as variables.

    Args:
        make_variable: Callable that creates a Keras variable of the optimizer.
        num_variables: Int, number of trained variables.
        options: `LossScaling`.
    """

    def __init__(
        self, make_variable: Any, num_variables: int, options: LossScaling
    ) -> None:
        self.options = options

        def counter(name: str, shape: tuple[int, ...] = ()) -> Any:
            """Create an integer Keras variable of zeros, and return it."""
            return make_variable(
                shape=shape, dtype="int", initializer="zeros", name=name
            )

        self.value = make_variable(
            shape=(),
            dtype="float32",
            initializer=keras.initializers.Constant(options.initial_scale),
            name="loss_scale",
        )
        self.good_steps = counter("good_steps")
        self.skipped_steps = counter("skipped_steps")
        self.skips_at_minimum = counter("skips_at_minimum")
        # For each trained variable, 1 if the last skipped step had a non-finite
        # gradient of it, so that an error can name these variables.
        self.non_finite = counter("non_finite", (num_variables,))

    @property
    def variables(self) -> list:
        """List of the Keras variables of the scale and its counters."""
        counters = [self.good_steps, self.skipped_steps, self.skips_at_minimum]
        return [self.value, *counters, self.non_finite]

    def read(self) -> tf.Tensor:
        """Return the scale on this replica, a scalar float32 tensor."""
        return _local(self.value).read_value()

    def record_success(self) -> None:
        """Count an update; double the scale after `growth_steps` without overflow."""
        _set(self.skips_at_minimum, 0)
        if self.options.growth_steps is None:
            return
        good = _local(self.good_steps).read_value() + 1
        grows = good >= self.options.growth_steps
        scale = self.read()
        # The scale stays finite, because halving an infinite scale would not reduce it.
        doubled = tf.where(tf.math.is_finite(scale * 2.0), scale * 2.0, scale)
        _set(self.value, tf.where(grows, doubled, scale))
        _set(self.good_steps, tf.where(grows, tf.zeros_like(good), good))

    def record_skip(
        self, non_finite: Sequence[tf.Tensor], positions: Sequence[int]
    ) -> None:
        """Count a step skipped for an overflow; halve the scale if it is dynamic.

        It does not fall below `min_scale`.

        Args:
            non_finite: Sequence of scalar bool tensors, whether a reduced gradient has
                infinite or NaN elements.
            positions: Sequence of ints, the position of each gradient's variable among
                all trained variables.
        """
        scale = self.read()
        is_least = True
        if self.options.is_dynamic:
            least = self.options.min_scale
            is_least = scale <= least
            _set(self.value, tf.minimum(scale, tf.maximum(scale * 0.5, least)))
        _set(self.good_steps, 0)
        _local(self.skipped_steps).assign_add(1)
        skips = _local(self.skips_at_minimum).read_value() + 1
        _set(self.skips_at_minimum, tf.where(is_least, skips, tf.zeros_like(skips)))
        culprits = [tf.cast(is_bad, skips.dtype) for is_bad in non_finite]
        size = self.non_finite.shape[0]
        where = [[position] for position in positions]
        _set(self.non_finite, tf.scatter_nd(where, culprits, [size]))

    def agree(self, reducer: GradientReducer) -> None:
        """Agree on one state with replicas that have updated independently.

        All replicas get the smallest scale, at which no replica has overflowed, and the
        largest number of skipped steps.

        Args:
            reducer: `GradientReducer` of all replicas.
        """
        reductions = [
            (self.value, tf.reduce_min),
            (self.good_steps, tf.reduce_min),
            (self.skips_at_minimum, tf.reduce_min),
            (self.skipped_steps, tf.reduce_max),
            (self.non_finite, tf.reduce_max),
        ]
        local = [
            _in_replica_row(variable, reducer.num_replicas)
            for variable, _ in reductions
        ]
        for (variable, reduce), rows in zip(
            reductions, reducer.sum(local), strict=True
        ):
            _set(variable, reduce(rows, axis=0))


def _in_replica_row(variable: Any, num_replicas: int) -> tf.Tensor:
    """Return float64 zeros `[num_replicas, ...]`, with a variable's value in one row.

    The row and the value are those of the calling replica.
    """
    context = replica_context()
    replica = 0 if context is None else context.replica_id_in_sync_group
    value = tf.cast(_local(variable).read_value(), tf.float64)
    row = tf.one_hot(replica, num_replicas, dtype=value.dtype)
    return tf.tensordot(row, value, axes=0)


def not_finite(gradient: Any) -> tf.Tensor:
    """Return a scalar bool tensor, whether a gradient has infinity or NaN."""
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    values = gradient.values if is_sparse else gradient
    return tf.logical_not(tf.reduce_all(tf.math.is_finite(values)))


def _local(variable: Any) -> Any:
    """Return the `tf.Variable` of a variable on the calling replica."""
    return tf_distribute.local_part(variable)


def _set(variable: Any, value: Any) -> None:
    """Cast a value to a variable's dtype, and assign it on the calling replica."""
    part = _local(variable)
    part.assign(tf.cast(value, part.dtype), read_value=False)
