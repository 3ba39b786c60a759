"""Atomic saves by Keras: workers do not write into each other's file.

Every worker may have a disk of its own, or all may share one. So each writes
beside the target, under a name of its own, and moves the complete file into
place, which is atomic: whoever comes last replaces equal contents.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from tfdp.base.files import replaced

_FILE_ENDINGS = (".weights.h5", ".keras", ".h5", ".hdf5")


_thread_state = threading.local()


def is_saving() -> bool:
    """True while one of Keras's own saving functions runs."""
    return getattr(_thread_state, "is_saving", False)


def save_atomically(
    strategy: Any, original: Callable, model: Any, path: Any, *rest: Any, **options: Any
) -> Any:
    """Call a saving function of Keras with a temporary path, and move the result.

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
    _thread_state.is_saving = True
    try:
        return _save(strategy, original, model, path, *rest, **options)
    finally:
        _thread_state.is_saving = False


def _save(
    strategy: Any, original: Callable, model: Any, path: Any, *rest: Any, **options: Any
) -> Any:
    worker_group = strategy.extended.worker_group
    target = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if (
        worker_group.num_workers == 1
        or target is None
        or not _may_replace(rest, options)
    ):
        return original(model, path, *rest, **options)
    if "://" in target:
        # Object stores have no atomic move; one writer needs none.
        is_chief = worker_group.rank == 0
        return original(model, path, *rest, **options) if is_chief else None
    rank = worker_group.rank
    own = _temporary_path(target, rank)
    # Of folders, which cannot replace each other, the first worker's stays.
    with replaced(target, own, replaces_folder=rank == 0) as temporary:
        return original(model, temporary, *rest, **options)


def _may_replace(rest: tuple, options: dict) -> bool:
    """True if the target may be replaced; if not, Keras asks the user."""
    overwrite = options.get("overwrite", rest[0] if rest else True)
    return overwrite is not False


def _temporary_path(target: str, rank: int) -> str:
    directory, name = os.path.split(target.rstrip(os.sep))
    ending = next((e for e in _FILE_ENDINGS if name.endswith(e)), "")
    stem = name[: len(name) - len(ending)]
    return os.path.join(directory, f".{stem}.worker{rank}{ending}")
