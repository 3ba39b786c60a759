"""Base of the callbacks that let replicas or nodes step alone."""

from __future__ import annotations

from typing import Any

from tfdp.callbacks.optimizer_callback import OptimizerCallback
from tfdp.features.local_steps import LocalSteps, LocalStepsOptions
from tfdp.ground.arguments import checked_integer
from tfdp.training.optimizer.distributed import DistributedOptimizer


class LocalStepsCallback(OptimizerCallback):
    """Base of the callbacks that let replicas or nodes step alone.

    Args:
        options: `LocalStepsOptions`.
        start_step: Int, updates that are made synchronously first.
    """

    # By which islands know that there is one of them.
    steps_locally = True

    def __init__(self, options: LocalStepsOptions, start_step: int) -> None:
        super().__init__()
        what = "updates that are made before"
        self.options = options
        self.start_step = checked_integer("start_step", start_step, 0, what)
        self._left = 0  # synchronous updates, at least
        self._last_batch = -1

    def switch_on(self, optimizer: DistributedOptimizer) -> None:
        """Make the state; begin at once where nothing comes before."""
        optimizer.step_locally(self.options, LocalSteps, alone=self.start_step == 0)
        self._left = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Prepare what all workers make together, before a step is traced."""
        super().on_train_begin(logs)
        local_steps = self.optimizer.features.local_steps
        if local_steps is not None:
            local_steps.prepare(self.model.distribute_strategy)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start to count batches."""
        self._last_batch = -1

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begin when `start_step` updates are made, also before a resumed run."""
        if self.optimizer.features.steps_alone:
            return
        self._left -= batch - self._last_batch
        self._last_batch = batch
        if self._left > 0:
            return  # reading the number of updates waits for the step
        self._left = self.start_step - int(self.optimizer.iterations.numpy())
        if self._left <= 0:
            self.optimizer.step_locally(self.options, LocalSteps, alone=True)
            self.model.make_train_function(force=True)

    def on_train_end(self, logs: Any = None) -> None:
        """Train synchronously again."""
        super().on_train_end(logs)
        self.optimizer.stop_local_steps()
        self.model.train_function = None
