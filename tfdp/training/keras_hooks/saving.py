"""Atomic saves: a file always has its old contents, or the complete new contents.

A process that is killed while it saves leaves the old file. Workers may share a disk or
not. So each worker writes a temporary file beside the target, and moves the complete
file into place, which is atomic. On a shared disk the last worker replaces a file with
equal contents.
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

from tfdp.communication.coordination.model_group import worker_group_of
from tfdp.ground.base.feature import job_part
from tfdp.ground.base.files import replaced
from tfdp.ground.base.wrappers import is_sharded

# File endings by which Keras selects a format. The name of a temporary file keeps the
# ending of its target, so that Keras writes the same format.
_FILE_ENDINGS = (".weights.h5", ".keras", ".h5", ".hdf5")


_thread_state = threading.local()


def is_saving() -> bool:
    """Return whether `save_atomically` runs in this thread."""
    return getattr(_thread_state, "is_saving", False)


def save_atomically(
    original: Callable, model: Any, path: Any, *rest: Any, **options: Any
) -> Any:
    """Save by a function of Keras to a temporary path, and move the file to `path`.

    Into an object store, or as several files, `original` saves directly, on worker 0
    only, unless other workers have to send it sharded state.

    Args:
        original: Callable, a saving function such as `keras.Model.save`.
        model: The Keras model.
        path: String or path-like, the target.
        *rest: Further positional arguments.
        **options: Keyword arguments.

    Returns:
        The result of `original`, or `None` on a worker that does not call it.
    """
    _thread_state.is_saving = True
    try:
        return _save(original, model, path, *rest, **options)
    finally:
        _thread_state.is_saving = False


def _save(original: Callable, model: Any, path: Any, *rest: Any, **options: Any) -> Any:
    """Save to a temporary path, and move the file to `path`.

    It does the work of `save_atomically`, which sets `is_saving` around the call.
    Arguments and result are the same.
    """
    worker_group = worker_group_of(model)
    target = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    arguments = (
        inspect.signature(original).bind(model, path, *rest, **options).arguments
    )
    # With `overwrite=False` Keras asks the user before it replaces an existing file, so
    # Keras has to receive the target itself, not a temporary path.
    if target is None or arguments.get("overwrite") is False:
        return original(model, path, *rest, **options)
    if worker_group.num_workers == 1:
        if not _is_replaceable(target) or _is_sharded_save(arguments):
            return original(model, path, *rest, **options)
    elif "://" in target or _is_sharded_save(arguments):
        # Files in object stores cannot be moved atomically, nor can several files. So
        # only worker 0 writes. All workers take part if sharded state has to be
        # gathered.
        optimizer = getattr(model, "optimizer", None)
        takes_part = worker_group.is_chief or is_sharded(optimizer)
        return original(model, path, *rest, **options) if takes_part else None
    part = job_part()
    writers = "worker" if part is None else f"{part.name}.worker"
    temporary_path = _temporary_path(target, f"{writers}{worker_group.rank}")
    if worker_group.is_chief:
        pattern = _temporary_path(target, f"{writers}(rank)")
        _remove_stale_files(pattern, worker_group.num_workers)
    # An existing folder has to be removed before another one is moved to its path, so
    # only worker 0 replaces a folder.
    with replaced(
        os.path.realpath(target), temporary_path, replaces_folder=worker_group.is_chief
    ) as temporary:
        try:
            result = original(model, temporary, *rest, **options)
        except Exception as error:
            # The error must name the target: users do not know the temporary path.
            error.args = tuple(
                item.replace(temporary, target) if isinstance(item, str) else item
                for item in error.args
            )
            raise
        if os.path.isfile(target):
            with contextlib.suppress(OSError):
                shutil.copymode(target, temporary)
    return result


def save_checkpoint_atomically(write: Callable[[str], Any], prefix: str) -> Any:
    """Write a TensorFlow checkpoint into a temporary folder, and move its files.

    All workers write equal contents. The index file is moved last, because it makes a
    checkpoint visible.

    Args:
        write: Callable that takes a prefix, and writes the files of a checkpoint.
        prefix: String, the prefix of the target's files; also in an object store.

    Returns:
        The result of `write`.
    """
    directory, name = os.path.split(prefix)
    temporary_folder = os.path.join(directory, f".{uuid.uuid4().hex[:12]}.{name}")
    files = tf.io.gfile
    files.makedirs(temporary_folder)
    try:
        result = write(os.path.join(temporary_folder, name))
        written = sorted(
            files.listdir(temporary_folder), key=lambda file: file.endswith(".index")
        )
        for file in written:
            target = os.path.join(directory, file)
            files.rename(os.path.join(temporary_folder, file), target, overwrite=True)
    finally:
        files.rmtree(temporary_folder)
    return result


def _is_sharded_save(arguments: dict) -> bool:
    """Return whether a save writes several files, by its argument `max_shard_size`."""
    return arguments.get("max_shard_size") is not None


def _is_replaceable(target: str) -> bool:
    """Return whether a target can be replaced by an atomic move.

    False for a URL, a name without an ending of Keras's file formats, a folder, a
    device, a pipe, and a file in a folder without write access.
    """
    return (
        "://" not in target
        and target.endswith(_FILE_ENDINGS)
        and (os.path.isfile(target) or not os.path.exists(target))
        and os.access(os.path.dirname(os.path.realpath(target)), os.W_OK | os.X_OK)
    )


def _remove_stale_files(pattern: str, num_workers: int) -> None:
    """Remove temporary files that a killed job with more workers has left.

    Args:
        pattern: String, path of a temporary file with "(rank)" in place of the rank.
        num_workers: Int, number of workers of this job.
    """
    folder, name = os.path.split(pattern)
    names = re.compile(re.escape(name).replace(r"\(rank\)", "([0-9]{1,6})"))
    with contextlib.suppress(OSError):
        for match in filter(None, map(names.fullmatch, os.listdir(folder))):
            if int(match[1]) >= num_workers:
                os.unlink(os.path.join(folder, match[0]))


def _temporary_path(target: str, writer: str) -> str:
    """Return a hidden path in the target's real folder, with the target's ending.

    Args:
        target: String, path of the file to be replaced.
        writer: String, the part of the name that identifies the writing worker.

    Returns:
        String, such as `"models/.best.worker1.keras"` for `"models/best.keras"`.
    """
    target = target.rstrip(os.sep)
    directory, name = (
        os.path.dirname(os.path.realpath(target)),
        os.path.basename(target),
    )
    ending = next((e for e in _FILE_ENDINGS if name.endswith(e)), "")
    stem = name[: len(name) - len(ending)]
    return os.path.join(directory, f".{stem}.{writer}{ending}")
