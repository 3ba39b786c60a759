"""Rebalancing of a batch's rows by the measured speed of the workers."""

from __future__ import annotations

import collections
import math
import statistics
from typing import Any

import keras

from tfdp.features.monitor.device_meter import meter_for
from tfdp.features.monitor.meter import TimedSteps
from tfdp.features.monitor.readings import Reading
from tfdp.ground.base.feature import Feature, Fit, register
from tfdp.training.data.load_balancer import LoadBalancer
from tfdp.training.keras_hooks.worker_callbacks import callback_list

# So many of the latest steps tell how fast a worker is, and fewer than that nothing.
_KEPT_STEPS, _FEWEST_STEPS = 64, 5
# An epoch may last for hours: the first ones to pass judgement on are these steps,
# and then those of twice the number, again and again.
_FIRST_STEP = 20


class Rebalance(TimedSteps):
    """Give slow workers fewer rows of each batch, and fast ones more.

    All workers see the same times, and compute the same weights from them. The mean
    of a batch stays that of its rows: each replica counts by how many it has.

    Args:
        strategy: A tfdp strategy of several workers.
        balance: Its `LoadBalancer`.
    """

    def __init__(self, strategy: Any, balance: LoadBalancer) -> None:
        super().__init__()
        self._strategy = strategy
        self._balance = balance
        self._due = _FIRST_STEP
        self._readings: collections.deque[Reading]
        self._readings = collections.deque(maxlen=_KEPT_STEPS)

    def on_train_begin(self, logs: Any = None) -> None:
        """Trace steps with time stamps."""
        self.meter = meter_for(self.model, self._strategy)
        self.meter.start()

    def on_step_end(self, num_steps: int, reading: Reading | None) -> None:
        """Store a reading; rebalance early within the first epoch."""
        if reading is not None:
            self._readings.append(reading)
        if self.step >= self._due:
            self._due = 2 * self.step
            self._rebalance()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Move rows, with all other workers."""
        super().on_epoch_end(epoch, logs)
        self._rebalance()

    def on_train_end(self, logs: Any = None) -> None:
        """Stop recording."""
        if self.meter is not None:
            self.meter.stop()
            self.meter = None

    def _rebalance(self) -> None:
        worker_group = self._strategy.extended.worker_group
        found = worker_group.all_gather("the speed of workers", self._measured())
        self._interrupt()
        if None in found:
            return
        times = [microseconds for microseconds, _ in found]
        num_rows = found[0][1]
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
        """Microseconds of this worker's own part of a step, and rows of a batch."""
        assert self.meter is not None
        samples = [self.meter.sample(reading) for reading in self._readings]
        self._readings.clear()
        if len(samples) < _FEWEST_STEPS:
            return None
        seconds = statistics.median(sample.compute_seconds for sample in samples)
        rows = statistics.median_high(sample.samples for sample in samples)
        # On GPUs the exposed part is unknown until a step has been profiled.
        unknown = any(math.isnan(sample.exposed_seconds) for sample in samples)
        if unknown or not math.isfinite(rows):
            return None
        return round(1e6 * seconds), int(rows)


class _Rebalancing(Feature):
    def choose_callbacks(self, fit: Fit) -> None:
        """Add the callback where the strategy's option asks for it."""
        strategy, callbacks = fit.strategy, fit.arguments["callbacks"]
        if strategy is None or strategy.extended.worker_group.num_workers == 1:
            return
        is_list = isinstance(callbacks, keras.callbacks.CallbackList)
        balance = strategy.extended.balance
        if balance is not None and not is_list:
            added = Rebalance(strategy, balance)
            fit.arguments["callbacks"] = [*callback_list(callbacks), added]


register(_Rebalancing())
