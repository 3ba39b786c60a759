"""Atomic saves: a file is the one that was there, or the new one, whole.

A process that is killed while it saves leaves the old file. Every worker may have a
disk of its own, or all may share one. So each writes beside the target, under a name
of its own, and moves the complete file into place, which is atomic: whoever comes last
replaces equal contents.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import shutil
import threading
import uuid
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.communication.cluster.islands import Island
from tfdp.ground.base.files import replaced

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
    given = inspect.signature(original).bind(model, path, *rest, **options).arguments
    # Where a file may not be replaced, Keras asks the user.
    if target is None or given.get("overwrite") is False:
        return original(model, path, *rest, **options)
    if worker_group.num_workers == 1:
        if not _is_replaceable(target) or _is_split(given):
            return original(model, path, *rest, **options)
    elif "://" in target or _is_split(given):
        # Object stores have no atomic move, nor have several files at once; one
        # writer needs none. All take part in collecting what is sharded.
        optimizer = getattr(model, "optimizer", None)
        takes_part = worker_group.is_chief or getattr(optimizer, "is_sharded", False)
        return original(model, path, *rest, **options) if takes_part else None
    island = Island.from_environment()
    of_island = "" if island is None else f"island{island.index}."
    own = _temporary_path(target, f"{of_island}worker{worker_group.rank}")
    if worker_group.is_chief:
        pattern = _temporary_path(target, f"{of_island}worker(rank)")
        _remove_left_over(pattern, worker_group.num_workers)
    # Of folders, which cannot replace each other, the first worker's stays.
    with replaced(
        os.path.realpath(target), own, replaces_folder=worker_group.is_chief
    ) as temporary:
        try:
            result = original(model, temporary, *rest, **options)
        except Exception as error:
            # The user has never seen the temporary path.
            error.args = tuple(
                item.replace(temporary, target) if isinstance(item, str) else item
                for item in error.args
            )
            raise
        _copy_mode(target, temporary)
    return result


def save_checkpoint_atomically(write: Callable[[str], Any], prefix: str) -> Any:
    """Write a checkpoint of TensorFlow into a folder of its own, and move its files.

    All workers write equal contents. The index comes last, since a checkpoint exists
    from the moment when its index does.

    Args:
        write: Callable that takes the prefix of the files that it writes.
        prefix: String, the prefix of the target's files; also in an object store.

    Returns:
        What `write` returns.
    """
    directory, name = os.path.split(prefix)
    own = os.path.join(directory, f".{uuid.uuid4().hex[:12]}.{name}")
    files = tf.io.gfile
    files.makedirs(own)
    try:
        result = write(os.path.join(own, name))
        written = sorted(files.listdir(own), key=lambda file: file.endswith(".index"))
        for file in written:
            target = os.path.join(directory, file)
            files.rename(os.path.join(own, file), target, overwrite=True)
    finally:
        files.rmtree(own)
    return result


def _is_split(given: dict) -> bool:
    """True if Keras makes several files, with names that follow from the target's."""
    return given.get("max_shard_size") is not None


def _is_replaceable(target: str) -> bool:
    """True for a file that can be replaced where Keras could write to it.

    Not so a folder, which no other can replace at once, a device, a pipe, and what
    lies where no other file can be made.
    """
    return (
        "://" not in target
        and target.endswith(_FILE_ENDINGS)
        and (os.path.isfile(target) or not os.path.exists(target))
        and os.access(os.path.dirname(os.path.realpath(target)), os.W_OK | os.X_OK)
    )


def _copy_mode(target: str, temporary: str) -> None:
    """Give a file the permissions of the one that it replaces."""
    if os.path.isfile(target):
        with contextlib.suppress(OSError):
            shutil.copymode(target, temporary)


def _remove_left_over(pattern: str, num_workers: int) -> None:
    """Remove what a job of more workers, which was killed, has left beside a file."""
    folder, name = os.path.split(pattern)
    names = re.compile(re.escape(name).replace(r"\(rank\)", "([0-9]{1,6})"))
    with contextlib.suppress(OSError):
        for found in filter(None, map(names.fullmatch, os.listdir(folder))):
            if int(found[1]) >= num_workers:
                os.unlink(os.path.join(folder, found[0]))


def _temporary_path(target: str, writer: str) -> str:
    """A path beside the file, also where a link leads to it, with Keras's ending."""
    target = target.rstrip(os.sep)
    directory, name = (
        os.path.dirname(os.path.realpath(target)),
        os.path.basename(target),
    )
    ending = next((e for e in _FILE_ENDINGS if name.endswith(e)), "")
    stem = name[: len(name) - len(ending)]
    return os.path.join(directory, f".{stem}.{writer}{ending}")
