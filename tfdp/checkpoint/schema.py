"""Schemas of values read from a file: types and bounds, checked before use.

A schema has the structure of the values that it describes:

    dict       object with exactly these fields; a field with a "?" may be missing
    list       list of any length; its one item is the schema of all values
    tuple      list of the same length, with a schema for each value
    set        one of these strings
    range      integer in this range, not a bool
    callable   function of a parsed JSON value and of its place in the file, a string
               such as "run.epoch"; raises `Malformed` if the value is wrong

Below, `value` is always a parsed JSON value, and `where` its place in the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from tfdp.ground.arguments import is_number
from tfdp.ground.text import pluralize

_NO_BOUND = 2**63
COUNT = range(_NO_BOUND)
POSITIVE = range(1, _NO_BOUND)
# Names and nested values have limits, so that a damaged file can neither flood an error
# message nor exceed Python's limit of recursion.
_NAME_LENGTH = 4096
_DEPTH = 200


class Malformed(ValueError):
    """Error: a value in a file violates the schema, so tfdp cannot have written it."""


def raise_malformed(value: Any, where: str, wanted: str) -> None:
    """Raise `Malformed` with a message of one line.

    Args:
        value: The wrong value, as JSON has it.
        where: String, the place of the value in the file, such as `"run.epoch"`.
        wanted: String, what the value must be, such as `"a list"`.
    """
    raise Malformed(f"its {where} must be {wanted}, but is {_shown(value)}")


def check(value: Any, schema: Any, where: str) -> None:
    """Raise `Malformed` unless a value matches a schema.

    Args:
        value: Value, as JSON has it.
        schema: Dict, the schemas of an object's fields; list with the schema of all
            items; tuple with a schema for each item; set of the allowed strings; range
            of the allowed ints; or function such as `number`, which checks the value.
        where: String, place of the value in the file.

    Example:

    >>> check({"epoch": 5}, {"epoch": POSITIVE, "logs?": [number]}, "run")
    >>> check({"epoch": 0}, {"epoch": POSITIVE, "logs?": [number]}, "run")
    Traceback (most recent call last):
    tfdp.checkpoint.schema.Malformed: its run.epoch must be an integer from 1, but is 0
    """
    if callable(schema):
        schema(value, where)
    elif isinstance(schema, range):
        if type(value) is not int or value not in schema:
            most = "" if schema.stop == _NO_BOUND else f" to {schema.stop - 1}"
            raise_malformed(value, where, f"an integer from {schema.start}{most}")
    elif isinstance(schema, set):
        if type(value) is not str or value not in schema:
            raise_malformed(
                value, where, "one of " + ", ".join(map(repr, sorted(schema)))
            )
    elif isinstance(schema, dict):
        _check_fields(value, schema, where)
    elif type(value) is not list:
        raise_malformed(value, where, "a list")
    elif isinstance(schema, tuple):
        if len(value) != len(schema):
            raise_malformed(
                value, where, f"a list of {pluralize(len(schema), 'value')}"
            )
        _check_items(zip(value, schema, strict=True), where)
    else:
        (each,) = schema
        _check_items(((item, each) for item in value), where)


def _check_fields(value: Any, schema: dict[str, Any], where: str) -> None:
    """Raise `Malformed` unless a value is an object with the fields of a schema.

    Only a field with a "?" at the end of its name in the schema may be missing.
    """
    if type(value) is not dict:
        raise_malformed(value, where, "an object")
    fields = {key.removesuffix("?"): each for key, each in schema.items()}
    for key, item in value.items():
        if key not in fields:
            raise_malformed(key, f"field in {where}", "a known one")
        check(item, fields[key], f"{where}.{key}")
    for key in schema:
        if key not in value and not key.endswith("?"):
            raise_malformed(value, where, f"an object with {key!r}")


def _check_items(pairs: Iterable[tuple[Any, Any]], where: str) -> None:
    """Raise `Malformed` unless the items of a list match their schemas.

    Args:
        pairs: Iterable of pairs of an item and its schema.
        where: String, place of the list in the file.
    """
    for place, (item, schema) in enumerate(pairs):
        check(item, schema, f"{where}[{place}]")


def number(value: Any, where: str) -> None:
    """Raise `Malformed`, which names `where`, unless a value is a finite number.

    A bool is not a number.
    """
    if not is_number(value):
        raise_malformed(value, where, "a finite number")


def boolean(value: Any, where: str) -> None:
    """Raise `Malformed`, which names `where`, unless a value is a bool."""
    if type(value) is not bool:
        raise_malformed(value, where, "true or false")


def name(value: Any, where: str) -> None:
    """Raise `Malformed`, naming `where`, unless a value is a short printable string."""
    is_name = type(value) is str and len(value) <= _NAME_LENGTH
    if not is_name or not value.isprintable():
        raise_malformed(value, where, "a name")


def string(value: Any, where: str) -> None:
    """Raise `Malformed`, which names `where`, unless a value is a string."""
    if type(value) is not str:
        raise_malformed(value, where, "a string")


def optional(schema: Any) -> Callable:
    """Return a schema for `None` or a value of the given schema."""

    def check_optional(value: Any, where: str) -> None:
        """Raise `Malformed` unless a value is `None` or matches the schema."""
        if value is not None:
            check(value, schema, where)

    return check_optional


def list_of(schema: Any, least: int = 0, most: float = math.inf) -> Callable:
    """Return a schema for lists of `least` to `most` values of one schema."""

    def check_list(value: Any, where: str) -> None:
        """Raise `Malformed` unless a value is a list of the right length and items."""
        check(value, [schema], where)
        if not least <= len(value) <= most:
            raise_malformed(value, where, "a list of the right length")

    return check_list


def mapping(schema: Any) -> Callable:
    """Return a schema for objects with any field names, and values of one schema."""

    def check_mapping(value: Any, where: str) -> None:
        """Raise `Malformed` unless a value is an object with matching values."""
        if type(value) is not dict:
            raise_malformed(value, where, "an object")
        for key, item in value.items():
            name(key, f"name in {where}")
            check(item, schema, f"{where}[{key!r}]")

    return check_mapping


def check_depth(value: Any, where: str, depth: int = _DEPTH) -> None:
    """Raise `Malformed` if values are nested so deeply that recursion would fail.

    Args:
        value: Value, as JSON has it.
        where: String, place of the value in the file.
        depth: Int, number of nested levels that are allowed. Defaults to 200.
    """
    if depth == 0:
        raise_malformed(value, where, f"nested less than {_DEPTH} deep")
    if isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            check_depth(item, where, depth - 1)


def _shown(value: Any) -> str:
    """Format a value in a short line for an error message, such as `"a list of 3"`."""
    if isinstance(value, (list, dict)):
        kind = "a list" if isinstance(value, list) else "an object"
        return f"{kind} of {len(value)}"
    if isinstance(value, str):
        return ascii(value if len(value) <= 60 else value[:60] + "...")
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)
