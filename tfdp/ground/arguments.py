"""Checks of booleans and numbers that a user gives: each is what it says, or an error.

What is returned is of Python's own types, so that NumPy's scalars do as well. A bool
is no number, and neither is what is not finite.
"""

from __future__ import annotations

import numbers
import sys
from typing import Any


def is_integer(value: object, least: int | None = None) -> bool:
    """Return whether a value is an integer, of at least `least`.

    Example:

    >>> is_integer(3, least=1), is_integer(True), is_integer(3.0), is_integer("3")
    (True, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return False
    return least is None or int(value) >= least


def is_number(value: object) -> bool:
    """Return whether a value is a finite number.

    Example:

    >>> is_number(3), is_number(0.5), is_number(True), is_number(float("nan"))
    (True, True, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    most = sys.float_info.max
    return -most <= plain(value) <= most


def plain(value: Any) -> Any:
    """Return a number or bool as one of Python's own types, and all else as it is."""
    if _is_boolean(value):
        return bool(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def checked_bool(name: str, value: object) -> bool:
    """Return a boolean.

    Args:
        name: String, of the argument.
        value: What was given for it.

    Raises:
        ValueError: If it is something else.
    """
    if not _is_boolean(value):
        raise ValueError(f"`{name}` must be True or False. Received: {name}={value!r}")
    return bool(value)


def checked_integer(name: str, value: object, least: int, what: str = "") -> int:
    """Return an integer.

    Args:
        name: String, of the argument.
        value: What was given for it.
        least: Int, the smallest one.
        what: String, what it counts, or `""`. Defaults to `""`.

    Raises:
        ValueError: If it is no integer, or too small.
    """
    if not is_integer(value, least):
        counts = f", {what}" if what else ""
        raise ValueError(
            f"`{name}` must be an integer of at least {least}{counts}. "
            f"Received: {name}={value!r}"
        )
    return plain(value)


def checked_number(
    name: str,
    value: object,
    what: str,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> float:
    """Return a finite number within bounds.

    Args:
        name: String, of the argument.
        value: What was given for it.
        what: String, what it must be.
        above: Float, less than all that are allowed, or `None`. Defaults to `None`.
        least: Float, the smallest that is allowed, or `None`. Defaults to `None`.
        most: Float, the largest that is allowed, or `None`. Defaults to `None`.
        below: Float, more than all that are allowed, or `None`. Defaults to `None`.

    Raises:
        ValueError: If it is no number, or out of bounds.
    """
    number = plain(value)
    if (
        not is_number(value)
        or (above is not None and number <= above)
        or (least is not None and number < least)
        or (most is not None and number > most)
        or (below is not None and number >= below)
    ):
        raise ValueError(f"`{name}` must be {what}. Received: {name}={value!r}")
    return number


def _is_boolean(value: object) -> bool:
    # By name: interpreters of benchmarks import this without NumPy.
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")
