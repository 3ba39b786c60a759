"""The first difference between what workers have, by its path and its values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LONGEST = 60


class _Missing:
    """What a worker does not have at a path where another has something."""

    def __repr__(self) -> str:
        return "nothing"


_MISSING = _Missing()


def describe_difference(values: Mapping[int, Any]) -> str:
    """Describe the first difference between workers' nests, or return `""`.

    Args:
        values: Mapping from worker to a nest of dicts, lists and plain values.

    Returns:
        String: the path, and what each worker has there.

    Example:

    >>> describe_difference({0: {"a": 1, "b": [2, 3]}, 1: {"a": 1, "b": [2]}})
    'b/1: 3 on worker 0, nothing on worker 1'
    """
    first = values[min(values)]
    paths = (_first_path(first, other) for other in values.values())
    path = next((found for found in paths if found is not None), None)
    if path is None:
        return ""
    told = ", ".join(
        f"{_text(_at(value, path))} on worker {rank}" for rank, value in values.items()
    )
    return f"{'/'.join(map(str, path))}: {told}"


def _first_path(first: Any, other: Any) -> tuple | None:
    """Return the path of the first difference between two nests, or `None`."""
    keys: list[Any]
    if isinstance(first, dict) and isinstance(other, dict):
        keys = [*first, *(key for key in other if key not in first)]
    elif isinstance(first, list) and isinstance(other, list):
        keys = list(range(max(len(first), len(other))))
    else:
        # Not a number is like itself here.
        is_same = first == other or (first != first and other != other)
        return None if is_same else ()
    for key in keys:
        path = _first_path(_at(first, (key,)), _at(other, (key,)))
        if path is not None:
            return (key, *path)
    return None


def _at(value: Any, path: tuple) -> Any:
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return _MISSING
    return value


def _text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
