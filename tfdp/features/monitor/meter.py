"""Timing of a worker's steps, and the base of callbacks that use it."""

from __future__ import annotations

import collections
import time
from typing import Any

import keras

from tfdp.communication.collectives import timing
from tfdp.features.monitor.readings import (
    KINDS,
    Reading,
    Sample,
    replicas_of,
    sample_of,
)
from tfdp.features.monitor.trace import WorkerTrace, trace_of_worker

# If the elapsed times by the wall clock and by `perf_counter` differ by more than this
# many seconds, the wall clock was set, since reading the two clocks one after the other
# takes far less time.
_CLOCK_SET_SECONDS = 0.2
# `TimedSteps` keeps this many readings for other observers of the same steps: a few
# recent ones are enough for their means.
_KEPT_READINGS = 5


class Meter:
    """Meter of steps on CPUs, by time stamps inside the graph.

    Args:
        norm_every: Int, steps from one record of the gradient's norm to the next, or
            `None` for no records. Defaults to `None`.
        num_replicas: Int, number of replicas on all workers. Defaults to 1.
    """

    def __init__(self, norm_every: int | None = None, num_replicas: int = 1) -> None:
        self.recorder = timing.Recorder(norm_every)
        self._num_replicas = num_replicas
        self._begin: float | None = None
        self._clock = 0.0
        self._num_rows = -1

    def start(self) -> None:
        """Add time stamps to steps that are traced from now on."""
        self.recorder.stop()
        self.recorder.__enter__()

    def stop(self) -> None:
        """Stop adding time stamps to traced steps."""
        self.recorder.stop()

    def interrupt(self) -> None:
        """Exclude the time until the next step begins from the times of steps."""
        self._begin = None

    def step_begins(self) -> None:
        """Record the start time of a step, unless it is the end of the previous step.

        Steps follow each other without a gap, except after `interrupt`.
        """
        if self._begin is None:
            self._begin, self._clock = time.time(), time.perf_counter()

    def step_ends(self, num_steps: int = 1) -> Reading | None:
        """Record the end time, and read the time stamps of the step.

        Args:
            num_steps: Int, steps of this execution. Defaults to 1.

        Returns:
            `Reading`, or `None` after a step that was being traced, or in which the
            machine's clock was set.
        """
        begin, clock = self._begin, self._clock
        values = self.recorder.read()
        self._begin, self._clock = time.time(), time.perf_counter()
        was_traced = len(self.recorder.rows) != self._num_rows
        self._num_rows = len(self.recorder.rows)
        if begin is None or was_traced:
            return None
        seconds = self._clock - clock
        # Time stamps in a graph use the wall clock. If the system has set this clock
        # during the step, the step has no valid times.
        if abs(self._begin - begin - seconds) > _CLOCK_SET_SECONDS:
            return None
        return Reading(values, begin, self._begin, seconds, num_steps)

    def sample(self, reading: Reading) -> Sample:
        """Compute the times of a step, a `Sample`, from its reading."""
        return sample_of(reading, self.recorder.rows)

    def trace_begins(self) -> None:
        """Prepare to measure steps for `trace`; called before each of them.

        Here it does nothing; `DeviceMeter` starts a profile.
        """

    def trace(
        self, rank: int, host: str, readings: list[tuple[int, Reading]]
    ) -> WorkerTrace:
        """Return the trace of this worker over several steps.

        Args:
            rank: Int, rank of this worker.
            host: String, host of this worker.
            readings: List of pairs: number of a step and its `Reading`.
        """
        rows = self.recorder.rows
        replicas = [replicas_of(reading, rows) for _, reading in readings]
        return trace_of_worker(rank, host, readings, replicas, self._num_replicas)

    @property
    def labels(self) -> list[str]:
        """Labels of the collectives, in the order in which they were traced."""
        labels = list(dict.fromkeys(c.label for c in self.recorder.collectives))
        shards_parameters = any(label.split()[0] == timing.UNIT for label in labels)
        return [*labels, *KINDS] if shards_parameters else labels


class TimedSteps(keras.callbacks.Callback):
    """Base of callbacks that receive a `Reading` of every step, by `on_step_end`.

    Attributes:
        meter: `Meter` that times the steps, or `None`: steps are not timed, and
            `on_step_end` is not called.
        step: Int, number of the last step, counted over all epochs.
        latest: Deque with the last five readings, for other observers of the steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.meter: Meter | None = None
        self.step = 0
        self._last_batch = -1
        self.latest: collections.deque[Reading]
        self.latest = collections.deque(maxlen=_KEPT_READINGS)

    def on_step_end(self, num_steps: int, reading: Reading | None) -> None:
        """Handle an execution of one or more steps; overridden by subclasses.

        `self.step` is the number of its last step.

        Args:
            num_steps: Int, steps of the execution.
            reading: `Reading`, or `None` if it was not timed.
        """
        raise NotImplementedError

    def set_model(self, model: Any) -> None:
        """Store the model, and have its step traced again, with time stamps."""
        super().set_model(model)
        model.train_function = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Restart the count of batches, which begins at 0 in each epoch."""
        self._last_batch = -1

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Have the meter record the start of a step."""
        if self.meter is not None:
            self.meter.step_begins()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the steps since the last call, and pass their reading to `on_step_end`.

        Keras calls it once for each `steps_per_execution` steps.
        """
        if self.meter is None:
            return
        num_steps = batch - self._last_batch
        self._last_batch = batch
        self.step += num_steps
        reading = self.meter.step_ends(num_steps)
        if reading is not None:
            self.latest.append(reading)
        self.on_step_end(num_steps, reading)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Exclude the time between two epochs from the times of steps."""
        self._interrupt()

    def on_test_begin(self, logs: Any = None) -> None:
        """Exclude the time of an evaluation from the times of steps."""
        self._interrupt()

    def _interrupt(self) -> None:
        """Have the meter ignore the time until the next step begins."""
        if self.meter is not None:
            self.meter.interrupt()
