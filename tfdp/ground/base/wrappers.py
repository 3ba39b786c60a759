"""Optimizers of a model: wrappers, sharding, and those beside `model.optimizer`."""

from __future__ import annotations

from typing import Any

import keras

from tfdp.ground.base.param_groups import innermost
from tfdp.ground.plans.sharding import NOT_SHARDED, ShardingOptions

_ATTRIBUTE = "_tfdp_wrapper"


class _WrapperReference:
    """Reference from an optimizer to its wrapper, which Keras does not save."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper


def register_wrapper(optimizer: Any, wrapper: Any) -> None:
    """Record the wrapper of an optimizer, which keeps the wrapper alive.

    Args:
        optimizer: Keras optimizer.
        wrapper: `DistributedOptimizer` around it.
    """
    # The reference hides the wrapper from Keras, which would otherwise save it as an
    # attribute of the optimizer.
    vars(optimizer)[_ATTRIBUTE] = _WrapperReference(wrapper)


def wrapper_of(optimizer: Any) -> Any:
    """Return the `DistributedOptimizer` around an optimizer, or `None`."""
    link = None if optimizer is None else vars(optimizer).get(_ATTRIBUTE)
    return None if link is None else link.wrapper


def is_sharded(optimizer: Any) -> bool:
    """Return whether the state of an optimizer is sharded; false for one of Keras."""
    return getattr(optimizer, "is_sharded", False)


def sharding_of(optimizer: Any) -> ShardingOptions:
    """Return the `ShardingOptions` of an optimizer, `NOT_SHARDED` for one of Keras."""
    return getattr(optimizer, "sharding_options", NOT_SHARDED)


def other_optimizers(model: Any) -> dict[str, Any]:
    """Return a model's optimizers other than `model.optimizer`, as of a GAN.

    Args:
        model: Keras model.

    Returns:
        Dict from names of attributes to Keras optimizers, sorted by name.
    """
    attributes = {
        name: value
        for name, value in sorted(vars(model).items())
        if isinstance(value, keras.optimizers.Optimizer)
    }
    main = getattr(model, "optimizer", None)
    known = {
        id(part)
        for optimizer in [main, *attributes.values()]
        for part in _parts(optimizer)
    }
    if main is not None:
        known.add(id(main))
    others = {}
    for name, value in attributes.items():
        if id(value) not in known:
            known.add(id(value))
            others[name] = value
    return others


def rate_variables(model: Any) -> list:
    """Return a list of the learning rates of a model's optimizers.

    Only those that are Keras variables are included, and no schedules.
    """
    optimizers = [getattr(model, "optimizer", None), *other_optimizers(model).values()]
    variables = [v for o in optimizers if o is not None for v in o.variables]
    return [v for v in variables if v.name == "learning_rate"]


def _parts(optimizer: Any) -> list[Any]:
    """Return all optimizers inside an optimizer, at any depth, without itself."""
    parts = []
    while optimizer is not None:
        parts += [part for part in innermost(optimizer) if part is not optimizer]
        optimizer = getattr(optimizer, "inner_optimizer", None)
        parts += [] if optimizer is None else [optimizer]
    return parts
