"""Reduction of sparse gradients: by rows, or by the whole table where that is less.

Keras applies `IndexedSlices` element by element. A row that occurs twice, as
the rows of an Embedding do, is then not the same as one row with the sum: Adam
squares each. On one device the rows of the global batch arrive one by one, so
they have to arrive one by one here too, unless the optimizer is linear in the
gradient, as SGD is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.communication.collectives import Member, ProcessGroup, padded_length
from tfdp.ground import _compat
from tfdp.training.reduction.fusion import all_reduce_any_shape


def reduce_indexed_slices(
    slices: tf.IndexedSlices,
    group: ProcessGroup,
    replica: int,
    *,
    may_sum: bool = False,
) -> tf.IndexedSlices:
    """Gather the rows of all replicas, or sum them.

    Args:
        slices: `tf.IndexedSlices` with values `[rows, ...]`.
        group: `ProcessGroup`.
        replica: Int, index of the calling replica among the local ones.
        may_sum: Bool, whether rows of one index may be summed. Then each
            travels once, or the whole table is all-reduced if that moves fewer
            bytes. Defaults to `False`.

    Returns:
        `tf.IndexedSlices` over the rows that any replica touched.
    """
    if group.size == 1:
        return slices
    if not may_sum and are_unique(slices.indices):
        summed = reduce_indexed_slices(slices, group, replica, may_sum=True)
        with tf.device(group.devices[replica]):
            indices, values = _sum_duplicates(summed.indices, summed.values)
        return tf.IndexedSlices(values, indices, slices.dense_shape)
    with tf.device(group.devices[replica]):
        indices, values = slices.indices, slices.values
        if may_sum:
            indices, values = _sum_duplicates(indices, values)
        num_rows = tf.size(indices, out_type=tf.int32)[tf.newaxis]  # [1]
        counts = Member(group, replica).all_gather(num_rows)  # [group.size]

        def gathered() -> tuple[tf.Tensor, tf.Tensor]:
            return _gather_rows(indices, values, counts, group, replica)

        def dense() -> tuple[tf.Tensor, tf.Tensor]:
            return _reduce_table(indices, values, table_rows, group, replica)

        if not may_sum or slices.dense_shape is None:
            indices, values = gathered()
            return tf.IndexedSlices(values, indices, slices.dense_shape)
        table_rows = tf.cast(slices.dense_shape[0], tf.int32)
        # An all-gather receives (size - 1) x longest rows, an all-reduce sends
        # and receives 2 (size - 1) / size x table rows. The counts are those
        # of all replicas, so that all take the same branch.
        rows_are_fewer = group.size * tf.reduce_max(counts) <= 2 * table_rows
        indices, values = tf.cond(rows_are_fewer, gathered, dense)
        return tf.IndexedSlices(values, indices, slices.dense_shape)


def are_unique(indices: tf.Tensor) -> bool:
    """True if no index can occur twice in any batch, by how they are made.

    Indices that Python knows are those of positions in a sample, or of the samples
    of a batch of known size, which come again in each sample.

    Args:
        indices: Integer tensor, symbolic; of an eager one nothing is known.
    """
    source = _source(indices)
    if tf.is_symbolic_tensor(source) and _compat.marker_of(source.op) == _UNIQUE:
        return True
    if not tf.is_symbolic_tensor(source):
        is_known = source is not indices and source is not None
        return is_known and _has_no_duplicates(source)
    if source.op.type in _UNIQUE_OPS:
        return source.value_index == 0
    value = tf.get_static_value(source)
    return value is not None and _has_no_duplicates(value)


def marked_unique(indices: tf.Tensor) -> tf.Tensor:
    """Return indices of which it is known that none occurs twice."""
    return _compat.marked(indices, _UNIQUE)


_UNIQUE = "unique"
# The first result of these holds nothing twice.
_UNIQUE_OPS = ("Range", "Unique", "UniqueV2")
# Their result holds elements of their first input, none of them more often.
_SELECTING_OPS = (
    *("Reshape", "Identity", "Cast", "ExpandDims", "Squeeze"),
    *("StridedSlice", "Slice"),
)


def _source(tensor: Any) -> Any:
    """Trace a tensor back to the one whose elements it holds, all or some."""
    while tf.is_symbolic_tensor(tensor):
        op = tensor.op
        if _compat.marker_of(op) == _UNIQUE:
            return tensor
        if op.type in _SELECTING_OPS:
            tensor = op.inputs[0]
        elif _wraps_negative(op):
            tensor = op.inputs[2]
        elif op.type == "Placeholder":
            outer = [o for o, i in getattr(tensor.graph, "captures", ()) if i is tensor]
            if not outer:
                return tensor
            tensor = outer[0]
        else:
            return tensor
    return tensor


def _wraps_negative(op: Any) -> bool:
    """True for the last operation of Keras's `where(i < 0, i + size, i)`."""
    if op.type != "SelectV2":
        return False
    wrapped = op.inputs[1].op
    return wrapped.type == "AddV2" and wrapped.inputs[0] is op.inputs[2]


def _has_no_duplicates(values: Any) -> bool:
    flat = np.asarray(values).ravel()
    return len(np.unique(flat)) == flat.size


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
    """Gather every replica's rows, padded to one length for the collective."""
    length, size = padded_length(tf.reduce_max(counts))
    missing = length - tf.size(indices, out_type=tf.int32)
    padding = [[0, missing]] + [[0, 0]] * (values.shape.rank - 1)
    member = Member(group, replica)
    all_values = member.all_gather(tf.pad(values, padding), size=size)
    all_indices = member.all_gather(tf.pad(indices, [[0, missing]]), size=size)
    valid = tf.reshape(tf.sequence_mask(counts, length), [-1])  # [size * length]
    return tf.boolean_mask(all_indices, valid), tf.boolean_mask(all_values, valid)


def _reduce_table(
    indices: tf.Tensor,
    values: tf.Tensor,
    table_rows: tf.Tensor,
    group: ProcessGroup,
    replica: int,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Reduce the whole table and, beside each row, how many replicas touched it."""
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
