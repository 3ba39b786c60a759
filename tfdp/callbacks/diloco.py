"""DiLoCo: nodes train independently, and an outer optimizer step combines them."""

from __future__ import annotations

from typing import Any

import keras

from tfdp.callbacks.local_sgd import LocalStepsCallback
from tfdp.communication.coordination.model_group import worker_group_of
from tfdp.features.islands.island import Island
from tfdp.features.islands.training import IslandTraining
from tfdp.features.local_steps import (
    LocalSteps,
    LocalStepsOptions,
    OuterOptions,
    step_fractions,
    workers_by_node,
)
from tfdp.ground import user_code
from tfdp.training.optimizer.distributed import DistributedOptimizer


class DiLoCo(LocalStepsCallback):
    """Train nodes independently, and combine them by an outer step at an interval.

    Within a node the replicas train synchronously. After `sync_every` updates the
    change of the weights, averaged over the nodes by samples, becomes the gradient of
    an outer optimizer, and all replicas continue from the weights that it computes.
    Nodes communicate once in `sync_every` updates; in return, the result is not that of
    one device. Slots of the inner optimizer stay on their node. Between outer steps
    nodes do not wait for each other: logs within an epoch are those of the worker, and
    moving statistics of BatchNormalization those of the replica.

    With `delay`, an exchange runs while the replicas continue, and its outer step is
    made `delay` updates after it was sent; each replica then keeps the fraction
    `mixing` of its local weights, and takes the rest from the common ones. The largest
    lateness of an outer step in an epoch, in updates, is logged as `staleness`.

    With `dynamic_steps`, a slower worker makes fewer inner steps, in proportion to its
    speed in the previous epoch: it skips some of its own batches, so that the others
    wait less for it. In the first epoch all workers make all steps.

    Under `tfdp run --islands` each node is a separate job that communicates with the
    others only in outer steps: a job that fails does not stop the others.

    An outer step is also made, and slots are averaged, at the end of an epoch, before
    `evaluate` and `predict`, and before a backup, so that the outer weights and one
    common state are evaluated and saved. Epochs should have at least `sync_every`
    updates. Sharded state and the gradient noise scale are not supported.

    Args:
        sync_every: Int, updates from one outer step to the next. Defaults to 100.
        outer_optimizer: Keras optimizer of the outer step, not built yet; each model
            gets a copy. Defaults to SGD with a rate of 0.7 and Nesterov momentum of
            0.9, as in the paper.
        scope: String, what trains synchronously: `"node"`, all replicas of a node; or
            `"replica"`, each replica alone. Defaults to `"node"`.
        fragments: Int, parts of the weights that are exchanged one after another, each
            once in `sync_every` updates, so that each exchange is smaller. Defaults
            to 1.
        compression: Compression of exchanges between nodes, as in
            `tfdp.CommunicationOptions`: `"fp16"`, `"bf16"`, `"int8"` or another
            `tfdp.compression.Compressor`, with error feedback to the next exchange; or
            `None`. Defaults to `None`.
        delay: Int, updates between the start of an exchange and its outer step, less
            than `sync_every / fragments`. On GPUs, and with TensorFlow's own
            collectives, the exchange runs only at that outer step. Defaults to 0.
        mixing: Float from 0 to 1, the fraction of its local weights that a replica
            keeps in a delayed outer step. Defaults to 0.5.
        scale_by_staleness: Bool, whether the gradient of an outer step that is s
            updates late is multiplied by `sync_every / (sync_every + s)`. Defaults to
            `False`.
        min_participants: Int, the number of workers that an exchange needs, the first
            worker among them; or `None`: all. An exchange waits `patience_seconds` for
            workers that took part in the last one, and continues without those that
            are late. A late worker takes the common weights instead of its own when it
            arrives. It needs `backend="direct"`, a `delay`, one fragment, and no
            compression. Defaults to `None`.
        patience_seconds: Float, how long an exchange waits for more workers than
            `min_participants`. Defaults to 1.0.
        dynamic_steps: Bool, whether slower workers make fewer inner steps. The
            smallest fraction that a worker makes is logged as `inner_steps`. Gradients
            must not be accumulated. Defaults to `False`.

    Raises:
        ValueError: If an argument is invalid; in `fit`, if all replicas are on one
            node, or if it is combined with an unsupported feature.

    Example:

    >>> DiLoCo(sync_every=50, fragments=5).options.offsets
    [10, 20, 30, 40, 0]

    Source: Douillard et al. 2023, https://arxiv.org/abs/2311.08105; Douillard et al.
    2025, https://arxiv.org/abs/2501.18512, for fragments, delay and mixing; Zhang et
    al. 2016, https://arxiv.org/abs/1511.05950, for smaller updates from stale
    gradients; Liu et al. 2024, https://arxiv.org/abs/2401.09135, for fewer inner steps
    of slower workers.
    """

    # Workers exchange their weights together, so `fit` raises an error if the settings
    # differ between workers.
    compared = ("settings",)
    # A callback with this attribute exchanges weights between the islands of `tfdp run
    # --islands`. Without one, an island would train alone, so its `fit` raises an
    # error.
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
                "`mixing` and `scale_by_staleness` have an effect only with a `delay`, "
                f"and are ignored. Received: delay={delay!r}"
            )
        options = LocalStepsOptions(sync_every, outer, dynamic_steps)
        super().__init__(options, start_step=0)
        self._least_share = 1.0
        self._island: IslandTraining | None = None

    def set_model(self, model: Any) -> None:
        """Set the model, and enable local steps, or the exchanges of an island.

        An island is one of the separate jobs under `tfdp run --islands`.
        """
        island = Island.from_environment()
        if island is not None:
            self._island = IslandTraining(model, self.options, self.settings, island)
        super().set_model(model)

    def enable_feature(self, optimizer: DistributedOptimizer) -> None:
        """Create the state of local steps, except on an island, which has none."""
        if self._island is None:
            super().enable_feature(optimizer)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Start local steps unless they are active; on an island, join other islands.

        Only the first call joins: the island connects to the hub, and adopts the common
        weights. An island is one of the separate jobs under `tfdp run --islands`.
        """
        if self._island is None:
            super().on_train_batch_begin(batch, logs)
        else:
            self._island.join()
            self._last_batch = batch - 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """On an island, count batches; make an outer step every `sync_every` updates.

        An island is one of the separate jobs under `tfdp run --islands`. Without
        islands, the traced step makes it.
        """
        if self._island is not None:
            self._island.end_batches(batch - self._last_batch)

    def on_train_begin(self, logs: Any = None) -> None:
        """Prepare delayed exchanges, or those of an island, before a step is traced.

        All workers call it. An island is one of the separate jobs under
        `tfdp run --islands`.
        """
        super().on_train_begin(logs)
        exchanges = self._exchanges()
        if exchanges is not None:
            exchanges.prepare(self.model.distribute_strategy)
        if self._island is not None:
            self._island.begin_fit()

    def on_train_end(self, logs: Any = None) -> None:
        """Return to synchronous training; disconnect an island from other islands."""
        super().on_train_end(logs)
        if self._island is not None:
            self._island.leave()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Reset the staleness; with `dynamic_steps`, set the fraction of steps to make.

        Staleness is the largest number of updates in an epoch between the start of an
        exchange and its outer step. The fraction follows from the workers' speeds.
        """
        super().on_epoch_begin(epoch, logs)
        if self._island is not None:
            self._island.staleness = 0
        if self.options.is_dynamic:
            self._share_steps()
        exchanges = self._exchanges()
        if exchanges is not None:
            exchanges.staleness.assign(0)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """On an island, make an outer step; add staleness and other values to `logs`.

        `"staleness"`, with a `delay` or on an island, is the largest number of updates
        between the start of an exchange and its outer step; `"islands"`, on an island,
        the number that took part in the last exchange; `"inner_steps"`, with
        `dynamic_steps`, the smallest fraction of inner steps that a worker makes.
        """
        if self._island is not None:
            self._island.sync()
            if logs is not None:
                logs["islands"] = self._island.participants
                logs["staleness"] = self._island.staleness
        if self.options.is_dynamic and logs is not None:
            logs["inner_steps"] = self._least_share
        exchanges = self._exchanges()
        if exchanges is not None and logs is not None:
            logs["staleness"] = int(exchanges.staleness.numpy())

    def get_state(self) -> dict[str, Any]:
        """Return a dict with the staleness of the epoch so far, for a backup."""
        if self._island is not None:
            return {"staleness": self._island.staleness}
        exchanges = self._exchanges()
        return {"staleness": int(exchanges.staleness.numpy()) if exchanges else 0}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the staleness of an epoch that continues.

        Args:
            state: Dict, the result of `get_state` when the backup was saved.
        """
        exchanges = self._exchanges()
        if self._island is not None:
            self._island.staleness = state["staleness"]
        elif exchanges is not None:
            exchanges.staleness.assign(state["staleness"])

    def _local_steps(self) -> Any:
        """Return the `LocalSteps` of the optimizer, or `None` on an island."""
        return self.optimizer.features.installed.get(LocalSteps)

    def _exchanges(self) -> Any:
        """Return the `Exchanges` of delayed outer steps; `None` without `delay`."""
        local_steps = self.options.delay and self._local_steps()
        return local_steps.exchanges if local_steps else None

    def _share_steps(self) -> None:
        """Set the fraction of its own batches on which this worker makes inner steps.

        With `dynamic_steps` all workers call it at the beginning of an epoch. The
        fraction follows from the speeds in the previous epoch, and is the same within a
        node.

        Raises:
            ValueError: If gradients are accumulated.
        """
        if self.optimizer.accumulation_steps > 1:
            raise ValueError(
                "`dynamic_steps` skips batches, so each batch must be one update. "
                "Remove `dynamic_steps` or gradient accumulation. Received: "
                f"accumulation_steps={self.optimizer.accumulation_steps}"
            )
        local_steps, worker_group = self._local_steps(), worker_group_of(self.model)
        if local_steps is None or worker_group.num_workers == 1:
            return
        strategy, pace = self.model.distribute_strategy, local_steps.pace
        seconds = worker_group.all_gather(
            "seconds of an inner step", pace.pop_mean_seconds()
        )
        nodes = workers_by_node(strategy, self.options.scope)
        if fractions := step_fractions(seconds, nodes):
            pace.share = fractions[worker_group.rank]
            self._least_share = min(fractions)

    @property
    def settings(self) -> dict[str, Any]:
        """Dict, JSON-serializable settings that must be the same on all workers."""
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
