"""Undo what a step changes apart from weights and slots, if its update is not made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.ground._compat import tf_distribute
from tfdp.ground.base.conditions import run_if
from tfdp.training.parameters.sharded_parameter import sharded_parameter


def changed_outside_update(model: Any) -> list:
    """Return a list of the variables that a step changes outside of its update.

    They are metrics, the statistics of BatchNormalization and the states of random
    generators. Sharded parameters are left out.

    Args:
        model: Keras model.
    """
    variables = [*model.non_trainable_variables, *model.metrics_variables]
    distinct = {id(variable): variable for variable in variables}.values()
    return [variable for variable in distinct if sharded_parameter(variable) is None]


def undo_after(
    variables: Sequence[Any], is_undone: Callable[[], tf.Tensor]
) -> Callable[[], None]:
    """Read variables before a step; return a function that can restore them after it.

    Args:
        variables: Sequence of Keras variables.
        is_undone: Callable that is called after the step, and returns a scalar bool
            tensor: whether to restore the variables.

    Returns:
        Callable for the end of the step, which restores the variables if `is_undone`
        returns true.
    """
    parts = [tf_distribute.local_part(variable) for variable in variables]
    before = [part.read_value() for part in parts]

    def restore() -> None:
        """Assign to the variables their values from before the step."""
        for part, value in zip(parts, before, strict=True):
            part.assign(value, read_value=False)

    return lambda: run_if(is_undone(), restore)
