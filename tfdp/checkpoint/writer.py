"""Write a checkpoint: the shards first, and last the index that makes it valid."""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.checkpoint import files
from tfdp.checkpoint.index import FILE_ENDINGS, Extent, File, Shard, plan_shards
from tfdp.checkpoint.index_file import (
    INDEX_BYTES,
    INDEX_FILE,
    is_folder_name,
    load_index,
    shards_from_json,
)
from tfdp.checkpoint.storage import Storage, StoreError
from tfdp.ground import user_code
from tfdp.training.sharding.state_tensors import LocalShard, StateTensor

# What a save writes into its folder of data, TensorFlow's temporary files included.
_OWN_FILE = re.compile(r"index\.json|worker-[0-9]+(\.json|-[0-9]+\..+)")


def make_data_folder(storage: Storage) -> str:
    """Make the data folder of a new checkpoint.

    Args:
        storage: `Storage` of the checkpoint.

    Returns:
        String, the name of the folder in it, which no other save uses.

    Raises:
        ValueError: If there can be none.
    """
    token = f"data-{uuid.uuid4().hex[:12]}"
    storage.make()
    storage.below(token).make(exist_ok=False)
    return token


def discard_save(storage: Storage, token: str) -> None:
    """Remove what a failed save has written, unless it had succeeded by then."""
    try:
        if load_index(storage.path).token == token:
            return
    except ValueError:
        pass  # there is none
    except OSError:
        return  # it may have succeeded; if not, the next one removes what is left
    with contextlib.suppress(OSError):
        storage.below(token).remove()


def remove_old_folders(storage: Storage, keep: str) -> None:
    """Remove the data of older checkpoints and of interrupted saves."""
    try:
        for folder in _own_folders(storage):
            if folder.name != keep:
                folder.remove()
    except StoreError as error:
        user_code.warn(
            "The checkpoint was saved, and what older ones have left in the object "
            f"store was not removed: {error}. The next save tries again. "
            f"Received: directory={storage.path!r}"
        )
    except OSError:
        pass  # the next save tries again


def remove_checkpoint(storage: Storage) -> None:
    """Remove what saves have written, and the directory if nothing else is in it.

    A directory in which no save has written stays as it is.
    """
    with contextlib.suppress(OSError):
        if storage.is_link:
            return
        folders = _own_folders(storage)
        if not folders and not _has_index(storage):
            return
        # The index first: without one it does not count.
        with contextlib.suppress(OSError):
            storage.remove_file(INDEX_FILE)
        for folder in folders:
            folder.remove()
        storage.remove_if_empty()


def _own_folders(storage: Storage) -> list[Storage]:
    """Folders of data that saves have written, by their names and all that they hold.

    A save that was interrupted has left no index that would name them.
    """
    named = [storage.below(name) for name in storage.names() if is_folder_name(name)]
    folders = [folder for folder in named if folder.is_folder()]
    return [each for each in folders if all(map(_OWN_FILE.fullmatch, each.names()))]


def _has_index(storage: Storage) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return bool(load_index(storage.path).token)
    return False


def write_local_shards(
    state: Sequence[StateTensor], folder: Storage, worker: int
) -> None:
    """Write this worker's shards, and the list of them for the first worker."""
    if not folder.is_folder():
        raise ValueError(
            "it does not see the folder that worker 0 has made; give a directory "
            "that all workers share"
        )
    shards = write_shards(state, folder, worker)
    folder.write_text(_list_name(worker), json.dumps(shards))


def collect_shard_lists(folder: Storage, num_workers: int) -> tuple[Shard, ...]:
    """Collect the shards that all workers have listed, and check their files."""
    shards: list[Shard] = []
    for worker in range(num_workers):
        name = _list_name(worker)
        try:
            text = folder.read_text(name, INDEX_BYTES)
        except FileNotFoundError as error:
            raise ValueError(
                f"it does not see what worker {worker} has written; give a directory "
                "that all workers share"
            ) from error
        shards.extend(shards_from_json(json.loads(text)))
        with contextlib.suppress(StoreError):  # goes with the rest, some day
            folder.remove_file(name)
    files.verify_files(shards, folder, contents=False)
    return tuple(shards)


def write_shards(
    state: Sequence[StateTensor], folder: Storage, worker: int
) -> list[Shard]:
    """Write what this process owns of the training state.

    Args:
        state: Sequence of `StateTensor`.
        folder: `Storage`, the subdirectory of the checkpoint.
        worker: Int, the rank of this worker.

    Returns:
        List of `Shard`, all of them on the disk or in the object store.
    """
    owned = (
        (Extent(number, local.start, local.stop), files.dtype_of(tensor).size)
        for number, tensor in enumerate(state)
        for local in tensor.owned_shards
    )
    reader = _Reader(state)
    shards = []
    with folder.writing() as (path, publish):
        for number, extents in enumerate(
            plan_shards(owned, files.SHARD_BYTES, files.CHUNK_BYTES)
        ):
            prefix = f"worker-{worker}-{number}"
            tensors = [reader.values(extent) for extent in extents]
            names = [files.tensor_key(state[e.tensor].name, e) for e in extents]
            with tf.device("CPU:0"):
                tf.raw_ops.SaveV2(
                    prefix=os.path.join(path, prefix),
                    tensor_names=names,
                    shape_and_slices=[""] * len(names),
                    tensors=tensors,
                )
            del tensors  # before the next are read
            written = tuple(_sync(path, prefix + ending) for ending in FILE_ENDINGS)
            publish([file.name for file in written])
            shards.append(Shard(prefix, worker, written, extents))
    return shards


def replace_index(storage: Storage, token: str, text: str) -> None:
    """Put an index in place: from here on the checkpoint is the new one."""
    storage.replace_text(INDEX_FILE, text, token)


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
            self._values = np.asarray(local.read())
            if self._values.shape != (local.stop - local.start,):
                raise ValueError(
                    f"A piece of {tensor.name!r} must have the shape "
                    f"({local.stop - local.start},). "
                    f"Received: shape={self._values.shape}"
                )
            self._local_shard = local
        offset = local.start
        values = self._values[extent.start - offset : extent.stop - offset]
        with tf.device("CPU:0"):
            return tf.constant(values, files.dtype_of(tensor))


def _sync(folder: str, name: str) -> File:
    """Sync a file to the disk, and compute its checksum."""
    with open(os.path.join(folder, name), "rb") as file:
        os.fsync(file.fileno())
        return File(name, os.fstat(file.fileno()).st_size, files.checksum(file))


def _list_name(worker: int) -> str:
    return f"worker-{worker}.json"
