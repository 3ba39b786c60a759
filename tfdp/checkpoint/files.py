"""Files of a checkpoint: shard sizes and checksums.

Each shard is a file of limited size, so that a reader opens only what it needs and a
damaged file has a name. It has the bytes of its elements and nothing else.
"""

from __future__ import annotations

import importlib
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.checkpoint.index import CRC32, CRC32C, File, Shard, TensorMetadata
from tfdp.checkpoint.index_file import UnknownFormat
from tfdp.checkpoint.storage import Storage, StoreError
from tfdp.ground.base.files import NotRegularFile
from tfdp.ground.text import pluralize
from tfdp.training.sharding.state_tensors import LocalShard, StateTensor

# Largest size of a shard in bytes. A save holds one shard at a time in memory, so the
# limit keeps the memory of a save below that of a bucket of gradients.
SHARD_BYTES = 8 * 2**20
# TensorFlow's messages contain names of ops, which do not help the user to find the
# cause, so text that matches this is removed.
_OP_NOISE = re.compile(r"\{\{.*?\}\}\s*|\s*\[Op:\w+\].*", re.DOTALL)


def metadata_of(state: Sequence[StateTensor]) -> tuple[TensorMetadata, ...]:
    """Return a tuple of the `TensorMetadata` of each state tensor, for an index."""
    return tuple(TensorMetadata(t.name, tuple(t.shape), t.dtype) for t in state)


def dtype_of(tensor: StateTensor) -> tf.DType:
    """Return the TensorFlow dtype of a state tensor."""
    return tf.as_dtype(tensor.dtype)


def check_shape(tensor: StateTensor, shard: LocalShard, values: np.ndarray) -> None:
    """Raise `ValueError` unless values of a shard have the shape `[stop - start]`.

    Args:
        tensor: `StateTensor` of the shard.
        shard: `LocalShard`.
        values: Array, the values that were read.
    """
    if values.shape != (shard.stop - shard.start,):
        raise ValueError(
            f"A piece of {tensor.name!r} must have the shape "
            f"({shard.stop - shard.start},). Received: shape={values.shape}"
        )


def check_sizes(shards: Iterable[Shard], folder: Storage) -> None:
    """Raise if a file of a shard is missing, or has another size than when written.

    Args:
        shards: Iterable of `Shard`.
        folder: `Storage`, the subdirectory of the checkpoint.

    Raises:
        ValueError: If a file is wrong; the message names the file, the fault and the
            worker that wrote the file.
        StoreError: If the object store cannot be read.
    """
    sizes = folder.sizes()
    for shard in shards:
        for file in shard.files:
            found = sizes.get(file.name)
            if found is None:
                raise _damage(folder, shard, file, "is missing")
            if found != file.num_bytes:
                wrong = f"has {pluralize(found, 'byte')} instead of {file.num_bytes:,}"
                raise _damage(folder, shard, file, wrong)


def read_data(shard: Shard, folder: Storage, algorithm: str) -> bytes:
    """Read the data file of a shard, and verify the checksum of the bytes read.

    Args:
        shard: `Shard`.
        folder: `Storage`, the subdirectory of the checkpoint.
        algorithm: String, the algorithm of the checksum, `CRC32` or `CRC32C`.

    Returns:
        Bytes, the content of the file.

    Raises:
        UnknownFormat: If the package that computes the checksum is not installed.
        ValueError: If the file is wrong; the message names the file, the fault and the
            worker that wrote the file.
        StoreError: If the object store cannot be read.
    """
    file = shard.data
    try:
        content = folder.read_bytes(file.name, file.num_bytes)
    except FileNotFoundError as error:
        raise _damage(folder, shard, file, "is missing") from error
    except NotRegularFile as error:
        raise _damage(folder, shard, file, "is not a regular file") from error
    except StoreError:
        # The store failed, so the file may be intact, and is not reported as damaged.
        raise
    except OSError as error:
        fault = f"cannot be read ({error.strerror})"
        raise _damage(folder, shard, file, fault) from error
    if checksum([content], algorithm) != file.checksum:
        fault = "was altered: its checksum does not match"
        raise _damage(folder, shard, file, fault)
    return content


def _damage(folder: Storage, shard: Shard, file: File, fault: str) -> ValueError:
    """Return the error for a wrong file of a shard.

    Args:
        folder: `Storage`, the subdirectory of the checkpoint.
        shard: `Shard`.
        file: `File` of the shard.
        fault: String, a verb phrase such as `"is missing"`.
    """
    name = f"{folder.name}/{file.name}"
    return ValueError(f"The file {name!r}, which worker {shard.worker} wrote, {fault}.")


def best_algorithm() -> str:
    """Return the fastest algorithm of checksums that is installed.

    Returns:
        String: `CRC32C` if google-crc32c has its C extension, else `CRC32`.

    Source: https://pypi.org/project/google-crc32c
    """
    try:
        package = importlib.import_module("google_crc32c")
    except ImportError:
        return CRC32
    # Without its C extension, google-crc32c computes in Python, which would slow
    # training down more than zlib's CRC-32 does.
    return CRC32C if package.implementation == "c" else CRC32


def checksum(chunks: Iterable[bytes | np.ndarray], algorithm: str) -> int:
    """Return the checksum of chunks of bytes, as of their concatenation.

    Args:
        chunks: Iterable of bytes or of arrays of bytes, one after another.
        algorithm: String, `CRC32` or `CRC32C`.

    Raises:
        UnknownFormat: If the package that computes the checksum is not installed.
    """
    extend, value = _crc32c() if algorithm == CRC32C else _crc32, 0
    for chunk in chunks:
        value = extend(value, chunk)
    return value


def _crc32(value: int, chunk: Any) -> int:
    """Return the CRC-32 `value`, continued with a chunk of bytes."""
    return zlib.crc32(chunk, value)


def _crc32c() -> Callable[[int, Any], int]:
    """Return the function that continues a CRC-32C with a chunk of bytes."""
    try:
        return importlib.import_module("google_crc32c").extend
    except ImportError as error:
        raise UnknownFormat(
            "it has checksums of CRC-32C; `pip install google-crc32c`"
        ) from error


def error_text(error: Exception) -> str:
    """Format an error as one line, without the op names that TensorFlow adds.

    Returns:
        String: the message of an `OSError` or `ValueError`; else such as
        `"NotFoundError: no such file"`.
    """
    if isinstance(error, FileNotFoundError):
        return f"{error} (was it removed, or does another job use this directory?)"
    if isinstance(error, (OSError, ValueError)):
        return str(error)
    text = error.message if isinstance(error, tf.errors.OpError) else str(error)
    return f"{type(error).__name__}: {' '.join(_OP_NOISE.sub('', text).split())}"
