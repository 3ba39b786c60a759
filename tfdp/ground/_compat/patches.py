"""Replacement of functions of Keras and TensorFlow, which have no hook in these places.

`tfdp.training.keras_hooks.install` holds the table of all replacements; nothing else
calls `replace`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import keras
import tensorflow as tf
from keras.src.utils import traceback_utils

Function = TypeVar("Function", bound=Callable)


@dataclasses.dataclass(frozen=True)
class Replacement:
    """One function of Keras or TensorFlow, and the function that takes its place.

    Attributes:
        owner: Module or class that holds the function, or the property.
        call: String, the function's name and the names of its parameters on the
            versions of `checked_on`, such as `"fit(self, x, *args, **kwargs)"`. Where
            versions differ, all forms stand there, with ` | ` between them.
        function: Callable, `function(original, *args, **kwargs)`. It hands over to the
            original wherever no tfdp strategy is involved.
        why: String, a sentence: what the original does that does not fit replicas.
        upstream: String, the URL of the issue that reports it, or `None` where none
            is known. Defaults to `None`.
        checked_on: String, the library and its first and last version on which the
            signature was read. Defaults to `"Keras 3.12 to 3.15"`.
    """

    owner: Any
    call: str
    function: Callable
    why: str
    upstream: str | None = None
    checked_on: str = "Keras 3.12 to 3.15"

    @property
    def name(self) -> str:
        """The function's name in its owner."""
        return self.call.partition("(")[0]

    @property
    def path(self) -> str:
        """The function's name with those of its module and class."""
        module = getattr(self.owner, "__module__", None)
        names = (module, self.owner.__name__, self.name)
        return ".".join(name for name in names if name)

    @property
    def replaced_by(self) -> str:
        """The name, with its module, of the function that takes its place."""
        function = getattr(self.function, "func", self.function)
        return f"{function.__module__}.{function.__name__}"


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


def change_of(entry: Replacement) -> str:
    """Describe how a function differs from the one that a replacement is written for.

    Args:
        entry: `Replacement`, in its place or not.

    Returns:
        String, one sentence; empty where the function's parameters are as recorded.
    """
    found = _call_of(entry.owner, entry.name)
    if found in entry.call.split(" | "):
        return ""
    is_keras = entry.path.startswith("keras.")
    library = (
        f"Keras {keras.__version__}" if is_keras else f"TensorFlow {tf.__version__}"
    )
    now = f"is now `{found}`" if found else "is gone"
    return (
        f"`{entry.path}` {now} in {library}, and was `{entry.call}` in "
        f"{entry.checked_on}: adapt `{entry.replaced_by}`, which takes its place, then "
        "its entry in tfdp/training/keras_hooks/install.py."
    )


def _function_of(owner: Any, name: str) -> Any:
    """A function of a module or a class, that of a property, or `None`."""
    found = getattr(owner, name, None)
    return found.fget if isinstance(found, property) else found


def _call_of(owner: Any, name: str) -> str:
    """A function's name and parameters as `Replacement.call` has them, or nothing."""
    function = _function_of(owner, name)
    if function is None:
        return ""
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
    # Follows `__wrapped__`, past what tfdp has put in its place.
    parameters = inspect.signature(function).parameters.values()
    names = [stars.get(p.kind.name, "") + p.name for p in parameters]
    return f"{name}({', '.join(names)})"
