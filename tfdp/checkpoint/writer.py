"""Write a checkpoint: first the shards, then the index, which makes it valid."""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfdp.checkpoint import files
from tfdp.checkpoint.index import DATA_ENDING, Extent, File, Shard, plan_shards
from tfdp.checkpoint.index_file import (
    INDEX_BYTES,
    INDEX_FILE,
    is_folder_name,
    load_index,
    shards_from_json,
)
from tfdp.checkpoint.storage import Storage, StoreError
from tfdp.ground import user_code
from tfdp.ground.base.files import page_aligned, write_aligned
from tfdp.training.sharding.state_tensors import LocalShard, StateTensor

# A data folder is only removed if all its files have such names: those of tfdp, those
# that TensorFlow wrote in older checkpoints, or those of its temporary files.
_DATA_FILE = re.compile(r"index\.json|worker-[0-9]+(\.json|-[0-9]+\..+)")


def make_data_folder(storage: Storage) -> str:
    """Create the data folder of a new checkpoint.

    Args:
        storage: `Storage` of the checkpoint.

    Returns:
        String, name of the data folder, which is unique.

    Raises:
        ValueError: If the folder of the checkpoint cannot be created.
    """
    token = f"data-{uuid.uuid4().hex[:12]}"
    storage.make()
    storage.below(token).make(exist_ok=False)
    return token


def discard_save(storage: Storage, token: str) -> None:
    """Remove the data folder of a failed save, unless its index was written.

    Args:
        storage: `Storage` of the checkpoint.
        token: String, name of the data folder.
    """
    try:
        if load_index(storage.path).token == token:
            return
    except ValueError:
        pass  # without a valid index, no checkpoint uses the data folder
    except OSError:
        # The index cannot be read, but may name this folder, so the folder stays. If
        # the index names another folder, the next save that succeeds removes this one.
        return
    with contextlib.suppress(OSError):
        storage.below(token).remove()


def remove_old_folders(storage: Storage, keep: str) -> None:
    """Remove the data folders of older checkpoints and of interrupted saves.

    Errors are not raised: the next save tries again.

    Args:
        storage: `Storage` of the checkpoint.
        keep: String, name of the data folder that stays.
    """
    try:
        for folder in _data_folders(storage):
            if folder.name != keep:
                folder.remove()
    except StoreError as error:
        user_code.warn(
            "The checkpoint was saved, but files of older ones were not removed from "
            f"the object store: {error}. The next save tries again. "
            f"Received: directory={storage.path!r}"
        )
    except OSError:
        pass  # old folders do no harm, and the next save tries to remove them again


def remove_checkpoint(storage: Storage) -> None:
    """Remove the files of all saves, and the directory if it is then empty.

    A link, or a directory without files of saves, stays unchanged. Errors are ignored.

    Args:
        storage: `Storage` of the checkpoint.
    """
    with contextlib.suppress(OSError):
        if storage.is_link:
            return
        folders = _data_folders(storage)
        if not folders and not _has_index(storage):
            return
        # The index is removed before its files, so that no valid index ever names
        # missing files.
        with contextlib.suppress(OSError):
            storage.remove_file(INDEX_FILE)
        for folder in folders:
            folder.remove()
        storage.remove_if_empty()


def _data_folders(storage: Storage) -> list[Storage]:
    """Return the data folders of saves in a checkpoint's directory.

    A data folder is named `data-` and a hexadecimal number, and contains no files but
    `index.json` and those of workers, such as `worker-0.json`. Folders that interrupted
    saves have left are included.
    """
    named = [storage.below(name) for name in storage.names() if is_folder_name(name)]
    folders = [folder for folder in named if folder.is_folder()]
    return [each for each in folders if all(map(_DATA_FILE.fullmatch, each.names()))]


def _has_index(storage: Storage) -> bool:
    """Return whether the directory has a valid index."""
    with contextlib.suppress(OSError, ValueError):
        return bool(load_index(storage.path).token)
    return False


def write_local_shards(
    state: Sequence[StateTensor],
    folder: Storage,
    worker: int,
    algorithm: str,
    pause: Callable[[], None],
) -> None:
    """Write this worker's shards, and a file that lists them for worker 0.

    Args:
        state: Sequence of `StateTensor`.
        folder: `Storage`, the data folder.
        worker: Int, rank of this worker.
        algorithm: String, the algorithm of checksums.
        pause: Callable, called between two files.
    """
    if not folder.is_folder():
        raise ValueError(
            "the folder that worker 0 created is not visible here; give a directory "
            "that all workers share, and no other job uses"
        )
    shards = write_shards(state, folder, worker, algorithm, pause)
    folder.write_text(_list_name(worker), json.dumps(shards))


