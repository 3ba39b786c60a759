"""What callbacks that time every step have in common."""

from __future__ import annotations

from typing import Any

import keras

from tfdp.monitor.meter import Meter
from tfdp.monitor.readings import Reading


class TimedSteps(keras.callbacks.Callback):
    """A callback that is told of every step, and of what the step noted.

    While `meter` is set, steps are timed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.meter: Meter | None = None
        self.step = 0
        self._last_batch = -1

    def on_step_end(self, num_steps: int, reading: Reading | None) -> None:
        """Takes in an execution; `step` is its last step.

        Args:
            num_steps: Int, steps of the execution.
            reading: `Reading`, or `None` where it was being traced.
        """
        raise NotImplementedError

    def set_model(self, model: Any) -> None:
        """A step that was traced before is traced again."""
        super().set_model(model)
        model.train_function = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begins to count batches."""
        self._last_batch = -1

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Takes the time of the first step of an epoch."""
        if self.meter is not None:
            self.meter.step_begins()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts the steps of the execution, and reads what they noted."""
        if self.meter is None:
            return
        num_steps = batch - self._last_batch
        self._last_batch = batch
        self.step += num_steps
        self.on_step_end(num_steps, self.meter.step_ends(num_steps))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """What happens between epochs belongs to no step."""
        self._interrupt()

    def on_test_begin(self, logs: Any = None) -> None:
        """What an evaluation takes belongs to no step."""
        self._interrupt()

    def _interrupt(self) -> None:
        if self.meter is not None:
            self.meter.interrupt()
