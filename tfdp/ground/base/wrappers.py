"""Optimizers that were wrapped, and those that a model has beside its own."""

from __future__ import annotations

from typing import Any

import keras

from tfdp.ground.base.param_groups import innermost

_ATTRIBUTE = "_tfdp_wrapper"


class _Link:
    """What a wrapped optimizer knows of its wrapper."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper


def note_wrapper(optimizer: Any, wrapper: Any) -> None:
    """Remember what has taken over an optimizer: from now on they live together.

    Args:
        optimizer: Keras optimizer.
        wrapper: `DistributedOptimizer` around it.
    """
    # Not the wrapper itself: Keras writes to files what it finds in an optimizer.
    vars(optimizer)[_ATTRIBUTE] = _Link(wrapper)


def wrapper_of(optimizer: Any) -> Any:
    """Return the `DistributedOptimizer` that has taken over an optimizer, or `None`."""
    link = None if optimizer is None else vars(optimizer).get(_ATTRIBUTE)
    return None if link is None else link.wrapper


def other_optimizers(model: Any) -> dict[str, Any]:
    """Return the optimizers that a model, such as a GAN, has beside `model.optimizer`.

    Args:
        model: Keras model.

    Returns:
        Dict from names of attributes to Keras optimizers, in one order.
    """
    found = {
        name: value
        for name, value in sorted(vars(model).items())
        if isinstance(value, keras.optimizers.Optimizer)
    }
    own = getattr(model, "optimizer", None)
    known = {
        id(part) for optimizer in [own, *found.values()] for part in _parts(optimizer)
    }
    if own is not None:
        known.add(id(own))
    others = {}
    for name, value in found.items():
        if id(value) not in known:
            known.add(id(value))
            others[name] = value
    return others


def _parts(optimizer: Any) -> list[Any]:
    """The optimizers within one, which are no others beside it."""
    parts = []
    while optimizer is not None:
        parts += [part for part in innermost(optimizer) if part is not optimizer]
        optimizer = getattr(optimizer, "inner_optimizer", None)
        parts += [] if optimizer is None else [optimizer]
    return parts
