"""Conditions of a trial: what a `fit` has to be like, and what its plan depends on."""

from __future__ import annotations

import math
from typing import Any

import keras

from tfdp.features.tuning.tuner import most_steps
from tfdp.ground import _compat
from tfdp.ground.text import pluralize

# A trial takes at most half of a `fit`.
LEAST_PART = 2


def obstacle(model: Any) -> str:
    """Say why the buckets of a model cannot change, or `""`.

    Args:
        model: Keras model, with the optimizer that its callbacks have made.
    """
    optimizer: Any = model.optimizer
    features = getattr(optimizer, "features", None)
    if model.run_eagerly:
        return "with `run_eagerly=True` there is no traced step to try plans with"
    if getattr(optimizer, "is_sharded", False):
        return "sharded state lies by its buckets, which have to stay"
    if features is not None and features.local_options is not None:
        return "replicas that step alone do not communicate in each step"
    if _compat.overridden(model, ("make_train_function",)):
        return "the model makes its own `train_function`"
    return ""


def shortness(num_steps: int | None, update_steps: int) -> str:
    """Say why a trial is not worth its steps, or `""`.

    Args:
        num_steps: Int, steps of `fit`, or `None` where that is not known.
        update_steps: Int, see `update_steps`.

    Example:

    >>> shortness(30, 1)
    'a trial of other plans needs a `fit` of 1,578 steps, and this one has 30'
    """
    if num_steps is None:
        return "its data does not tell the number of steps (`steps_per_epoch` does)"
    least = LEAST_PART * most_steps(update_steps)
    if num_steps < least:
        return (
            f"a trial of other plans needs a `fit` of {pluralize(least, 'step')}, and "
            f"this one has {num_steps:,}"
        )
    return ""


def update_steps(model: Any) -> int:
    """Return the steps after which updates and executions of a loop both are whole.

    Args:
        model: Keras model.
    """
    optimizer: Any = model.optimizer
    plan = getattr(getattr(optimizer, "features", None), "plan", None)
    if isinstance(plan, dict):  # from epochs to micro-batches of an update
        accumulated = max(plan.values())
    else:
        own = getattr(optimizer, "accumulation_steps", None)
        accumulated = own or getattr(optimizer, "gradient_accumulation_steps", None)
    return math.lcm(accumulated or 1, model.steps_per_execution)


def describe_batches(arguments: dict[str, Any]) -> str:
    """Describe the batches of a `fit`, as far as its arguments show them.

    Args:
        arguments: Dict, the arguments of `fit` by name.

    Returns:
        String.

    Example:

    >>> import numpy as np
    >>> describe_batches({"x": np.zeros([100, 3]), "batch_size": 8})
    '8 of (3,)'
    """
    x = arguments.get("x")
    spec = getattr(x, "element_spec", None)
    if spec is not None:
        return repr(spec)
    shapes = [getattr(part, "shape", None) for part in keras.tree.flatten(x)]
    rows = ", ".join(str(tuple(shape[1:])) for shape in shapes if shape)
    return f"{arguments.get('batch_size')} of {rows}"
