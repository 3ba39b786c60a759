"""Read a checkpoint: each process opens the shards that it needs, some at a time."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfdp.checkpoint import files
from tfdp.checkpoint.index import Extent, Index, Shard, first_difference
from tfdp.checkpoint.storage import Storage
from tfdp.training.sharding.state_tensors import LocalShard, StateTensor


def _nothing() -> None:
    pass


@dataclasses.dataclass
class LoadPlan:
    """What to read of a checkpoint or a backup, and what to leave out.

    Args:
        tensors: List of `StateTensor`, what is read.
        left_out: List of strings, names of what is not.
        clear: Callable, called before variables are written. Defaults to one that does
            nothing.
        finish: Callable, called when all workers have read all. Defaults to the same.
        arrays: Dict from names to arrays, those of callbacks that are read into.
        label: String, what all workers have to decide alike. Defaults to `""`.
    """

    tensors: list[StateTensor]
    left_out: list[str] = dataclasses.field(default_factory=list)
    clear: Callable[[], None] = _nothing
    finish: Callable[[], None] = _nothing
    arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    label: str = ""


def check_model(index: Index, load_plan: LoadPlan) -> None:
    """Check that a checkpoint is of this model, by its index alone.

    Raises:
        ValueError: If it is not.
    """
    saved = [entry for entry in index.tensors if entry.name not in load_plan.left_out]
    difference = first_difference(saved, files.metadata_of(load_plan.tensors))
    if difference:
        raise ValueError(f"it is of another model. {difference}")


def needed_shards(state: Sequence[StateTensor], index: Index) -> list[Shard]:
    """Shards of the checkpoint that this process has to read."""
    positions = _positions(index)
    found = {}
    for tensor in state:
        for local in tensor.local_shards:
            extent = Extent(positions[tensor.name], local.start, local.stop)
            found.update({shard.prefix: shard for shard, _ in index.find(extent)})
    return list(found.values())


def read_shards(load_plan: LoadPlan, index: Index, folder: Storage) -> None:
    """Read shards into the variables of this process.

    Args:
        load_plan: `LoadPlan`.
        index: `Index` of its tensors.
        folder: `Storage`, the subdirectory of the checkpoint.
    """
    load_plan.clear()
    with folder.reading() as fetch:
        for items in _read_batches(load_plan.tensors, _positions(index)):
            for shard, extents in _items_by_shard(items, index):
                path = fetch([file.name for file in shard.files])
                _read_shard(shard, extents, index, path)
            for item in items:
                item.local.write(item.values)


@dataclasses.dataclass(frozen=True)
class _ReadItem:
    """Local shard to fill, with the elements that have been read for it."""

    local: LocalShard
    extent: Extent
    values: np.ndarray


def _read_batches(
    state: Sequence[StateTensor], positions: dict[str, int]
) -> Iterator[list[_ReadItem]]:
    """Read items, as many at a time as a shard of a checkpoint may hold."""
    batch: list[_ReadItem] = []
    room = files.SHARD_BYTES
    for tensor in state:
        dtype = files.dtype_of(tensor)
        for local in tensor.local_shards:
            num_bytes = (local.stop - local.start) * dtype.size
            if batch and num_bytes > room:
                yield batch
                batch, room = [], files.SHARD_BYTES
            extent = Extent(positions[tensor.name], local.start, local.stop)
            values = np.empty(local.stop - local.start, dtype.as_numpy_dtype)
            batch.append(_ReadItem(local, extent, values))
            room -= num_bytes
    yield batch


def _items_by_shard(
    items: list[_ReadItem], index: Index
) -> Iterable[tuple[Shard, dict[Extent, list[_ReadItem]]]]:
    """Group read items by shard and extent."""
    by_shard: dict[str, tuple[Shard, dict[Extent, list[_ReadItem]]]] = {}
    for item in items:
        for shard, extent in index.find(item.extent):
            _, extents = by_shard.setdefault(shard.prefix, (shard, {}))
            extents.setdefault(extent, []).append(item)
    return by_shard.values()


def _read_shard(
    shard: Shard, extents: dict[Extent, list[_ReadItem]], index: Index, folder: str
) -> None:
    entries = [index.tensors[extent.tensor] for extent in extents]
    prefix = os.path.join(folder, shard.prefix)
    keys = [files.tensor_key(e.name, x) for e, x in zip(entries, extents, strict=True)]
    # TensorFlow takes as much memory as the file says.
    shapes = tf.train.load_checkpoint(prefix).get_variable_to_shape_map()
    for key, extent in zip(keys, extents, strict=True):
        if shapes.get(key) != [extent.stop - extent.start]:
            raise ValueError(f"The shard {shard.prefix!r} does not hold {key!r}.")
    with tf.device("CPU:0"):
        loaded = tf.raw_ops.RestoreV2(
            prefix=prefix,
            tensor_names=keys,
            shape_and_slices=[""] * len(entries),
            dtypes=[tf.as_dtype(entry.dtype) for entry in entries],
        )
    for (extent, items), tensor in zip(extents.items(), loaded, strict=True):
        values = np.asarray(tensor)
        for item in items:
            start = max(extent.start, item.extent.start)
            stop = min(extent.stop, item.extent.stop)
            offset = item.extent.start
            item.values[start - offset : stop - offset] = values[
                start - extent.start : stop - extent.start
            ]


def _positions(index: Index) -> dict[str, int]:
    return {entry.name: number for number, entry in enumerate(index.tensors)}
