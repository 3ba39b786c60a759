"""Schemas of what is read from a file: types and bounds, checked before use.

A check is a callable that takes a value, as JSON has it, and where it stands in the
file, and raises `Malformed` if the value is not what it has to be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tfdp.ground.text import pluralize

Check = Callable[[Any, str], None]

_LARGEST = 2**63 - 1
_NAME_LENGTH = 4096
_DEPTH = 200


class Malformed(ValueError):
    """Value in a file that nothing could have written there."""


def refuse(value: Any, where: str, wanted: str) -> None:
    """Raise `Malformed`, in one line whatever the value is."""
    raise Malformed(f"its {where} must be {wanted}, and is {_shown(value)}")


def integer(least: int = 0, most: int = _LARGEST) -> Check:
    """Integer from `least` to `most`, and no bool.

    Example:

    >>> integer(1)(5, "epoch")
    >>> integer(1)(0, "epoch")
    Traceback (most recent call last):
    tfdp.checkpoint.schema.Malformed: its epoch must be an integer from 1, and is 0
    """
    bounds = f"from {least}" if most == _LARGEST else f"from {least} to {most}"

    def check(value: Any, where: str) -> None:
        if type(value) is not int or not least <= value <= most:
            refuse(value, where, f"an integer {bounds}")

    return check


def number(value: Any, where: str) -> None:
    """Finite number, and no bool."""
    is_number = type(value) in (int, float) and abs(value) < 2**1023
    if not is_number or not math.isfinite(value):
        refuse(value, where, "a finite number")


def boolean(value: Any, where: str) -> None:
    """True or false."""
    if type(value) is not bool:
        refuse(value, where, "true or false")


def name(value: Any, where: str) -> None:
    """String for a name: printable, of limited length."""
    is_name = type(value) is str and len(value) <= _NAME_LENGTH
    if not is_name or not value.isprintable():
        refuse(value, where, "a name")


def string(value: Any, where: str) -> None:
    """Any string."""
    if type(value) is not str:
        refuse(value, where, "a string")


def one_of(*values: str) -> Check:
    """One of some strings."""

    def check(value: Any, where: str) -> None:
        if type(value) is not str or value not in values:
            refuse(value, where, "one of " + ", ".join(map(repr, values)))

    return check


def optional(check: Check) -> Check:
    """`None`, or what another check takes."""

    def check_optional(value: Any, where: str) -> None:
        if value is not None:
            check(value, where)

    return check_optional


def list_of(check: Check, least: int = 0, most: int | None = None) -> Check:
    """List of values of one kind.

    Args:
        check: What each is checked with.
        least: Int, number of values at least. Defaults to 0.
        most: Int, number at most, or `None` for any. Defaults to `None`.
    """

    def check_list(value: Any, where: str) -> None:
        if type(value) is not list or not least <= len(value) <= (most or len(value)):
            refuse(value, where, "a list of the right length")
        for place, item in enumerate(value):
            check(item, f"{where}[{place}]")

    return check_list


def row(*checks: Check) -> Check:
    """List of as many values as there are checks, one for each."""

    def check_row(value: Any, where: str) -> None:
        if type(value) is not list or len(value) != len(checks):
            refuse(value, where, f"a list of {pluralize(len(checks), 'value')}")
        for place, (check, item) in enumerate(zip(checks, value, strict=True)):
            check(item, f"{where}[{place}]")

    return check_row


def record(fields: Mapping[str, Check], may_miss: tuple[str, ...] = ()) -> Check:
    """Object with certain fields and no other.

    Args:
        fields: Mapping from the name of a field to its check.
        may_miss: Tuple of strings, fields that may not be there. Defaults to `()`.
    """

    def check_record(value: Any, where: str) -> None:
        if type(value) is not dict:
            refuse(value, where, "an object")
        for key in value:
            if key not in fields:
                refuse(key, f"field in {where}", "one that is known")
        for key, check in fields.items():
            if key in value:
                check(value[key], f"{where}.{key}")
            elif key not in may_miss:
                refuse(value, where, f"an object with {key!r}")

    return check_record


def mapping(check: Check) -> Check:
    """Object with any names, and values of one kind."""

    def check_mapping(value: Any, where: str) -> None:
        if type(value) is not dict:
            refuse(value, where, "an object")
        for key, item in value.items():
            name(key, f"name in {where}")
            check(item, f"{where}[{key!r}]")

    return check_mapping


def check_depth(value: Any, where: str, depth: int = _DEPTH) -> None:
    """Check that values are not nested so deeply that reading them would fail."""
    if depth == 0:
        refuse(value, where, f"nested less than {_DEPTH} deep")
    if isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, (list, dict)):
                check_depth(item, where, depth - 1)


def _shown(value: Any) -> str:
    if isinstance(value, (list, dict)):
        kind = "a list" if isinstance(value, list) else "an object"
        return f"{kind} of {len(value)}"
    if isinstance(value, str):
        return ascii(value if len(value) <= 60 else value[:60] + "...")
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)
