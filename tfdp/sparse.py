"""Sparse gradients, reduced in whichever form moves fewer bytes."""

from __future__ import annotations

import tensorflow as tf

from tfdp.collectives import ProcessGroup, all_gather, padded_length
from tfdp.fusion import all_reduce_any_shape


def reduce_indexed_slices(
    slices: tf.IndexedSlices,
    group: ProcessGroup,
    replica: int,
    *,
    channel: int = 0,
) -> tf.IndexedSlices:
    """Sums `IndexedSlices` over the group.

    Rows that one replica touched several times are summed before they travel.
    Then either the rows are gathered, or the whole table is all-reduced,
    whichever moves fewer bytes; the choice is made from the gathered row
    counts, so that all replicas make the same one.

    Args:
        slices: `tf.IndexedSlices` with values `[rows, ...]`.
        group: `ProcessGroup`.
        replica: Int, index of the calling replica among the local ones.
        channel: Int, the chain of the launch order. Defaults to `0`.

    Returns:
        `tf.IndexedSlices` over the rows that any replica touched, each once.
    """
    with tf.device(group.devices[replica]):
        indices, values = _sum_duplicates(slices.indices, slices.values)
        if group.size == 1:
            return tf.IndexedSlices(values, indices, slices.dense_shape)

        num_rows = tf.size(indices, out_type=tf.int32)[tf.newaxis]  # [1]
        counts = all_gather(num_rows, group, replica, channel=channel)  # [size]
        longest = tf.reduce_max(counts)

        def gathered() -> tuple[tf.Tensor, tf.Tensor]:
            return _gather_rows(indices, values, counts, group, replica)

        def dense() -> tuple[tf.Tensor, tf.Tensor]:
            return _reduce_table(indices, values, table_rows, group, replica)

        if slices.dense_shape is None:
            indices, values = gathered()
            return tf.IndexedSlices(values, indices)
        table_rows = tf.cast(slices.dense_shape[0], tf.int32)
        # A ring all-gather receives (size - 1) x longest rows, an all-reduce
        # sends and receives 2 (size - 1) / size x table rows.
        rows_are_fewer = group.size * longest <= 2 * table_rows
        indices, values = tf.cond(rows_are_fewer, gathered, dense)
        return tf.IndexedSlices(values, indices, slices.dense_shape)


def _sum_duplicates(
    indices: tf.Tensor, values: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    unique, position = tf.unique(indices)
    summed = tf.math.unsorted_segment_sum(values, position, tf.size(unique))
    return unique, summed


def _gather_rows(
    indices: tf.Tensor,
    values: tf.Tensor,
    counts: tf.Tensor,
    group: ProcessGroup,
    replica: int,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Every replica's rows, padded to one length for the collective."""
    length, size = padded_length(tf.reduce_max(counts))
    missing = length - tf.size(indices, out_type=tf.int32)
    padding = [[0, missing]] + [[0, 0]] * (values.shape.rank - 1)
    all_values = all_gather(tf.pad(values, padding), group, replica, size=size)
    all_indices = all_gather(
        tf.pad(indices, [[0, missing]]), group, replica, size=size
    )
    valid = tf.reshape(tf.sequence_mask(counts, length), [-1])  # [size * length]
    return _sum_duplicates(
        tf.boolean_mask(all_indices, valid), tf.boolean_mask(all_values, valid)
    )


def _reduce_table(
    indices: tf.Tensor,
    values: tf.Tensor,
    table_rows: tf.Tensor,
    group: ProcessGroup,
    replica: int,
) -> tuple[tf.Tensor, tf.Tensor]:
    """The whole table and, beside each row, how many replicas touched it."""
    row_size = tf.reduce_prod(tf.shape(values)[1:])
    flat = tf.reshape(values, [-1, row_size])  # [rows, row_size]
    touched = tf.concat([flat, tf.ones_like(flat[:, :1])], axis=1)
    table = tf.math.unsorted_segment_sum(touched, indices, table_rows)
    total = all_reduce_any_shape(tf.reshape(table, [-1]), group, replica)
    total = tf.reshape(total, [table_rows, row_size + 1])
    rows = tf.where(total[:, -1] > 0)[:, 0]
    shape = tf.concat([[-1], tf.shape(values)[1:]], axis=0)
    reduced = tf.reshape(tf.gather(total[:, :-1], rows), shape)
    return tf.cast(rows, indices.dtype), tf.ensure_shape(reduced, values.shape)
