"""Settings and counters of a `DistributedOptimizer`, and its traced functions."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp.ground._compat import keras_optimizer
from tfdp.ground.base.param_groups import innermost
from tfdp.training.keras_hooks import file_view
from tfdp.training.optimizer import arguments
from tfdp.training.optimizer.features import Features

# Only the wrapped optimizer has values of these settings. Keras's constructor also sets
# defaults for them on the wrapper; the wrapper's `__setattr__` ignores these defaults.
_KERAS_SETTINGS = frozenset(
    {
        *("weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "use_ema"),
        *("ema_momentum", "ema_overwrite_frequency", "loss_scale_factor"),
        "gradient_accumulation_steps",
    }
)


class OptimizerSettings:
    """Settings, counters and variables of a `DistributedOptimizer`.

    Settings of Keras optimizers are read and set on the wrapped optimizer.
    """

    inner_optimizer: Any
    features: Features
    _traces: Traces

    def __getattr__(self, name: str) -> Any:
        """Return a public attribute of the wrapped optimizer, such as `momentum`."""
        inner = vars(self).get("inner_optimizer")
        if inner is None or name.startswith("_"):
            kind = type(self).__name__
            raise AttributeError(f"{kind!r} object has no attribute {name!r}")
        return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, on the wrapped optimizer if only that one has it."""
        inner = vars(self).get("inner_optimizer")
        if inner is None and name in _KERAS_SETTINGS:
            return
        is_own = name.startswith("_") or name in vars(self) or hasattr(type(self), name)
        if is_own or not hasattr(inner, name):
            super().__setattr__(name, value)
        else:
            setattr(inner, name, value)

    @property
    def accumulation_steps(self) -> int:
        """Int, number of micro-batches of an update."""
        return self.features.steps

    @accumulation_steps.setter
    def accumulation_steps(self, steps: int) -> None:
        """Set the number of micro-batches of an update; accumulated gradients are kept.

        Learning-rate schedules count updates from now on.

        Args:
            steps: Int, at least 1.

        Raises:
            ValueError: If `steps` is not such an integer.
        """
        self.features.set_steps(arguments.checked_steps(steps))
        file_view.count_updates_in_schedules(self.inner_optimizer)

    @property
    def gradient_accumulation_steps(self) -> int | None:
        """Int, `accumulation_steps` as Keras has them: `None` without accumulation."""
        return self.accumulation_steps if self.accumulation_steps > 1 else None

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int | None) -> None:
        """Set `accumulation_steps`; `None` stands for 1."""
        self.accumulation_steps = 1 if steps is None else steps

    @property
    def accumulation_plan(self) -> Any:
        """Int, number of micro-batches of an update; or a dict such as `{0: 8, 5: 4}`.

        Each key of the dict is the first epoch, counted from 0, with that number.
        """
        return self.features.plan or self.accumulation_steps

    def set_accumulated_count(self, count: int, factor: float) -> None:
        """Set the number of accumulated micro-batches, outside a step.

        Args:
            count: Int, the new number.
            factor: Float, the factor by which to multiply the accumulated sums.
        """
        accumulation = self.features.accumulation
        if accumulation is not None:
            accumulation.rescale(factor)
            accumulation.count.assign(count)

    def exclude_from_weight_decay(
        self, var_list: Any = None, var_names: Any = None
    ) -> None:
        """Exclude variables from weight decay, see `keras.optimizers.Optimizer`.

        Raises:
            ValueError: For a `MultiOptimizer` that has no inner optimizers yet.
        """
        parts = innermost(self.inner_optimizer)
        if not parts:
            raise ValueError(
                "A `MultiOptimizer` whose `optimizer_map` is a function has no "
                "optimizers before it is built. Call `exclude_from_weight_decay` of "
                "each of its optimizers."
            )
        for part in parts:
            part.exclude_from_weight_decay(var_list=var_list, var_names=var_names)

    @property
    def was_traced(self) -> bool:
        """Bool, whether a step was ever traced."""
        return self._traces.features is not None

    @property
    def loss_scale(self) -> float | None:
        """Float, the factor of the loss, or `None` without loss scaling."""
        scale = self.features.scale
        return None if scale is None else float(scale.value.numpy())

    @property
    def dynamic_scale(self) -> Any:
        """Variable with the loss scale, as Keras's `LossScaleOptimizer` has it."""
        scale = self.features.scale
        return self.inner_optimizer.dynamic_scale if scale is None else scale.value

    @property
    def skipped_steps(self) -> int:
        """Int, number of updates that were skipped because of an overflow."""
        scale = self.features.scale
        return 0 if scale is None else int(scale.skipped_steps.numpy())

    @property
    def accumulated_steps(self) -> int:
        """Int, number of micro-batches accumulated for the next update."""
        accumulation = self.features.accumulation
        return 0 if accumulation is None else int(accumulation.count.numpy())

    @property
    def variables(self) -> list:
        """List of the wrapper's own variables, then those of the wrapped optimizer."""
        own = super().variables  # type: ignore[misc]
        return own + self.inner_optimizer.variables

    @property
    def iterations(self) -> Any:
        """Keras variable, the number of updates."""
        return self.inner_optimizer.iterations

    @property
    def learning_rate(self) -> Any:
        """Learning rate of the wrapped optimizer: a variable, or a schedule's value."""
        return file_view.rate_of(self.inner_optimizer, self.features.accumulation)

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        """Set the learning rate of the wrapped optimizer."""
        self.inner_optimizer.learning_rate = value


class Traces:
    """What the last step was traced with, and functions traced to run on all replicas.

    They are in a separate object since Keras tracks attributes of an optimizer.

    Attributes:
        features: Tuple of the features and the sharded state that the last step was
            traced with, to detect a later change; or `None` before the first trace.
        variables: List of the Keras variables that this step updates, or `None`.
    """

    def __init__(self) -> None:
        self.features: tuple | None = None
        self.variables: list[Any] | None = None
        self._functions: dict[tuple, Any] = {}

    def record(self, features: tuple, variables: list) -> None:
        """Remember the features and the variables of the step that is being traced."""
        self.features = features
        self.variables = list(variables)

    def drop(self) -> None:
        """Drop the traced functions, which keep the variables that they use alive.

        It also marks a step that was traced as outdated, so that it is traced again.
        """
        self._functions.clear()
        if self.features is not None:
            self.features = ()

    def run(self, optimizer: Any, name: str, function: Any) -> None:
        """Run a function on every replica, as a graph that is traced once.

        It is traced again if the features, the sharding or the updated variables
        change.

        Args:
            optimizer: `DistributedOptimizer`.
            name: String, which identifies the function.
            function: Callable without arguments, called in replica context.
        """
        strategy = keras_optimizer.strategy_of_optimizer(optimizer)
        key = (
            name,
            self.features,
            optimizer.is_sharded,
            tuple(map(id, self.variables or ())),
        )
        if key not in self._functions:

            @tf.function(autograph=False)
            def on_replicas() -> None:
                """Run the function on every replica."""
                strategy.run(function)

            self._functions[key] = on_replicas
        self._functions[key]()
