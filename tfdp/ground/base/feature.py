"""`Feature`: base class of features of training, with the hooks that the core calls.

The core imports no feature. Each feature registers itself when its module is imported.
`import tfdp` registers the name of the module that imports those of tfdp, which is
imported when hooks are first called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass
class Fit:
    """A call of `fit`, before Keras runs it.

    Args:
        strategy: The tfdp strategy of the model, or `None`.
        model: The Keras model.
        arguments: Dict, the arguments of `fit` by name, `"callbacks"` among them.
    """

    strategy: Any
    model: Any
    arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class JobPart:
    """Part of a job, such as a DiLoCo island, that trains on its rows of each batch.

    Args:
        name: String, unique among the parts, for names of files.
        index: Int, index of the part. The first one writes the files of the job.
        count: Int, number of parts.
        seed: Int, the same for all parts of a job, and another for other jobs.
    """

    name: str
    index: int
    count: int
    seed: int


class Feature:
    """Base class of features of training.

    A feature overrides the hooks that it needs; only these are called. They are called
    for every model, and return immediately for a model that does not use the feature.
    Hooks that communicate are called on all workers, in the same order. For a model
    without a tfdp strategy, hooks of steps and `after_fit` are not called.

    Example:

    >>> class Counter(Feature):
    ...     loops = 0
    ...     def before_loop(self, model):
    ...         self.loops += 1
    >>> counter = register(Counter())
    >>> counter in overriders(Feature.before_loop)
    True
    >>> counter in overriders(Feature.after_fit)
    False
    >>> unregister(counter)
    """

    def on_strategy(self, rank: int) -> None:
        """Handle the rank of this worker, as soon as a strategy knows it."""

    def job_part(self) -> JobPart | None:
        """Return the part of a job that this process trains, or `None` for all of it.

        The core asks whenever it reads training data, shuffles or writes files.
        """
        return None

    def before_sync(self, model: Any) -> None:
        """Prepare for the end of an epoch or evaluation, where all workers synchronize.

        A feature pauses communication in which only some workers take part.
        """

    def before_loop(self, model: Any) -> None:
        """Prepare for a call of `fit`, `evaluate` or `predict`.

        It is called first. Then the workers compare the call's arguments, and
        `equalize_replicas` follows.
        """

    def equalize_replicas(self, model: Any) -> None:
        """Give all replicas of a model the same state, before evaluation or saving."""

    def choose_callbacks(self, fit: Fit) -> None:
        """Prepare a call of `fit`, and change its callbacks.

        Called on all workers before Keras runs `fit`, also for a model without a tfdp
        strategy. A feature may replace `fit.arguments["callbacks"]`.

        Args:
            fit: `Fit`, with the callbacks that earlier features have chosen.

        Raises:
            ValueError: If some callbacks cannot be combined.
        """

    def gradient_exchange(self, fit: Fit) -> Any:
        """Return the `GradientExchange` that replaces a `fit`'s all-reduce, or `None`.

        It sums gradients in each step without a wait for all replicas.

        Raises:
            ValueError: If the model or the arguments do not support it.
        """
        return None

    def wrap_step(self, model: Any, step: Callable) -> Callable:
        """Wrap `step`, a model's `train_function`; by default return `step` itself.

        Both functions take an iterator over batches, and return the logs of a step.
        """
        return step

    def batches_between_syncs(self, model: Any) -> int | None:
        """Return the most batches of `fit` between two synchronizations of workers.

        Workers synchronize where all wait for each other, as in a reduction. Only there
        they can agree to stop training. The largest number of all features counts.

        Returns:
            Int, 1 if workers synchronize in every step; or `None` if they do not
            synchronize within an epoch.
        """
        return 1

    def optional_tensors(self) -> dict[str, str]:
        """Return which of the feature's tensors a model may lack in a checkpoint.

        Returns:
            Dict from a prefix of names to the warning if a checkpoint has such tensors,
            and the model has none.
        """
        return {}

    def recover(
        self,
        name: str,
        model: Any,
        arguments: dict[str, Any],
        error: Exception,
        stack: contextlib.ExitStack,
    ) -> bool:
        """Prepare to repeat a loop after an error; `fit` resumes from its last backup.

        Args:
            name: String, `"fit"`, `"evaluate"` or `"predict"`.
            model: The Keras model.
            arguments: Dict, the arguments of the call by name; changed in place.
            error: The error that the loop has raised.
            stack: `contextlib.ExitStack`, closed at the end of the call.

        Returns:
            Bool, whether the loop is repeated. If no feature returns `True`, the error
            is raised.
        """
        return False

    def complete_fit(self, model: Any) -> None:
        """Complete what callbacks have begun; not called after an error.

        An example is a checkpoint that is saved in the background.
        """

    def after_fit(self, fit: Fit) -> None:
        """Release the resources of a `fit`, even if its training has failed."""


_registered: list[Feature] = []
_module_names: list[str] = []


def register(feature: Feature) -> Feature:
    """Have the core call the hooks of a feature, after those of earlier features.

    Args:
        feature: `Feature`.

    Returns:
        The feature.
    """
    _registered.append(feature)
    return feature


def register_module(name: str) -> None:
    """Import a module, which registers features, when hooks are first called.

    Args:
        name: String, name of the module.
    """
    _module_names.append(name)


def unregister(feature: Feature) -> None:
    """Stop calling the hooks of a feature that `register` has added.

    Args:
        feature: `Feature`.
    """
    _registered.remove(feature)


def registered() -> tuple[Feature, ...]:
    """Return the registered features, in the order in which their hooks are called."""
    for name in _module_names:
        importlib.import_module(name)
    return tuple(_registered)


def overriders(hook: Callable) -> list[Feature]:
    """Return the registered features that override a hook, in order.

    Args:
        hook: Function of the class `Feature`, such as `Feature.before_loop`.
    """
    name = hook.__name__
    return [item for item in registered() if getattr(type(item), name) is not hook]


def job_part() -> JobPart | None:
    """Return the part of a job that this process trains, or `None` for all of it."""
    features = overriders(Feature.job_part)
    parts = (feature.job_part() for feature in features)
    return next(filter(None, parts), None)


def equalize_replicas(model: Any) -> None:
    """Give all replicas of a model the same state, by the hooks of all features.

    Call it on all workers, outside a step. Each feature that lets replicas differ has
    its own rule.

    Args:
        model: Keras model.
    """
    for feature in overriders(Feature.equalize_replicas):
        feature.equalize_replicas(model)


def batches_between_syncs(model: Any) -> int | None:
    """Return the most batches of a model's `fit` between synchronizations of workers.

    Args:
        model: Keras model.

    Returns:
        Int, 1 without features; or `None` if workers do not synchronize within an
        epoch.
    """
    features = overriders(Feature.batches_between_syncs)
    intervals = [feature.batches_between_syncs(model) for feature in features]
    known = [every for every in intervals if every is not None]
    return max(known, default=1) if len(known) == len(intervals) else None
