"""Write a checkpoint: the shards first, and last the index that makes it valid."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.base.files import (
    make_private_folder,
    replaced,
    sync_folder,
    write_text,
)
from tfdp.checkpoint import files
from tfdp.checkpoint.index import FILE_ENDINGS, Extent, File, Shard, plan_shards
from tfdp.checkpoint.index_file import (
    INDEX_FILE,
    is_folder_name,
    load_index,
    shards_from_json,
    shards_to_json,
)
from tfdp.sharding.state_tensors import LocalShard, StateTensor

# What a save writes into its folder of data, TensorFlow's temporary files included.
_OWN_FILE = re.compile(r"index\.json|worker-[0-9]+(\.json|-[0-9]+\..+)")


def make_data_folder(directory: str) -> str:
    """Make the data folder of a new checkpoint.

    Args:
        directory: String.

    Returns:
        String, the name of the folder in it.

    Raises:
        ValueError: If there can be none.
    """
    if "://" in directory:
        raise ValueError("an object store has no atomic move; give a directory")
    if os.path.exists(directory) and not os.path.isdir(directory):
        raise ValueError("there is a file of that name; give a directory")
    token = f"data-{uuid.uuid4().hex[:12]}"
    make_private_folder(directory)
    make_private_folder(os.path.join(directory, token), exist_ok=False)
    return token


def discard_save(directory: str, token: str) -> None:
    """Remove what a failed save has written, unless it had succeeded by then."""
    with contextlib.suppress(OSError, ValueError):
        if load_index(directory).token == token:
            return
    shutil.rmtree(os.path.join(directory, token), ignore_errors=True)


def remove_old_folders(directory: str, keep: str) -> None:
    """Remove the data of older checkpoints and of interrupted saves."""
    with contextlib.suppress(OSError):  # the next save tries again
        for path in _own_folders(directory):
            if os.path.basename(path) != keep:
                shutil.rmtree(path, ignore_errors=True)


def remove_checkpoint(directory: str) -> None:
    """Remove what saves have written, and the directory if nothing else is in it.

    A directory in which no save has written stays as it is.
    """
    with contextlib.suppress(OSError):
        if os.path.islink(directory):
            return
        folders = _own_folders(directory)
        if not folders and not _has_index(directory):
            return
        # The index first: without one it does not count.
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(directory, INDEX_FILE))
        for path in folders:
            shutil.rmtree(path, ignore_errors=True)
        os.rmdir(directory)


def _own_folders(directory: str) -> list[str]:
    """Folders of data that saves have written, by their names and all that they hold.

    A save that was interrupted has left no index that would name them.
    """
    with os.scandir(directory) as entries:
        folders = [
            entry.path
            for entry in entries
            if is_folder_name(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
    return [path for path in folders if all(map(_OWN_FILE.fullmatch, os.listdir(path)))]


def _has_index(directory: str) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return bool(load_index(directory).token)
    return False


def write_local_shards(state: Sequence[StateTensor], folder: str, worker: int) -> None:
    """Write this worker's shards, and the list of them for the first worker."""
    if not os.path.isdir(folder):
        raise ValueError(
            "it does not see the folder that worker 0 has made; give a directory "
            "that all workers share"
        )
    shards = write_shards(state, folder, worker)
    text = json.dumps(shards_to_json(shards))
    write_text(_list_path(folder, worker), text)


def collect_shard_lists(folder: str, num_workers: int) -> tuple[Shard, ...]:
    """Collect the shards that all workers have listed, and check their files."""
    shards: list[Shard] = []
    for worker in range(num_workers):
        path = _list_path(folder, worker)
        with open(path, encoding="utf-8") as file:
            shards.extend(shards_from_json(json.load(file)))
        os.unlink(path)
    files.verify_files(shards, folder, contents=False)
    return tuple(shards)


def write_shards(state: Sequence[StateTensor], folder: str, worker: int) -> list[Shard]:
    """Write what this process owns of the training state.

    Args:
        state: Sequence of `StateTensor`.
        folder: String, the subdirectory of the checkpoint.
        worker: Int, the rank of this worker.

    Returns:
        List of `Shard`, all of them on the disk.
    """
    owned = (
        (Extent(number, local.start, local.stop), files.dtype_of(tensor).size)
        for number, tensor in enumerate(state)
        for local in tensor.owned_shards
    )
    reader = _Reader(state)
    shards = []
    for number, extents in enumerate(
        plan_shards(owned, files.SHARD_BYTES, files.CHUNK_BYTES)
    ):
        prefix = f"worker-{worker}-{number}"
        tensors = [reader.values(extent) for extent in extents]
        names = [files.tensor_key(state[e.tensor].name, e) for e in extents]
        with tf.device("CPU:0"):
            tf.raw_ops.SaveV2(
                prefix=os.path.join(folder, prefix),
                tensor_names=names,
                shape_and_slices=[""] * len(names),
                tensors=tensors,
            )
        del tensors  # before the next are read
        written = tuple(_sync(folder, prefix + ending) for ending in FILE_ENDINGS)
        shards.append(Shard(prefix, worker, written, extents))
    sync_folder(folder)
    return shards


def replace_index(directory: str, token: str, text: str) -> None:
    """Put an index in place: from here on the checkpoint is the new one."""
    own = os.path.join(directory, token, INDEX_FILE)
    with replaced(os.path.join(directory, INDEX_FILE), own) as temporary:
        write_text(temporary, text)
    sync_folder(directory)


class _Reader:
    """Reader of local shards: reads each once, and holds one at a time."""

    def __init__(self, state: Sequence[StateTensor]) -> None:
        self._state = state
        self._local_shard: LocalShard | None = None
        self._values: Any = None

    def values(self, extent: Extent) -> tf.Tensor:
        """Elements of an extent, which lies in one local shard. [stop - start]."""
        tensor = self._state[extent.tensor]
        local = next(p for p in tensor.owned_shards if p.start <= extent.start < p.stop)
        if local is not self._local_shard:
            self._values = None  # freed before the next is there
            self._values = _checked(local.read(), local, tensor)
            self._local_shard = local
        offset = local.start
        values = self._values[extent.start - offset : extent.stop - offset]
        with tf.device("CPU:0"):
            return tf.constant(values, files.dtype_of(tensor))


def _checked(values: Any, local: LocalShard, tensor: StateTensor) -> np.ndarray:
    """Values that a local shard has read, checked for their size."""
    values = np.asarray(values)
    if values.shape != (local.stop - local.start,):
        raise ValueError(
            f"A piece of {tensor.name!r} must have the shape "
            f"({local.stop - local.start},). Received: shape={values.shape}"
        )
    return values


def _sync(folder: str, name: str) -> File:
    """Sync a file to the disk, and compute its checksum."""
    with open(os.path.join(folder, name), "rb") as file:
        os.fsync(file.fileno())
        return File(name, os.fstat(file.fileno()).st_size, files.checksum(file))


def _list_path(folder: str, worker: int) -> str:
    return os.path.join(folder, f"worker-{worker}.json")
