"""The files of a checkpoint: parts are written, verified and read.

The bytes are in TensorFlow's own checkpoint format. Each part is a checkpoint of
its own, so that a reader opens only what it needs and a damaged file has a name.
Within a part each run of elements is a one-dimensional tensor, not a slice of a
larger one: TensorFlow cannot read slices of float16 and of unsigned integers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.checkpoint_index import (
    INDEX_FILE,
    Entry,
    Extent,
    File,
    Index,
    Part,
    cut,
    first_difference,
    load_index,
    parts_from_json,
    parts_to_json,
)
from tfdp.state_tensors import Piece, StateTensor

# The largest part, and the largest run of elements in it. A part is in memory when
# it is written and when it is read; so is TensorFlow's buffer of 8 MB, and a second
# copy of each run for a moment. Together it is less than a bucket of gradients.
PART_BYTES = 8 * 2**20
RUN_BYTES = 2**20
_FILE_ENDINGS = (".index", ".data-00000-of-00001")
_CHUNK_BYTES = 2**20
_OP_NOISE = re.compile(r"\{\{.*?\}\}\s*|\s*\[Op:\w+\].*", re.DOTALL)
_FOLDER = re.compile(r"data-[0-9a-f]{12}")


def entries_of(state: Sequence[StateTensor]) -> tuple[Entry, ...]:
    """The state's tensors, as an index lists them."""
    return tuple(Entry(t.name, tuple(t.shape), t.dtype) for t in state)


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
    os.makedirs(os.path.join(directory, token))
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


def listed_parts(folder: str, num_workers: int) -> tuple[Part, ...]:
    """The parts that all workers have listed, if this one finds their files."""
    parts: list[Part] = []
    for worker in range(num_workers):
        path = _list_path(folder, worker)
        with open(path, encoding="utf-8") as file:
            parts.extend(parts_from_json(json.load(file)))
        os.unlink(path)
    verify(parts, folder, contents=False)
    return tuple(parts)


def write_parts(state: Sequence[StateTensor], folder: str, worker: int) -> list[Part]:
    """Writes what this process owns of the training state.

    Args:
        state: Sequence of `StateTensor`.
        folder: String, the subdirectory of the checkpoint.
        worker: Int, the rank of this worker.

    Returns:
        List of `Part`, all of them on the disk.
    """
    owned = (
        (Extent(number, piece.start, piece.stop), _dtype(tensor).size)
        for number, tensor in enumerate(state)
        for piece in tensor.owned
    )
    reader = _Reader(state)
    parts = []
    for number, extents in enumerate(cut(owned, PART_BYTES, RUN_BYTES)):
        prefix = f"worker-{worker}-{number}"
        tensors = [reader.values(extent) for extent in extents]
        names = [_key(state[e.tensor].name, e) for e in extents]
        with tf.device("CPU:0"):
            tf.raw_ops.SaveV2(
                prefix=os.path.join(folder, prefix),
                tensor_names=names,
                shape_and_slices=[""] * len(names),
                tensors=tensors,
            )
        del tensors  # before the next are read
        files = tuple(_sync(folder, prefix + ending) for ending in _FILE_ENDINGS)
        parts.append(Part(prefix, worker, files, extents))
    sync_folder(folder)
    return parts


def verify(parts: Iterable[Part], folder: str, *, contents: bool = True) -> None:
    """Raises if a file is not as it was written.

    Args:
        parts: Iterable of `Part`.
        folder: String, the subdirectory of the checkpoint.
        contents: Bool, whether the bytes are looked at, and not only their
            number.

    Raises:
        ValueError: Naming the file, what is wrong with it, and who wrote it.
    """
    for part in parts:
        for file in part.files:
            fault = _fault(os.path.join(folder, file.name), file, contents)
            if fault:
                name = os.path.join(os.path.basename(folder), file.name)
                raise ValueError(
                    f"The file {name!r}, which worker {part.worker} wrote, {fault}."
                )


def check_index(
    index: Index,
    state: Sequence[StateTensor],
    directory: str,
    left_out: Sequence[str] = (),
) -> None:
    """Checks that a checkpoint is of this model, and that its files are intact.

    Args:
        index: `Index` of the checkpoint.
        state: Sequence of `StateTensor`, what is to be restored.
        directory: String, where it is.
        left_out: Sequence of strings, tensors that nobody wants. Defaults to none.

    Raises:
        ValueError: If it is not, or they are not.
    """
    check_model(index, state, left_out)
    verify(needed_parts(state, index), os.path.join(directory, index.token))


def check_model(
    index: Index, state: Sequence[StateTensor], left_out: Sequence[str] = ()
) -> None:
    """Checks that a checkpoint is of this model; its files are not looked at.

    Args:
        index: `Index` of the checkpoint.
        state: Sequence of `StateTensor`, what is to be restored.
        left_out: Sequence of strings, tensors that nobody wants. Defaults to none.

    Raises:
        ValueError: If it is not.
    """
    saved = [entry for entry in index.entries if entry.name not in left_out]
    difference = first_difference(saved, entries_of(state))
    if difference:
        raise ValueError(f"it is of another model. {difference}")


