"""Rebalancing: division of a batch's rows by the measured speed of the workers."""

from __future__ import annotations

import collections
import math
import statistics
from typing import Any

import keras

from tfdp.communication.coordination.model_group import worker_group_of
from tfdp.features.monitor.device_meter import meter_for
from tfdp.features.monitor.meter import TimedSteps
from tfdp.features.monitor.readings import Reading
from tfdp.ground.base.feature import Feature, Fit, register
from tfdp.training.data.load_balancer import LoadBalancer
from tfdp.training.keras_hooks.worker_callbacks import callback_list

# The speed of a worker is the median time of its latest steps: of no more than 64, so
# that old steps do not count, and of no fewer than 5, so that an outlier does not.
_KEPT_STEPS, _MIN_STEPS = 64, 5
# Number of the step of the first rebalancing, which does not wait for the end of an
# epoch, since that may take hours. Each further rebalancing is due at twice the step of
# the previous one.
_FIRST_STEP = 20


class Rebalance(TimedSteps):
    """Give slow workers fewer rows of each batch, and fast workers more.

    All workers gather the same times, and compute the same division from them. The mean
    gradient stays that of the batch: each replica is weighted by its number of rows.

    Args:
        strategy: A tfdp strategy of several workers.
        balance: `LoadBalancer` of the strategy.
    """

    def __init__(self, strategy: Any, balance: LoadBalancer) -> None:
        super().__init__()
        self._strategy = strategy
        self._balance = balance
        self._due = _FIRST_STEP
        self._readings: collections.deque[Reading]
        self._readings = collections.deque(maxlen=_KEPT_STEPS)

    def on_train_begin(self, logs: Any = None) -> None:
        """Create and start a meter, so that steps are traced with time stamps."""
        self.meter = meter_for(self.model, self._strategy)
        self.meter.start()

    def on_step_end(self, num_steps: int, reading: Reading | None) -> None:
        """Store the time of an execution; rebalance if that is due.

        It is due at step 20, and whenever the number of steps has doubled since. An
        execution is one call of the traced function, of one or several steps.

        Args:
            num_steps: Int, steps of the execution.
            reading: `Reading` of its time, or `None` if it was not timed, as when it
                was traced.
        """
        if reading is not None:
            self._readings.append(reading)
        if self.step >= self._due:
            self._due = 2 * self.step
            self._rebalance()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Divide rows anew, by the times of workers; all workers call it together."""
        super().on_epoch_end(epoch, logs)
        self._rebalance()

    def on_train_end(self, logs: Any = None) -> None:
        """Stop the meter: steps that are traced later have no time stamps."""
        if self.meter is not None:
            self.meter.stop()
            self.meter = None

    def _rebalance(self) -> None:
        """Change each worker's share of the rows of later batches by its step time.

        All workers call it. Nothing changes if any worker has no measured time.
        """
        worker_group = worker_group_of(self.model)
        measured = worker_group.all_gather("the speed of workers", self._measured())
        self._interrupt()
        if None in measured:
            return
        times = [microseconds for microseconds, _ in measured]
        num_rows = measured[0][1]
        before = self._balance.rows(num_rows)
        self._balance.update(num_rows, times)
        after = self._balance.rows(num_rows)
        if worker_group.is_chief and after != before:
            took = ", ".join(f"{time / 1000:.1f}" for time in times)
            print(
                f"\ntfdp: workers took {took} ms for their own part of a step; of "
                f"{num_rows} rows they get {after} from here on, {before} before."
            )

    def _measured(self) -> tuple[int, int] | None:
        """Return this worker's compute time of a step in microseconds, and batch rows.

        Both are medians over the stored readings, which are removed.

        Returns:
            Tuple of two ints, or `None` if too few steps were timed, or if their
            compute time is not known.
        """
        assert self.meter is not None
        samples = [self.meter.sample(reading) for reading in self._readings]
        self._readings.clear()
        if len(samples) < _MIN_STEPS:
            return None
        seconds = statistics.median(sample.compute_seconds for sample in samples)
        rows = statistics.median_high(sample.samples for sample in samples)
        # On GPUs only a profiled step shows which part of the time is communication.
        # Until then `exposed_seconds` is NaN, and `compute_seconds` is the time of the
        # whole step, which is the same on all workers, so it is not used.
        unknown = any(math.isnan(sample.exposed_seconds) for sample in samples)
        if unknown or not math.isfinite(rows):
            return None
        return round(1e6 * seconds), int(rows)


class _Rebalancing(Feature):
    """Hook of `fit` that adds the callback `Rebalance`."""

    def choose_callbacks(self, fit: Fit) -> None:
        """Add `Rebalance` to the callbacks if the strategy rebalances rows."""
        strategy, callbacks = fit.strategy, fit.arguments["callbacks"]
        if strategy is None or worker_group_of(fit.model).num_workers == 1:
            return
        is_list = isinstance(callbacks, keras.callbacks.CallbackList)
        balance = strategy.extended.balance
        if balance is not None and not is_list:
            added = Rebalance(strategy, balance)
            fit.arguments["callbacks"] = [*callback_list(callbacks), added]


register(_Rebalancing())
