"""Files of a checkpoint: shard sizes, tensor keys and checksums.

Shards have TensorFlow's checkpoint format. Each shard is a separate TensorFlow
checkpoint, so that a reader opens only what it needs and a damaged file has a name.
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

from tfdp.checkpoint.index import Extent, File, Shard, TensorMetadata
from tfdp.checkpoint.storage import Fetch, Storage, StoreError
from tfdp.ground.base.files import NotRegularFile, open_regular
from tfdp.ground.text import pluralize
from tfdp.training.sharding.state_tensors import StateTensor

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


def verify_files(
    shards: Iterable[Shard], folder: Storage, *, contents: bool = True
) -> None:
    """Raise if a file of a shard is missing or differs from what was written.

    Args:
        shards: Iterable of `Shard`.
        folder: `Storage`, the subdirectory of the checkpoint.
        contents: Bool, whether checksums are compared too, and not only sizes.
            Defaults to `True`.

    Raises:
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
                elif contents:
                    fault = _fault_of_contents(file, fetch)
                if fault:
                    name = f"{folder.name}/{file.name}"
                    raise ValueError(
                        f"The file {name!r}, which worker {shard.worker} wrote, "
                        f"{fault}."
                    )


def _fault_of_contents(file: File, fetch: Fetch) -> str | None:
    """Return what is wrong with a file of the right size, or `None`.

    Args:
        file: `File`, as it was written.
        fetch: Callable, see `Fetch`.

    Returns:
        String, a verb phrase such as `"is missing"`.
    """
    try:
        path = os.path.join(fetch([file.name]), file.name)
        with open_regular(path) as opened:
            if checksum(opened) != file.checksum:
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


def checksum(file: Any) -> int:
    """Return the CRC-32 of the rest of an open file."""
    value = 0
    while chunk := file.read(_READ_BYTES):
        value = zlib.crc32(chunk, value)
    return value


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