def needed_parts(state: Sequence[StateTensor], index: Index) -> list[Part]:
    """The parts that hold something that this process needs."""
    numbers = _numbers(index)
    found = {}
    for tensor in state:
        for piece in tensor.held:
            wanted = Extent(numbers[tensor.name], piece.start, piece.stop)
            found.update({part.prefix: part for part, _ in index.find(wanted)})
    return list(found.values())


def read_parts(state: Sequence[StateTensor], index: Index, folder: str) -> None:
    """Writes into the variables of this process what the checkpoint has for them.

    Args:
        state: Sequence of `StateTensor`.
        index: `Index` of the same tensors.
        folder: String, the subdirectory of the checkpoint.
    """
    for targets in _batches(state, _numbers(index)):
        for part, extents in _sources(targets, index):
            _read_part(part, extents, index, folder)
        for target in targets:
            target.piece.write(target.values)


def write_zeros(state: Iterable[StateTensor]) -> None:
    """Writes zeros into the variables of this process that hold these tensors."""
    for tensor in state:
        for piece in tensor.held:
            size = piece.stop - piece.start
            piece.write(np.zeros(size, _dtype(tensor).as_numpy_dtype))


def cause_of(error: Exception) -> str:
    """What an error says, without the noise that TensorFlow puts around it."""
    if isinstance(error, (OSError, ValueError)):
        return str(error)
    text = error.message if isinstance(error, tf.errors.OpError) else str(error)
    return f"{type(error).__name__}: {_OP_NOISE.sub('', text)}"


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
            return tf.constant(values, _dtype(tensor))


@dataclasses.dataclass(frozen=True)
class _Target:
    """A piece with the elements that are being gathered for it."""

    piece: Piece
    wanted: Extent
    values: np.ndarray


def _batches(
    state: Sequence[StateTensor], numbers: dict[str, int]
) -> Iterator[list[_Target]]:
    """All pieces, as many at a time as a part may hold."""
    batch: list[_Target] = []
    room = PART_BYTES
    for tensor in state:
        dtype = _dtype(tensor)
        for piece in tensor.held:
            num_bytes = (piece.stop - piece.start) * dtype.size
            if batch and num_bytes > room:
                yield batch
                batch, room = [], PART_BYTES
            wanted = Extent(numbers[tensor.name], piece.start, piece.stop)
            values = np.empty(piece.stop - piece.start, dtype.as_numpy_dtype)
            batch.append(_Target(piece, wanted, values))
            room -= num_bytes
    yield batch


def _sources(
    targets: list[_Target], index: Index
) -> Iterable[tuple[Part, dict[Extent, list[_Target]]]]:
    """What is to be read for a batch, by part, and who needs it."""
    sources: dict[str, tuple[Part, dict[Extent, list[_Target]]]] = {}
    for target in targets:
        for part, extent in index.find(target.wanted):
            _, extents = sources.setdefault(part.prefix, (part, {}))
            extents.setdefault(extent, []).append(target)
    return sources.values()


def _read_part(
    part: Part, extents: dict[Extent, list[_Target]], index: Index, folder: str
) -> None:
    entries = [index.entries[extent.tensor] for extent in extents]
    with tf.device("CPU:0"):
        loaded = tf.raw_ops.RestoreV2(
            prefix=os.path.join(folder, part.prefix),
            tensor_names=[
                _key(e.name, x) for e, x in zip(entries, extents, strict=True)
            ],
            shape_and_slices=[""] * len(entries),
            dtypes=[tf.as_dtype(entry.dtype) for entry in entries],
        )
    for (extent, targets), tensor in zip(extents.items(), loaded, strict=True):
        values = np.asarray(tensor)
        for target in targets:
            start = max(extent.start, target.wanted.start)
            stop = min(extent.stop, target.wanted.stop)
            offset = target.wanted.start
            target.values[start - offset : stop - offset] = values[
                start - extent.start : stop - extent.start
            ]


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
        return File(name, os.fstat(file.fileno()).st_size, _checksum(file))


def _fault(path: str, file: File, contents: bool) -> str | None:
    try:
        with open(path, "rb") as opened:
            num_bytes = os.fstat(opened.fileno()).st_size
            if num_bytes != file.num_bytes:
                return f"has {num_bytes} bytes instead of {file.num_bytes}"
            if contents and _checksum(opened) != file.checksum:
                return "was altered: its checksum does not fit"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None


def _checksum(file: Any) -> int:
    value = 0
    while chunk := file.read(_CHUNK_BYTES):
        value = zlib.crc32(chunk, value)
    return value


def _key(name: str, extent: Extent) -> str:
    """What a run of elements is called inside a part."""
    return f"{name}:{extent.start}"


def _numbers(index: Index) -> dict[str, int]:
    return {entry.name: number for number, entry in enumerate(index.entries)}


def _dtype(tensor: StateTensor) -> tf.DType:
    return tf.as_dtype(tensor.dtype)


def _list_path(folder: str, worker: int) -> str:
    return os.path.join(folder, f"worker-{worker}.json")
