"""DiLoCo: nodes train by themselves, and an outer step brings them together."""

from __future__ import annotations

from typing import Any

import keras

from tfdp.callbacks.local_sgd import LocalStepsCallback
from tfdp.communication.cluster.islands import Island
from tfdp.features.islands.training import IslandTraining
from tfdp.features.local_steps import (
    LocalStepsOptions,
    OuterOptions,
    shares,
    workers_by_node,
)
from tfdp.ground import user_code
from tfdp.training.optimizer.distributed import DistributedOptimizer


class DiLoCo(LocalStepsCallback):
    """Train each node by itself, and bring the nodes together every so many updates.

    Within a node the replicas train synchronously. After `sync_every` updates the mean
    of what the nodes have learned, by samples, is taken as the gradient of an outer
    optimizer, whose weights all go on from: between nodes the weights travel once in
    `sync_every` updates. What is given up is exactness: the result is not that of one
    device. The slots of the inner optimizer stay with their node. Between outer steps
    no node waits for another: logs within an epoch are those of the worker, and moving
    statistics of BatchNormalization those of the replica.

    With `delay` an exchange travels while the replicas go on, and its outer step is
    made `delay` updates after it was sent; of the weights that a replica has by then
    it keeps `mixing`, and takes the rest from the common ones. The most updates by
    which an outer step was late in an epoch is logged as `staleness`.

    With `dynamic_steps` a slower worker makes fewer inner steps, in proportion to its
    speed, as it was measured in the epoch before: it leaves out batches of its own, so
    that the others wait less for it. Of the first epoch all make all steps.

    Under `tfdp run --islands` the nodes are jobs of their own, which meet in outer
    steps and nowhere else: one that is gone stops no other.

    At the end of an epoch, before `evaluate` and `predict` and before a backup an outer
    step is made, and slots are averaged, so that what is evaluated and saved are the
    outer weights, and one state. Give epochs of at least `sync_every` updates. Sharded
    state and the gradient noise scale cannot be combined with it.

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
        compression: In which form what was learned travels between nodes, as in
            `tfdp.CommunicationOptions`: `"fp16"`, `"bf16"`, `"int8"` or another
            `tfdp.compression.Compressor`, which keeps what it leaves out for the next
            exchange; or `None`. Defaults to `None`.
        delay: Int, updates between the begin of an exchange and its outer step, less
            than `sync_every / fragments`. Workers that TensorFlow's own collectives
            connect, and GPUs, exchange only then. Defaults to 0.
        mixing: Float from 0 to 1, how much of its own weights a replica keeps in a
            delayed outer step. Defaults to 0.5.
        scale_by_staleness: Bool, whether what is learned from an exchange that is s
            updates late is multiplied by `sync_every / (sync_every + s)`. Defaults to
            `False`.
        min_participants: Int, how many workers make an exchange, the first among them,
            or `None`: all. An exchange waits `patience_seconds` for those that were
            there at the last one, and goes on without who is late. That worker takes
            the common weights when it comes, instead of its own. It needs
            `backend="direct"`, a `delay`, one fragment, and no compression. Defaults
            to `None`.
        patience_seconds: Float, how long an exchange waits for more workers than
            `min_participants`. Defaults to 1.0.
        dynamic_steps: Bool, whether slower workers make fewer inner steps. The
            smallest part that one makes is logged as `inner_steps`. Gradients must
            not be accumulated. Defaults to `False`.

    Raises:
        ValueError: If an argument is none of these; in `fit`, if all replicas are on
            one node, or where it is combined with what it excludes.

    Example:

    >>> DiLoCo(sync_every=50, fragments=5).options.offsets
    [10, 20, 30, 40, 0]

    Source: Douillard et al. 2023, https://arxiv.org/abs/2311.08105; Douillard et al.
    2025, https://arxiv.org/abs/2501.18512, for fragments, delay and mixing; Zhang et
    al. 2016, https://arxiv.org/abs/1511.05950, for smaller updates from stale
    gradients; Liu et al. 2024, https://arxiv.org/abs/2401.09135, for fewer inner steps
    of slower workers.
    """

    # Settings that all workers have to share.
    compared = ("settings",)
    # See `tfdp.features.islands`.
    trains_islands = True

    def __init__(
        self,
        sync_every: int = 100,
        outer_optimizer: keras.optimizers.Optimizer | None = None,
        *,
        scope: str = "node",
        fragments: int = 1,
        compression: Any = None,
        delay: int = 0,
        mixing: float = 0.5,
        scale_by_staleness: bool = False,
        min_participants: int | None = None,
        patience_seconds: float = 1.0,
        dynamic_steps: bool = False,
    ) -> None:
        if outer_optimizer is None:
            outer_optimizer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
        outer = OuterOptions(
            outer_optimizer,
            scope,
            fragments,
            compression=compression,
            delay=delay,
            mixing=mixing,
            scales_by_staleness=scale_by_staleness,
            min_participants=min_participants,
            patience_seconds=patience_seconds,
        )
        if not delay and (scale_by_staleness or mixing != 0.5):
            user_code.warn(
                "`mixing` and `scale_by_staleness` are for late outer steps, and are "
                f"ignored. Received: delay={delay!r}"
            )
        options = LocalStepsOptions(sync_every, outer, dynamic_steps)
        super().__init__(options, start_step=0)
        self._least_share = 1.0
        self._island: IslandTraining | None = None

    def set_model(self, model: Any) -> None:
        """Switch local steps on; or, on an island, prepare its exchanges."""
        island = Island.from_environment()
        if island is not None:
            self._island = IslandTraining(model, self.options, self.settings, island)
        super().set_model(model)

    def switch_on(self, optimizer: DistributedOptimizer) -> None:
        """Make the state of local steps, which an island has none of."""
        if self._island is None:
            super().switch_on(optimizer)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Join the other islands, when all else is ready."""
        if self._island is None:
            super().on_train_batch_begin(batch, logs)
        else:
            self._island.begin()
            self._last_batch = batch - 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Exchange what an island has learned, when that is due."""
        if self._island is not None:
            self._island.batches_end(batch - self._last_batch)

    def on_train_begin(self, logs: Any = None) -> None:
        """Prepare what is made before the first step."""
        super().on_train_begin(logs)
        if self._island is not None:
            self._island.fit_begins()

    def on_train_end(self, logs: Any = None) -> None:
        """Train synchronously again; leave the other islands."""
        super().on_train_end(logs)
        if self._island is not None:
            self._island.end()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start to look for late outer steps, and agree on the inner ones of each."""
        super().on_epoch_begin(epoch, logs)
        if self._island is not None:
            self._island.staleness = 0
        if self.options.is_dynamic:
            self._share_steps()
        exchanges = self._exchanges()
        if exchanges is not None:
            exchanges.staleness.assign(0)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log by how many updates an outer step was late, and who made fewest."""
        if self._island is not None:
            self._island.meet()
            if logs is not None:
                logs["islands"] = self._island.participants
                logs["staleness"] = self._island.staleness
        if self.options.is_dynamic and logs is not None:
            logs["inner_steps"] = self._least_share
        exchanges = self._exchanges()
        if exchanges is not None and logs is not None:
            logs["staleness"] = int(exchanges.staleness.numpy())

    def _exchanges(self) -> Any:
        """The exchanges of the model's optimizer, if they are delayed."""
        local_steps = self.optimizer.features.local_steps
        if local_steps is None or not self.options.delay:
            return None
        return local_steps.exchanges

    def _share_steps(self) -> None:
        """Agree with all workers on the part of the inner steps that each makes."""
        if self.optimizer.accumulation_steps > 1:
            raise ValueError(
                "`dynamic_steps` leaves out batches, each of which must be an update. "
                "Leave out it, or gradient accumulation. Received: "
                f"accumulation_steps={self.optimizer.accumulation_steps}"
            )
        local_steps = self.optimizer.features.local_steps
        if local_steps is None or local_steps.pace is None:
            return
        assert self.options.outer is not None
        strategy = self.model.distribute_strategy
        pace = local_steps.pace
        worker_group = strategy.extended.worker_group
        seconds = worker_group.all_gather(
            "seconds of an inner step", pace.take_seconds()
        )
        nodes = workers_by_node(strategy, self.options.outer.scope)
        if found := shares(seconds, nodes):
            pace.share, self._least_share = found[worker_group.rank], min(found)

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
            "compression": repr(outer.compression),
            "delay": outer.delay,
            "mixing": outer.mixing,
            "scale_by_staleness": outer.scales_by_staleness,
            "min_participants": outer.min_participants,
            "patience_seconds": outer.patience_seconds,
            "dynamic_steps": self.options.is_dynamic,
        }
