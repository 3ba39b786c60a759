"""A checkpoint is read: each process opens the parts that it needs, some at a time."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfdp.checkpoint import files
from tfdp.checkpoint.index import Extent, Index, Shard, first_difference
from tfdp.sharding.state_tensors import Piece, StateTensor


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
    files.verify(needed_parts(state, index), os.path.join(directory, index.token))


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
    difference = first_difference(saved, files.entries_of(state))
    if difference:
        raise ValueError(f"it is of another model. {difference}")


def needed_parts(state: Sequence[StateTensor], index: Index) -> list[Shard]:
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
            piece.write(np.zeros(size, files.dtype_of(tensor).as_numpy_dtype))


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
    room = files.PART_BYTES
    for tensor in state:
        dtype = files.dtype_of(tensor)
        for piece in tensor.held:
            num_bytes = (piece.stop - piece.start) * dtype.size
            if batch and num_bytes > room:
                yield batch
                batch, room = [], files.PART_BYTES
            wanted = Extent(numbers[tensor.name], piece.start, piece.stop)
            values = np.empty(piece.stop - piece.start, dtype.as_numpy_dtype)
            batch.append(_Target(piece, wanted, values))
            room -= num_bytes
    yield batch


def _sources(
    targets: list[_Target], index: Index
) -> Iterable[tuple[Shard, dict[Extent, list[_Target]]]]:
    """What is to be read for a batch, by part, and who needs it."""
    sources: dict[str, tuple[Shard, dict[Extent, list[_Target]]]] = {}
    for target in targets:
        for part, extent in index.find(target.wanted):
            _, extents = sources.setdefault(part.prefix, (part, {}))
            extents.setdefault(extent, []).append(target)
    return sources.values()


def _read_part(
    part: Shard, extents: dict[Extent, list[_Target]], index: Index, folder: str
) -> None:
    entries = [index.entries[extent.tensor] for extent in extents]
    with tf.device("CPU:0"):
        loaded = tf.raw_ops.RestoreV2(
            prefix=os.path.join(folder, part.prefix),
            tensor_names=[
                files.key_of(e.name, x) for e, x in zip(entries, extents, strict=True)
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


def _numbers(index: Index) -> dict[str, int]:
    return {entry.name: number for number, entry in enumerate(index.entries)}
