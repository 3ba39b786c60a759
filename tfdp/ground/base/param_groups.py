"""Parameter groups of a step, and properties of Keras's optimizers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp.ground._compat import keras_optimizer
from tfdp.ground.plans.buckets import Entry

# These optimizers update each element of a variable from the same element of the
# gradient alone, so a shard may begin anywhere in a variable. Any other class, even a
# subclass of these, may need whole tensors.
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
    """Variables of a step that one optimizer updates.

    Args:
        optimizer: Keras optimizer without inner optimizers.
        indices: Tuple of ints, positions among the variables of the step.
    """

    optimizer: Any
    indices: tuple[int, ...]

    def of(self, items: Sequence) -> list:
        """Return this group's part of `items`, which has one item for each variable."""
        return [items[index] for index in self.indices]


def param_groups_of(optimizer: Any, variables: Sequence[Any]) -> list[ParamGroup]:
    """Group the variables of a step by the optimizer that updates them.

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
        inner = keras_optimizer.inner_index(optimizer, variable)
        members.setdefault(inner, []).append(index)
    return [
        ParamGroup(optimizer.optimizers[inner], tuple(indices))
        for inner, indices in sorted(members.items())
    ]


def path_of(variable: Any) -> str:
    """Return the path of a Keras variable, or the name of a `tf.Variable`."""
    return str(getattr(variable, "path", None) or variable.name)


def entry_of(variable: Any) -> Entry:
    """Return the name, shape and dtype of a variable as an `Entry` of a bucket plan."""
    dtype = tf.as_dtype(variable.dtype)
    return Entry(path_of(variable), tuple(variable.shape), dtype.name, dtype.size)


def is_multi(optimizer: Any) -> bool:
    """Return whether an optimizer is a `MultiOptimizer`."""
    kind = getattr(keras.optimizers, "MultiOptimizer", None)
    return kind is not None and isinstance(optimizer, kind)


def innermost(optimizer: Any) -> list:
    """Return the inner optimizers of a `MultiOptimizer`, or the optimizer itself."""
    return list(optimizer.optimizers) if is_multi(optimizer) else [optimizer]


def is_elementwise(optimizer: Any) -> bool:
    """Return whether an optimizer is known to update elements independently."""
    return type(optimizer) in _ELEMENTWISE


def gains_from_groups(optimizer: Any) -> bool:
    """Return whether an optimizer is faster if it updates several variables as one.

    It then launches fewer kernels. Plain `SGD` has a single kernel for each variable,
    so it gains nothing.
    """
    is_plain = type(optimizer) is keras.optimizers.SGD and not optimizer.momentum
    return is_elementwise(optimizer) and not is_plain


def batches_per_update(optimizer: Any) -> int:
    """Return the number of batches that tfdp or Keras accumulates for an update."""
    steps = getattr(optimizer, "accumulation_steps", None)
    return steps or getattr(optimizer, "gradient_accumulation_steps", None) or 1


def clips(optimizer: Any) -> bool:
    """Return whether an optimizer clips gradients."""
    return any(getattr(optimizer, name, None) for name in _CLIPPING)


def is_linear(optimizer: Any) -> bool:
    """Return whether an optimizer is linear in gradients: `SGD` that does not clip.

    Rows of a sparse gradient with the same index may then be summed before the update.
    Keras clips rows one by one, so a sum of rows would be clipped differently.
    """
    return type(optimizer) is keras.optimizers.SGD and not clips(optimizer)


def rate_is_in_slots(optimizer: Any) -> bool:
    """Return whether the momentum of an optimizer contains the learning rate.

    Keras's `SGD` and tfdp's `LARS` add the rate times the gradient to the momentum, so
    the momentum must be rescaled when the rate changes.
    """
    kind = type(optimizer)
    has_rate = kind is keras.optimizers.SGD or getattr(kind, "rate_in_slots", False)
    return has_rate and bool(getattr(optimizer, "momentum", 0))
