"""`DistributedOptimizer`: any Keras optimizer, exact on any number of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp import _compat, interchange, step, trainer
from tfdp.accumulate import Accumulation
from tfdp.gradient_noise import GradientNoise
from tfdp.layout import WholeVariables
from tfdp.loss_scale import MOST_SKIPS, LossScale, LossScaling
from tfdp.ownership import is_ours, replica_context
from tfdp.reducer import GradientReducer, LocalReducer, ReplicaReducer
from tfdp.traits import Part, innermost, parts_of, rate_is_in_slots
from tfdp.warmup import Warmup, WarmupOptions

_SHARDINGS = ("none", "optimizer", "gradients")


@keras.saving.register_keras_serializable(package="tfdp")
class DistributedOptimizer(keras.optimizers.Optimizer):
    """Gives any Keras optimizer the result of one device on many replicas.

    Gradients are accumulated on each replica, reduced, unscaled, checked for
    overflow, clipped and applied, in this order; `tfdp.step` shows it. Under no
    strategy it does the same on one device.

    Args:
        optimizer: Keras optimizer. Its `gradient_accumulation_steps` become
            `accumulation_steps`; a `LossScaleOptimizer` is unwrapped and its
            settings are kept.
        accumulation_steps: Int, micro-batches of an update. Defaults to 1.
        loss_scale: `None`, a float, or `"dynamic"`. Defaults to `None`.
        sharding: `"none"`. Others are not there yet.
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
        name: str | None = None,
    ) -> None:
        trainer.install()
        optimizer = _checked(optimizer)
        check_accumulation_steps(accumulation_steps)
        _check_sharding(sharding)
        scaling = _loss_scaling(loss_scale)
        outer = None
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            scaling = scaling or interchange.scaling_of(optimizer)
            outer, optimizer = optimizer, optimizer.inner_optimizer
        check_strategy(_compat.strategy_of_optimizer(optimizer))
        _check_scope(optimizer)
        own_steps = interchange.take_accumulation_steps(optimizer)
        if own_steps > 1 and accumulation_steps > 1:
            raise ValueError(
                "Give the number of micro-batches once. Received: "
                f"accumulation_steps={accumulation_steps} and an optimizer with "
                f"gradient_accumulation_steps={own_steps}"
            )
        super().__init__(learning_rate=0.0, name=name)
        self._untrack_variable(self._learning_rate)
        self.inner_optimizer = optimizer
        self._distribution_strategy = _compat.strategy_of_optimizer(optimizer)
        self.sharding = sharding
        self._scaling = scaling
        self._steps = max(accumulation_steps, own_steps)
        self._accumulation: Accumulation | None = None
        self._scale: LossScale | None = None
        self._warmup_options: WarmupOptions | None = None
        self._warmup: Warmup | None = None
        self._noise: GradientNoise | None = None
        self._layout = WholeVariables()
        # The variables that had gradients when a step was traced last.
        self._with_gradients: list[Any] | None = None
        if optimizer.built:
            self.build(_compat.trained_by(optimizer))
            self._inherit(outer, own_steps)

    # What is switched on.

    @property
    def accumulation_steps(self) -> int:
        """Int, micro-batches of an update."""
        return self._steps

    @accumulation_steps.setter
    def accumulation_steps(self, steps: int) -> None:
        check_accumulation_steps(steps)
        self._steps = steps
        if self._accumulation is not None:
            self._accumulation.steps.assign(steps)
        elif self.built:
            self._build_state()

    @property
    def loss_scaling(self) -> LossScaling | None:
        """`LossScaling` or `None`."""
        return self._scaling

    @loss_scaling.setter
    def loss_scaling(self, scaling: LossScaling | None) -> None:
        if scaling == self._scaling:
            return
        self._scaling = scaling
        self._scale = None
        if self.built:
            self._build_state()

    @property
    def warmup(self) -> WarmupOptions | None:
        """`WarmupOptions`, or `None` outside a warmup."""
        return self._warmup_options

    @warmup.setter
    def warmup(self, options: WarmupOptions | None) -> None:
        self._warmup_options = options
        if self._warmup is None:
            if self.built:
                self._build_state()
        elif options is None:
            self._warmup.switch_off()
        else:
            self._warmup.set(options)

    def finish_warmup(self) -> bool:
        """Hands the rate over if the warmup is over, outside a step.

        A rate that is a variable gets the product of base rate and last factor
        as its value. One that is a schedule stays multiplied.

        Returns:
            Bool, whether it is over.
        """
        options = self._warmup_options
        if options is None or int(self.iterations.numpy()) <= options.steps:
            return options is None
        if self._has_rate_variables():
            for part in innermost(self.inner_optimizer):
                part.learning_rate = float(part.learning_rate) * options.last
        self.leave_warmup()
        return True

    def leave_warmup(self) -> None:
        """Ends a warmup whose last factor is in the rate already.

        A schedule never gets it, so that there it goes on.
        """
        if self._has_rate_variables():
            self.warmup = None

    def _has_rate_variables(self) -> bool:
        parts = innermost(self.inner_optimizer)
        return all(_compat.has_rate_variable(part) for part in parts)

    @property
    def features(self) -> tuple:
        """What a traced step contains; with others it has to be traced again."""
        return id(self), self._accumulation, self._scale, self._warmup, self._noise

    def measure_noise(self, smoothing: float) -> None:
        """Measures the gradient noise scale at each update from now on.

        Args:
            smoothing: Float, weight of the past in the moving averages.
        """
        if self._noise is None or self._noise.smoothing != smoothing:
            with _compat.scope_of_optimizer(self):
                self._noise = GradientNoise(self.add_variable, smoothing)

    # What can be read.

    @property
    def gradient_noise_scale(self) -> float:
        """Float, in samples, or NaN where it is not measured."""
        return float("nan") if self._noise is None else self._noise.scale

    @property
    def loss_scale(self) -> float | None:
        """Float, the factor of the loss, or `None` without loss scaling."""
        return None if self._scale is None else float(self._scale.value.numpy())

    @property
    def skipped_steps(self) -> int:
        """Int, updates that were left out because of an overflow."""
        return 0 if self._scale is None else int(self._scale.skipped_steps.numpy())

    @property
    def accumulated_steps(self) -> int:
        """Int, micro-batches that wait for the next update."""
        count = self._accumulation
        return 0 if count is None else int(count.count.numpy())

    @property
    def variables(self) -> list:
        """The wrapped optimizer's variables after those of its own."""
        return super().variables + self.inner_optimizer.variables

    @property
    def iterations(self) -> Any:
        """The number of updates."""
        return self.inner_optimizer.iterations

    @property
    def learning_rate(self) -> Any:
        """The wrapped optimizer's."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    # What Keras calls.

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the variables of the wrapped optimizer and its own."""
        if self.built:
            return
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(list(variables))
        super().build(list(_compat.trained_by(self.inner_optimizer)))
        self._build_state()

    def scale_loss(self, loss: Any) -> Any:
        """Multiplies a loss by the loss scale, before its gradient is taken."""
        if self._scaling is not None:
            first = self._scaling.initial_scale
            scale = first if self._scale is None else self._scale.read()
            loss = loss * tf.cast(scale, loss.dtype)
        return self.inner_optimizer.scale_loss(loss)

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
            self._with_gradients = variables
            step.take_step(self._step(variables), gradients)
        self._iterations.assign_add(1)

    def share_accumulated(self) -> None:
        """Gives every replica an equal part of what all have accumulated.

        Called in replica context. The sum stays; files can then be written by any
        one worker.
        """
        if self._accumulation is not None:
            variables = _compat.trained_by(self)
            self._accumulation.share(_reducer(), variables)

    def flush(self) -> None:
        """Makes an update of the micro-batches that wait, in replica context.

        Without micro-batches that wait it must not be called.
        """
        with keras.name_scope(self.name):
            variables = self._with_gradients or _compat.trained_by(self)
            step.flush(self._step(variables))

    def finalize_variable_values(self, var_list: Any) -> None:
        """Gives variables their averages at the end of training, as Keras does."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def check_progress(self) -> None:
        """Raises if every step overflows, whatever the loss scale.

        Raises:
            RuntimeError: After ten skips in a row at the smallest scale.
        """
        if self._scale is None:
            return
        skips = int(self._scale.skips_at_minimum.numpy())
        if skips < MOST_SKIPS:
            return
        bad = self._scale.non_finite.numpy().nonzero()[0]
        paths = [_compat.trained_by(self)[index].path for index in bad[:5]]
        raise RuntimeError(
            f"The gradients overflowed in {skips} steps in a row at the smallest loss "
            f"scale, {self.loss_scale:g}, so that nothing is learned. First variables "
            f"with infinite or NaN gradients: {', '.join(paths)}. Look for a learning "
            "rate that is too high, or for bad values in the data."
        )

    def as_keras(self) -> keras.optimizers.Optimizer:
        """The user's own optimizer, as files hold it, sharing this one's state.

        Returns:
            A Keras optimizer: the wrapped one with `gradient_accumulation_steps`,
            in a `LossScaleOptimizer` where the loss is scaled.
        """
        return interchange.plain_view(
            self.inner_optimizer,
            self._accumulation,
            self._scale,
            self._scaling,
            self._distribution_strategy.num_replicas_in_sync,
        )

    def get_config(self) -> dict:
        """The arguments of the constructor, as Keras serializes them."""
        scaling = self._scaling
        return {
            "optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "accumulation_steps": self._steps,
            "loss_scale": None if scaling is None else vars(scaling),
            "sharding": self.sharding,
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

    def _build_state(self) -> None:
        """Makes the variables of what is switched on and has none yet."""
        variables = _compat.trained_by(self)
        with _compat.scope_of_optimizer(self):
            if self._steps > 1 and self._accumulation is None:
                self._accumulation = Accumulation(
                    self.add_variable, variables, self._steps
                )
            if self._scaling is not None and self._scale is None:
                self._scale = LossScale(
                    self.add_variable, len(variables), self._scaling
                )
            if self._warmup_options is not None and self._warmup is None:
                self._warmup = Warmup(self.add_variable, self._warmup_options)

    def _inherit(self, outer: Any, steps: int) -> None:
        """Goes on where a built optimizer stands."""
        if outer is not None and outer.built and self._scale is not None:
            self._scale.value.assign(outer.dynamic_scale.numpy())
            self._scale.good_steps.assign(outer.step_counter.numpy())
        positions = {id(v): i for i, v in enumerate(_compat.trained_by(self))}
        for part in innermost(self.inner_optimizer):
            if _compat.has_accumulators(part):
                interchange.inherit(
                    part, steps, self._accumulation, positions, self.loss_scale or 1.0
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

    def _step(self, variables: list) -> step.Step:
        parts = parts_of(self.inner_optimizer, variables)
        return step.Step(
            parts=parts,
            variables=variables,
            positions=[_compat.index_in(self, variable) for variable in variables],
            reducer=_reducer(),
            layout=self._layout,
            rates=[self._rate(part) for part in parts],
            growths=[self._growth(part) for part in parts],
            noise=self._noise,
            accumulation=self._accumulation,
            scale=self._scale,
            fixed_scale=self.inner_optimizer.loss_scale_factor,
        )

    def _rate(self, part: Part) -> tf.Tensor:
        rate = tf.convert_to_tensor(part.optimizer.learning_rate)
        if self._warmup is None:
            return rate
        return rate * tf.cast(self._warmup.factor(_updates(part)), rate.dtype)

    def _growth(self, part: Part) -> tf.Tensor | None:
        warmup = self._warmup
        if warmup is None or not warmup.momentum_correction:
            return None
        return (
            warmup.growth(_updates(part)) if rate_is_in_slots(part.optimizer) else None
        )


def check_accumulation_steps(steps: Any) -> None:
    """Checks a number of micro-batches.

    Raises:
        ValueError: If it is no integer of at least one.
    """
    is_int = isinstance(steps, int) and not isinstance(steps, bool)
    if not is_int or steps < 1:
        raise ValueError(
            "`accumulation_steps` must be an integer of at least 1. "
            f"Received: accumulation_steps={steps!r}"
        )


def _checked(optimizer: Any) -> Any:
    if isinstance(optimizer, DistributedOptimizer):
        raise ValueError(
            "The optimizer is a `DistributedOptimizer` already. Set "
            "`accumulation_steps` and `loss_scale` where it is made."
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            "`optimizer` must be a Keras optimizer, such as "
            f"`keras.optimizers.Adam()`. Received: optimizer={optimizer!r}"
        )
    return optimizer


def _check_sharding(sharding: str) -> None:
    if sharding not in _SHARDINGS:
        raise ValueError(
            f"`sharding` must be one of {_SHARDINGS}. Received: sharding={sharding!r}"
        )
    if sharding != "none":
        raise ValueError(
            f'`sharding={sharding!r}` is not there yet. Use `sharding="none"`.'
        )


def _loss_scaling(loss_scale: Any) -> LossScaling | None:
    if loss_scale is None or isinstance(loss_scale, LossScaling):
        return loss_scale
    if loss_scale == "dynamic":
        return LossScaling()
    is_number = isinstance(loss_scale, (int, float)) and not isinstance(
        loss_scale, bool
    )
    if not is_number or not loss_scale > 0:
        raise ValueError(
            '`loss_scale` must be `None`, "dynamic" or a positive number. '
            f"Received: loss_scale={loss_scale!r}"
        )
    return LossScaling(initial_scale=float(loss_scale), growth_steps=None)


def check_strategy(strategy: Any) -> None:
    """Checks that a strategy of several replicas is tfdp's.

    Raises:
        ValueError: If it is not.
    """
    if strategy.num_replicas_in_sync > 1 and not is_ours(strategy):
        raise ValueError(
            "tfdp's optimizer and callbacks need a strategy of tfdp: use "
            "`tfdp.MirroredStrategy` or `tfdp.MultiWorkerMirroredStrategy`. "
            f"Received: {type(strategy).__module__}.{type(strategy).__name__}"
        )


def _check_scope(optimizer: Any) -> None:
    in_force = tf.distribute.get_strategy()
    is_elsewhere = _compat.strategy_of_optimizer(optimizer) is not in_force
    if optimizer.built and tf.distribute.has_strategy() and is_elsewhere:
        raise ValueError(
            f"The optimizer {optimizer.name!r} was built outside "
            "`strategy.scope()`. Make a new one, inside the scope."
        )


def _updates(part: Part) -> tf.Tensor:
    return tf.convert_to_tensor(part.optimizer.iterations)


def _reducer() -> GradientReducer:
    context = replica_context()
    if context is None:
        check_strategy(tf.distribute.get_strategy())
        return LocalReducer()
    return ReplicaReducer(tf.distribute.get_strategy().extended.reducer, context)
