"""Local SGD: replicas update independently and average their weights periodically."""

from __future__ import annotations

from typing import Any

from tfdp.callbacks.bases import OptimizerCallback
from tfdp.features.local_steps import LocalStepsOptions, enable
from tfdp.ground.arguments import checked_integer
from tfdp.training.optimizer.distributed import DistributedOptimizer


class LocalStepsCallback(OptimizerCallback):
    """Base of the callbacks under which replicas or nodes update independently.

    Args:
        options: `LocalStepsOptions`.
        start_step: Int, synchronous updates before local steps start.
    """

    # On an island of `tfdp run --islands`, one `DiLoCo` exchanges for all replicas, so
    # `fit` raises an error for a second callback with this attribute.
    steps_locally = True

    def __init__(self, options: LocalStepsOptions, start_step: int) -> None:
        super().__init__()
        what = "the number of updates before local steps begin"
        self.options = options
        self.start_step = checked_integer("start_step", start_step, 0, what)
        # At least this many synchronous updates are left before local steps begin.
        # Until then `iterations` is not read, since a read waits for the device.
        self._left = 0
        self._last_batch = -1

    def enable_feature(self, optimizer: DistributedOptimizer) -> None:
        """Create the variables of local steps; start the steps if `start_step` is 0."""
        enable(optimizer, self.options, now=self.start_step == 0)
        self._left = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Restart the number of the last batch, which counts from 0 in each epoch.

        The count of updates until `start_step` continues.
        """
        self._last_batch = -1

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Start local steps after `start_step` updates, also in a resumed run."""
        if self.optimizer.features.independent_groups is not None:
            return
        self._left -= batch - self._last_batch
        self._last_batch = batch
        if self._left > 0:
            # `iterations` is not read in every step, since each read waits for the
            # device.
            return
        self._left = self.start_step - int(self.optimizer.iterations.numpy())
        if self._left <= 0:
            enable(self.optimizer, self.options, now=True)
            self.model.make_train_function(force=True)

    def on_train_end(self, logs: Any = None) -> None:
        """Return to synchronous training."""
        super().on_train_end(logs)
        self.optimizer.features.reset()
        self.model.train_function = None


class LocalSGD(LocalStepsCallback):
    """Train each replica independently, and average all replicas every few updates.

    Use it if the network limits training: one of `sync_every` updates communicates,
    and exchanges weights and the optimizer's slots instead of gradients. In return, the
    result is not that of one device: between two averages each replica follows its own
    gradients, which are clipped separately. Replicas are weighted by the samples that
    they have seen. Between averages replicas do not wait for each other: logs within an
    epoch are those of the worker, and moving statistics of BatchNormalization those of
    the replica.

    Replicas are also averaged at the end of an epoch, before `evaluate` and `predict`,
    and before a backup, so that one model is evaluated and saved. Between averages, a
    callback that reads weights gets those of one replica. Sharded state and the
    gradient noise scale are not supported.

    Args:
        sync_every: Int, updates from one average to the next. With 1 and plain SGD
            training is synchronous. Defaults to 8.
        start_step: Int, synchronous updates before local steps start (post-local SGD).
            Defaults to 0.

    Raises:
        ValueError: If an argument is invalid; in `fit`, if it is combined with an
            unsupported feature.

    Example:

    >>> LocalSGD(sync_every=16, start_step=1000).sync_every
    16

    Source: Stich 2019, https://arxiv.org/abs/1805.09767; Lin et al. 2020,
    https://arxiv.org/abs/1808.07217, for `start_step`.
    """

    # All workers must average their weights after the same updates, so `fit` raises an
    # error if these settings differ between workers.
    compared = ("sync_every", "start_step")

    def __init__(self, sync_every: int = 8, start_step: int = 0) -> None:
        super().__init__(LocalStepsOptions(sync_every), start_step)
        self.sync_every = self.options.sync_every
