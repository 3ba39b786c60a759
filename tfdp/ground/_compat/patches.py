"""Replacement of functions of Keras and TensorFlow, where they have no hooks.

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
    """A function of Keras or TensorFlow, and the function that replaces it.

    Attributes:
        owner: Module or class that holds the function, or the property.
        name: String, the function's name in its owner.
        function: Callable, `function(original, *args, **kwargs)`. It calls the original
            if no tfdp strategy is involved.
        why: String, a sentence about the original's behavior that is wrong on replicas.
        upstream: String, the URL of the upstream issue, or `None` if none is known.
            Defaults to `None`.
    """

    owner: Any
    name: str
    function: Callable
    why: str
    upstream: str | None = None


def replace(entry: Replacement) -> None:
    """Install a replacement; no effect if it is installed already.

    Args:
        entry: `Replacement`.
    """
    original = _function_of(entry.owner, entry.name)
    if getattr(original, "_tfdp_entry", None) is entry:
        return
    function = entry.function
    installed, cell = original, _cell_in_traceback_filter(original)
    if cell is not None:
        original = traceback_utils.filter_traceback(cell.cell_contents)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        """Call tfdp's function with the original function, and return its result."""
        return function(original, *args, **kwargs)

    # `__module__` stays tfdp's, because AutoGraph uses it to choose what it converts.
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
        installed._tfdp_entry = entry


def filter_traceback(function: Function) -> Function:
    """Wrap a function so that tracebacks of its errors leave out library frames.

    Left out are frames of Keras, of TensorFlow and of folders that
    `hide_from_tracebacks` has added.

    Args:
        function: Callable.

    Returns:
        Callable with the same signature.
    """
    return traceback_utils.filter_traceback(function)


def hide_from_tracebacks(folder: str) -> None:
    """Have Keras leave a folder's frames out of tracebacks, like its own frames.

    Args:
        folder: String, the path of the folder, with a separator at its end.
    """
    paths = traceback_utils._EXCLUDED_PATHS
    if folder not in paths:
        traceback_utils._EXCLUDED_PATHS = (*paths, folder)


def _cell_in_traceback_filter(function: Any) -> Any:
    """Return the closure cell with the function that Keras's traceback filter wraps.

    It is `None` if `function` is not such a wrapper.

    Python looks up `model.fit` in `model.fit(callbacks=[tfdp.callbacks...])` before it
    creates the callback, which may be the first use of tfdp. With a new content of
    the cell, the method that is looked up already calls the replacement, too. Keras's
    filter then also leaves out tfdp's frames.
    """
    if getattr(function, "__globals__", None) is not vars(traceback_utils):
        return None
    names = function.__code__.co_freevars
    return function.__closure__[0] if names == ("fn",) else None


def _function_of(owner: Any, name: str) -> Any:
    """Return an attribute of `owner`, or a property's getter; `None` if missing."""
    attribute = getattr(owner, name, None)
    return attribute.fget if isinstance(attribute, property) else attribute
