"""Read a checkpoint: each process opens only the shards that it needs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfdp.checkpoint import files
from tfdp.checkpoint.index import Extent, Index, Shard, first_difference
from tfdp.checkpoint.storage import Storage
from tfdp.communication.collectives.bridge import from_bytes, new_tensor
from tfdp.training.sharding.state_tensors import LocalShard, StateTensor


def _nothing() -> None:
    """Do nothing."""


@dataclasses.dataclass
class LoadPlan:
    """Tensors to read from a checkpoint or a backup, and tensors to skip.

    Args:
        tensors: List of `StateTensor` to read into.
        left_out: List of strings, names of saved tensors that are not read.
        clear: Callable, called before variables are written. Does nothing by default.
        finish: Callable, called when all workers have read their shards. Does nothing
            by default.
        arrays: Dict from names to the arrays that state of callbacks is read into.
        label: String, a decision that must be equal on all workers. Defaults to `""`.
    """

    tensors: list[StateTensor]
    left_out: list[str] = dataclasses.field(default_factory=list)
    clear: Callable[[], None] = _nothing
    finish: Callable[[], None] = _nothing
    arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    label: str = ""


def check_model(index: Index, load_plan: LoadPlan) -> None:
    """Check that the tensors of a checkpoint match those of a load plan.

    Args:
        index: `Index` of the checkpoint.
        load_plan: `LoadPlan` for the model.

    Raises:
        ValueError: If they differ: the checkpoint belongs to another model.
    """
    saved = [entry for entry in index.tensors if entry.name not in load_plan.left_out]
    difference = first_difference(saved, files.metadata_of(load_plan.tensors))
    if difference:
        raise ValueError(f"it belongs to another model. {difference}")


def needed_shards(state: Sequence[StateTensor], index: Index) -> list[Shard]:
    """Return the shards of a checkpoint that this process has to read.

    Args:
        state: Sequence of `StateTensor` to read into.
        index: `Index` of the checkpoint.
    """
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
        index: `Index` of the checkpoint.
        folder: `Storage`, the subdirectory of the checkpoint.
    """
    load_plan.clear()
    with folder.reading() as fetch:
        for items in read_batches(load_plan.tensors, index):
            for shard, extents in _items_by_shard(items, index):
                path = fetch([file.name for file in shard.files])
                _read_shard(shard, extents, index, path)
            for item in items:
                item.assign()


class ReadItem:
    """Local shard to restore.

    Args:
        local: `LocalShard`.
        extent: `Extent` of its elements in the checkpoint.
        dtype: `tf.DType` of the elements.

    Attributes:
        values: Flat array, a buffer for the elements that are read for it.
    """

    def __init__(self, local: LocalShard, extent: Extent, dtype: tf.DType) -> None:
        self.local, self.extent, self._dtype = local, extent, dtype
        num_bytes = (local.stop - local.start) * dtype.size
        with tf.device("CPU:0"):
            self._tensor, data = new_tensor(num_bytes)
        self.values = data.view(dtype.as_numpy_dtype)

    def assign(self) -> None:
        """Assign the elements. The variable takes the buffer, without a copy."""
        try:
            with tf.device("CPU:0"):
                elements = from_bytes(self._tensor, self._dtype)
        except tf.errors.InvalidArgumentError:  # such as of int4 and float8
            elements = self.values
        self.local.write(elements)


def read_batches(
    state: Sequence[StateTensor], index: Index
) -> Iterator[list[ReadItem]]:
    """Yield read items in batches, whose buffers fit into the size of a shard.

    Args:
        state: Sequence of `StateTensor`.
        index: `Index` of the checkpoint.
    """
    batch: list[ReadItem] = []
    positions, room = _positions(index), files.SHARD_BYTES
    for tensor in state:
        dtype = files.dtype_of(tensor)
        for local in tensor.local_shards:
            num_bytes = (local.stop - local.start) * dtype.size
            if batch and num_bytes > room:
                yield batch
                batch, room = [], files.SHARD_BYTES
            extent = Extent(positions[tensor.name], local.start, local.stop)
            batch.append(ReadItem(local, extent, dtype))
            room -= num_bytes
    yield batch


def _items_by_shard(
    items: list[ReadItem], index: Index
) -> Iterable[tuple[Shard, dict[Extent, list[ReadItem]]]]:
    """Group read items by the shards and extents that hold their elements.

    Args:
        items: List of `ReadItem`.
        index: `Index` of the checkpoint.

    Returns:
        Iterable of pairs of a `Shard`, and a dict from an `Extent` of it to the items
        that need elements of the extent.
    """
    by_shard: dict[str, tuple[Shard, dict[Extent, list[ReadItem]]]] = {}
    for item in items:
        for shard, extent in index.find(item.extent):
            _, extents = by_shard.setdefault(shard.prefix, (shard, {}))
            extents.setdefault(extent, []).append(item)
    return by_shard.values()


def _read_shard(
    shard: Shard, extents: dict[Extent, list[ReadItem]], index: Index, folder: str
) -> None:
    """Read extents of a shard into the buffers of the read items that need them.

    Args:
        shard: `Shard`.
        extents: Dict from an `Extent` of the shard to the items that need it.
        index: `Index` of the checkpoint.
        folder: String, path of the local folder with the files of the shard.
    """
    entries = [index.tensors[extent.tensor] for extent in extents]
    prefix = os.path.join(folder, shard.prefix)
    keys = [files.tensor_key(e.name, x) for e, x in zip(entries, extents, strict=True)]
    # TensorFlow allocates the sizes in the file, so a forged file must be found first.
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
    """Return the position of each tensor in the index, by name."""
    return {entry.name: number for number, entry in enumerate(index.tensors)}
