"""Files of a checkpoint: shard sizes, tensor keys and checksums.

Shards have TensorFlow's checkpoint format. Each shard is a separate TensorFlow
checkpoint, so that a reader opens only what it needs and a damaged file has a name.
Within a shard each chunk of elements is a one-dimensional tensor, not a slice of a
larger one: TensorFlow cannot read slices of float16 and of unsigned integers.
"""

from __future__ import annotations

import importlib
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.checkpoint.index import CRC32, CRC32C, Extent, File, Shard, TensorMetadata
from tfdp.checkpoint.index_file import UnknownFormat
from tfdp.checkpoint.storage import Storage, StoreError
from tfdp.ground.base.files import NotRegularFile
from tfdp.ground.text import pluralize
from tfdp.training.sharding.state_tensors import LocalShard, StateTensor

# Largest sizes in bytes of a shard, and of a chunk of elements in it. Writing needs
# memory for one shard, for TensorFlow's buffer of 8 MB and for a copy of a chunk:
# together less than a bucket of gradients.
SHARD_BYTES = 8 * 2**20
CHUNK_BYTES = 2**20
# Parts of the messages of TensorFlow that name an op and not the cause.
_OP_NOISE = re.compile(r"\{\{.*?\}\}\s*|\s*\[Op:\w+\].*", re.DOTALL)


def metadata_of(state: Sequence[StateTensor]) -> tuple[TensorMetadata, ...]:
    """Return the metadata of state tensors, as an index lists them."""
    return tuple(TensorMetadata(t.name, tuple(t.shape), t.dtype) for t in state)


def tensor_key(name: str, extent: Extent) -> str:
    """Return the key of a chunk of elements in a shard.

    Args:
        name: String, name of the tensor.
        extent: `Extent`, the elements of the chunk.

    Returns:
        String such as `"model/dense/kernel:0"`, with the first element.
    """
    return f"{name}:{extent.start}"


def dtype_of(tensor: StateTensor) -> tf.DType:
    """Return the TensorFlow dtype of a state tensor."""
    return tf.as_dtype(tensor.dtype)


def check_shape(tensor: StateTensor, shard: LocalShard, values: np.ndarray) -> None:
    """Raise if the values that were read of a shard have a wrong shape.

    Args:
        tensor: `StateTensor` of the shard.
        shard: `LocalShard`.
        values: Array.
    """
    if values.shape != (shard.stop - shard.start,):
        raise ValueError(
            f"A piece of {tensor.name!r} must have the shape "
            f"({shard.stop - shard.start},). Received: shape={values.shape}"
        )


def check_sizes(shards: Iterable[Shard], folder: Storage) -> None:
    """Raise if a file of a shard is missing or has another size than was written.

    Args:
        shards: Iterable of `Shard`.
        folder: `Storage`, the subdirectory of the checkpoint.

    Raises:
        ValueError: If a file is wrong; names the file, the fault and the worker that
            wrote it.
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


def read_files(shard: Shard, folder: Storage, algorithm: str) -> list[bytes]:
    """Read the files of a shard, and compare the checksums of what was read.

    Args:
        shard: `Shard`.
        folder: `Storage`, the subdirectory of the checkpoint.
        algorithm: String, that of the checksums, see `best_algorithm`.

    Returns:
        List of bytes, the content of each file.

    Raises:
        UnknownFormat: If the package that computes the checksums is not installed.
        ValueError: As for `check_sizes`.
        StoreError: If the object store cannot be read.
    """
    return [_read_file(shard, file, folder, algorithm) for file in shard.files]


def _read_file(shard: Shard, file: File, folder: Storage, algorithm: str) -> bytes:
    """Read one of the files of a shard; see `read_files`."""
    try:
        content = folder.read_bytes(file.name, file.num_bytes)
    except FileNotFoundError as error:
        raise _damage(folder, shard, file, "is missing") from error
    except NotRegularFile as error:
        raise _damage(folder, shard, file, "is not a regular file") from error
    except StoreError:
        raise  # the store failed; the file may be intact
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
        file: `File` of it.
        fault: String, a verb phrase such as `"is missing"`.
    """
    name = f"{folder.name}/{file.name}"
    return ValueError(f"The file {name!r}, which worker {shard.worker} wrote, {fault}.")


def best_algorithm() -> str:
    """Return the fastest algorithm of checksums that is installed.

    Returns:
        String: `CRC32C` with the package google-crc32c, else `CRC32`.

    Source: https://pypi.org/project/google-crc32c
    """
    try:
        package = importlib.import_module("google_crc32c")
    except ImportError:
        return CRC32
    # Its substitute in Python is slow, and would stop training.
    return CRC32C if package.implementation == "c" else CRC32


def checksum(chunks: Iterable[bytes | np.ndarray], algorithm: str) -> int:
    """Return the checksum of bytes.

    Args:
        chunks: Iterable of bytes or of arrays of bytes, one after another.
        algorithm: String, see `best_algorithm`.

    Raises:
        UnknownFormat: If the package that computes it is not installed.
    """
    extend, value = _crc32c() if algorithm == CRC32C else _crc32, 0
    for chunk in chunks:
        value = extend(value, chunk)
    return value


def _crc32(value: int, chunk: Any) -> int:
    """Continue a CRC-32 with a chunk of bytes."""
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
    if isinstance(error, (OSError, ValueError)):
        return str(error)
    text = error.message if isinstance(error, tf.errors.OpError) else str(error)
    return f"{type(error).__name__}: {' '.join(_OP_NOISE.sub('', text).split())}"
