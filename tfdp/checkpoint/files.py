"""Files of a checkpoint: shard sizes, tensor keys and checksums.

Shards have TensorFlow's checkpoint format. Each shard is a separate TensorFlow
checkpoint, so that a reader opens only what it needs and a damaged file has a name.
Within a shard each chunk of elements is a one-dimensional tensor, not a slice of a
larger one: TensorFlow cannot read slices of float16 and of unsigned integers.
"""

from __future__ import annotations

import importlib
import os
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.checkpoint.index import CRC32, CRC32C, Extent, File, Shard, TensorMetadata
from tfdp.checkpoint.index_file import UnknownFormat
from tfdp.checkpoint.storage import Fetch, Storage, StoreError
from tfdp.ground.base.files import NotRegularFile, open_regular
from tfdp.ground.text import pluralize
from tfdp.training.sharding.state_tensors import LocalShard, StateTensor

# Largest sizes in bytes of a shard, and of a chunk of elements in it. Writing and
# reading need memory for one shard, for TensorFlow's buffer of 8 MB and for a copy of a
# chunk: together less than a bucket of gradients.
SHARD_BYTES = 8 * 2**20
CHUNK_BYTES = 2**20
# Bytes that are read at a time to compute a checksum.
_READ_BYTES = 2**20
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


def verify_files(
    shards: Iterable[Shard], folder: Storage, algorithm: str | None
) -> None:
    """Raise if a file of a shard is missing or differs from what was written.

    Args:
        shards: Iterable of `Shard`.
        folder: `Storage`, the subdirectory of the checkpoint.
        algorithm: String, that of the checksums, see `best_algorithm`; or `None` to
            compare sizes only.

    Raises:
        UnknownFormat: If the package that computes the checksums is not installed.
        ValueError: If a file is wrong; names the file, the fault and the worker that
            wrote it.
        StoreError: If the object store cannot be read.
    """
    sizes = folder.sizes()
    with folder.reading() as fetch:
        for shard in shards:
            for file in shard.files:
                found, fault = sizes.get(file.name), None
                if found is None:
                    fault = "is missing"
                elif found != file.num_bytes:
                    wrong = pluralize(found, "byte")
                    fault = f"has {wrong} instead of {file.num_bytes:,}"
                elif algorithm is not None:
                    fault = _fault_of_contents(file, fetch, algorithm)
                if fault:
                    name = f"{folder.name}/{file.name}"
                    raise ValueError(
                        f"The file {name!r}, which worker {shard.worker} wrote, "
                        f"{fault}."
                    )


def _fault_of_contents(file: File, fetch: Fetch, algorithm: str) -> str | None:
    """Return what is wrong with a file of the right size, or `None`.

    Args:
        file: `File`, as it was written.
        fetch: Callable, see `Fetch`.
        algorithm: String, that of the checksum.

    Returns:
        String, a verb phrase such as `"is missing"`.
    """
    try:
        path = os.path.join(fetch([file.name]), file.name)
        with open_regular(path) as opened:
            if checksum(opened, algorithm) != file.checksum:
                return "was altered: its checksum does not match"
    except FileNotFoundError:
        return "is missing"
    except NotRegularFile:
        return "is not a regular file"
    except StoreError:
        raise  # the store failed; the file may be intact
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None


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


def checksum(file: Any, algorithm: str) -> int:
    """Return the checksum of the rest of an open file.

    Args:
        file: Binary file.
        algorithm: String, see `best_algorithm`.

    Raises:
        UnknownFormat: If the package that computes it is not installed.
    """
    extend = _crc32c() if algorithm == CRC32C else _crc32
    value = 0
    while chunk := file.read(_READ_BYTES):
        value = extend(value, chunk)
    return value


def _crc32(value: int, chunk: bytes) -> int:
    """Continue a CRC-32 with a chunk of bytes."""
    return zlib.crc32(chunk, value)


def _crc32c() -> Callable[[int, bytes], int]:
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
