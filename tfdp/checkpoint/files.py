"""Files of a checkpoint: sizes, tensor keys, checksums.

The bytes are in TensorFlow's own checkpoint format. Each shard is a checkpoint of
its own, so that a reader opens only what it needs and a damaged file has a name.
Within a shard each chunk of elements is a one-dimensional tensor, not a slice of a
larger one: TensorFlow cannot read slices of float16 and of unsigned integers.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.base.files import NotRegularFile, open_regular
from tfdp.checkpoint.index import Extent, File, Shard, TensorMetadata
from tfdp.cluster.words import counted
from tfdp.sharding.state_tensors import StateTensor

# The largest shard, and the largest chunk of elements in it. A shard is in memory
# when it is written and when it is read; so is TensorFlow's buffer of 8 MB, and a
# second copy of each chunk for a moment. Together it is less than a bucket of
# gradients.
SHARD_BYTES = 8 * 2**20
CHUNK_BYTES = 2**20
_READ_BYTES = 2**20
_OP_NOISE = re.compile(r"\{\{.*?\}\}\s*|\s*\[Op:\w+\].*", re.DOTALL)


def metadata_of(state: Sequence[StateTensor]) -> tuple[TensorMetadata, ...]:
    """Metadata of state tensors, as an index lists them."""
    return tuple(TensorMetadata(t.name, tuple(t.shape), t.dtype) for t in state)


def tensor_key(name: str, extent: Extent) -> str:
    """Key of a chunk of elements inside a shard."""
    return f"{name}:{extent.start}"


def dtype_of(tensor: StateTensor) -> tf.DType:
    """TensorFlow dtype of a tensor's elements."""
    return tf.as_dtype(tensor.dtype)


def verify_files(
    shards: Iterable[Shard], folder: str, *, contents: bool = True
) -> None:
    """Raise if a file is not as it was written.

    Args:
        shards: Iterable of `Shard`.
        folder: String, the subdirectory of the checkpoint.
        contents: Bool, whether the bytes are looked at, and not only their
            number.

    Raises:
        ValueError: Naming the file, what is wrong with it, and who wrote it.
    """
    check_folder(folder)
    for shard in shards:
        for file in shard.files:
            fault = _fault(os.path.join(folder, file.name), file, contents)
            if fault:
                name = os.path.join(os.path.basename(folder), file.name)
                raise ValueError(
                    f"The file {name!r}, which worker {shard.worker} wrote, {fault}."
                )


def check_folder(folder: str) -> None:
    """Raise if a folder of data leads elsewhere, or holds what reading would hang at.

    TensorFlow opens files of the folder by name, and follows links.
    """
    name = os.path.basename(folder)
    if os.path.islink(folder):
        raise ValueError(f"The folder {name!r} is a link. Put the folder itself there.")
    if not os.path.isdir(folder):
        return  # each of its files is missing
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_file(follow_symlinks=False):
                raise ValueError(
                    f"The folder {name!r} has {entry.name!a} in it, which is no "
                    "regular file."
                )


def _fault(path: str, file: File, contents: bool) -> str | None:
    try:
        with open_regular(path) as opened:
            num_bytes = os.fstat(opened.fileno()).st_size
            if num_bytes != file.num_bytes:
                return f"has {counted(num_bytes, 'byte')} instead of {file.num_bytes:,}"
            if contents and checksum(opened) != file.checksum:
                return "was altered: its checksum does not fit"
    except FileNotFoundError:
        return "is missing"
    except NotRegularFile:
        return "is no regular file"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None


def checksum(file: Any) -> int:
    """CRC-32 of the rest of an open file."""
    value = 0
    while chunk := file.read(_READ_BYTES):
        value = zlib.crc32(chunk, value)
    return value


def error_text(error: Exception) -> str:
    """Text of an error, without the noise that TensorFlow puts around it."""
    if isinstance(error, (OSError, ValueError)):
        return str(error)
    text = error.message if isinstance(error, tf.errors.OpError) else str(error)
    return f"{type(error).__name__}: {_OP_NOISE.sub('', text)}"
