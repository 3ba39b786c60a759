"""`DistributedOptimizer`: any Keras optimizer, exact on any number of replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp import _compat
from tfdp.base import batch_weight
from tfdp.base.ownership import replica_context
from tfdp.base.param_groups import (
    ParamGroup,
    innermost,
    param_groups_of,
    path_of,
    rate_is_in_slots,
)
from tfdp.keras_hooks import file_view, install
from tfdp.optimizer import arguments
from tfdp.optimizer.features import Features
from tfdp.optimizer.shardable import ShardableOptimizer
from tfdp.optimizer.traces import Traces
from tfdp.reduction.replica_reducer import GradientReducer, LocalReducer, ReplicaReducer
from tfdp.sharding import ShardedState
from tfdp.sharding.full_state import FullState
from tfdp.step import path
from tfdp.step.loss_scale import MOST_SKIPS, LossScaling
from tfdp.step.state_layout import WholeVariables


@keras.saving.register_keras_serializable(package="tfdp")
class DistributedOptimizer(ShardableOptimizer, keras.optimizers.Optimizer):
    """Gives any Keras optimizer the result of one device on many replicas.

    Gradients are accumulated on each replica, reduced, unscaled, checked for
    overflow, clipped and applied, in this order; `tfdp.step.path` shows it. Under no
    strategy it does the same on one device.

    Args:
        optimizer: Keras optimizer. Its `gradient_accumulation_steps` become
            `accumulation_steps`; a `LossScaleOptimizer` is unwrapped and its
            settings are kept.
        accumulation_steps: Int, micro-batches of an update. Defaults to 1.
        loss_scale: `None`, a float, or `"dynamic"`. Defaults to `None`.
        sharding: String: `"none"`; `"optimizer"`, each replica holds and updates
            a part of the optimizer's state (ZeRO-1); or `"gradients"`, accumulated
            gradients are sharded too (ZeRO-2). Defaults to `"none"`.
        shard_scope: String, who shares one state: `"all"` replicas, or those of a
            `"node"`. Defaults to `"all"`.
        offload: `"cpu"`: sharded state is kept and updated in the memory of the
            host (ZeRO-Offload); or `None`. Defaults to `None`.
        name: String or `None`.

    Raises:
        ValueError: If an argument is none of these.

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
        name: str | None = None,
    ) -> None:
        install.install()
        arguments.check_optimizer(optimizer)
        arguments.check_sharding(sharding, shard_scope, offload)
        scaling = arguments.checked_loss_scale(loss_scale)
        outer = None
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            outer, optimizer = optimizer, optimizer.inner_optimizer
        arguments.check_strategy(_compat.strategy_of_optimizer(optimizer))
        arguments.bring_into_scope(optimizer)
        own_steps = file_view.take_accumulation_steps(optimizer)
        steps = arguments.agreed_steps(accumulation_steps, own_steps)
        super().__init__(learning_rate=0.0, name=name)
        _compat.untrack(self, [self._learning_rate])
        self.inner_optimizer = optimizer
        self._distribution_strategy = _compat.strategy_of_optimizer(optimizer)
        self.sharding = sharding
        self.shard_scope = shard_scope
        self.offload = offload
        self._shards: ShardedState | None = None
        self._features = Features(
            self._make_variable,
            self._forget,
            steps,
            scaling or (outer and file_view.scaling_of(outer)),
        )
        self._traces = Traces()
        if optimizer.built:
            self.build(_compat.trained_by(optimizer))
            self._inherit(outer if scaling is None else None, own_steps)
            self._shard()

    # What Keras calls.

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the variables of the wrapped optimizer and its own.

        Raises:
            ValueError: For variables of float8 training.
        """
        if self.built:
            return
        arguments.bring_into_scope(self)
        arguments.check_variables(list(variables))
        is_new = not self.inner_optimizer.built
        if is_new and self._can_shard():
            self._shards = self._sharding(list(variables))
        elif is_new:
            self.inner_optimizer.build(list(variables))
        trained = _compat.trained_by(self.inner_optimizer)
        _compat.set_trained(self, trained)
        slices = None
        if self._shards is not None and self.accumulates_sums:
            slices = self._shards.held
        self._features.build(trained, slices)

    # AutoGraph has nothing to convert here; the loops that call it, it may convert.
    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss: Any) -> Any:
        """Multiplies a loss by the loss scale, before its gradient is taken.

        Returns:
            Tensor like `loss`, but in float32 if that is a half.
        """
        features = self._features
        if features.scaling is not None:
            scale = features.scaling.initial_scale
            if features.scale is not None:
                scale = features.scale.read()
            loss = tf.convert_to_tensor(loss)
            if loss.dtype.size < tf.float32.size:
                loss = tf.cast(loss, tf.float32)
            loss = batch_weight.weigh_loss(loss, [self])
            loss = loss * tf.cast(scale, loss.dtype)
        return self.inner_optimizer.scale_loss(loss)

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Takes in the gradients of a micro-batch, in replica context.

        Args:
            grads: Sequence of gradients of this replica, `None` where there is
                none.
            trainable_variables: Sequence of variables or `None`, those that
                the optimizer was built for.

        Raises:
            ValueError: If it is called outside `strategy.run`.
        """
        if len(grads) == 0:
            return
        if tf.distribute.in_cross_replica_context():
            raise ValueError(
                "Call `apply` and `apply_gradients` in the function that is given to "
                "`strategy.run`."
            )
        variables = self._variables_of(grads, trainable_variables)
        with keras.name_scope(self.name):
            gradients, variables = _compat.without_missing(
                self, list(grads), list(variables)
            )
            self._traces.note(self._traced_parts, variables)
            path.take_step(self._step(variables), gradients)
        self._iterations.assign_add(1)

    def flush(self) -> None:
        """Makes an update of the micro-batches that wait, outside a step.

        Without any it does nothing.
        """
        if self.accumulated_steps:
            self._traces.run(self, "flush", self._flush)

    def redistribute_accumulated(self) -> None:
        """Gives every replica an equal part of what waits, outside a step.

        The sum stays; any one worker can then write it to a file.
        """
        if self.accumulated_steps and not self.accumulates_sums:
            self._traces.run(self, "redistribute", self._redistribute)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Gives variables their averages at the end of training, as Keras does."""
        if self.is_sharded:
            if any(part.use_ema for part in innermost(self.inner_optimizer)):
                self._traces.run(self, "finalize", self._overwrite_with_averages)
            return
        for part in innermost(self.inner_optimizer):
            if part.use_ema:
                _compat.finalize_averages(part, var_list)

    def check_progress(self) -> None:
        """Raises if every step overflows, whatever the loss scale.

        Raises:
            RuntimeError: After ten skips in a row at the smallest scale.
        """
        scale = self._features.scale
        skips = 0 if scale is None else int(scale.skips_at_minimum.numpy())
        if scale is None or skips < MOST_SKIPS:
            return
        bad = scale.non_finite.numpy().nonzero()[0]
        paths = [path_of(_compat.trained_by(self)[index]) for index in bad[:5]]
        raise RuntimeError(
            f"The gradients overflowed in {skips} steps in a row at the smallest loss "
            f"scale, {self.loss_scale:g}, so that nothing is learned. First variables "
            f"with infinite or NaN gradients: {', '.join(paths)}. Look for a learning "
            "rate that is too high, or for bad values in the data."
        )

    def as_keras(self, whole: FullState | None = None) -> keras.optimizers.Optimizer:
        """The user's own optimizer, as files hold it, sharing this one's state.

        Args:
            whole: `FullState`, what was collected of sharded state, or `None`.
                Defaults to `None`.

        Returns:
            A Keras optimizer: the wrapped one with `gradient_accumulation_steps`,
            in a `LossScaleOptimizer` where the loss is scaled.
        """
        return file_view.plain_view(self, whole or FullState())

    def get_config(self) -> dict:
        """The arguments of the constructor, as Keras serializes them."""
        scaling = self.loss_scaling
        return {
            "optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "accumulation_steps": self.accumulation_steps,
            "loss_scale": None if scaling is None else dataclasses.asdict(scaling),
            "sharding": self.sharding,
            "shard_scope": self.shard_scope,
            "offload": self.offload,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict, custom_objects: Any = None) -> Any:
        """An optimizer like that of which this is the config."""
        config = dict(config)
        optimizer = keras.saving.deserialize_keras_object(
            config.pop("optimizer"), custom_objects=custom_objects
        )
        scaling = config.pop("loss_scale")
        loss_scale = None if scaling is None else LossScaling(**scaling)
        return cls(optimizer, loss_scale=loss_scale, **config)

    # The rest is private.

    def _make_variable(self, **arguments: Any) -> Any:
        with _compat.scope_of_optimizer(self):
            return self.add_variable(**arguments)

    def _forget(self, variables: Sequence[Any]) -> None:
        _compat.untrack(self, list(variables))

    def _inherit(self, outer: Any, steps: int) -> None:
        """Goes on where a built optimizer stands."""
        scale = self._features.scale
        if outer is not None and outer.built and scale is not None:
            scale.value.assign(outer.dynamic_scale.numpy())
            scale.good_steps.assign(outer.step_counter.numpy())
        file_view.inherit(
            self.inner_optimizer,
            steps,
            self._features.accumulation,
            _compat.trained_by(self),
            self.loss_scale or 1.0,
        )

    def _variables_of(self, grads: Any, variables: Any) -> list:
        if variables is None and not self.built:
            raise ValueError(
                "Give `apply` the variables, or build the optimizer for them first: "
                "`optimizer.build(variables)`."
            )
        if variables is not None and not self.built:
            self.build(list(variables))
        given = _compat.trained_by(self) if variables is None else list(variables)
        _compat.check_known(self, given)
        if len(grads) != len(given):
            raise ValueError(
                "`apply` needs one gradient for each variable. Received: "
                f"{len(grads)} gradients for {len(given)} variables"
            )
        return given

    def _flush(self) -> None:
        variables = self._traces.variables or _compat.trained_by(self)
        path.flush(self._step(variables))

    def _redistribute(self) -> None:
        assert self._features.accumulation is not None
        self._features.accumulation.redistribute(_reducer())

    def _step(self, variables: list) -> path.Step:
        self._check_noise()
        parts = param_groups_of(self.inner_optimizer, variables)
        reducer = _reducer()
        sharded = None if self._shards is None else self._shards.on_replica()
        return path.Step(
            optimizer=self.inner_optimizer,
            parts=parts,
            variables=variables,
            positions=[_compat.index_in(self, variable) for variable in variables],
            reducer=reducer,
            weight=batch_weight.weight_for(self),
            layout=WholeVariables(reducer) if sharded is None else sharded,
            rates=[self._rate(part) for part in parts],
            growths=[self._growth(part) for part in parts],
            noise=self._features.noise,
            accumulation=self._features.accumulation,
            scale=self._features.scale,
            fixed_scale=self.inner_optimizer.loss_scale_factor,
            sliced=sharded if self.accumulates_sums else None,
        )

    def _rate(self, part: ParamGroup) -> tf.Tensor | None:
        warmup = self._features.warmup
        if warmup is None:
            return None
        rate = tf.convert_to_tensor(part.optimizer.learning_rate)
        updates = tf.convert_to_tensor(part.optimizer.iterations)
        return rate * tf.cast(warmup.factor(updates), rate.dtype)

    def _growth(self, part: ParamGroup) -> tf.Tensor | None:
        warmup = self._features.warmup
        has_rate = rate_is_in_slots(part.optimizer)
        if warmup is None or not warmup.momentum_correction or not has_rate:
            return None
        return warmup.growth(tf.convert_to_tensor(part.optimizer.iterations))


def _reducer() -> GradientReducer:
    context = replica_context()
    if context is None:
        arguments.check_strategy(tf.distribute.get_strategy())
        return LocalReducer()
    return ReplicaReducer(tf.distribute.get_strategy().extended.reducer, context)
