"""Lines of the user's code: warnings at them, and the line that started TensorFlow.

This module is separate from the files of `tfdp.ground._compat`, which import
TensorFlow: `import tfdp` must not, and a watch of its start must be set up before it.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import site
import sys
import sysconfig
import types
import warnings
import weakref
from pathlib import Path
from typing import Any

from tfdp.ground.forks import Owner

# Warnings name the user's line, so frames of code in these folders are skipped: those
# of Python, of installed packages, and of tfdp in a checkout.
_LIBRARIES = tuple(
    folder + os.sep
    for folder in (
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        *(*site.getsitepackages(), site.getusersitepackages()),
        str(Path(__file__).parents[1]),
    )
)
# TensorFlow creates its devices in `Context.ensure_initialized` of this private module.
# Checked on TensorFlow 2.19 to 2.21.
_CONTEXT = "tensorflow.python.eager.context"
_started_at: list[str] = []
_started_by: list[Owner] = []
# Topics of the warnings that were shown, by the object that a warning is about. The
# keys are weak, so that the record does not keep a model alive.
_topics: weakref.WeakKeyDictionary[Any, dict[str, object]]
_topics = weakref.WeakKeyDictionary()


def warn(message: str, *, once_for: Any = None, topic: str = "") -> None:
    """Warn at the innermost line of the user's code in the call stack.

    Args:
        message: String, a sentence.
        once_for: Object that the warning is about, such as a model; the warning is
            shown once for it. Defaults to `None`: each call warns.
        topic: String that identifies the warning among those about the object.
            Defaults to the message.
    """
    if once_for is not None and not record_if_new(topic or message, once_for):
        return
    depth, frame = 1, inspect.currentframe()
    while frame is not None and not _is_of_user(frame):
        # `stacklevel` of `warnings.warn` does not count frames of an import, so they
        # are not counted here.
        is_import = frame.f_code.co_filename.startswith("<frozen importlib")
        depth, frame = depth + (not is_import), frame.f_back
    # In a thread of tfdp or TensorFlow, no frame is the user's. The warning then names
    # the caller of `warn`.
    warnings.warn(message, stacklevel=2 if frame is None else depth)


def record_if_new(topic: str, about: Any) -> bool:
    """Record a topic for an object; return whether it was not recorded before.

    Args:
        topic: String, such as the message of a warning.
        about: Object, such as a model; its records are deleted with it.
    """
    # `setdefault` is atomic, so no lock is needed. A lock could be held during a fork,
    # and would never be released in the forked process.
    mark = object()
    return _topics.setdefault(about, {}).setdefault(topic, mark) is mark


def forget_topics() -> None:
    """Forget which warnings `warn` and `record_if_new` have recorded, for tests."""
    _topics.clear()


def describe_user_line(frame: types.FrameType | None) -> str:
    """Describe the innermost line of the user's code that a frame was called from.

    Args:
        frame: Frame or `None`.

    Returns:
        String with file, line and text, or `"an unknown line"`.

    Example:

    >>> text = "import inspect; print(describe_user_line(inspect.currentframe()))"
    >>> exec(compile(text, "<in>", "exec"))
    line 1 of <in>
    """
    while frame is not None and not _is_of_user(frame):
        frame = frame.f_back
    if frame is None:
        return "an unknown line"
    return describe_line(frame.f_code.co_filename, frame.f_lineno)


def describe_line(path: str, line: int) -> str:
    """Describe a line of the user's code.

    Args:
        path: String, the file name in Python's form, such as `co_filename`.
        line: Int, the line number.

    Returns:
        String with file, line and text.
    """
    text = text_of_line(path, line)
    where = (
        f"{path}:{line}" if os.path.exists(path) else f"line {line} of {_cell(path)}"
    )
    return f"{where}: `{text}`" if text else where


def text_of_line(path: str, line: int) -> str:
    """Return the text of a line of code, or `""` if the source is not available."""
    return linecache.getline(path, line).strip()


def _cell(path: str) -> str:
    """Return `path` if it is like `<string>`, otherwise "a cell" of a notebook."""
    return path if path.startswith("<") and "ipython" not in path else "a cell"


def watch_start() -> None:
    """Install a hook that records the user's line that initializes TensorFlow.

    If TensorFlow is not imported yet, its import installs the hook.
    """
    module = sys.modules.get(_CONTEXT)
    if module is not None:
        _watch(module)
        return
    import wrapt  # TensorFlow requires it, so it is installed

    wrapt.register_post_import_hook(_watch, _CONTEXT)


def start_of_tensorflow() -> str:
    """Return where TensorFlow was initialized, as a part of a sentence.

    Returns:
        String such as `"at train.py:3: `x = tf.zeros(2)`"`; if no line was recorded,
        `"before tfdp was imported"`.
    """
    return _started_at[0] if _started_at else "before tfdp was imported"


def check_process_of_tensorflow(call: str) -> None:
    """Raise in a process that was forked from one in which TensorFlow had started.

    Args:
        call: String, the call that needs TensorFlow.

    Raises:
        RuntimeError: In a forked process.
    """
    for owner in _started_by:
        owner.check(call)


def _watch(module: Any) -> None:
    """Replace `ensure_initialized` until its first call, to record its caller.

    If TensorFlow has started already, record the line that imports tfdp instead.

    Args:
        module: The module `tensorflow.python.eager.context`.
    """
    context = module.Context
    original = context.ensure_initialized
    if module._context is not None and module._context._initialized:
        importer = describe_user_line(inspect.currentframe())
        _started_at[:] = [f"before tfdp was imported at {importer}"]
        _started_by[:] = [Owner()]
        return

    @functools.wraps(original)
    def ensure_initialized(self: Any) -> None:
        """Record the caller, restore TensorFlow's method, and call it."""
        if not self._initialized:
            _started_at[:] = [f"at {describe_user_line(inspect.currentframe())}"]
            _started_by[:] = [Owner()]
        context.ensure_initialized = original
        original(self)

    context.ensure_initialized = ensure_initialized


def _is_of_user(frame: types.FrameType) -> bool:
    """Return whether a frame runs the user's code."""
    return is_user_file(frame.f_code.co_filename)


def is_user_file(path: str) -> bool:
    """Return whether a file is the user's: not of Python, tfdp or an installed package.

    Args:
        path: String, the name of the file as in `co_filename` of a code object.
    """
    return not path.startswith(_LIBRARIES) and not path.startswith("<frozen")
