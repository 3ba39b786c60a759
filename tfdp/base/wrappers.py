"""Optimizers that were wrapped, and those that a model has beside its own."""

from __future__ import annotations

import weakref
from typing import Any

import keras

_wrappers: weakref.WeakKeyDictionary[Any, weakref.ref] = weakref.WeakKeyDictionary()


def note_wrapper(optimizer: Any, wrapper: Any) -> None:
    """Remember what has taken over an optimizer, for as long as both live.

    Args:
        optimizer: Keras optimizer.
        wrapper: `DistributedOptimizer` around it.
    """
    _wrappers[optimizer] = weakref.ref(wrapper)


def wrapper_of(optimizer: Any) -> Any:
    """Return the `DistributedOptimizer` that has taken over an optimizer, or `None`."""
    found = _wrappers.get(optimizer) if optimizer is not None else None
    return None if found is None else found()


def other_optimizers(model: Any) -> dict[str, Any]:
    """Return the optimizers that a model, such as a GAN, has beside `model.optimizer`.

    Args:
        model: Keras model.

    Returns:
        Dict from names of attributes to Keras optimizers, in one order.
    """
    own, known = getattr(model, "optimizer", None), set()
    while own is not None:
        known.add(id(own))
        own = getattr(own, "inner_optimizer", None)
    found = {}
    for name, value in sorted(vars(model).items()):
        if isinstance(value, keras.optimizers.Optimizer) and id(value) not in known:
            known.add(id(value))
            found[name] = value
    return found
