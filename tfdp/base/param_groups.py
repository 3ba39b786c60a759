"""What is known about the optimizers of Keras: how each looks at a gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras

from tfdp import _compat

# They treat every element of a variable alike and by itself. Any other class, a
# user's own and a subclass too, is taken to look at whole tensors.
_ELEMENTWISE = frozenset(
    getattr(keras.optimizers, name)
    for name in (
        "SGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "Ftrl",
        "Lion",
        "Nadam",
        "RMSprop",
        "ScheduleFreeAdamW",
    )
    if hasattr(keras.optimizers, name)
)
_CLIPPING = ("clipnorm", "clipvalue", "global_clipnorm")


@dataclasses.dataclass(frozen=True)
class ParamGroup:
    """The variables of a step that one optimizer updates.

    Args:
        optimizer: Keras optimizer that is no wrapper.
        indices: Tuple of ints, positions among the variables of the step.
    """

    optimizer: Any
    indices: tuple[int, ...]

    def of(self, items: Sequence) -> list:
        """Those of some items, one for each variable of the step."""
        return [items[index] for index in self.indices]


def param_groups_of(optimizer: Any, variables: Sequence[Any]) -> list[ParamGroup]:
    """Which optimizer updates which variables.

    Args:
        optimizer: A built Keras optimizer, `MultiOptimizer` or other.
        variables: Sequence of Keras variables.

    Returns:
        List of `ParamGroup`, in the order of the inner optimizers.
    """
    if not is_multi(optimizer):
        return [ParamGroup(optimizer, tuple(range(len(variables))))]
    members: dict[int, list[int]] = {}
    for index, variable in enumerate(variables):
        inner = _compat.inner_index(optimizer, variable)
        members.setdefault(inner, []).append(index)
    return [
        ParamGroup(optimizer.optimizers[inner], tuple(indices))
        for inner, indices in sorted(members.items())
    ]


def path_of(variable: Any) -> str:
    """The path of a Keras variable, or the name of a `tf.Variable`."""
    return str(getattr(variable, "path", None) or variable.name)


def is_multi(optimizer: Any) -> bool:
    """Whether an optimizer hands its variables to others."""
    kind = getattr(keras.optimizers, "MultiOptimizer", None)
    return kind is not None and isinstance(optimizer, kind)


def innermost(optimizer: Any) -> list:
    """The optimizers that update variables: itself, or those of a `MultiOptimizer`."""
    return list(optimizer.optimizers) if is_multi(optimizer) else [optimizer]


def is_elementwise(optimizer: Any) -> bool:
    """Whether an optimizer is known to treat every element by itself."""
    return type(optimizer) in _ELEMENTWISE


def gains_from_groups(optimizer: Any) -> bool:
    """Whether an update has so many kernels that variables are better grouped.

    Plain `SGD` has a single one for each variable.
    """
    is_plain = type(optimizer) is keras.optimizers.SGD and not optimizer.momentum
    return is_elementwise(optimizer) and not is_plain


def clips(optimizer: Any) -> bool:
    """Whether an optimizer clips gradients."""
    return any(getattr(optimizer, name, None) for name in _CLIPPING)


def is_linear(optimizer: Any) -> bool:
    """Whether equal rows of a sparse gradient may be added up beforehand.

    Keras clips rows one by one, so that a sum of rows would be clipped
    differently.
    """
    return type(optimizer) is keras.optimizers.SGD and not clips(optimizer)


def rate_is_in_slots(optimizer: Any) -> bool:
    """Whether the momentum of an optimizer contains the learning rate.

    Keras's `SGD` and tfdp's `LARS` add the rate times the gradient to it, so that
    it has to be rescaled when the rate changes.
    """
    kind = type(optimizer)
    has_rate = kind is keras.optimizers.SGD or getattr(kind, "rate_in_slots", False)
    return has_rate and bool(getattr(optimizer, "momentum", 0))
