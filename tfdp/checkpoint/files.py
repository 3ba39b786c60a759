"""The files of a checkpoint: what they are like, and whether they are intact.

The bytes are in TensorFlow's own checkpoint format. Each part is a checkpoint of
its own, so that a reader opens only what it needs and a damaged file has a name.
Within a part each run of elements is a one-dimensional tensor, not a slice of a
larger one: TensorFlow cannot read slices of float16 and of unsigned integers.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.checkpoint.index import Entry, Extent, File, Shard
from tfdp.sharding.state_tensors import StateTensor

# The largest part, and the largest run of elements in it. A part is in memory when
# it is written and when it is read; so is TensorFlow's buffer of 8 MB, and a second
# copy of each run for a moment. Together it is less than a bucket of gradients.
PART_BYTES = 8 * 2**20
RUN_BYTES = 2**20
_CHUNK_BYTES = 2**20
_OP_NOISE = re.compile(r"\{\{.*?\}\}\s*|\s*\[Op:\w+\].*", re.DOTALL)


def entries_of(state: Sequence[StateTensor]) -> tuple[Entry, ...]:
    """The state's tensors, as an index lists them."""
    return tuple(Entry(t.name, tuple(t.shape), t.dtype) for t in state)


def key_of(name: str, extent: Extent) -> str:
    """What a run of elements is called inside a part."""
    return f"{name}:{extent.start}"


def dtype_of(tensor: StateTensor) -> tf.DType:
    """The type of a tensor's elements, as TensorFlow has it."""
    return tf.as_dtype(tensor.dtype)


def verify(parts: Iterable[Shard], folder: str, *, contents: bool = True) -> None:
    """Raises if a file is not as it was written.

    Args:
        parts: Iterable of `Shard`.
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


def _fault(path: str, file: File, contents: bool) -> str | None:
    try:
        with open(path, "rb") as opened:
            num_bytes = os.fstat(opened.fileno()).st_size
            if num_bytes != file.num_bytes:
                return f"has {num_bytes} bytes instead of {file.num_bytes}"
            if contents and checksum(opened) != file.checksum:
                return "was altered: its checksum does not fit"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None


def checksum(file: Any) -> int:
    """The CRC-32 of what an open file still has."""
    value = 0
    while chunk := file.read(_CHUNK_BYTES):
        value = zlib.crc32(chunk, value)
    return value


def cause_of(error: Exception) -> str:
    """What an error says, without the noise that TensorFlow puts around it."""
    if isinstance(error, (OSError, ValueError)):
        return str(error)
    text = error.message if isinstance(error, tf.errors.OpError) else str(error)
    return f"{type(error).__name__}: {_OP_NOISE.sub('', text)}"
