"""Decision in a step on whether the loss or the gradient spikes.

The value of an update is reduced over all replicas already, so that all of them compare
the same number with the same statistics, and decide alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.ground._compat import tf_distribute
from tfdp.ground.base.conditions import run_if
from tfdp.ground.base.context import is_tfdp
from tfdp.ground.options import has_error_feedback
from tfdp.training.step.accumulation import Totals, read
from tfdp.training.step.state_layout import GradientStatistics
from tfdp.training.step.step import Step, StepFeature
from tfdp.training.step.undo import changed_outside_update, undo_after

# A finite value can be a spike only after this many accepted values, whose median is
# reliable enough; or after a whole window if the window is smaller.
MIN_VALUES = 20
# The step keeps its latest skipped updates in variables of this fixed size, which the
# host reads at the end of an epoch.
MAX_LOGGED = 256
# Largest number of batches that rollbacks exclude: the step finds their numbers in a
# variable of this fixed size. With more, `SpikeGuard` raises an error.
MAX_EXCLUDED = 1024
# An error message names at most this many variables, those with the largest gradients,
# as clues to the cause.
MAX_NAMED = 3
# The least deviation, as a fraction of the median: a nearly constant loss has hardly
# any deviation, so each small change would be a spike.
_MIN_DEVIATION = 0.01
# Ratio of a normal distribution's standard deviation to its median absolute deviation.
# The latter is measured, since spikes do not distort it.
_NORMAL = 1.4826


class StepGuard(StepFeature):
    """Hooks of a step that skip an update whose loss or gradient norm is a spike.

    Args:
        make_variable: Callable that creates a Keras variable of the optimizer.
        threshold: Float, standard deviations above the median from which a value is a
            spike; they are estimated by the median absolute deviation.
        window: Int, number of the last accepted values whose median is taken.
        on: String, `"loss"` or `"gradient_norm"`.
        action: String, `"skip"`, `"stop"` or `"rollback"`. Except with `"skip"`, all
            updates after a spike are left out until the host has stopped or rolled
            back.
    """

    label = "`SpikeGuard`"
    checks_finite = True

    def __init__(
        self,
        make_variable: Callable,
        threshold: float,
        window: int,
        on: str,
        action: str,
    ) -> None:
        self.threshold, self.window, self.on, self.action = (
            threshold,
            window,
            on,
            action,
        )
        self.measures_loss = on == "loss"
        self.measures_norm = on == "gradient_norm"

        def zeros(name: str, *shape: int, dtype: str = "int") -> Any:
            """Create a Keras variable of zeros, named `name` with prefix `spike_`."""
            return make_variable(
                shape=shape, dtype=dtype, initializer="zeros", name=f"spike_{name}"
            )

        # Ring buffer of the last accepted values, since a traced step needs a fixed
        # size: value `n` is at `n % window`.
        self.values = zeros("values", window, dtype="float32")
        self.num_values = zeros("num_values")
        self.num_batches = zeros("num_batches")
        self.num_skipped = zeros("num_skipped")
        self.num_in_a_row = zeros("num_in_a_row")
        # The host reports skipped updates from these two: the number of the last batch
        # of each update; and its loss or gradient norm, with the median of the accepted
        # values before it.
        self.skipped_batches = zeros("skipped_batches", MAX_LOGGED)
        self.skipped_values = zeros("skipped_values", MAX_LOGGED, 2, dtype="float32")
        # Positions of the variables with the largest gradients, counted from 1, since 0
        # marks an unused element.
        self.largest = zeros("largest", MAX_NAMED)
        # `waiting` is 0, or the number of the last batch of a spike that the host must
        # handle: until then, the step leaves out all updates. `num_of_update` is the
        # number of batches in the update of that spike.
        self.waiting = zeros("waiting")
        self.num_of_update = zeros("num_of_update")
        self.excluded = zeros("excluded", MAX_EXCLUDED)
        self._is_left_out = zeros("is_left_out")

    @property
    def variables(self) -> list:
        """List of the Keras variables of the guard."""
        others = [self.waiting, self.num_of_update, self.excluded, self._is_left_out]
        return [*self.counters.values(), *others]

    @property
    def counters(self) -> dict[str, Any]:
        """Dict of the variables that a backup saves, by name with the prefix `spike_`.

        They are the numbers of batches, accepted updates, skipped updates, and
        consecutive skips; the latest accepted values and skipped updates; and which
        variables had the largest gradients at the last skip.
        """
        names = (
            *("values", "num_values", "num_batches", "num_skipped", "num_in_a_row"),
            *("skipped_batches", "skipped_values", "largest"),
        )
        return {f"spike_{name}": getattr(self, name) for name in names}

    def check(self, optimizer: Any) -> None:
        """Raise if a skipped update could not restore the residuals of compression.

        Raises:
            ValueError: With sharded accumulators and a compressor with residuals.
        """
        strategy = tf.distribute.get_strategy()
        if not (is_tfdp(strategy) and optimizer.accumulates_sums):
            return
        levels = strategy.extended.reducer.options.compression_levels
        if optimizer.features.accumulation and any(map(has_error_feedback, levels)):
            raise ValueError(
                f"{self.label} cannot leave out an update whose micro-batches were "
                "reduced with residuals one by one, as with "
                f'`sharding={optimizer.sharding!r}`. Use `sharding="optimizer"`, '
                '`compression="bf16"` or "fp16", or one batch an update.'
            )

    def begin(self, *, has_batch: bool) -> None:
        """Implements `StepFeature.begin`: count a batch, and record if it is left out.

        It is left out if a rollback has excluded it, or until the callback has handled
        an earlier spike. `around_step` then undoes what its step changes besides the
        update.

        Args:
            has_batch: Bool, false in an update with the accumulated gradients alone,
                which changes nothing here.
        """
        if not has_batch:
            return
        _set(self.num_batches, read(self.num_batches) + 1)
        _set(self._is_left_out, self._is_excluded() | self._is_waiting())

    def _is_excluded(self) -> tf.Tensor:
        """Return a scalar bool tensor, true if a rollback has excluded this batch."""
        if self.action != "rollback":
            return tf.constant(False)
        return tf.reduce_any(read(self.excluded) == read(self.num_batches))

    def _is_waiting(self) -> tf.Tensor:
        """Return a scalar bool tensor, true while the callback must handle a spike."""
        return read(self.waiting) > 0

    def examine(
        self,
        step: Step,
        totals: Totals,
        divisor: tf.Tensor | None,
        statistics: GradientStatistics,
    ) -> tf.Tensor:
        """Implements `StepFeature.examine`: decide whether an update is made.

        The loss or the norm of an accepted update joins the window of `values`. For a
        spike, the batch, its value and the variables with the largest gradients are
        recorded. An overflow of the loss scale is not a spike, and is not recorded.

        Args:
            step: `Step`.
            totals: `Totals`, read for the number of micro-batches of the update.
            divisor: Not used here.
            statistics: `GradientStatistics` of the reduced gradients, with the loss if
                `on` is `"loss"`.

        Returns:
            Scalar bool tensor, whether the update is made.
        """
        is_finite = statistics.is_finite()
        if self.on == "loss":
            assert statistics.loss is not None
            value = tf.cast(statistics.loss, tf.float32)
        else:
            value = tf.sqrt(statistics.squared_norm())
        median, limit = self._median_and_limit()
        is_spike = ~is_finite | ~tf.math.is_finite(value) | (value > limit)
        is_spike |= self._is_excluded()
        is_waiting = self._is_waiting()
        counts = ~is_waiting
        if step.scale is not None:
            counts &= is_finite

        def skip() -> None:
            """Record an update that is left out.

            After a spike, unless `action` is `"skip"`, all updates are left out until
            the callback has handled it.
            """
            self._log(value, median)
            self._name_largest(step, statistics)
            if self.action != "skip":
                self._wait(totals)

        run_if(counts & is_spike, skip)
        run_if(counts & ~is_spike, lambda: self._accept(value))
        is_left_out = is_waiting | (counts & is_spike)
        _set(self._is_left_out, is_left_out)
        return ~is_left_out

    def _median_and_limit(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the median of the window, and the limit above which spikes begin.

        Returns:
            Tuple of two float32 scalars; the second is infinite while too few values
            are known.
        """
        number = read(self.num_values)
        size = tf.minimum(number, self.window)
        values = read(self.values)
        median = _median(values, size)
        deviation = _NORMAL * _median(tf.abs(values - median), size)
        deviation = tf.maximum(deviation, _MIN_DEVIATION * tf.abs(median))
        is_known = (number >= min(self.window, MIN_VALUES)) & (deviation > 0)
        limit = median + self.threshold * deviation
        return median, tf.where(is_known, limit, float("inf"))

    def _accept(self, value: tf.Tensor) -> None:
        """Add `value`, the loss or norm of an accepted update, to the window."""
        number = read(self.num_values)
        place = tf.range(self.window, dtype=number.dtype) == number % self.window
        _set(self.values, tf.where(place, value, read(self.values)))
        _set(self.num_values, number + 1)
        _set(self.num_in_a_row, 0)

    def _wait(self, totals: Totals) -> None:
        """Have all updates left out until the callback on the host handles this spike.

        It sets `waiting`, which `begin` and `examine` read. For a batch that a rollback
        has excluded, the host has nothing to do, and `waiting` is 0.

        Args:
            totals: `Totals` of the update.
        """
        batch = read(self.num_batches)
        _set(self.waiting, tf.where(self._is_excluded(), tf.zeros_like(batch), batch))
        _set(self.num_of_update, 1 if totals.count is None else totals.count)

    def _log(self, value: tf.Tensor, median: tf.Tensor) -> None:
        """Record the batch and the value of an update that is left out.

        Args:
            value: Scalar float32 tensor, the loss or the norm of the gradient.
            median: Scalar float32 tensor, the median of the window.
        """
        number, batch = read(self.num_skipped), read(self.num_batches)
        place = tf.range(MAX_LOGGED, dtype=number.dtype) == number % MAX_LOGGED
        _set(self.skipped_batches, tf.where(place, batch, read(self.skipped_batches)))
        row = tf.stack([value, median])
        rows = tf.where(place[:, tf.newaxis], row, read(self.skipped_values))
        _set(self.skipped_values, rows)
        _set(self.num_skipped, number + 1)
        _set(self.num_in_a_row, read(self.num_in_a_row) + 1)

    def _name_largest(self, step: Step, statistics: GradientStatistics) -> None:
        """Store in `largest` which variables have the gradients of largest norm.

        At most `MAX_NAMED` are named, by their positions among all trained variables,
        from 1, the largest norm first; the rest of `largest` is 0.
        """
        norms = tf.stack(statistics.squared_norm_of_each())
        norms = tf.where(tf.math.is_nan(norms), float("inf"), norms)
        _, order = tf.math.top_k(norms, min(MAX_NAMED, norms.shape[0]))
        positions = tf.gather(tf.constant(step.grouped_positions), order) + 1
        _set(self.largest, tf.pad(positions, [[0, MAX_NAMED - positions.shape[0]]]))

    def around_step(self, model: Any) -> Callable[[], None]:
        """Read the variables that a step changes besides its update, before it.

        Implements `StepFeature.around_step`. These variables are metrics, the
        statistics of BatchNormalization and the states of random generators.

        Returns:
            Callable for the end of the step, which restores them if `begin` or
            `examine` has recorded that the batch or its update is left out.
        """
        is_left_out = self._is_left_out
        variables = changed_outside_update(model)
        return undo_after(variables, lambda: read(is_left_out) > 0)


def _median(values: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """Return the median of the first elements of a vector.

    Args:
        values: Tensor of shape `[window]`.
        size: Scalar int tensor, number of first elements; for 0 the result is infinite.
    """
    is_known = tf.range(values.shape[0], dtype=size.dtype) < size
    ordered = tf.sort(tf.where(is_known, values, float("inf")))
    size = tf.maximum(size, 1)
    return (ordered[(size - 1) // 2] + ordered[size // 2]) / 2


def _set(variable: Any, value: Any) -> None:
    """Assign a value to the running replica's copy of a variable, in its dtype."""
    part = tf_distribute.local_part(variable)
    part.assign(tf.cast(value, part.dtype), read_value=False)
