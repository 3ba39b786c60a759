"""Workers that save to one path do not write into each other's file.

Every worker may have a disk of its own, or all may share one. So each writes
beside the target, under a name of its own, and moves the complete file into
place, which is atomic: whoever comes last replaces equal contents.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable
from typing import Any

_FILE_ENDINGS = (".weights.h5", ".keras", ".h5", ".hdf5")


_thread = threading.local()


def is_saving() -> bool:
    """Whether one of Keras's own saving functions is under way."""
    return getattr(_thread, "is_saving", False)


def save_atomically(
    strategy: Any, original: Callable, model: Any, path: Any, *rest: Any, **options: Any
) -> Any:
    """Calls a saving function of Keras with a path beside the one asked for.

    Args:
        strategy: The model's tfdp strategy.
        original: Callable, such as `keras.Model.save`.
        model: The Keras model.
        path: String or path-like, the target.
        *rest: Further positional arguments.
        **options: Keyword arguments.

    Returns:
        What `original` returns.
    """
    _thread.is_saving = True
    try:
        return _save(strategy, original, model, path, *rest, **options)
    finally:
        _thread.is_saving = False


def _save(
    strategy: Any, original: Callable, model: Any, path: Any, *rest: Any, **options: Any
) -> Any:
    worker_group = strategy.extended.worker_group
    target = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if worker_group.num_workers == 1 or target is None or not _replaces(rest, options):
        return original(model, path, *rest, **options)
    if "://" in target:
        # Object stores have no atomic move; one writer needs none.
        is_chief = worker_group.rank == 0
        return original(model, path, *rest, **options) if is_chief else None
    temporary = _beside(target, worker_group.rank)
    try:
        result = original(model, temporary, *rest, **options)
        _move(temporary, target, is_chief=worker_group.rank == 0)
        return result
    finally:
        _remove(temporary)


def _replaces(rest: tuple, options: dict) -> bool:
    """Whether the target may be replaced; if not, Keras asks the user."""
    overwrite = options.get("overwrite", rest[0] if rest else True)
    return overwrite is not False


def _beside(target: str, rank: int) -> str:
    directory, name = os.path.split(target.rstrip(os.sep))
    ending = next((e for e in _FILE_ENDINGS if name.endswith(e)), "")
    stem = name[: len(name) - len(ending)]
    return os.path.join(directory, f".{stem}.worker{rank}{ending}")


def _move(temporary: str, target: str, *, is_chief: bool) -> None:
    if not os.path.isdir(temporary):
        if os.path.exists(temporary):
            os.replace(temporary, target)
        return
    # A directory cannot replace another one. The first worker's stays.
    if os.path.exists(target) and is_chief:
        shutil.rmtree(target, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rename(temporary, target)


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.exists(path):
        os.remove(path)
