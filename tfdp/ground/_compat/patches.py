"""Replacement of functions of Keras and TensorFlow, which have no hook in these places.

`tfdp.training.keras_hooks.install` holds the table of all replacements; nothing else
calls `replace`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from keras.src.utils import traceback_utils

Function = TypeVar("Function", bound=Callable)


@dataclasses.dataclass(frozen=True)
class Replacement:
    """One function of Keras or TensorFlow, and the function that takes its place.

    Attributes:
        owner: Module or class that holds the function, or the property.
        name: String, the function's name in its owner.
        function: Callable, `function(original, *args, **kwargs)`. It hands over to the
            original wherever no tfdp strategy is involved.
        why: String, a sentence: what the original does that does not fit replicas.
        upstream: String, the URL of the issue that reports it, or `None` where none
            is known. Defaults to `None`.
    """

    owner: Any
    name: str
    function: Callable
    why: str
    upstream: str | None = None


def replace(entry: Replacement) -> None:
    """Put a replacement in its place; again has no effect.

    Args:
        entry: `Replacement`.
    """
    original = _function_of(entry.owner, entry.name)
    if getattr(original, "_tfdp_entry", None) is entry:
        return
    function = entry.function
    found, cell = original, _filtered(original)
    if cell is not None:
        original = traceback_utils.filter_traceback(cell.cell_contents)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    # Not `__module__`, by which AutoGraph decides what it converts.
    replacement.__name__ = entry.name
    replacement.__qualname__ = getattr(original, "__qualname__", entry.name)
    replacement.__doc__ = original.__doc__
    replacement.__wrapped__ = original  # type: ignore[attr-defined]
    replacement._tfdp_entry = entry  # type: ignore[attr-defined]
    if isinstance(getattr(entry.owner, entry.name), property):
        setattr(entry.owner, entry.name, property(replacement))
    elif cell is None:
        setattr(entry.owner, entry.name, replacement)
    else:
        cell.cell_contents = replacement
        found._tfdp_entry = entry


def filter_traceback(function: Function) -> Function:
    """Leave out of the traceback of what a function raises the frames of libraries.

    Those of Keras, TensorFlow and what `hide_from_tracebacks` names.

    Args:
        function: Callable.

    Returns:
        Callable, with the same signature.
    """
    return traceback_utils.filter_traceback(function)


def hide_from_tracebacks(folder: str) -> None:
    """Have Keras leave a folder's frames out of tracebacks, as it does with its own.

    Args:
        folder: String, the path, with a separator at its end.
    """
    paths = traceback_utils._EXCLUDED_PATHS
    if folder not in paths:
        traceback_utils._EXCLUDED_PATHS = (*paths, folder)


def _filtered(function: Any) -> Any:
    """Return the cell that holds what Keras's filter of tracebacks calls, or `None`.

    `model.fit(callbacks=[tfdp.callbacks...])` looks `fit` up before the callback, which
    may be the first use of tfdp in the process, is made: what Keras has handed out by
    then has to call the replacement, too. And its filter leaves out tfdp's frames.
    """
    if getattr(function, "__globals__", None) is not vars(traceback_utils):
        return None
    names = function.__code__.co_freevars
    return function.__closure__[0] if names == ("fn",) else None


def _function_of(owner: Any, name: str) -> Any:
    """A function of a module or a class, that of a property, or `None`."""
    found = getattr(owner, name, None)
    return found.fget if isinstance(found, property) else found
