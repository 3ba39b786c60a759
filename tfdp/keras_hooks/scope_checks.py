"""Checks of what is made outside of `strategy.scope()`."""

from __future__ import annotations

from typing import Any

import keras

from tfdp import _compat
from tfdp.base.context import in_tfdp_scope


def check_outside_scope(model: Any, name: str) -> None:
    """Raise if a model made outside the scope is used inside it.

    Raises:
        ValueError: If a tfdp strategy's scope is in force.
    """
    if in_tfdp_scope():
        raise ValueError(
            f"The model {model.name!r} was made outside `strategy.scope()`, so that "
            "its variables are on one device. Make and compile it inside the "
            f"scope. Received: a call of `{name}` inside the scope"
        )


def move_metrics_into_scope(strategy: Any, arguments: dict[str, Any]) -> None:
    """Move metrics that were made outside the scope into it, in place."""
    del strategy
    for key in ("metrics", "weighted_metrics"):
        for metric in keras.tree.flatten(arguments.get(key)):
            if isinstance(metric, keras.Metric):
                for variable in metric.variables:
                    _compat.rehome_variable(variable)


def move_optimizer_into_scope(strategy: Any, optimizer: Any) -> None:
    """Move an optimizer that was made outside the scope into it, in place.

    Raises:
        ValueError: If it has been built outside already.
    """
    if optimizer is None or _compat.is_optimizer_of(optimizer, strategy):
        return
    if optimizer.built:
        raise ValueError(
            f"The optimizer {optimizer.name!r} was built outside "
            "`strategy.scope()`. Make a new one, inside the scope."
        )
    _compat.rehome_optimizer(optimizer, strategy)
