"""Copies of the state in the memory of the host.

The shards that a process owns lie in one array, one after another.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from tfdp.checkpoint import files
from tfdp.training.sharding.state_tensors import LocalShard, StateTensor

# The offset of each shard is a multiple of this number, the bytes of a cache line, so
# that a view of its bytes is aligned for any dtype.
_ALIGNMENT = 64


def copy_to_host(state: Sequence[StateTensor], buffer: np.ndarray) -> None:
    """Copy the shards that this process owns into one array.

    Args:
        state: Sequence of `StateTensor`.
        buffer: Array of bytes, with room for all shards at aligned offsets.

    Example:

    >>> from tfdp.training.sharding.state_tensors import LocalShard
    >>> weights = np.ones(3, "float32")
    >>> shard = LocalShard(0, 3, lambda: weights, weights.put)
    >>> state = [StateTensor("weights", (3,), "float32", (shard,), (shard,))]
    >>> buffer = np.empty(64, "uint8")
    >>> copy_to_host(state, buffer)
    >>> weights[:] = 2
    >>> copied_state(state, buffer)[0].owned_shards[0].read()
    array([1., 1., 1.], dtype=float32)
    """
    for tensor, shard, part in _parts(state, buffer):
        values = np.asarray(shard.read())
        files.check_shape(tensor, shard, values)
        np.copyto(part, values)


def copied_state(state: Sequence[StateTensor], buffer: np.ndarray) -> list[StateTensor]:
    """Return state tensors whose owned shards read from a copy by `copy_to_host`.

    Args:
        state: Sequence of `StateTensor`.
        buffer: Array of bytes, the copy.
    """
    shards: dict[str, list[LocalShard]] = {tensor.name: [] for tensor in state}
    for tensor, shard, part in _parts(state, buffer):
        read = functools.partial(np.asarray, part)
        copied = dataclasses.replace(shard, read=read, read_range=None)
        shards[tensor.name].append(copied)
    return [
        dataclasses.replace(
            tensor, owned_shards=tuple(shards[tensor.name]), local_shards=()
        )
        for tensor in state
    ]


def _parts(
    state: Sequence[StateTensor], buffer: np.ndarray
) -> Iterator[tuple[StateTensor, LocalShard, np.ndarray]]:
    """Yield the tensor of each owned shard, the shard, and its slice of an array.

    Args:
        state: Sequence of `StateTensor`.
        buffer: Array of bytes, with room for all shards that this process owns.
    """
    offset = 0
    for tensor in state:
        dtype = files.dtype_of(tensor)
        for shard in tensor.owned_shards:
            size = (shard.stop - shard.start) * dtype.size
            part = buffer[offset : offset + size]
            yield tensor, shard, part.view(dtype.as_numpy_dtype)
            offset += aligned(size)


def copy_bytes(state: Sequence[StateTensor]) -> int:
    """Return the size in bytes of a copy of the shards that this process owns."""
    return sum(
        aligned((shard.stop - shard.start) * files.dtype_of(tensor).size)
        for tensor in state
        for shard in tensor.owned_shards
    )


def aligned(size: int) -> int:
    """Return a size in bytes, rounded up to the alignment of shards in a copy."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
