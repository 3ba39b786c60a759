"""Read a checkpoint: each process opens only the shards that it needs."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfdp.checkpoint import files
from tfdp.checkpoint.index import ITEM_BYTES, Extent, Index, Shard, first_difference
from tfdp.checkpoint.storage import Storage
from tfdp.communication.collectives.collective_thread import from_bytes, new_tensor
from tfdp.training.replicas.assigned_values import common_values
from tfdp.training.sharding.state_tensors import LocalShard, StateTensor


def _nothing() -> None:
    """Do nothing; the default of callables of `LoadPlan`."""


@dataclasses.dataclass
class LoadPlan:
    """Tensors to read from a checkpoint or a backup, and tensors to skip.

    Args:
        tensors: List of `StateTensor` to read into.
        left_out: List of strings, names of saved tensors that are not read.
        clear: Callable that clears accumulated gradients, called before variables are
            written. Does nothing by default.
        finish: Callable that restores the state of gradient compressors from what was
            read, called when all workers have read their shards. Does nothing by
            default.
        arrays: Dict from names to the arrays into which callbacks' state is read.
        label: String, where the run resumes, `"within the epoch"` or `"at its start"`,
            which must be equal on all workers. Defaults to `""`.
        batches: Iterable of deques of `ReadItem` with the values read, which
            `assign_values` empties. Defaults to none; `read_shards` sets it.
    """

    tensors: list[StateTensor]
    left_out: list[str] = dataclasses.field(default_factory=list)
    clear: Callable[[], None] = _nothing
    finish: Callable[[], None] = _nothing
    arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    label: str = ""
    batches: Iterable[deque[ReadItem]] = ()


def check_model(index: Index, load_plan: LoadPlan) -> None:
    """Check that the tensors of a checkpoint match those of a load plan.

    Args:
        index: `Index` of the checkpoint.
        load_plan: `LoadPlan` for the model.

    Raises:
        ValueError: If the tensors differ, since the checkpoint is of another model.
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


def read_shards(load_plan: LoadPlan, index: Index, folder: Storage, room: int) -> None:
    """Read and verify the shards that this process needs; change no variable.

    Each file is read once, and its values wait for `assign_values`. If all values take
    more memory than `room`, the files are only verified here, and `assign_values` reads
    and verifies them again, for as many variables at a time as `room` allows.

    Args:
        load_plan: `LoadPlan`, which gets the values.
        index: `Index` of the checkpoint.
        folder: `Storage`, the subdirectory of the checkpoint.
        room: Int, bytes of memory that the values may take, from `memory_budget`.

    Raises:
        ValueError: If a file is wrong, as `files.read_data` raises it.
        StoreError: If the object store cannot be read.
    """
    shards = needed_shards(load_plan.tensors, index)
    files.check_sizes(shards, folder)
    batches = group_reads(load_plan.tensors, index, max(room, files.SHARD_BYTES))
    load_plan.batches = (_fill(items, index, folder) for items in batches)
    if _num_bytes(load_plan.tensors) <= room:
        load_plan.batches = list(load_plan.batches)
    else:
        for shard in shards:
            files.read_data(shard, folder, index.algorithm)


def assign_values(load_plan: LoadPlan) -> None:
    """Assign the values of `read_shards` to the variables of this process.

    Args:
        load_plan: `LoadPlan`.
    """
    load_plan.clear()
    for items in load_plan.batches:
        while items:
            # Each item is dropped when it is assigned: the variable takes over its
            # buffer and frees the previous value, so memory does not grow.
            items.popleft().assign()


def _num_bytes(state: Sequence[StateTensor]) -> int:
    """Return the bytes of all local shards of a state, which this process reads."""
    return sum(
        (local.stop - local.start) * files.dtype_of(tensor).size
        for tensor in state
        for local in tensor.local_shards
    )


class ReadItem:
    """Local shard of a variable to restore, and a buffer for its elements.

    Args:
        local: `LocalShard`.
        extent: `Extent` of its elements in the checkpoint.
        dtype: `tf.DType` of the elements.

    Attributes:
        values: Flat array, the buffer into which the elements are read.
    """

    def __init__(self, local: LocalShard, extent: Extent, dtype: tf.DType) -> None:
        self.local, self.extent, self._dtype = local, extent, dtype
        num_bytes = (local.stop - local.start) * dtype.size
        with tf.device("CPU:0"):
            self._tensor, data = new_tensor(num_bytes)
        self.values = data.view(dtype.as_numpy_dtype)

    def assign(self) -> None:
        """Assign the buffer's elements to the variable, without a copy if possible."""
        try:
            with tf.device("CPU:0"):
                elements = from_bytes(self._tensor, self._dtype)
        # TensorFlow cannot bitcast bytes to some dtypes, such as int4 and float8, so
        # the NumPy array is assigned instead.
        except tf.errors.InvalidArgumentError:
            elements = self.values
        with common_values():
            self.local.write(elements)


def group_reads(
    state: Sequence[StateTensor], index: Index, room: int = files.SHARD_BYTES
) -> Iterator[deque[ReadItem]]:
    """Group local shards of a state, so that the buffers of a group fit into memory.

    Nothing is read yet.

    Args:
        state: Sequence of `StateTensor`.
        index: `Index` of the checkpoint.
        room: Int, the largest size of a group of several items, in bytes. Defaults to
            that of a shard.

    Yields:
        Deque of `ReadItem`, the next group.
    """
    group: deque[ReadItem] = deque()
    positions, free = _positions(index), room
    for tensor in state:
        dtype = files.dtype_of(tensor)
        for local in tensor.local_shards:
            num_bytes = (local.stop - local.start) * dtype.size
            if group and num_bytes > free:
                yield group
                group, free = deque(), room
            extent = Extent(positions[tensor.name], local.start, local.stop)
            group.append(ReadItem(local, extent, dtype))
            free -= num_bytes
    yield group


def _fill(items: deque[ReadItem], index: Index, folder: Storage) -> deque[ReadItem]:
    """Read and verify the shards that read items need; return the items, filled."""
    for shard, extents in _items_by_shard(items, index):
        _read_shard(shard, extents, index, folder)
    return items


def _items_by_shard(
    items: Iterable[ReadItem], index: Index
) -> Iterable[tuple[Shard, dict[Extent, list[ReadItem]]]]:
    """Group read items by the shards and extents that hold their elements.

    Args:
        items: Iterable of `ReadItem`.
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
    shard: Shard, extents: dict[Extent, list[ReadItem]], index: Index, folder: Storage
) -> None:
    """Read extents of a shard into the buffers of the read items that need them.

    Args:
        shard: `Shard`.
        extents: Dict from an `Extent` of the shard to the items that need it.
        index: `Index` of the checkpoint.
        folder: `Storage`, the subdirectory of the checkpoint.
    """
    data = np.frombuffer(files.read_data(shard, folder, index.algorithm), np.uint8)
    begin = 0
    for extent in shard.extents:
        size = ITEM_BYTES[index.tensors[extent.tensor].dtype]
        end = begin + (extent.stop - extent.start) * size
        for item in extents.get(extent, ()):
            start = max(extent.start, item.extent.start)
            stop = min(extent.stop, item.extent.stop)
            target, first = item.values.view(np.uint8), item.extent.start
            target[(start - first) * size : (stop - first) * size] = data[begin:end][
                (start - extent.start) * size : (stop - extent.start) * size
            ]
        begin = end


def _positions(index: Index) -> dict[str, int]:
    """Return the position of each tensor in the index, by the tensor's name."""
    return {entry.name: number for number, entry in enumerate(index.tensors)}
