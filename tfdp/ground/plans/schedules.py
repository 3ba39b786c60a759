"""Learning rates and accumulation as functions of batch size, step and epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tfdp.ground.arguments import checked_integer, checked_number, is_integer

RULES = ("linear", "sqrt")


def scale_learning_rate(
    learning_rate: float, scale: float, *, rule: str = "linear"
) -> float:
    """Scale a learning rate to another batch size.

    Args:
        learning_rate: Float above 0, the rate that was tuned.
        scale: Float above 0, the new global batch size divided by the one for
            which the rate was tuned. If each replica keeps the batch of one device,
            it is the number of replicas times the accumulation steps.
        rule: String, `"linear"` multiplies by `scale`, `"sqrt"` by its square
            root. Defaults to `"linear"`.

    Returns:
        Float, the scaled rate.

    Raises:
        ValueError: If a number is not above 0, or the rule is unknown.

    Example:

    >>> scale_learning_rate(0.1, 8)
    0.8
    >>> scale_learning_rate(0.1, 4, rule="sqrt")
    0.2

    Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD",
    https://arxiv.org/abs/1706.02677, for the linear rule; Krizhevsky 2014, "One
    weird trick for parallelizing convolutional neural networks",
    https://arxiv.org/abs/1404.5997, for the square root.
    """
    positive = "a number greater than zero"
    learning_rate = checked_number("learning_rate", learning_rate, positive, above=0)
    scale = checked_number("scale", scale, positive, above=0)
    if rule not in RULES:
        listed = " or ".join(f'"{known}"' for known in RULES)
        raise ValueError(f"`rule` must be {listed}. Received: rule={rule!r}")
    return float(learning_rate * (scale if rule == "linear" else math.sqrt(scale)))


def steps_at_epoch(steps: int | Mapping[int, int], epoch: int) -> int:
    """Return the number of micro-batches of an update in an epoch.

    Args:
        steps: Int of at least 1; or a dict from the first epoch, counted from
            0, to the number from that epoch on. Before the first epoch of the
            dict the number is 1.
        epoch: Int of at least 0.

    Returns:
        Int, the number of micro-batches.

    Raises:
        ValueError: If `steps` is invalid, see `check_steps`, or `epoch` is not an
            integer of at least 0.

    Example:

    >>> [steps_at_epoch({0: 8, 5: 4}, epoch) for epoch in (0, 4, 5, 90)]
    [8, 8, 4, 4]
    """
    check_steps(steps)
    checked_integer("epoch", epoch, 0)
    if not isinstance(steps, Mapping):
        return int(steps)
    begun = [first for first in steps if first <= epoch]
    return int(steps[max(begun)]) if begun else 1


def check_steps(steps: int | Mapping[int, int], *, name: str = "steps") -> None:
    """Check the argument `steps` of `steps_at_epoch`.

    Args:
        steps: Int or dict, the argument of `steps_at_epoch`.
        name: String, the argument's name in messages. Defaults to `"steps"`.

    Raises:
        ValueError: If `steps` is neither an integer of at least 1 nor a non-empty dict
            from integers of at least 0 to integers of at least 1.
    """
    if not isinstance(steps, Mapping):
        checked_integer(name, steps, 1)
        return
    is_right = all(
        is_integer(first, least=0) and is_integer(number, least=1)
        for first, number in steps.items()
    )
    if not steps or not is_right:
        raise ValueError(
            f"`{name}` must map at least one epoch, an integer >= 0, to a number "
            f"of micro-batches, an integer >= 1. Received: {name}={steps!r}"
        )
