"""A checkpoint is written: the parts first, and last the index that makes it valid."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.base.private_folder import make_private_folder
from tfdp.checkpoint import files
from tfdp.checkpoint.index import Extent, File, Shard, cut
from tfdp.checkpoint.index_file import (
    INDEX_FILE,
    load_index,
    parts_from_json,
    parts_to_json,
)
from tfdp.sharding.state_tensors import Piece, StateTensor

_FILE_ENDINGS = (".index", ".data-00000-of-00001")
_FOLDER = re.compile(r"data-[0-9a-f]{12}")


def new_folder(directory: str) -> str:
    """Makes the folder of a new checkpoint.

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


def discard(directory: str, token: str) -> None:
    """Removes what a failed save has written, unless it had succeeded by then."""
    with contextlib.suppress(OSError, ValueError):
        if load_index(directory).token == token:
            return
    shutil.rmtree(os.path.join(directory, token), ignore_errors=True)


def remove_folders(directory: str, keep: str) -> None:
    """Removes the data of older checkpoints and of saves that did not end."""
    with contextlib.suppress(OSError):  # the next save tries again
        for name in os.listdir(directory):
            if _FOLDER.fullmatch(name) and name != keep:
                shutil.rmtree(os.path.join(directory, name), ignore_errors=True)


def write_own(state: Sequence[StateTensor], folder: str, worker: int) -> None:
    """Writes this worker's parts, and the list of them for the first worker."""
    if not os.path.isdir(folder):
        raise ValueError(
            "it does not see the folder that worker 0 has made; give a directory "
            "that all workers share"
        )
    parts = write_parts(state, folder, worker)
    text = json.dumps(parts_to_json(parts))
    write_text(_list_path(folder, worker), text)


def listed_parts(folder: str, num_workers: int) -> tuple[Shard, ...]:
    """The parts that all workers have listed, if this one finds their files."""
    parts: list[Shard] = []
    for worker in range(num_workers):
        path = _list_path(folder, worker)
        with open(path, encoding="utf-8") as file:
            parts.extend(parts_from_json(json.load(file)))
        os.unlink(path)
    files.verify(parts, folder, contents=False)
    return tuple(parts)


def write_parts(state: Sequence[StateTensor], folder: str, worker: int) -> list[Shard]:
    """Writes what this process owns of the training state.

    Args:
        state: Sequence of `StateTensor`.
        folder: String, the subdirectory of the checkpoint.
        worker: Int, the rank of this worker.

    Returns:
        List of `Shard`, all of them on the disk.
    """
    owned = (
        (Extent(number, piece.start, piece.stop), files.dtype_of(tensor).size)
        for number, tensor in enumerate(state)
        for piece in tensor.owned
    )
    reader = _Reader(state)
    parts = []
    for number, extents in enumerate(cut(owned, files.PART_BYTES, files.RUN_BYTES)):
        prefix = f"worker-{worker}-{number}"
        tensors = [reader.values(extent) for extent in extents]
        names = [files.key_of(state[e.tensor].name, e) for e in extents]
        with tf.device("CPU:0"):
            tf.raw_ops.SaveV2(
                prefix=os.path.join(folder, prefix),
                tensor_names=names,
                shape_and_slices=[""] * len(names),
                tensors=tensors,
            )
        del tensors  # before the next are read
        written = tuple(_sync(folder, prefix + ending) for ending in _FILE_ENDINGS)
        parts.append(Shard(prefix, worker, written, extents))
    sync_folder(folder)
    return parts


def replace_index(directory: str, token: str, text: str) -> None:
    """Puts an index in place: from here on the checkpoint is the new one."""
    temporary = os.path.join(directory, token, INDEX_FILE)
    write_text(temporary, text)
    os.replace(temporary, os.path.join(directory, INDEX_FILE))
    sync_folder(directory)


def write_text(path: str, text: str) -> None:
    """Writes a file, all the way to the disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: str) -> None:
    """Takes the names of a directory's files to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # no such thing here
            raise
    finally:
        os.close(number)


class _Reader:
    """Reads pieces for a part, each once, and holds one at a time."""

    def __init__(self, state: Sequence[StateTensor]) -> None:
        self._state = state
        self._piece: Piece | None = None
        self._values: Any = None

    def values(self, extent: Extent) -> tf.Tensor:
        """The elements of an extent, which lies in one piece. [stop - start]."""
        tensor = self._state[extent.tensor]
        piece = next(p for p in tensor.owned if p.start <= extent.start < p.stop)
        if piece is not self._piece:
            self._values = None  # freed before the next is there
            self._values = _checked(piece.read(), piece, tensor)
            self._piece = piece
        offset = piece.start
        values = self._values[extent.start - offset : extent.stop - offset]
        with tf.device("CPU:0"):
            return tf.constant(values, files.dtype_of(tensor))


def _checked(values: Any, piece: Piece, tensor: StateTensor) -> np.ndarray:
    """What a piece has read, which must fit: a file that does not is of no use."""
    values = np.asarray(values)
    if values.shape != (piece.stop - piece.start,):
        raise ValueError(
            f"A piece of {tensor.name!r} must have the shape "
            f"({piece.stop - piece.start},). Received: shape={values.shape}"
        )
    return values


def _sync(folder: str, name: str) -> File:
    """Takes a file to the disk, and looks at it once more for its checksum."""
    with open(os.path.join(folder, name), "rb") as file:
        os.fsync(file.fileno())
        return File(name, os.fstat(file.fileno()).st_size, files.checksum(file))


def _list_path(folder: str, worker: int) -> str:
    return os.path.join(folder, f"worker-{worker}.json")
