"""`DistributedOptimizer`: wraps any Keras optimizer, for any number of replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp.ground._compat import (
    graphs,
    keras_model,
    keras_optimizer,
    optimizer_state,
    optimizer_views,
)
from tfdp.ground.base import batch_weight
from tfdp.ground.base.context import (
    in_replica_thread,
    num_replicas_of,
    replica_context,
)
from tfdp.ground.base.deferred_updates import defer
from tfdp.ground.base.param_groups import (
    ParamGroup,
    innermost,
    param_groups_of,
    path_of,
)
from tfdp.ground.base.wrappers import register_wrapper
from tfdp.ground.plans.sharding import ShardingOptions
from tfdp.ground.plans.units import UnitOptions, resolve_gather_groups
from tfdp.training.keras_hooks import file_view, install, scope_checks
from tfdp.training.optimizer import arguments
from tfdp.training.optimizer.features import Features
from tfdp.training.optimizer.settings import Traces
from tfdp.training.optimizer.shardable import ShardableOptimizer
from tfdp.training.reduction.gradient_reducer import GradientReducer, replica_reducer
from tfdp.training.sharding.full_state import FullState
from tfdp.training.step.accumulation import (
    Accumulator,
    LocalAccumulation,
    NoAccumulation,
    ShardedAccumulation,
)
from tfdp.training.step.empty_step import record_update
from tfdp.training.step.loss_scale import MAX_SKIPS, LossScaling
from tfdp.training.step.path import take_step
from tfdp.training.step.state_layout import StateLayout
from tfdp.training.step.step import Step, match_gradients


@keras.saving.register_keras_serializable(package="tfdp")
class DistributedOptimizer(ShardableOptimizer, keras.optimizers.Optimizer):
    """Wraps a Keras optimizer: many replicas get the same result as one device.

    Gradients are accumulated on each replica, reduced, unscaled, checked for
    overflow, clipped and applied, in this order; see `tfdp.training.step.path`.
    Without a strategy it does the same on one device.

    Args:
        optimizer: Keras optimizer. Its `gradient_accumulation_steps` become
            `accumulation_steps`, and its learning-rate schedule continues to count
            micro-batches; a `LossScaleOptimizer` is unwrapped and its settings are
            kept.
        accumulation_steps: Int, number of micro-batches of an update. Defaults to 1.
        loss_scale: `None`, a float, or `"dynamic"`. Defaults to `None`.
        sharding: String: `"none"`; `"optimizer"`, each replica holds and updates
            a part of the optimizer's state (ZeRO-1); `"gradients"`, accumulated
            gradients are sharded too (ZeRO-2); or `"parameters"`, the weights too
            (ZeRO-3). Defaults to `"none"`.
        shard_scope: String, the replicas that share one state: `"all"` replicas, or
            those of a `"node"`. Defaults to `"all"`.
        offload: `"cpu"`: sharded state is kept and updated in the memory of the
            host (ZeRO-Offload); or `None`. Defaults to `None`.
        gather_groups: With sharded parameters, a sequence of strings, names of layers.
            The parameters of each of these layers are gathered together. Those of other
            layers are grouped by size. Defaults to `()`.
        reshard_after_forward: With sharded parameters, `True`: gathered parameters are
            freed when their layers have run, and gathered again for the backward pass;
            `False`: they are kept until the backward pass, which needs fewer bytes and
            more memory; or `"node"`: they are gathered again inside nodes only.
            Defaults to `True`.
        prefetch: With sharded parameters, an int, number of groups that are gathered
            ahead of the group that computes. Defaults to 1.
        gather_compression: With sharded parameters, `"int8"`: large parameters with
            two or more dimensions are gathered in 8 bits an element, and layers compute
            with the rounded values; the shards are not rounded. Or `None`, without
            rounding. Defaults to `None`.
        units: The old name of `gather_groups`.
        name: String or `None`.

    Raises:
        ValueError: If an argument has another value.

    Example:

    >>> import keras
    >>> adam = keras.optimizers.Adam(1e-3, global_clipnorm=1.0)
    >>> DistributedOptimizer(adam, accumulation_steps=4).accumulation_steps
    4
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        *,
        accumulation_steps: int = 1,
        loss_scale: float | str | LossScaling | None = None,
        sharding: str = "none",
        shard_scope: str = "all",
        offload: str | None = None,
        gather_groups: Sequence[str] = (),
        reshard_after_forward: bool | str = True,
        prefetch: int = 1,
        gather_compression: str | None = None,
        units: Sequence[str] | None = None,
        name: str | None = None,
    ) -> None:
        install.install()
        arguments.check_optimizer(optimizer)
        options = ShardingOptions(
            sharding,
            shard_scope,
            offload,
            UnitOptions(
                resolve_gather_groups(gather_groups, units),
                reshard_after_forward,
                prefetch,
                gather_compression,
            ),
        )
        scaling = arguments.checked_loss_scale(loss_scale)
        outer = None
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            outer, optimizer = optimizer, optimizer.inner_optimizer
        arguments.check_strategy(keras_optimizer.strategy_of_optimizer(optimizer))
        scope_checks.bring_optimizer_into_scope(optimizer)
        own_steps = file_view.pop_accumulation_steps(optimizer)
        steps = arguments.resolve_accumulation_steps(accumulation_steps, own_steps)
        super().__init__(learning_rate=0.0, name=name)
        optimizer_state.untrack(self, [keras_optimizer.rate_or_schedule(self)])
        keras_optimizer.share_strategy(optimizer, self)
        scaling = scaling or (outer and file_view.loss_scaling_of(outer))
        self.inner_optimizer = optimizer
        self.features = Features(self, steps, scaling)
        self.sharding_options = options
        self._traces = Traces()
        self._is_replaced = False
        register_wrapper(optimizer, self)
        if optimizer.built:
            self.build(keras_optimizer.trained_by(optimizer))
            self._copy_keras_state(outer if loss_scale is None else None, own_steps)
            self._shard()

    def build(self, variables: Sequence[Any]) -> None:
        """Create the variables of the wrapped optimizer and of the wrapper.

        Raises:
            ValueError: For variables of float8 training.
        """
        if self.built:
            return
        scope_checks.bring_optimizer_into_scope(self)
        arguments.check_variables(list(variables))
        is_new = not self.inner_optimizer.built
        if is_new:
            self._warn_of_one_replica()
        if is_new and self._can_shard():
            self.shards = self._create_shards(list(variables))
        elif is_new:
            self.inner_optimizer.build(list(variables))
        arguments.check_accumulation(self.inner_optimizer)
        trained = keras_optimizer.trained_by(self.inner_optimizer)
        keras_optimizer.set_trained(self, trained)
        slices = None
        if self.shards is not None and self.accumulates_sums:
            slices = self.shards.accumulated_slices
        self.features.build(trained, slices)

    # AutoGraph converts a training loop, and also the functions that the loop calls.
    # `scale_loss` needs no conversion, because it branches on Python values only.
    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss: Any) -> Any:
        """Multiply a loss by the loss scale, before its gradient is computed.

        Returns:
            Tensor like `loss`; in float32 if `loss` has 16 bits.
        """
        features = self.features
        if features.measures_loss:
            features.loss = loss
        if features.scaling is not None:
            scale = features.scaling.initial_scale
            if features.scale is not None:
                scale = features.scale.read()
            loss = tf.convert_to_tensor(loss)
            if loss.dtype.size < tf.float32.size:
                loss = tf.cast(loss, tf.float32)
            loss = loss * tf.cast(scale, loss.dtype)
        return self.inner_optimizer.scale_loss(loss)

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Accumulate or apply the gradients of a micro-batch, in replica context.

        Args:
            grads: Sequence of gradients of this replica, with `None` for variables
                without a gradient.
            trainable_variables: Sequence of variables, or `None` for those that the
                optimizer was built for.

        Raises:
            ValueError: If it is called outside `strategy.run`, or if the wrapped
                optimizer overrides `apply` and the loss is scaled.
        """
        if len(grads) == 0 or keras_model.is_built_symbolically():
            return
        # Outside of `strategy.run`, also outside of the strategy's scope, `apply` would
        # update the copies of one replica only.
        is_outside = num_replicas_of(self) > 1 and not in_replica_thread()
        if is_outside or tf.distribute.in_cross_replica_context():
            raise ValueError(
                "Call `apply` and `apply_gradients` in the function that is given to "
                "`strategy.run`."
            )
        if self._is_replaced:
            raise ValueError(
                "The workers have changed, and a new optimizer has the sharded state: "
                "use `model.optimizer` in the step."
            )
        inner = self.inner_optimizer
        if not keras_optimizer.overrides_apply(inner):
            self.apply_directly(grads, trainable_variables)
            return
        if self.features.scaling is not None:
            raise ValueError(
                f"`{type(inner).__name__}` overrides `apply`, which would receive "
                "gradients times the loss scale. Override `update_step` instead, or "
                "train without a loss scale."
            )
        variables = trainable_variables or keras_optimizer.trained_by(self)
        # The user's `apply` may change the gradients. It then calls Keras's `apply`,
        # whose hook calls `apply_directly` of this optimizer.
        inner.apply_gradients(list(zip(grads, variables, strict=True)))

    @tf.autograph.experimental.do_not_convert
    def apply_directly(self, grads: Sequence[Any], trainable_variables: Any) -> None:
        """Accumulate or apply gradients, without the `apply` of the wrapped optimizer.

        `apply` calls it, or an `apply` that a user's optimizer overrides and that may
        change the gradients.

        Args:
            grads: Sequence of gradients of this replica, as in `apply`.
            trainable_variables: Sequence of variables, or `None`, as in `apply`.
        """
        if self.features.measures_loss:
            tensors = [*grads, self.features.take_loss()]
            self._apply_with_loss(tensors, trainable_variables)
        elif not defer(self, grads, trainable_variables, self.apply_directly):
            self._take_step(grads, trainable_variables)

    def _apply_with_loss(self, tensors: Sequence[Any], variables: Any) -> None:
        """Accumulate or apply a micro-batch's gradients; keep its loss for features.

        While a step is traced as on one device, gradients and loss are recorded; each
        replica then calls this method with its own part of them.

        Args:
            tensors: Sequence of the gradients and, last, the loss.
            variables: Sequence of variables, or `None` for those that the optimizer was
                built for.
        """
        if not defer(self, tensors, variables, self._apply_with_loss):
            *gradients, loss = tensors
            self._take_step(gradients, variables, loss)

    def _take_step(
        self, grads: Sequence[Any], trainable_variables: Any, loss: Any = None
    ) -> None:
        """Accumulate or apply the gradients of a micro-batch now, on this replica.

        Args:
            grads: Sequence of gradients of this replica, with `None` for variables
                without a gradient.
            trainable_variables: Sequence of variables, or `None` for those that the
                optimizer was built for.
            loss: Scalar tensor, this replica's part of the loss, if a feature reads it.
                Defaults to `None`.
        """
        scope_checks.bring_optimizer_into_scope(self)
        gradients, variables = match_gradients(self, grads, trainable_variables)
        # On one device the update waits for the first gradient. If the data has ended,
        # the step then fails before it changes a variable, as a step on replicas does.
        with (
            keras.name_scope(self.name),
            tf.control_dependencies(_first_traced(gradients)),
        ):
            self._traces.record(self._traced_parts, variables)
            record_update(self, lambda: self._step(variables))
            take_step(self._step(variables, loss), gradients)
            keras_optimizer.count_update(self, 1)

    def flush(self) -> None:
        """Apply an update of the accumulated micro-batches now, outside a step.

        Does nothing if no micro-batches are accumulated. All replicas have the same
        state afterwards.
        """
        if self.accumulated_steps:
            self.run_on_replicas("flush", self._flush)
            self.equalize_replicas()

    def equalize_replicas(self) -> None:
        """Give all replicas the same state, if features have let them differ.

        Call it outside a step, on all workers. It does nothing in synchronous training.
        """
        for feature in self.features.installed.values():
            feature.equalize_replicas(self)

    def run_on_replicas(self, name: str, function: Callable[[], None]) -> None:
        """Run a function on every replica, outside a step.

        Args:
            name: String, which identifies the function, so that a later call reuses its
                trace.
            function: Callable without arguments, called in replica context.
        """
        self._traces.run(self, name, function)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Overwrite variables with their moving averages, after training.

        Args:
            var_list: Sequence of Keras variables. Those that no inner optimizer with
                `use_ema` trains stay unchanged.
        """
        if self.is_sharded:
            if any(part.use_ema for part in innermost(self.inner_optimizer)):
                self.overwrite_with_averages(var_list)
            return
        for part in innermost(self.inner_optimizer):
            if part.use_ema:
                keras_optimizer.finalize_averages(part, var_list)

    def check_progress(self) -> None:
        """Check that not every step overflows, whatever the loss scale.

        Raises:
            RuntimeError: After ten skips in a row at the smallest scale.
        """
        scale = self.features.scale
        skips = 0 if scale is None else int(scale.skips_at_minimum.numpy())
        if scale is None or skips < MAX_SKIPS:
            return
        bad = scale.non_finite.numpy().nonzero()[0]
        paths = [path_of(keras_optimizer.trained_by(self)[index]) for index in bad[:5]]
        raise RuntimeError(
            f"The gradients overflowed in {skips} steps in a row at the smallest loss "
            f"scale, {self.loss_scale:g}, so that nothing is learned. First variables "
            f"with infinite or NaN gradients: {', '.join(paths)}. Look for a learning "
            "rate that is too high, or for bad values in the data."
        )

    def as_keras(
        self, full_state: FullState | None = None
    ) -> keras.optimizers.Optimizer:
        """Return the optimizer in the form of Keras files, sharing this one's state.

        Args:
            full_state: `FullState`, the gathered sharded state, or `None`. Defaults to
                `None`.

        Returns:
            Keras optimizer: the wrapped one with `gradient_accumulation_steps`, inside
            a `LossScaleOptimizer` if the loss is scaled.
        """
        return file_view.keras_view(self, full_state or FullState())

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor, as Keras serializes them."""
        scaling = self.features.scaling
        return {
            "optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "accumulation_steps": self.accumulation_steps,
            "loss_scale": None if scaling is None else dataclasses.asdict(scaling),
            "name": self.name,
            **self.sharding_options.config,
        }

    def renew(self) -> DistributedOptimizer:
        """Return a new, unbuilt optimizer with these settings, which replaces this one.

        Afterwards `apply` of this one raises an error.
        """
        self._is_replaced = True
        inner = self.inner_optimizer
        config = optimizer_views.config_of(inner)
        optimizer = optimizer_views.clone_from_config(inner, config)
        optimizer_views.copy_exclusions(inner, optimizer)
        return type(self)(
            optimizer,
            accumulation_steps=self.accumulation_steps,
            loss_scale=self.features.scaling,
            name=self.name,
            **self.sharding_options.config,
        )

    def forget_traces(self) -> None:
        """Drop the functions that were traced to run on all replicas.

        A step that was traced before is traced again. Call it after a change of the
        replicas.
        """
        self._traces.drop()

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Create a `DistributedOptimizer` from the result of `get_config`."""
        config = dict(config)
        optimizer = keras.saving.deserialize_keras_object(
            config.pop("optimizer"), custom_objects=custom_objects
        )
        scaling = config.pop("loss_scale")
        loss_scale = None if scaling is None else LossScaling(**scaling)
        return cls(optimizer, loss_scale=loss_scale, **config)

    def _copy_keras_state(self, outer: Any, steps: int) -> None:
        """Copy loss scale and accumulated gradients from a built Keras optimizer.

        Args:
            outer: `LossScaleOptimizer` that was unwrapped, or `None`.
            steps: Int, number of micro-batches that the Keras optimizer accumulates.
        """
        scale = self.features.scale
        if outer is not None and outer.built and scale is not None:
            scale.value.assign(outer.dynamic_scale.numpy())
            scale.good_steps.assign(outer.step_counter.numpy())
        file_view.move_accumulated_gradients(
            self.inner_optimizer,
            steps,
            self.features.accumulation,
            keras_optimizer.trained_by(self),
            self.loss_scale or 1.0,
        )

    def _flush(self) -> None:
        """Update with the accumulated gradients on the calling replica."""
        variables = self._traces.variables or keras_optimizer.trained_by(self)
        take_step(self._step(variables), None)

    def _step(self, variables: list, loss: Any = None) -> Step:
        """Create the `Step` of the calling replica: settings and state of a step.

        Args:
            variables: List of Keras variables that have gradients.
            loss: Scalar tensor, this replica's part of the loss, if a feature reads it.
                Defaults to `None`.

        Raises:
            ValueError: If features in use cannot be combined.
        """
        features = self.features
        for feature in features.active:
            feature.check(self)
        param_groups = param_groups_of(self.inner_optimizer, variables)
        reducer = _reducer()
        groups = features.independent_groups
        sharded = None if self.shards is None else self.shards.layout_of_replica()
        step_reducer = groups.reducer() if groups else reducer
        layout = sharded or StateLayout(step_reducer)
        return Step(
            optimizer=self.inner_optimizer,
            param_groups=param_groups,
            variables=variables,
            positions=keras_optimizer.positions_in(self, variables),
            accumulator=self._accumulator(
                layout, param_groups, variables, step_reducer
            ),
            reducer=reducer,
            layout=layout,
            schedules=[features.schedule(group) for group in param_groups],
            scale=features.scale,
            features=features.active,
            fixed_scale=self.inner_optimizer.loss_scale_factor,
            loss=loss,
            loss_sum=features.loss_sum if features.measures_loss else None,
        )

    def _accumulator(
        self,
        layout: StateLayout,
        param_groups: list[ParamGroup],
        variables: list,
        reducer: GradientReducer,
    ) -> Accumulator:
        """Create the accumulator of a step, which weighs and sums its gradients.

        Args:
            layout: `StateLayout` of the step.
            param_groups: List of `ParamGroup`.
            variables: List of Keras variables that have gradients.
            reducer: `GradientReducer`, which knows the weight of the replica.

        Returns:
            `NoAccumulation`, `LocalAccumulation`, or, for ZeRO-2,
            `ShardedAccumulation`.
        """
        weight, num_groups = reducer.gradient_weight(), 1
        groups = self.features.independent_groups
        # Groups of replicas may update independently. Gradients are then divided by the
        # number of groups, but only in Keras's loops: in a custom loop each replica's
        # loss is a part of the global mean already.
        if groups and batch_weight.is_part_of_sum():
            num_groups = len(groups.groups_of_ranks(tf.distribute.get_strategy()))
        state = self.features.accumulation
        if state is None:
            return NoAccumulation(weight)
        if not self.accumulates_sums:
            positions = keras_optimizer.positions_in(self, variables)
            return LocalAccumulation(state, positions, weight, num_groups)
        return ShardedAccumulation(state, layout, param_groups, variables, weight)


def _first_traced(gradients: list) -> list:
    """Return the gradient that was traced first, for the update to wait for it.

    If the data has ended, a step on one device then fails before it changes a variable.

    Args:
        gradients: List of tensors or `tf.IndexedSlices`.

    Returns:
        List of one tensor, a component of that gradient. Empty in eager mode, in a
        replica of a tfdp strategy, or without gradients.
    """
    if tf.executing_eagerly() or replica_context() is not None:
        return []
    traced = [tf.nest.flatten(g, expand_composites=True)[0] for g in gradients]
    return [min(traced, key=graphs.op_position)] if traced else []


def _reducer() -> GradientReducer:
    """Return the reducer of the calling replica, or that of a single device.

    Raises:
        ValueError: If the current strategy is neither of tfdp nor for one device.
    """
    if replica_context() is None:
        arguments.check_strategy(tf.distribute.get_strategy())
    return replica_reducer()
