"""Local SGD: replicas step alone and average their weights now and then."""

from __future__ import annotations

from tfdp.callbacks.local_steps import LocalStepsCallback
from tfdp.features.local_steps import LocalStepsOptions


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
