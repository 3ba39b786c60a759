"""Checks of booleans, numbers, choices and paths in users' arguments.

The checks accept NumPy's scalars and return Python's own types. Bools, infinity and NaN
do not count as numbers.
"""

from __future__ import annotations

import numbers
import os
import sys
from collections.abc import Sequence
from typing import Any


def is_integer(value: object, least: int | None = None) -> bool:
    """Return whether a value is an integer, and at least `least` if that is given.

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
    """Convert a number or bool to Python's own type; return other values unchanged."""
    if _is_boolean(value):
        return bool(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def checked_bool(name: str, value: object) -> bool:
    """Check that an argument is a boolean, and return it.

    Args:
        name: String, the name of the argument.
        value: Object, the value of the argument.

    Raises:
        ValueError: If the value is not a boolean.
    """
    if not _is_boolean(value):
        raise ValueError(f"`{name}` must be True or False. Received: {name}={value!r}")
    return bool(value)


def check_choice(name: str, value: object, allowed: Sequence[str | None]) -> None:
    """Check that an argument is one of a few strings, or `None`.

    Args:
        name: String, the name of the argument.
        value: Object, the value of the argument.
        allowed: Sequence of two or more strings, or `None` among them.

    Raises:
        ValueError: If the value is another one.
    """
    if value not in allowed:
        *first, last = ("`None`" if one is None else f'"{one}"' for one in allowed)
        count = "one of " if len(allowed) > 2 else ""
        raise ValueError(
            f"`{name}` must be {count}{', '.join(first)} or {last}. "
            f"Received: {name}={value!r}"
        )


def checked_path(name: str, value: Any, what: str) -> str:
    """Check that an argument is a path that is not empty, and return it as a string.

    Args:
        name: String, the name of the argument.
        value: Object, the value of the argument.
        what: String, the allowed values in words, for the message, such as `"the path
            of a directory"`.

    Raises:
        ValueError: If the value is not a path.
    """
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ValueError(f"`{name}` must be {what}. Received: {name}={value!r}")
    return os.fspath(value)


def checked_integer(name: str, value: object, least: int, what: str = "") -> int:
    """Check that an argument is an integer of at least `least`, and return it.

    Args:
        name: String, the name of the argument.
        value: Object, the value of the argument.
        least: Int, the smallest allowed value.
        what: String, a clause such as `"or None"` that follows "an integer of at least
            1" in the message; or `""`. Defaults to `""`.

    Raises:
        ValueError: If the value is not an integer, or too small.
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
    """Check that an argument is a finite number within bounds, and return it.

    Args:
        name: String, the name of the argument.
        value: Object, the value of the argument.
        what: String, the allowed values in words, for the message, such as `"a positive
            number"`.
        above: Float, exclusive lower bound, or `None`. Defaults to `None`.
        least: Float, inclusive lower bound, or `None`. Defaults to `None`.
        most: Float, inclusive upper bound, or `None`. Defaults to `None`.
        below: Float, exclusive upper bound, or `None`. Defaults to `None`.

    Raises:
        ValueError: If the value is not a number, or out of bounds.
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
    """Return whether a value is a bool of Python or of NumPy."""
    # NumPy's bool is recognized by its name, because interpreters of benchmarks import
    # this module without NumPy.
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")