def collect_shard_lists(folder: Storage, num_workers: int) -> tuple[Shard, ...]:
    """Read and remove the lists of shards of all workers; check the shards' files.

    Args:
        folder: `Storage`, the data folder.
        num_workers: Int, number of workers that have written lists.

    Returns:
        Tuple of `Shard`, those of all workers.

    Raises:
        ValueError: If a list or a file is missing, or a file has another size.
    """
    shards: list[Shard] = []
    for worker in range(num_workers):
        name = _list_name(worker)
        try:
            text = folder.read_text(name, INDEX_BYTES)
        except FileNotFoundError as error:
            raise ValueError(
                f"the files that worker {worker} wrote are not visible here; give a "
                "directory that all workers share"
            ) from error
        shards.extend(shards_from_json(json.loads(text)))
        # A list of shards is not needed after it is read. If the store fails to remove
        # it, a later save removes it together with its folder.
        with contextlib.suppress(StoreError):
            folder.remove_file(name)
    files.check_sizes(shards, folder)
    return tuple(shards)


def write_shards(
    state: Sequence[StateTensor],
    folder: Storage,
    worker: int,
    algorithm: str,
    pause: Callable[[], None],
) -> list[Shard]:
    """Write the shards of the training state that this process owns.

    Args:
        state: Sequence of `StateTensor`.
        folder: `Storage`, the subdirectory of the checkpoint.
        worker: Int, the rank of this worker.
        algorithm: String, the algorithm of checksums.
        pause: Callable, called between two files.

    Returns:
        List of `Shard`, written to the disk or to the object store.
    """
    owned = (
        (Extent(number, local.start, local.stop), files.dtype_of(tensor).size)
        for number, tensor in enumerate(state)
        for local in tensor.owned_shards
    )
    reader, buffer = _ShardReader(state), page_aligned(files.SHARD_BYTES)
    shards = []
    plan = plan_shards(owned, files.SHARD_BYTES)
    with folder.writing() as (path, publish):
        for number, extents in enumerate(plan):
            if number:
                pause()
            prefix = f"worker-{worker}-{number}"
            name, num_bytes = prefix + DATA_ENDING, 0
            for extent in extents:
                begin, values = num_bytes, reader.values(extent).view(np.uint8)
                num_bytes += values.size
                buffer[begin:num_bytes] = values
            write_aligned(os.path.join(path, name), buffer, num_bytes)
            publish([name])
            file = File(
                name, num_bytes, files.checksum([buffer[:num_bytes]], algorithm)
            )
            shards.append(Shard(prefix, worker, (file,), extents))
    return shards


def replace_index(storage: Storage, token: str, text: str) -> None:
    """Write the index, which replaces the old checkpoint by the new one.

    Args:
        storage: `Storage` of the checkpoint.
        token: String, name of the new data folder.
        text: String, the text of the index.
    """
    storage.replace_text(INDEX_FILE, text, token)


class _ShardReader:
    """Reader of local shards for writing, which keeps only the latest one in memory.

    A shard is read once if all its extents are requested one after another.

    Args:
        state: Sequence of `StateTensor`.
    """

    def __init__(self, state: Sequence[StateTensor]) -> None:
        self._state = state
        self._local_shard: LocalShard | None = None
        self._values: Any = None

    def values(self, extent: Extent) -> np.ndarray:
        """Return the elements of an extent, which must lie in one local shard.

        Returns:
            Array of shape `[stop - start]`, in the dtype of the tensor.
        """
        tensor = self._state[extent.tensor]
        local = next(p for p in tensor.owned_shards if p.start <= extent.start < p.stop)
        if local is not self._local_shard:
            self._values = None  # frees the old shard, so that only one is in memory
            dtype = files.dtype_of(tensor).as_numpy_dtype
            self._values = np.ascontiguousarray(local.read(), dtype)
            files.check_shape(tensor, local, self._values)
            self._local_shard = local
        offset = local.start
        return self._values[extent.start - offset : extent.stop - offset]


def _list_name(worker: int) -> str:
    """Return the name of the file that lists a worker's shards: `"worker-1.json"`."""
    return f"worker-{worker}.json"
