"""Gradients and variables as they are handed to `Optimizer.apply`, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfdp import _compat


def checked_gradients(
    optimizer: Any, grads: Sequence[Any], variables: Sequence[Any] | None
) -> tuple[list, list]:
    """Match gradients with variables; build the optimizer if it is not built.

    Args:
        optimizer: Keras optimizer.
        grads: Sequence of gradients, `None` where there is none.
        variables: Sequence of Keras variables, one for each, or `None` for those that
            the optimizer was built for.

    Returns:
        Tuple of the gradients that there are, and their variables.

    Raises:
        ValueError: If they do not match, or the optimizer does not know a variable.
    """
    if variables is None and not optimizer.built:
        raise ValueError(
            "Give `apply` the variables, or build the optimizer for them first: "
            "`optimizer.build(variables)`."
        )
    with keras.name_scope(optimizer.name, caller=optimizer):
        if variables is not None and not optimizer.built:
            optimizer.build(list(variables))
            optimizer.built = True
        given = _compat.trained_by(optimizer) if variables is None else list(variables)
        _compat.check_known(optimizer, given)
        if len(grads) != len(given):
            raise ValueError(
                "`apply` needs one gradient for each variable. Received: "
                f"{len(grads)} gradients for {len(given)} variables"
            )
        gradients, given = _compat.without_missing(optimizer, list(grads), given)
    return list(gradients), list(given)
