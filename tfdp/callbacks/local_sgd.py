"""Local SGD: replicas step alone and average their weights now and then."""

from __future__ import annotations

from typing import Any

from tfdp.callbacks.bases import OptimizerCallback
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
        optimizer.features.start_local_steps(
            self.options, LocalSteps, now=self.start_step == 0
        )
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
        if self.optimizer.features.uses_local_steps:
            return
        self._left -= batch - self._last_batch
        self._last_batch = batch
        if self._left > 0:
            return  # reading the number of updates waits for the step
        self._left = self.start_step - int(self.optimizer.iterations.numpy())
        if self._left <= 0:
            self.optimizer.features.start_local_steps(
                self.options, LocalSteps, now=True
            )
            self.model.make_train_function(force=True)

    def on_train_end(self, logs: Any = None) -> None:
        """Train synchronously again."""
        super().on_train_end(logs)
        self.optimizer.features.stop_local_steps()
        self.model.train_function = None


class LocalSGD(LocalStepsCallback):
    """Let each replica train alone on its rows, and average all every few updates.

    For links that are slower than the model: of `sync_every` updates one communicates,
    weights and the optimizer's slots instead of gradients. What is given up is
    exactness: between two averages each replica follows its own gradients, clipped by
    themselves, and the result is not that of one device. The average counts a replica
    by the samples that it has seen. Between averages no replica waits for another: logs
    within an epoch are those of the worker, and moving statistics of BatchNormalization
    those of the replica.

    The replicas are averaged also at the end of an epoch, before `evaluate` and
    `predict` and before a backup, so that what is evaluated and saved is one model;
    between averages a callback that reads weights sees those of a replica. Sharded
    state and the gradient noise scale cannot be combined with it.

    Args:
        sync_every: Int, updates from one average to the next. With 1 and plain SGD it
            is synchronous training. Defaults to 8.
        start_step: Int, updates that are made synchronously first (post-local SGD).
            Defaults to 0.

    Raises:
        ValueError: If an argument is no such integer; in `fit`, where it is combined
            with what it excludes.

    Example:

    >>> LocalSGD(sync_every=16, start_step=1000).sync_every
    16

    Source: Stich 2019, https://arxiv.org/abs/1805.09767; Lin et al. 2020,
    https://arxiv.org/abs/1808.07217, for `start_step`.
    """

    # Settings that all workers have to share.
    compared = ("sync_every", "start_step")

    def __init__(self, sync_every: int = 8, start_step: int = 0) -> None:
        super().__init__(LocalStepsOptions(sync_every), start_step)
        self.sync_every = self.options.sync_every
