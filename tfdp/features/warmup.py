"""Warmup of the learning rate, computed in the graph from the update counter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.ground._compat import keras_optimizer, tf_distribute
from tfdp.ground.base.param_groups import ParamGroup, innermost, rate_is_in_slots
from tfdp.training.optimizer.features import installed
from tfdp.training.step.step import Schedule, StepFeature


@dataclasses.dataclass(frozen=True)
class WarmupOptions:
    """Length and factors of a learning-rate warmup.

    Args:
        steps: Int, the number of updates until the last factor is reached.
        first: Float, factor of the base rate at the first update.
        last: Float, factor of the base rate after `steps` updates.
        start: Int, the number of updates before the warmup. Defaults to 0.
        momentum_correction: Bool, whether momentum that contains the rate is
            rescaled when the rate changes. Defaults to `True`.
    """

    steps: int
    first: float
    last: float
    start: int = 0
    momentum_correction: bool = True


class Warmup(StepFeature):
    """Learning-rate warmup, whose settings are variables that steps read.

    A change of the settings therefore needs no new trace of the step.

    Args:
        make_variable: Callable that creates a Keras variable of the optimizer.
        momentum_correction: Bool, see `WarmupOptions`.

    Attributes:
        options: `WarmupOptions`, or `None` outside a warmup.
        is_over: Bool, whether a warmup has ended; a second one does not start then.
    """

    def __init__(self, make_variable: Callable, momentum_correction: bool) -> None:
        self.momentum_correction = momentum_correction
        self.options: WarmupOptions | None = None
        self.is_over = False
        self._settings = [
            make_variable(
                shape=(), dtype="float64", initializer="ones", name=f"warmup_{name}"
            )
            for name in ("steps", "start", "first_factor", "last_factor")
        ]

    @property
    def variables(self) -> list:
        """List of the Keras variables of `steps`, `start`, `first` and `last`."""
        return list(self._settings)

    def set(self, options: WarmupOptions | None) -> None:
        """Start or change a warmup; `None` ends it, with the base rate unchanged."""
        self.options = options
        new = options or WarmupOptions(1, 1.0, 1.0)
        values = new.steps, new.start, new.first, new.last
        for variable, value in zip(self._settings, values, strict=True):
            variable.assign(value)

    def leave(self, optimizer: Any) -> None:
        """End a warmup whose last factor the learning rate contains already.

        `finish` has multiplied the rate by the factor, or the rate was restored from
        after the warmup. With a schedule, which cannot contain the factor, the warmup
        stays active.

        Args:
            optimizer: `DistributedOptimizer`.
        """
        self.is_over = True
        if _has_rate_variables(optimizer):
            self.set(None)

    def schedule(self, group: ParamGroup) -> Schedule:
        """Implements `StepFeature.schedule`: multiply the rate by the warmup's factor.

        Returns:
            `Schedule`: the group's own learning rate times the factor at this update;
            and the ratio that rescales momentum, or `None` without a correction.
        """
        optimizer = group.optimizer
        rate = tf.convert_to_tensor(optimizer.learning_rate)
        updates = tf.convert_to_tensor(optimizer.iterations)
        corrects = self.momentum_correction and rate_is_in_slots(optimizer)
        return Schedule(
            rate * tf.cast(self.factor(updates), rate.dtype),
            self.growth(updates) if corrects else None,
        )

    def factor(self, update: tf.Tensor) -> tf.Tensor:
        """Return the factor of the base rate, a scalar float64 tensor.

        Args:
            update: Scalar int tensor, the number of updates so far.
        """
        steps, start, first, last = (
            tf_distribute.local_part(variable).read_value()
            for variable in self._settings
        )
        update = tf.maximum(tf.cast(update, tf.float64) - start, 0.0)
        # A weighted sum of both factors is exact at both ends, in spite of rounding,
        # unlike `first + done * (last - first)`.
        done = tf.minimum(update / steps, 1.0)
        return (1.0 - done) * first + done * last

    def growth(self, update: tf.Tensor) -> tf.Tensor:
        """Return the factor divided by the previous update's, a scalar float64 tensor.

        Momentum that contains the rate is rescaled by this ratio. It is 1 if the
        previous factor is 0.

        Args:
            update: Scalar int tensor, the number of updates so far.
        """
        start = tf_distribute.local_part(self._settings[1]).read_value()
        # When a warmup begins after earlier updates, momentum contains the base rate,
        # so the previous factor is 1.
        begins = (tf.cast(update, start.dtype) == start) & (start > 0)
        one = tf.ones([], tf.float64)
        before = tf.where(begins, one, self.factor(tf.maximum(update - 1, 0)))
        now = self.factor(update)
        return tf.where(before > 0, tf.math.divide_no_nan(now, before), one)


def options_of(optimizer: Any) -> WarmupOptions | None:
    """Return the options of an optimizer's active warmup, or `None` if it has none."""
    warmup = installed(optimizer, Warmup)
    return None if warmup is None else warmup.options


def start(optimizer: Any, options: WarmupOptions) -> Warmup:
    """Start a learning-rate warmup, or change the running one, and return it.

    Args:
        optimizer: `DistributedOptimizer`.
        options: `WarmupOptions`.
    """
    corrects = options.momentum_correction
    warmup = optimizer.features.install(Warmup, momentum_correction=corrects)
    warmup.set(options)
    return warmup


def finish(optimizer: Any) -> bool:
    """End the warmup if its last update was made; called outside a step.

    A learning rate that is a variable is set to the product of the base rate and the
    last factor. A schedule stays multiplied by the last factor.

    Args:
        optimizer: `DistributedOptimizer`.

    Returns:
        Bool, whether the warmup is over.
    """
    options = options_of(optimizer)
    if options is None:
        return True
    if int(optimizer.iterations.numpy()) <= options.start + options.steps:
        return False
    if _has_rate_variables(optimizer):
        for part in innermost(optimizer.inner_optimizer):
            part.learning_rate = float(part.learning_rate.numpy()) * options.last
    installed(optimizer, Warmup).leave(optimizer)
    return True


def _has_rate_variables(optimizer: Any) -> bool:
    """Return whether all learning rates are variables, not schedules."""
    parts = innermost(optimizer.inner_optimizer)
    return all(keras_optimizer.has_rate_variable(part) for part in parts)
