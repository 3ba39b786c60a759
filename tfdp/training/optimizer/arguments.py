"""Checks of the arguments of a `DistributedOptimizer`."""

from __future__ import annotations

from typing import Any

import keras

from tfdp.ground._compat import tf_distribute
from tfdp.ground.arguments import checked_integer, checked_number
from tfdp.ground.base.context import is_tfdp
from tfdp.ground.base.param_groups import innermost
from tfdp.training.step.loss_scale import LossScaling


def check_optimizer(optimizer: Any) -> None:
    """Check that a value is a Keras optimizer that is not wrapped yet.

    Raises:
        ValueError: If it is not an optimizer, or is wrapped already.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            "`optimizer` must be a Keras optimizer, such as "
            f"`keras.optimizers.Adam()`. Received: optimizer={optimizer!r}"
        )
    inside = [optimizer, getattr(optimizer, "inner_optimizer", optimizer)]
    for item in [*inside, *innermost(inside[-1])]:
        if hasattr(item, "as_keras"):
            raise ValueError(
                "The optimizer is a `DistributedOptimizer` already, or holds one. Set "
                "`accumulation_steps` and `loss_scale` where it is made."
            )


def checked_steps(steps: Any) -> int:
    """Check the number of micro-batches of an update, and return it.

    Raises:
        ValueError: If it is not an integer of at least one.
    """
    return checked_integer("accumulation_steps", steps, 1)


def resolve_accumulation_steps(accumulation_steps: Any, own_steps: int) -> int:
    """Return the number of micro-batches of an update, which may be set in one place.

    Args:
        accumulation_steps: Argument of `DistributedOptimizer`, the number.
        own_steps: Int, the number that is set on the wrapped Keras optimizer.

    Returns:
        Int, the larger number.

    Raises:
        ValueError: If both are above one.
    """
    steps = checked_steps(accumulation_steps)
    if own_steps > 1 and steps > 1:
        raise ValueError(
            "Give the number of micro-batches once. Received: "
            f"accumulation_steps={steps} and an optimizer with "
            f"gradient_accumulation_steps={own_steps}"
        )
    return max(steps, own_steps)


def check_accumulation(optimizer: Any) -> None:
    """Check that a built, wrapped optimizer does not accumulate gradients itself.

    Only the wrapper should accumulate them.

    Args:
        optimizer: Keras optimizer that a `DistributedOptimizer` wraps.

    Raises:
        ValueError: If `gradient_accumulation_steps` is set. The setting of other
            optimizers was moved to the wrapper before; that of a `MultiOptimizer` could
            not, if it creates its optimizers when it is built.
    """
    if any(part.gradient_accumulation_steps for part in innermost(optimizer)):
        raise ValueError(
            "A `MultiOptimizer` whose `optimizer_map` is a function has no optimizers "
            "before it is built. Remove their `gradient_accumulation_steps`, and give "
            "`accumulation_steps` to `DistributedOptimizer`."
        )


def checked_loss_scale(loss_scale: Any) -> LossScaling | None:
    """Check the argument `loss_scale`, and convert it to a `LossScaling` or `None`.

    A number becomes a constant scale, and `"dynamic"` the default `LossScaling`.

    Raises:
        ValueError: If it is not `None`, `"dynamic"`, a `LossScaling` or a positive
            number.
    """
    if loss_scale is None or isinstance(loss_scale, LossScaling):
        return loss_scale
    if isinstance(loss_scale, str) and loss_scale == "dynamic":
        return LossScaling()
    what = '`None`, "dynamic" or a positive number'
    scale = float(checked_number("loss_scale", loss_scale, what, above=0))
    return LossScaling(
        initial_scale=scale, growth_steps=None, min_scale=min(scale, 1.0)
    )


def check_strategy(strategy: Any) -> None:
    """Check that a strategy is one of tfdp, or TensorFlow's for one device.

    Raises:
        ValueError: If it is another strategy.
    """
    if is_tfdp(strategy) or tf_distribute.is_one_device(strategy):
        return
    raise ValueError(
        "tfdp's optimizer and callbacks need a strategy of tfdp: use "
        "`tfdp.MirroredStrategy` or `tfdp.MultiWorkerMirroredStrategy`. "
        f"Received: {type(strategy).__module__}.{type(strategy).__name__}"
    )


def check_variables(variables: list) -> None:
    """Check that tfdp can train variables on several replicas.

    Raises:
        ValueError: For float8 training, which overwrites variables by gradients.
    """
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ValueError(
                "tfdp cannot train in float8: the replicas' scales would differ. "
                f"Received: the variable {variable.path!r}, which is overwritten "
                "with its gradient"
            )
