"""Full state: whole tensors from the shards that replicas hold, for Keras's files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.communication.collectives import Member, ProcessGroup
from tfdp.ground._compat import tf_distribute
from tfdp.training.sharding.state_tensors import StateTensor

# Largest number of bytes of a message: heartbeats wait behind each message, and on a
# slow link a longer message would delay them too long.
_MESSAGE_BYTES = 2**22
# Each replica holds an addend of a sum. Addends are all-reduced in ranges of rows of
# about this many bytes, since averaging a range needs several times its memory.
_SUM_BYTES = 2**20


class FullState:
    """Values of state tensors that this process holds or has gathered.

    Args:
        gathered: Dict from name to the flat array of a tensor that other processes hold
            a part of, or `None` for none. Defaults to `None`.
    """

    def __init__(self, gathered: dict[str, np.ndarray] | None = None) -> None:
        self._gathered = gathered or {}

    def read(self, tensor: StateTensor) -> np.ndarray:
        """Return a whole state tensor, gathered before or assembled from owned shards.

        Raises:
            RuntimeError: If the tensor was not gathered, and other workers hold
                elements of it.
        """
        if tensor.name in self._gathered:
            return self._gathered[tensor.name].reshape(tensor.shape)
        if sum(shard.stop - shard.start for shard in tensor.owned_shards) < tensor.size:
            raise RuntimeError(
                f"Other workers hold a part of {tensor.name!r}. Save the model by "
                "`model.save` or `model.save_weights`, on all workers."
            )
        full = np.zeros(tensor.size, tf.as_dtype(tensor.dtype).as_numpy_dtype)
        for shard in tensor.owned_shards:
            full[shard.start : shard.stop] = shard.read()
        return full.reshape(tensor.shape)


def gather_full_state(
    tensors: Sequence[StateTensor], host_group: ProcessGroup, *, keep: bool
) -> FullState:
    """Gather whole tensors, a few megabytes at a time. All workers call it.

    Args:
        tensors: Sequence of `StateTensor`.
        host_group: `ProcessGroup` with one member for each worker.
        keep: Bool, whether this worker keeps the whole tensors.

    Returns:
        `FullState`, empty on a worker that does not keep them, and on a single worker,
        which owns all shards.
    """
    if host_group.size == 1:
        return FullState()
    gathered: dict[str, np.ndarray] = {}
    for tensor in tensors:
        dtype = tf.as_dtype(tensor.dtype).as_numpy_dtype
        step = max(1, _MESSAGE_BYTES // np.dtype(dtype).itemsize)
        full = np.zeros(tensor.size if keep else 0, dtype)
        for start in range(0, tensor.size, step):
            part = np.zeros(min(step, tensor.size - start), dtype)
            _fill(part, start, tensor)
            total = _sum_bits(part, host_group)
            if keep:
                full[start : start + len(part)] = total
        if keep:
            gathered[tensor.name] = full
    return FullState(gathered)


def redistribute_sums(strategy: Any, totals: Iterable[Any]) -> None:
    """Set every replica's part of sums to the mean of all parts. All workers call it.

    The total over all replicas stays the same. Sums are redistributed one after
    another, a few megabytes at a time; the peak of extra memory is one part.

    Args:
        strategy: A tfdp strategy.
        totals: Iterable of Keras variables; each replica holds one addend of each.
    """
    for total in totals:
        replicas = range(strategy.extended.num_local)
        parts = [tf_distribute.local_value(total, replica) for replica in replicas]
        _redistribute_sum(
            parts, strategy.extended.host_group, strategy.num_replicas_in_sync
        )


def _redistribute_sum(
    parts: Sequence[tf.Variable], host_group: ProcessGroup, num_replicas: int
) -> None:
    """Set the local replicas' parts of a sum to the mean of all replicas' parts.

    Args:
        parts: Sequence of `tf.Variable`, the addend of each local replica.
        host_group: `ProcessGroup` with one member for each worker.
        num_replicas: Int, number of replicas on all workers.
    """

    def mean(values: list[tf.Tensor]) -> tf.Tensor:
        """Return the mean of a tensor over all replicas of all workers.

        `values` has the tensor of each local replica.
        """
        total = tf.reshape(tf.add_n(values), [-1])
        if host_group.size > 1:
            total = Member(host_group, 0).all_reduce(total)
        return tf.reshape(total, values[0].shape) / num_replicas

    # A scalar has no rows to average range by range, so it is averaged as a whole.
    if not parts[0].shape.rank:
        value = mean([part.read_value() for part in parts])
        for part in parts:
            part.assign(value)
        return
    for rows in _row_ranges(tuple(parts[0].shape), parts[0].dtype.size):
        value = mean([tf.gather(part, rows) for part in parts])
        for part in parts:
            part.scatter_update(tf.IndexedSlices(value, rows))
    for part in parts:
        # TensorFlow copies a variable that was written in pieces on every read. An
        # assignment of the whole value ends these copies.
        part.assign(part.read_value())


def _row_ranges(shape: tuple[int, ...], item_bytes: int) -> Iterator[tf.Tensor]:
    """Divide the rows of a tensor into ranges of about `_SUM_BYTES`.

    Args:
        shape: Tuple of ints, shape of the tensor.
        item_bytes: Int, bytes of an element.

    Yields:
        Int tensor, the indices of adjacent rows.
    """
    num_rows = shape[0]
    row_bytes = max(1, int(np.prod(shape[1:], dtype=np.int64)) * item_bytes)
    step = max(1, _SUM_BYTES // row_bytes)
    for start in range(0, num_rows, step):
        yield tf.range(start, min(start + step, num_rows))


def _fill(part: np.ndarray, start: int, tensor: StateTensor) -> None:
    """Copy the elements that this process owns to a part of a flattened tensor.

    Args:
        part: Flat array, changed in place where the process owns elements.
        start: Int, index of the part's first element in the tensor.
        tensor: `StateTensor`.
    """
    stop = start + len(part)
    for shard in tensor.owned_shards:
        first, last = max(start, shard.start), min(stop, shard.stop)
        if first < last:
            values = shard.read()[first - shard.start : last - shard.start]
            part[first - start : last - start] = values


def _sum_bits(part: np.ndarray, group: ProcessGroup) -> np.ndarray:
    """Sum an array over workers; each element is zero on all workers but one.

    The bits are summed as integers, which is exact in any dtype.
    """
    raw = part.tobytes()
    words = np.frombuffer(raw + b"\0" * (-len(raw) % 4), np.int32)
    total = Member(group, 0).all_reduce(tf.constant(words)).numpy()
    return np.frombuffer(total.tobytes()[: len(raw)], part.dtype)
