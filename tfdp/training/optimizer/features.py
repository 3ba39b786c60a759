"""Features of an optimizer that are in use, with their variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdp.training.step.accumulation import AccumulationState
from tfdp.training.step.loss_scale import LossScale, LossScaling
from tfdp.training.step.step import StepFeature
from tfdp.training.step.warmup import Warmup, WarmupOptions


class Features:
    """Settings, and once the optimizer is built the state that belongs to them.

    Args:
        make_variable: Callable that creates a Keras variable of the optimizer.
        forget: Callable that takes a list of its variables out of it.
        steps: Int, micro-batches of an update.
        scaling: `LossScaling` or `None`.
    """

    def __init__(
        self,
        make_variable: Callable,
        forget: Callable,
        steps: int,
        scaling: LossScaling | None,
    ) -> None:
        self._make_variable = make_variable
        self._forget = forget
        self._trained: list[Any] | None = None
        self._accumulated: list[Any] = []
        self.steps = steps
        self.plan: int | Mapping[int, int] | None = None
        self.scaling = scaling
        self.warmup_options: WarmupOptions | None = None
        self.accumulation: AccumulationState | None = None
        self.scale: LossScale | None = None
        self.warmup: Warmup | None = None
        self.installed: dict[type[StepFeature], Any] = {}
        self.local_options: Any = None
        self.local_steps: Any = None
        self._make_local_steps: Callable | None = None
        self.steps_alone = False

    @property
    def traced_parts(self) -> tuple:
        """State that a traced step refers to: with other state it is traced again."""
        parts = self.accumulation, self.scale, self.warmup, self.local_steps
        return *parts, self.steps_alone, *self.installed.values()

    def build(
        self, variables: Sequence[Any], accumulated: Sequence[Any] | None = None
    ) -> None:
        """Make the variables of the features in use.

        Args:
            variables: Sequence of the trained variables.
            accumulated: Sequence of what is accumulated, with a path, a shape and
                a dtype each, or `None` for the gradients of the variables.
                Defaults to `None`.
        """
        self._trained = list(variables)
        self._accumulated = list(variables if accumulated is None else accumulated)
        self._complete()

    def accumulate(self, accumulated: Sequence[Any]) -> None:
        """Accumulate other things from now on; what was accumulated is dropped."""
        self._accumulated = list(accumulated)
        if self.accumulation is not None:
            self._forget(self.accumulation.variables)
            self.accumulation = None
        self._complete()

    def set_steps(self, steps: int) -> None:
        """Change the number of micro-batches of an update."""
        self.steps = steps
        if self.accumulation is not None:
            self.accumulation.steps.assign(steps)
        self._complete()

    def set_scaling(self, scaling: LossScaling | None) -> None:
        """Change how the loss is scaled; what is accumulated keeps its meaning."""
        if scaling == self.scaling:
            return
        before = 1.0 if self.scale is None else float(self.scale.value.numpy())
        if self.scale is not None:
            self._forget(self.scale.variables)
        self.scaling, self.scale = scaling, None
        self._complete()
        after = 1.0 if self.scale is None else float(self.scale.value.numpy())
        if self.accumulation is not None and after != before:
            self.accumulation.rescale(after / before)

    def set_warmup(self, options: WarmupOptions | None) -> None:
        """Start a warmup, change it, or end it."""
        self.warmup_options = options
        if self.warmup is None:
            self._complete()
        elif options is None:
            self.warmup.switch_off()
        elif options.momentum_correction == self.warmup.momentum_correction:
            self.warmup.set(options)
        else:
            self._forget(self.warmup.variables)
            self.warmup = None
            self._complete()

    def install(self, kind: type, **settings: Any) -> None:
        """Add a feature to each step from now on, in place of another of its class.

        Args:
            kind: Subclass of `StepFeature`, which is called with what creates a
                variable of the optimizer, and the settings.
            **settings: Kept as its attributes, too.
        """
        found = self.installed.get(kind)
        if found is not None:
            if all(getattr(found, name) == settings[name] for name in settings):
                return
            self._forget(found.variables)
        self.installed[kind] = kind(self._make_variable, **settings)

    def step_locally(self, options: Any, make: Callable, *, alone: bool) -> None:
        """Prepare local steps, and begin with them or not yet.

        Args:
            options: What says when the replicas meet.
            make: Callable, see `LocallySteppingOptimizer.step_locally`.
            alone: Bool, whether replicas step alone from now on.

        Raises:
            ValueError: If there are other local steps already.
        """
        if self.local_options not in (None, options):
            raise ValueError(
                "Give `fit` one of `LocalSGD` and `DiLoCo`, once: each says when the "
                "replicas meet."
            )
        self.local_options, self.steps_alone = options, alone
        self._make_local_steps = make
        if self.local_steps is not None and self.local_steps.options != options:
            self._forget(self.local_steps.variables)
            self.local_steps = None
        self._complete()

    def stop_local_steps(self) -> None:
        """Step synchronously from now on; what local steps hold in common is kept."""
        self.local_options, self.steps_alone = None, False

    def _complete(self) -> None:
        if self._trained is None:
            return
        if self.steps > 1 and self.accumulation is None:
            self.accumulation = AccumulationState(
                self._make_variable, self._accumulated, self.steps
            )
        if self.scaling is not None and self.scale is None:
            self.scale = LossScale(
                self._make_variable, len(self._trained), self.scaling
            )
        if self.warmup_options is not None and self.warmup is None:
            self.warmup = Warmup(self._make_variable, self.warmup_options)
        if self.local_options is not None and self.local_steps is None:
            assert self._make_local_steps is not None
            self.local_steps = self._make_local_steps(
                self._make_variable, self.local_options, self._trained
            )
