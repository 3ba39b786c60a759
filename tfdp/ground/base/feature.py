"""`Feature`: what can be added to training, and the hooks at which the core calls it.

The core imports no feature. Each registers itself when it is imported, and
`tfdp.features.built_in`, which is imported when hooks are called, names those of tfdp.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass
class Fit:
    """A call of `fit` before Keras has it.

    Args:
        strategy: The tfdp strategy of the model, or `None`.
        model: The Keras model.
        arguments: Dict, the arguments of `fit` by name, `"callbacks"` among them.
    """

    strategy: Any
    model: Any
    arguments: dict[str, Any]


class Feature:
    """What can be added to training. Each hook does nothing where it is not overridden.

    Hooks are called for every model; a feature returns at once for one that it is not
    a part of. Those that communicate are called on all workers, in the same order. A
    model of no tfdp strategy has no step of tfdp's, and `after_fit` is not called.

    Example:

    >>> class Counter(Feature):
    ...     loops = 0
    ...     def before_loop(self, model):
    ...         self.loops += 1
    >>> counter = register(Counter())
    >>> counter in registered()
    True
    >>> unregister(counter)
    """

    def on_strategy(self, rank: int) -> None:
        """Learn the rank of this worker, as soon as a strategy knows it."""

    def before_meeting(self, model: Any) -> None:
        """Prepare for something in which all workers of a model take part."""

    def before_loop(self, model: Any) -> None:
        """Prepare for a loop of Keras's, before the workers agree on it."""

    def equalize_replicas(self, model: Any) -> None:
        """Give all replicas of a model one state, before it is evaluated or saved."""

    def choose_callbacks(self, fit: Fit) -> None:
        """Change the callbacks in the arguments of `fit`.

        Raises:
            ValueError: If they do not fit together.
        """

    def wrap_step(self, model: Any, step: Callable) -> Callable:
        """Return what is called in place of a model's `train_function`."""
        return step

    def batches_between_meetings(self, model: Any) -> int | None:
        """Return after how many batches of `fit` the workers meet at the latest.

        Returns:
            Int, or `None` if they do not within an epoch.
        """
        return 1

    def after_fit(self, fit: Fit) -> None:
        """Release what a `fit` has had, also where its training has failed."""


_registered: list[Feature] = []


def register(feature: Feature) -> Feature:
    """Have the core call the hooks of a feature, after those registered before.

    Args:
        feature: `Feature`.

    Returns:
        The same.
    """
    _registered.append(feature)
    return feature


def unregister(feature: Feature) -> None:
    """End what `register` began.

    Args:
        feature: `Feature`.
    """
    _registered.remove(feature)


def registered() -> tuple[Feature, ...]:
    """Return the features whose hooks are called, in order."""
    importlib.import_module("tfdp.features.built_in")
    return tuple(_registered)


def equalize_replicas(model: Any) -> None:
    """Give all replicas of a model one state, on all workers.

    Args:
        model: Keras model.
    """
    for feature in registered():
        feature.equalize_replicas(model)


def batches_between_meetings(model: Any) -> int | None:
    """Return after how many batches the workers of a model in `fit` meet at the latest.

    Args:
        model: Keras model.

    Returns:
        Int, 1 without features; or `None` if they do not within an epoch.
    """
    found = [feature.batches_between_meetings(model) for feature in registered()]
    given = [every for every in found if every is not None]
    return max(given, default=1) if len(given) == len(found) else None
