"""DiLoCo: nodes train by themselves, and an outer step brings them together."""

from __future__ import annotations

from typing import Any

import keras

from tfdp.callbacks.local_steps import LocalStepsCallback
from tfdp.local_steps import LocalStepsOptions, OuterOptions


class DiLoCo(LocalStepsCallback):
    """Train each node by itself, and bring the nodes together every so many updates.

    Within a node the replicas train synchronously. After `sync_every` updates the mean
    of what the nodes have learned, by samples, is taken as the gradient of an outer
    optimizer, whose weights all go on from: between nodes the weights travel once in
    `sync_every` updates. What is given up is exactness: the result is not that of one
    device. The slots of the inner optimizer stay with their node. Moving statistics of
    BatchNormalization and the logs are averaged over all replicas in every step.

    At the end of an epoch, before `evaluate` and `predict` and before a backup an outer
    step is made, and slots are averaged, so that what is evaluated and saved are the
    outer weights, and one state. Give epochs of at least `sync_every` updates. Sharded
    state, a loss scale and the gradient noise scale cannot be combined with it.

    Args:
        sync_every: Int, updates from one outer step to the next. Defaults to 100.
        outer_optimizer: Keras optimizer of the outer step, not built yet; each model
            gets a copy. Defaults to SGD with a rate of 0.7 and Nesterov momentum of
            0.9, as in the paper.
        scope: String: `"node"`, or `"replica"`, where each replica trains by itself.
            Defaults to `"node"`.
        fragments: Int, parts of the weights that are exchanged one after the other,
            each once in `sync_every` updates, so that less travels at a time. Defaults
            to 1.

    Raises:
        ValueError: If an argument is none of these; in `fit`, if all replicas are on
            one node, or where it is combined with what it excludes.

    Example:

    >>> DiLoCo(sync_every=50, fragments=5).options.offsets
    [10, 20, 30, 40, 0]

    Source: Douillard et al. 2023, https://arxiv.org/abs/2311.08105; Douillard et al.
    2025, https://arxiv.org/abs/2501.18512, for fragments.
    """

    # Settings that all workers have to share.
    compared = ("settings",)

    def __init__(
        self,
        sync_every: int = 100,
        outer_optimizer: keras.optimizers.Optimizer | None = None,
        *,
        scope: str = "node",
        fragments: int = 1,
    ) -> None:
        if outer_optimizer is None:
            outer_optimizer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
        outer = OuterOptions(outer_optimizer, scope, fragments)
        super().__init__(LocalStepsOptions(sync_every, outer), start_step=0)

    @property
    def settings(self) -> dict[str, Any]:
        """Dict, what all workers have to share, as JSON can hold it."""
        outer = self.options.outer
        assert outer is not None
        return {
            "sync_every": self.options.sync_every,
            "outer_optimizer": keras.saving.serialize_keras_object(outer.optimizer),
            "scope": outer.scope,
            "fragments": outer.fragments,
        }
