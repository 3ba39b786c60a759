"""Dataclasses from values of JSON, with the types of their fields checked."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")


def from_fields(kind: type[_T], content: Mapping[str, Any]) -> _T:
    """Create a dataclass from a JSON object; other keys of the object are ignored.

    Args:
        kind: The dataclass. Its fields are strings, numbers, bools, dataclasses; lists,
            tuples, and dicts with ints as keys, of these; or one of them and `None`.
        content: Mapping, the object.

    Raises:
        KeyError: If a field is missing.
        TypeError: If a value has another type, or is not a finite number.
        ValueError: If a key of a dict is not an int.

    Example:

    >>> @dataclasses.dataclass
    ... class Point:
    ...     place: tuple[int, ...]
    ...     name: str | None
    >>> from_fields(Point, {"place": [3, 4], "name": None})
    Point(place=(3, 4), name=None)
    """
    hints = typing.get_type_hints(kind)
    return kind(
        **{name: _value_of(hint, content[name]) for name, hint in hints.items()}
    )


def _value_of(hint: Any, value: Any) -> Any:
    """Convert a value from JSON to the type of a dataclass field.

    Args:
        hint: Type of the field.
        value: Value of JSON.

    Raises:
        TypeError: If the value has another type.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (list, tuple):
        return origin(_value_of(arguments[0], each) for each in value)
    if origin is dict:
        return {int(k): _value_of(arguments[1], each) for k, each in value.items()}
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return from_fields(hint, value)
    kinds = arguments or (hint,)
    if type(value) is int and float in kinds:
        value = float(value)
    # Types are compared exactly, since `isinstance` would accept a bool as an int.
    if type(value) not in kinds or (type(value) is float and not math.isfinite(value)):
        raise TypeError(value)
    return value
