"""Optional features of a `DistributedOptimizer`, with their variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdp.ground._compat import keras_optimizer, optimizer_state
from tfdp.ground.base import program_trace
from tfdp.ground.base.param_groups import ParamGroup
from tfdp.training.step.accumulation import AccumulationState
from tfdp.training.step.loss_scale import LossScale, LossScaling
from tfdp.training.step.step import IndependentGroups, RowDivider, Schedule, StepFeature


def installed(optimizer: Any, kind: type) -> Any:
    """Return an optimizer's installed `StepFeature` of a class, or `None`.

    Args:
        optimizer: Keras optimizer, or `None`.
        kind: Subclass of `StepFeature`.
    """
    features = getattr(optimizer, "features", None)
    return None if features is None else features.installed.get(kind)


class Features:
    """Features of a `DistributedOptimizer`: settings and, once built, their state.

    Features are the accumulation of micro-batches, loss scaling, and each `StepFeature`
    that is installed. They can be changed at any time; `build` creates their variables,
    as does a change after it.

    Args:
        optimizer: `DistributedOptimizer`.
        steps: Int, number of micro-batches of an update.
        scaling: `LossScaling`, or `None` for no loss scale.
    """

    def __init__(self, optimizer: Any, steps: int, scaling: LossScaling | None) -> None:
        self._optimizer = optimizer
        self._trained: list[Any] | None = None
        self._accumulated: list[Any] = []
        self.steps = steps
        self.plan: int | Mapping[int, int] | None = None
        self.scaling = scaling
        self.accumulation: AccumulationState | None = None
        self.scale: LossScale | None = None
        self.installed: dict[type[StepFeature], Any] = {}
        # Some features read the loss of an update, a mean over micro-batches.
        # `loss_sum` is the variable that adds up the losses of the micro-batches, and
        # `loss` is the loss of the step that is being traced.
        self.loss_sum: Any = None
        self.loss: Any = None

    @property
    def traced_parts(self) -> tuple:
        """Tuple of objects that a traced step uses; a change requires a new trace.

        They are the `AccumulationState` and the `LossScale`, each `None` if not in use,
        and every active `StepFeature`.
        """
        return self.accumulation, self.scale, *self.active

    @property
    def active(self) -> list:
        """List of each installed `StepFeature` whose `is_active` is true."""
        return [feature for feature in self.installed.values() if feature.is_active]

    @property
    def independent_groups(self) -> IndependentGroups | None:
        """The feature with which groups of replicas update independently, or `None`."""
        return next((f for f in self.active if isinstance(f, IndependentGroups)), None)

    @property
    def divider_of_rows(self) -> RowDivider | None:
        """The feature that divides a replica's rows into micro-batches, or `None`."""
        return next((f for f in self.active if isinstance(f, RowDivider)), None)

    def build(
        self, variables: Sequence[Any], accumulated: Sequence[Any] | None = None
    ) -> None:
        """Create the variables of the features in use.

        Args:
            variables: Sequence of the trained variables.
            accumulated: Sequence of objects with a path, a shape and a dtype: one for
                each variable that accumulates gradients. Or `None` for one for each
                trained variable. Defaults to `None`.
        """
        self._trained = list(variables)
        self._accumulated = list(variables if accumulated is None else accumulated)
        self._create_missing()
        for feature in self.installed.values():
            self._build_feature(feature)

    def accumulate(self, accumulated: Sequence[Any]) -> None:
        """Replace the variables in which gradients are accumulated by new ones.

        Gradients that were accumulated before are lost.

        Args:
            accumulated: Sequence of objects with a path, a shape and a dtype, one for
                each new variable.
        """
        self._accumulated = list(accumulated)
        if self.accumulation is not None:
            self._untrack(self.accumulation.variables)
            self.accumulation = None
        self._create_missing()

    def set_steps(self, steps: int) -> None:
        """Change the number of micro-batches of an update.

        Accumulated gradients are kept.
        """
        self.steps = steps
        if self.accumulation is not None:
            self.accumulation.steps.assign(steps)
        self._create_missing()

    def set_scaling(self, scaling: LossScaling | None) -> None:
        """Change the loss scaling, and rescale accumulated gradients accordingly."""
        if scaling == self.scaling:
            return
        before = 1.0 if self.scale is None else float(self.scale.value.numpy())
        if self.scale is not None:
            self._untrack(self.scale.variables)
        self.scaling, self.scale = scaling, None
        self._create_missing()
        after = 1.0 if self.scale is None else float(self.scale.value.numpy())
        if self.accumulation is not None and after != before:
            self.accumulation.rescale(after / before)

    def install(self, kind: type, **settings: Any) -> Any:
        """Add a feature to all later steps; it replaces a feature of the same class.

        Args:
            kind: Subclass of `StepFeature`. It is called with a function that creates
                variables of the optimizer, and with the settings.
            **settings: Keyword arguments of `kind`; a feature has attributes with the
                same names and values.

        Returns:
            The feature: the one that was installed before, if it has these settings.
        """
        found = self.installed.get(kind)
        if found is not None:
            if all(getattr(found, name) == settings[name] for name in settings):
                return found
            self._untrack(found.variables)
        feature = self.installed[kind] = kind(self._make_variable, **settings)
        if self.measures_loss and self.loss_sum is None:
            self.loss_sum = self._make_variable(
                shape=(), dtype="float32", initializer="zeros", name="loss_sum"
            )
        if self._trained is not None:
            self._build_feature(feature)
        return feature

    def uninstall(self, kind: type) -> None:
        """Remove a feature from all later steps.

        Args:
            kind: Subclass of `StepFeature` that is installed.
        """
        self._untrack(self.installed.pop(kind).variables)

    @property
    def measures_loss(self) -> bool:
        """Bool, whether a feature reads the loss of the global batch."""
        return any(feature.measures_loss for feature in self.active)

    def take_loss(self) -> tf.Tensor:
        """Return the scalar loss whose gradients are passed to the optimizer.

        It is the loss that `scale_loss` has received, which is then forgotten; or else
        the last tensor that gradients were taken of.

        Raises:
            ValueError: If the loss is not known.
        """
        loss, self.loss = self.loss, None
        if loss is None:
            loss = program_trace.latest_loss()
        if loss is None:
            raise ValueError(
                "The loss of the step is not known, since its gradients are not taken "
                "in `train_step`, but in a function that it calls. Call "
                "`optimizer.scale_loss(loss)` in `train_step`, or do not use a "
                "callback that reads the loss."
            )
        return tf.reduce_sum(tf.cast(loss, tf.float32))

    def schedule(self, group: ParamGroup) -> Schedule:
        """Return the `Schedule` of a parameter group for the next update.

        It has the learning rate and a factor of the momentum, as the first active
        feature with a `Schedule` sets them. Without such a feature, the optimizer's own
        rate is used.
        """
        found = (feature.schedule(group) for feature in self.active)
        return next((item for item in found if item is not None), Schedule())

    def reset(self) -> None:
        """Call `reset` of each installed `StepFeature`, which ends its part in a `fit`.

        A feature that becomes inactive keeps its variables.
        """
        for feature in self.installed.values():
            feature.reset()

    def _make_variable(self, **arguments: Any) -> Any:
        """Call `add_variable` of the optimizer, in its strategy's scope."""
        with keras_optimizer.scope_of_optimizer(self._optimizer):
            return self._optimizer.add_variable(**arguments)

    def _build_feature(self, feature: StepFeature) -> None:
        """Let a feature create its variables, in the scope of the strategy."""
        assert self._trained is not None
        with keras_optimizer.scope_of_optimizer(self._optimizer):
            feature.build(self._trained)

    def _untrack(self, variables: Sequence[Any]) -> None:
        """Remove the variables of a removed feature from those of the optimizer."""
        optimizer_state.untrack(self._optimizer, list(variables))

    def _create_missing(self) -> None:
        """Create the missing state of features in use, if the optimizer is built.

        The state is that of accumulation and of loss scaling.
        """
        if self._trained is None:
            return
        # Keras may build an optimizer inside the first step, whose trace later epochs
        # use as well. `self.plan` may give these more micro-batches, so accumulators
        # have to exist if any epoch of the plan needs them.
        plan = self.plan.values() if isinstance(self.plan, Mapping) else ()
        accumulates = any(steps > 1 for steps in (self.steps, *plan))
        if accumulates and self.accumulation is None:
            self.accumulation = AccumulationState(
                self._make_variable, self._accumulated, self.steps
            )
        if self.scaling is not None and self.scale is None:
            self.scale = LossScale(
                self._make_variable, len(self._trained), self.scaling
            )
