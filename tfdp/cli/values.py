"""What the values on the command line may be: callbacks for click's options."""

from __future__ import annotations

import math

import click

from tfdp.plans.cost_model import Algorithm


def count(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> int | None:
    """A whole number of at least 1."""
    if value is None:
        return None
    if not (value.isdecimal() and int(value) >= 1):
        raise click.BadParameter(
            f"it must be a whole number of at least 1. Received: {value}"
        )
    return int(value)


def number_of_times(
    context: click.Context, parameter: click.Parameter, value: str
) -> int:
    """A whole number that is not negative."""
    if not value.isdecimal():
        raise click.BadParameter(
            f"it must be a whole number, not negative. Received: {value}"
        )
    return int(value)


def positive(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> float | None:
    """A number above 0."""
    if value is None:
        return None
    numbers = _numbers(value, "one number", above_zero=True)
    if len(numbers) > 1:
        raise click.BadParameter(f"it must be one number. Received: {value}")
    return numbers[0]


def levels(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[float, float] | None:
    """One number for both levels, or two: inside a node, across nodes."""
    if value is None:
        return None
    what = "one number, or two: inside a node,across nodes"
    numbers = _numbers(value, what, above_zero=parameter.name == "beta")
    if len(numbers) > 2:
        raise click.BadParameter(f"it must be {what}. Received: {value}")
    return numbers[0], numbers[-1]


def share(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> float | None:
    """A number from 0 to 1."""
    if value is None:
        return None
    numbers = _numbers(value, "a number from 0 to 1", above_zero=False)
    if len(numbers) > 1 or numbers[0] > 1:
        raise click.BadParameter(f"it must be a number from 0 to 1. Received: {value}")
    return numbers[0]


def algorithm(
    context: click.Context, parameter: click.Parameter, value: str
) -> Algorithm | None:
    """An algorithm by its name; `None` for `auto`."""
    if value == "auto":
        return None
    name, _, levels = value.partition(":")
    inner, _, outer = levels.partition(",")
    try:
        if levels and name != "hierarchical":
            raise ValueError("Only a hierarchical algorithm has an inner and an outer")
        return Algorithm(name, inner or "ring", outer or "ring")
    except ValueError as error:
        raise click.BadParameter(
            "it must be auto, ring, tree, halving_doubling, hierarchical, or "
            f"hierarchical:INNER,OUTER. Received: {value}"
        ) from error


def _numbers(value: str, what: str, *, above_zero: bool) -> list[float]:
    try:
        numbers = [float(text) for text in value.split(",")]
    except ValueError:
        numbers = [math.nan]
    for number in numbers:
        if not (number > 0 or (number == 0 and not above_zero)) or number == math.inf:
            least = "above 0" if above_zero else "not negative"
            raise click.BadParameter(f"it must be {what}, {least}. Received: {value}")
    return numbers
