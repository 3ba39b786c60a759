"""Features of an optimizer that are in use, with their variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdp.ground import _compat
from tfdp.training.step.accumulation import AccumulationState
from tfdp.training.step.loss_scale import LossScale, LossScaling
from tfdp.training.step.step import StepFeature
from tfdp.training.step.warmup import Warmup, WarmupOptions


class Features:
    """Settings, and once the optimizer is built the state that belongs to them.

    Args:
        optimizer: `DistributedOptimizer`.
        steps: Int, micro-batches of an update.
        scaling: `LossScaling` or `None`.
    """

    def __init__(self, optimizer: Any, steps: int, scaling: LossScaling | None) -> None:
        self._optimizer = optimizer
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
        # With what replicas train alone, if they do; and whether they do now.
        self.alone_options: Any = None
        self.alone: Any = None
        self._make_alone: Callable | None = None
        self.steps_alone = False

    @property
    def traced_parts(self) -> tuple:
        """State that a traced step refers to: with other state it is traced again."""
        parts = self.accumulation, self.scale, self.warmup, self.alone
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

    def train_alone(self, options: Any, make: Callable, *, now: bool) -> None:
        """Let replicas, or nodes, train alone, and meet every so many updates.

        Args:
            options: What says when they meet.
            make: Callable of what creates a variable of the optimizer, the options and
                the trained variables, which returns a `StepFeature`.
            now: Bool, whether from now on; else the state for it is only made.

        Raises:
            ValueError: If this `fit` lets them train alone in another way.
        """
        if self.alone_options not in (None, options):
            raise ValueError(
                "Give `fit` one of `LocalSGD` and `DiLoCo`, once: each says when the "
                "replicas meet."
            )
        self.alone_options, self.steps_alone = options, now
        self._make_alone = make
        if self.alone is not None and self.alone.options != options:
            self._forget(self.alone.variables)
            self.alone = None
        self._complete()

    def train_together(self) -> None:
        """Train synchronously from now on; what replicas hold in common is kept."""
        self.alone_options, self.steps_alone = None, False

    def _make_variable(self, **arguments: Any) -> Any:
        with _compat.scope_of_optimizer(self._optimizer):
            return self._optimizer.add_variable(**arguments)

    def _forget(self, variables: Sequence[Any]) -> None:
        _compat.untrack(self._optimizer, list(variables))

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
        if self.alone_options is not None and self.alone is None:
            assert self._make_alone is not None
            with _compat.scope_of_optimizer(self._optimizer):  # of an outer one, too
                self.alone = self._make_alone(
                    self._make_variable, self.alone_options, self._trained
                )
