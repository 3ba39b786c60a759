"""How a `DistributedOptimizer` gets its state sharded, and goes on with what it had."""

from __future__ import annotations

from typing import Any

from tfdp import _compat
from tfdp.base.ownership import is_ours
from tfdp.base.param_groups import ParamGroup, param_groups_of
from tfdp.keras_hooks.saving import is_saving
from tfdp.optimizer import arguments
from tfdp.optimizer.settings import OptimizerSettings
from tfdp.plans.memory import MemoryReport
from tfdp.replicas.initial_values import synchronize_new_variables
from tfdp.sharding import ShardedLayout, ShardedState, memory_report


class ShardableOptimizer(OptimizerSettings):
    """What of a `DistributedOptimizer` decides where its state lies."""

    sharding: str
    shard_scope: str
    offload: str | None
    built: bool
    _redistribute: Any
    _shards: ShardedState | None
    _distribution_strategy: Any

    @property
    def needs_trace(self) -> bool:
        """Whether a step was traced with other things switched on than now."""
        return self._traces.features not in (None, self._traced_parts)

    @property
    def shards(self) -> ShardedState | None:
        """`ShardedState`, or `None` where every replica has all of the state."""
        return self._shards

    @property
    def accumulates_sums(self) -> bool:
        """Whether slices of the sum over replicas are accumulated (ZeRO-2)."""
        return self._shards is not None and self.sharding == "gradients"

    @property
    def own_by_replica(self) -> list:
        """Variables of which each replica has another value: slices of sums."""
        accumulation = self._features.accumulation
        if accumulation is None or not self.accumulates_sums:
            return []
        return list(accumulation.sums)

    @property
    def is_sharded(self) -> bool:
        """Whether no replica holds the whole state."""
        return self._shards is not None

    def shard(
        self, sharding: str, shard_scope: str = "all", offload: str | None = None
    ) -> None:
        """Shards the state from now on; what is there is kept.

        Args:
            sharding: String: `"optimizer"` or `"gradients"`.
            shard_scope: String: `"all"` or `"node"`. Defaults to `"all"`.
            offload: `"cpu"` or `None`. Defaults to `None`.

        Raises:
            ValueError: If it is sharded already, in another way.
        """
        arguments.check_sharding(sharding, shard_scope, offload)
        wanted = (sharding, shard_scope, offload)
        own = (self.sharding, self.shard_scope, self.offload)
        if wanted == own:
            return
        if self.sharding != "none":
            raise ValueError(
                "The optimizer is sharded already, in another way: (sharding, "
                f"shard_scope, offload) = {own}. Received: {wanted}"
            )
        self.sharding, self.shard_scope, self.offload = wanted
        if self.built:
            self._shard()

    def memory_report(self) -> MemoryReport:
        """Bytes of the training state on a replica, with and without sharding.

        Returns:
            `MemoryReport`; print it.

        Raises:
            ValueError: If the optimizer has not been built.
        """
        if not self.built:
            raise ValueError(
                "The optimizer has no variables yet. Train a step first, or call "
                "`optimizer.build(model.trainable_variables)`."
            )
        return memory_report(self)

    def swap_averages(self) -> None:
        """Swaps weights with their moving averages, outside a step."""
        self._traces.run(self, "swap", self._swap_averages)

    def restart_averages(self) -> None:
        """Lets moving averages begin again at the weights, outside a step."""
        self._traces.run(self, "restart", self._restart_averages)

    def _overwrite_with_averages(self) -> None:
        for layout, part in self._averaged():
            layout.overwrite_with_average(part)

    def _swap_averages(self) -> None:
        for layout, part in self._averaged():
            layout.swap_with_average(part)

    def _restart_averages(self) -> None:
        for layout, part in self._averaged():
            layout.restart_average(part)

    def _averaged(self) -> list[tuple[ShardedLayout, ParamGroup]]:
        """The parts that have averages, with the layout on this replica."""
        assert self._shards is not None
        layout = self._shards.on_replica()
        parts = param_groups_of(self.inner_optimizer, _compat.trained_by(self))
        return [(layout, part) for part in parts if part.optimizer.use_ema]

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        """What TensorFlow saves: a checkpoint would lose what it cannot see."""
        # Older Keras looks at the model like this when it exports one.
        is_checkpoint = save_type == "checkpoint" and not is_saving()
        if self.is_sharded and is_checkpoint:
            raise ValueError(
                "`tf.train.Checkpoint` does not see sharded optimizer state. Use "
                "`tfdp.checkpoint.save(model, directory)`, or `model.save`."
            )
        return super()._trackable_children(save_type, **kwargs)  # type: ignore[misc]

    def _check_noise(self) -> None:
        features = self._features
        if features.noise and features.accumulation and self.accumulates_sums:
            raise ValueError(
                "The gradient noise scale needs what each replica accumulates itself, "
                'which `sharding="gradients"` does not keep. Use '
                '`sharding="optimizer"`, stage 1.'
            )

    def _can_shard(self) -> bool:
        """One replica has nobody to share with."""
        strategy = self._distribution_strategy
        wanted = self.sharding != "none" and self._shards is None
        return wanted and is_ours(strategy) and strategy.num_replicas_in_sync > 1

    def _sharding(self, variables: list[Any]) -> ShardedState:
        strategy = self._distribution_strategy
        synchronize_new_variables(strategy)  # slots may start as copies of weights
        settings = (self.sharding, self.shard_scope, self.offload)
        return ShardedState(self.inner_optimizer, variables, strategy, *settings)

    def _shard(self) -> None:
        """Shards the state that is there."""
        if not self._can_shard():
            return
        self._shards = self._sharding(_compat.trained_by(self))
        if self.accumulates_sums:
            self._shard_accumulated()

    def _shard_accumulated(self) -> None:
        """Turns each replica's own sums into slices of the sums of all."""
        assert self._shards is not None
        count, totals = self.accumulated_steps, []
        if count:
            self._traces.run(self, "redistribute", self._redistribute)
            assert self._features.accumulation is not None
            replicas = self._distribution_strategy.num_replicas_in_sync
            totals = [
                _compat.local_value(item, 0).numpy().ravel() * replicas
                for item in self._features.accumulation.sums
            ]
        self._traces.drop()  # it would keep the whole sums alive
        self._features.accumulate(self._shards.held)
        # What was made in the scope waits for worker 0's values, and has its own.
        synchronize_new_variables(self._distribution_strategy)
        accumulation = self._features.accumulation
        if accumulation is None or not count:
            return
        tensors = self._shards.accumulated(accumulation.sums)
        for variable, total in zip(_compat.trained_by(self), totals, strict=True):
            for piece in tensors[id(variable)].held:
                piece.write(total[piece.start : piece.stop])
        accumulation.count.assign(count)

    @property
    def _traced_parts(self) -> tuple:
        return (*self._features.traced_parts, self.shards)
