"""Weights of the replicas in the sums over a global batch, by their rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tfdp.communication.collectives import Member, ProcessGroup
from tfdp.ground.base.batch_weight import BatchWeight
from tfdp.training.data.rows import first_tensor, num_rows


def weigh_batches(
    local_batches: list,
    host_group: ProcessGroup,
    num_replicas: int,
    total: tf.Tensor | None,
) -> list[BatchWeight] | None:
    """Compute the weight of each local replica in the sums over a global batch.

    Args:
        local_batches: List of nests, the batch of each local replica.
        host_group: `ProcessGroup` with one member for each worker.
        num_replicas: Int, number of replicas on all workers.
        total: Scalar float32 tensor, the number of rows of the global batch, or `None`
            if workers have to all-reduce it.

    Returns:
        List of `BatchWeight`, whose weights sum to one over all replicas, or `None` if
        there is one replica.
    """
    if num_replicas == 1:
        return None
    firsts = [first_tensor(batch) for batch in local_batches]
    without_data = any(first is None for first in firsts)
    if without_data or have_equal_rows(local_batches, host_group):
        rows = None if without_data else firsts[0].shape[0]
        num_samples = None if rows is None else tf.constant(float(num_replicas * rows))
        equal = tf.constant(1.0 / num_replicas, tf.float64)
        return [BatchWeight(equal, num_samples)] * len(firsts)
    counts = [num_rows(first) for first in firsts]
    if total is None:
        with tf.device(host_group.devices[0]):
            total = Member(host_group, 0).all_reduce(tf.add_n(counts)[tf.newaxis])[0]
    exact = tf.cast(total, tf.float64)
    weights = [tf.math.divide_no_nan(tf.cast(n, tf.float64), exact) for n in counts]
    return [BatchWeight(weight, total) for weight in weights]


def have_equal_rows(local_batches: list, host_group: ProcessGroup) -> bool:
    """Return whether all replicas are known to have the same number of rows.

    They are known from the static shapes of `local_batches`, the batch of each local
    replica, if there is a single worker: `host_group` has one member for each.
    """
    firsts = [first_tensor(batch) for batch in local_batches]
    static = {None if first is None else first.shape[0] for first in firsts}
    return len(static) == 1 and None not in static and host_group.size == 1


class CountedBatch(NamedTuple):
    """Rows of the local replicas, and the number of rows of their global batch.

    Every worker reads the whole global batch before it takes its rows, so the number
    needs no all-reduce.

    Args:
        batch: Per-replica value, the rows of the local replicas.
        num_rows: Scalar float32 tensor, the number of rows of the global batch.
    """

    batch: Any
    num_rows: tf.Tensor


def unpack_counted(args: tuple) -> tuple[tuple, tf.Tensor | None]:
    """Replace a `CountedBatch` among a step's arguments by the batch inside it.

    Args:
        args: Tuple, one item may be a `CountedBatch`.

    Returns:
        Tuple of the plain arguments, and the number of rows of the global batch;
        `None` without a `CountedBatch`.
    """
    plain = tuple(a.batch if isinstance(a, CountedBatch) else a for a in args)
    totals = [a.num_rows for a in args if isinstance(a, CountedBatch)]
    return plain, totals[0] if totals else None
