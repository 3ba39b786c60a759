"""Sharding of the state of a `DistributedOptimizer`, before or after it is built."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.ground import user_code
from tfdp.ground._compat import keras_optimizer, tf_distribute
from tfdp.ground.base import step_context
from tfdp.ground.base.context import is_tfdp
from tfdp.ground.base.param_groups import ParamGroup, param_groups_of
from tfdp.ground.plans.memory import MemoryReport
from tfdp.ground.plans.sharding import ShardingOptions
from tfdp.ground.text import pluralize
from tfdp.training.keras_hooks.saving import is_saving
from tfdp.training.optimizer.settings import OptimizerSettings
from tfdp.training.parameters.conversion import parameters_in_order
from tfdp.training.replicas.synchronized_scope import synchronize_new_variables
from tfdp.training.sharding.full_state import redistribute_sums
from tfdp.training.sharding.memory_report import memory_report
from tfdp.training.sharding.sharded_layout import ShardedLayout
from tfdp.training.sharding.sharded_state import ShardedState


class ShardableOptimizer(OptimizerSettings):
    """Base class of `DistributedOptimizer` that shards the optimizer's state.

    Attributes:
        sharding_options: `ShardingOptions`, what is sharded and over which replicas.
        shards: `ShardedState`, or `None` if every replica holds the whole state.
    """

    built: bool
    name: str
    _model: weakref.ref[Any] | None = None

    sharding_options: ShardingOptions
    shards: ShardedState | None = None

    @property
    def sharding(self) -> str:
        """String: `"none"`, `"optimizer"`, `"gradients"` or `"parameters"`.

        It says what is sharded over replicas, see `DistributedOptimizer`.
        """
        return self.sharding_options.sharding

    def register_model(self, model: Any) -> None:
        """Remember the model that is trained, by a weak reference.

        Sharding follows the order of its parameters.

        Args:
            model: Keras model that was compiled with this optimizer.
        """
        self._model = weakref.ref(model)

    @property
    def frozen_parameters(self) -> list:
        """List of the model's parameters that the optimizer does not train.

        They are Keras variables, such as those of frozen layers. The list is empty
        until the model is registered.
        """
        model = self._model and self._model()
        if model is None:
            return []
        trained = keras_optimizer.trained_by(self)
        known = {id(variable) for variable in trained}
        ordered = parameters_in_order(model, trained)
        return [variable for variable in ordered if id(variable) not in known]

    @property
    def needs_trace(self) -> bool:
        """Bool, whether a step was traced with settings that have changed since."""
        return self._traces.features not in (None, self._traced_parts)

    @property
    def accumulates_sums(self) -> bool:
        """Bool, whether a replica accumulates a shard of the gradients' sum (ZeRO-2).

        If false, each replica accumulates its own gradients.
        """
        return self.shards is not None and self.sharding_options.shards_gradients

    @property
    def per_replica_variables(self) -> list:
        """List of the variables whose values differ between replicas.

        They are the sums of accumulated gradients if these are sharded: each replica
        has another shard. Otherwise the list is empty.
        """
        accumulation = self.features.accumulation
        if accumulation is None or not self.accumulates_sums:
            return []
        return list(accumulation.sums)

    @property
    def is_sharded(self) -> bool:
        """Bool, whether the state is sharded: no replica holds all of it."""
        return self.shards is not None

    def shard(self, options: ShardingOptions) -> None:
        """Shard the optimizer's state from now on; existing values are kept.

        Args:
            options: `ShardingOptions`, what to shard and over which replicas.

        Raises:
            ValueError: If the state is sharded already with other options.
        """
        current = self.sharding_options
        if options == current:
            return
        if current.shards_state:
            raise ValueError(
                f"The optimizer is already sharded with other options: {current.text}. "
                f"Received: {options.text}"
            )
        self.sharding_options = options
        if self.built:
            self._shard()

    def memory_report(self) -> MemoryReport:
        """Return the bytes of the training state on a replica, sharded and whole.

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

    def redistribute_accumulated(self) -> None:
        """Give every replica an equal part of accumulated gradients, outside a step.

        The sum over replicas does not change. Afterwards any worker can compute it, and
        write it to a file.
        """
        accumulation = self.features.accumulation
        strategy = keras_optimizer.strategy_of_optimizer(self)
        if self.accumulated_steps and not self.accumulates_sums and is_tfdp(strategy):
            assert accumulation is not None
            redistribute_sums(strategy, accumulation.sums)

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Set the values of `variables`, as Keras does.

        Args:
            weights: Sequence of arrays, one for each of `variables`.

        Raises:
            ValueError: If the number of arrays is wrong, or the state is sharded.
        """
        variables = self.variables
        if self.is_sharded or len(weights) != len(variables):
            raise ValueError(
                "`set_weights` of an optimizer takes one value for each of its "
                "`variables`, which do not include sharded state. For that use "
                "`model.load_weights`, or `tfdp.checkpoint`. Received: "
                f"{pluralize(len(weights), 'value')}, for "
                f"{pluralize(len(variables), 'variable')}"
            )
        for variable, value in zip(variables, weights, strict=True):
            variable.assign(value)

    def save_own_variables(self, store: Any) -> None:
        """Write the variables of an optimizer other than `model.optimizer` to a file.

        `model.optimizer` is saved as the optimizer that `as_keras` returns.

        Args:
            store: Dict-like object of Keras for the arrays of a file.

        Raises:
            ValueError: If the state is sharded, or gradients are accumulated.
        """
        if self.is_sharded or self.accumulated_steps:
            raise ValueError(
                "A Keras file cannot hold sharded state or accumulated gradients of an "
                "optimizer other than `model.optimizer`. Use `tfdp.checkpoint`, or "
                f"save after whole updates. Received: {self.name!r}"
            )
        super().save_own_variables(store)  # type: ignore[misc]

    def swap_averages(self) -> None:
        """Swap weights with the moving averages of sharded state, outside a step."""
        self._on_averages("swap", ShardedLayout.swap_with_average)

    def restart_averages(self) -> None:
        """Set the moving averages of sharded state to the weights, outside a step."""
        self._on_averages("restart", ShardedLayout.restart_average)

    def overwrite_with_averages(self, variables: Sequence[Any]) -> None:
        """Overwrite variables with moving averages of sharded state, outside a step.

        Args:
            variables: Sequence of Keras variables.
        """
        known = {id(variable) for variable in variables}
        trained = keras_optimizer.trained_by(self)
        chosen = [index for index, v in enumerate(trained) if id(v) in known]
        self._on_averages(
            f"finalize {chosen}",
            lambda layout, part: layout.overwrite_with_average(part, known),
        )

    def _on_averages(
        self, name: str, action: Callable[[ShardedLayout, ParamGroup], None]
    ) -> None:
        """Run an action on all replicas for each parameter group with moving averages.

        The state must be sharded.

        Args:
            name: String, which identifies the action among traced functions.
            action: Callable that takes the `ShardedLayout` of the replica and a
                `ParamGroup`.
        """

        def on_replica() -> None:
            """Call `action` for each parameter group with averages on this replica."""
            assert self.shards is not None
            layout = self.shards.layout_of_replica()
            trained = keras_optimizer.trained_by(self)
            for part in param_groups_of(self.inner_optimizer, trained):
                if part.optimizer.use_ema:
                    action(layout, part)

        self._traces.run(self, name, on_replica)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        """Return the objects that TensorFlow saves, if the state is not sharded.

        Returns:
            Dict of TensorFlow's trackable objects by name.

        Raises:
            ValueError: For `tf.train.Checkpoint` with sharded state, which it would
                lose.
        """
        # Older versions of Keras also pass "checkpoint" when they export a model, which
        # `is_saving` recognizes.
        is_checkpoint = save_type == "checkpoint" and not is_saving()
        if self.is_sharded and is_checkpoint:
            raise ValueError(
                "`tf.train.Checkpoint` does not see sharded optimizer state. Use "
                "`tfdp.checkpoint.save(model, directory)`, or `model.save`."
            )
        return super()._trackable_children(save_type, **kwargs)  # type: ignore[misc]

    def _warn_of_one_replica(self) -> None:
        """Warn if parameters are to be sharded over one replica only."""
        strategy = keras_optimizer.strategy_of_optimizer(self)
        # A job that continues after losses is not warned, because other replicas may
        # still join it.
        has_one_replica = (
            is_tfdp(strategy)
            and strategy.num_replicas_in_sync == 1
            and not strategy.extended.continues_after_loss
        )
        if has_one_replica and self.sharding_options.shards_parameters:
            user_code.warn(
                '`sharding="parameters"` has no effect: there is one replica, which '
                "holds everything."
            )

    def _can_shard(self) -> bool:
        """Return whether the state is to be sharded now, over several replicas.

        That is so if `sharding` is set, the state is not sharded yet, and the
        optimizer's strategy is a tfdp strategy with several replicas.
        """
        strategy = keras_optimizer.strategy_of_optimizer(self)
        wanted = self.sharding_options.shards_state and self.shards is None
        return wanted and is_tfdp(strategy) and strategy.num_replicas_in_sync > 1

    def _create_shards(self, variables: list[Any]) -> ShardedState:
        """Create the sharded state of the wrapped optimizer for these variables.

        Raises:
            ValueError: If a running step would shard parameters that it has read whole.
        """
        builds_in_step = step_context.current().builds_optimizer
        in_step = not tf.executing_eagerly() or builds_in_step
        if self.sharding_options.shards_parameters and in_step:
            raise ValueError(
                "A step builds an optimizer that shards parameters, but the step has "
                "already read them whole. Build it before the first step, in the scope "
                "of the strategy: `optimizer.build(model.trainable_variables)`."
            )
        strategy = keras_optimizer.strategy_of_optimizer(self)
        # Slots may begin as copies of weights. So the weights are made equal on all
        # workers before the slots are created.
        synchronize_new_variables(strategy)
        model = self._model and self._model()
        return ShardedState(
            self.inner_optimizer,
            variables,
            strategy,
            self.sharding_options,
            () if model is None else parameters_in_order(model, variables),
        )

    def _shard(self) -> None:
        """Shard the existing state, or leave it whole if there is a single replica."""
        self._warn_of_one_replica()
        if not self._can_shard():
            return
        self.shards = self._create_shards(keras_optimizer.trained_by(self))
        if self.accumulates_sums:
            self._shard_accumulated()

    def _shard_accumulated(self) -> None:
        """Replace each replica's accumulated gradients by a shard of their sum.

        The sum is that over all replicas. The number of accumulated micro-batches
        stays.
        """
        assert self.shards is not None
        count, totals = self.accumulated_steps, []
        if count:
            assert self.features.accumulation is not None
            strategy = keras_optimizer.strategy_of_optimizer(self)
            redistribute_sums(strategy, self.features.accumulation.sums)
            replicas = strategy.num_replicas_in_sync
            totals = [
                tf_distribute.local_value(item, 0).numpy().ravel() * replicas
                for item in self.features.accumulation.sums
            ]
        # The traced functions are dropped, because they would keep the whole sums
        # alive.
        self._traces.drop()
        self.features.accumulate(self.shards.accumulated_slices)
        # When a strategy's scope ends, its new variables receive the values of worker
        # 0. They are synchronized now instead, so that the shards below are kept.
        synchronize_new_variables(keras_optimizer.strategy_of_optimizer(self))
        accumulation = self.features.accumulation
        if accumulation is None or not count:
            return
        tensors = self.shards.accumulated(accumulation.sums)
        trained = keras_optimizer.trained_by(self)
        for variable, total in zip(trained, totals, strict=True):
            for shard in tensors[id(variable)].local_shards:
                shard.write(total[shard.start : shard.stop])
        accumulation.count.assign(count)

    @property
    def _traced_parts(self) -> tuple:
        """Tuple of the state that a traced step uses; a change requires a new trace.

        Its items are the accumulated gradients, the loss scale, each active feature and
        the sharded state, in this order; `None` for state that is not in use.
        """
        return (*self.features.traced_parts, self.shards)
