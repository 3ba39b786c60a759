"""Reduction of sparse gradients: by rows, or as a dense table if that is smaller.

Keras applies `IndexedSlices` row by row. Two rows with the same index, as an
Embedding has them, do not have the effect of one row with their sum: Adam squares
each. On one device the rows of the global batch are not summed, so they must not be
summed here either, unless the optimizer is linear in the gradient, as SGD is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.communication.collectives import Member, ProcessGroup, padded_length
from tfdp.ground._compat import programs
from tfdp.training.reduction.fusion import all_reduce_any_shape


def reduce_indexed_slices(
    slices: tf.IndexedSlices,
    group: ProcessGroup,
    replica: int,
    *,
    may_sum: bool = False,
) -> tf.IndexedSlices:
    """Gather the rows of a sparse gradient from all replicas, or sum them.

    Args:
        slices: `tf.IndexedSlices` with values `[rows, ...]`.
        group: `ProcessGroup` of the replicas.
        replica: Int, index of the calling replica among the local ones.
        may_sum: Bool, whether rows with the same index may be summed. Then each
            replica sends an index only once, or the gradient is all-reduced as a
            dense table if that sends fewer bytes. Defaults to `False`.

    Returns:
        `tf.IndexedSlices` with the rows of all replicas, the same on each. Rows with
        the same index, which may remain, add up.
    """
    if group.size == 1:
        return slices
    if not may_sum and are_unique(slices.indices):
        summed = reduce_indexed_slices(slices, group, replica, may_sum=True)
        with tf.device(group.devices[replica]):
            indices, values = sum_duplicates(summed.indices, summed.values)
        return tf.IndexedSlices(values, indices, slices.dense_shape)
    with tf.device(group.devices[replica]):
        indices, values = slices.indices, slices.values
        if may_sum:
            indices, values = sum_duplicates(indices, values)
        num_rows = tf.size(indices, out_type=tf.int32)[tf.newaxis]
        counts = Member(group, replica).all_gather(num_rows)

        def gathered() -> tuple[tf.Tensor, tf.Tensor]:
            """All-gather the rows; return the indices and values of all replicas."""
            return _gather_rows(indices, values, counts, group, replica)

        def dense() -> tuple[tf.Tensor, tf.Tensor]:
            """All-reduce the rows as a dense table.

            Returns:
                Tuple of the indices and the values of the rows that any replica has.
            """
            return _reduce_table(indices, values, table_rows, group, replica)

        if not may_sum or slices.dense_shape is None:
            indices, values = gathered()
            return tf.IndexedSlices(values, indices, slices.dense_shape)
        table_rows = tf.cast(slices.dense_shape[0], tf.int32)
        # An all-gather moves (size - 1) times the largest count of rows, an all-reduce
        # 2 (size - 1) / size times the rows of the table: the smaller one runs. All
        # replicas have gathered the same counts, so they take the same branch.
        rows_are_fewer = group.size * tf.reduce_max(counts) <= 2 * table_rows
        indices, values = tf.cond(rows_are_fewer, gathered, dense)
        return tf.IndexedSlices(values, indices, slices.dense_shape)


def are_unique(indices: tf.Tensor) -> bool:
    """Return whether no index can occur twice in any batch.

    It is known for the results of some operations, and for constants, such as the
    positions within a sample. The result is `False` if it is not known.

    Args:
        indices: Integer tensor. The result is `False` for an eager one.
    """
    source = _source(indices)
    if tf.is_symbolic_tensor(source) and programs.marker_of(source.op) == _UNIQUE:
        return True
    if not tf.is_symbolic_tensor(source):
        is_known = source is not indices and source is not None
        return is_known and _has_no_duplicates(source)
    if source.op.type in _UNIQUE_OPS:
        return source.value_index == 0
    value = tf.get_static_value(source)
    return value is not None and _has_no_duplicates(value)


def marked_unique(indices: tf.Tensor) -> tf.Tensor:
    """Return the same indices as a tensor for which `are_unique` returns `True`.

    An eager tensor is not marked.
    """
    return programs.marked(indices, _UNIQUE)


# `are_unique` recognizes an operation whose result has no duplicates by this marker,
# since most graphs of indices do not show whether they are unique.
_UNIQUE = "unique"
# The first result of these operations has no duplicates, whatever their inputs.
_UNIQUE_OPS = ("Range", "Unique", "UniqueV2")
# The result of these operations has elements of their first input, each at most as
# often as the input, so it has no duplicates if the input has none.
_SELECTING_OPS = (
    *("Reshape", "Identity", "Cast", "ExpandDims", "Squeeze"),
    *("StridedSlice", "Slice"),
)


def _source(tensor: Any) -> Any:
    """Return the tensor from which the elements of a tensor were selected.

    Slices, reshapes, casts, captures and Keras's wrapping of negative indices are
    traced back. Without any of them the result is `tensor` itself.

    Args:
        tensor: Integer tensor.

    Returns:
        Tensor, in the same graph or in one around it, or an eager tensor.
    """
    while tf.is_symbolic_tensor(tensor):
        op = tensor.op
        if programs.marker_of(op) == _UNIQUE:
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
    """Return whether an operation is the `where` of `where(i < 0, i + size, i)`.

    Keras converts negative indices by this expression.
    """
    if op.type != "SelectV2":
        return False
    wrapped = op.inputs[1].op
    return wrapped.type == "AddV2" and wrapped.inputs[0] is op.inputs[2]


def _has_no_duplicates(values: Any) -> bool:
    """Return whether no element occurs twice in an array."""
    flat = np.asarray(values).ravel()
    return len(np.unique(flat)) == flat.size


def sum_duplicates(
    indices: tf.Tensor, values: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sum the rows of a sparse gradient that have the same index.

    Returns:
        Tuple of the unique indices, and the sum of the rows of each.
    """
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
    """All-gather every replica's rows, padded to one length for the collective.

    Args:
        indices: Integer tensor of shape `[rows]`.
        values: Tensor of shape `[rows, ...]`.
        counts: Int32 tensor of shape `[group.size]`, number of rows of each replica.
        group: `ProcessGroup` of the replicas.
        replica: Int, index of the calling replica among the local ones.

    Returns:
        Tuple of the indices and the values of all rows.
    """
    length, size = padded_length(tf.reduce_max(counts))
    missing = length - tf.size(indices, out_type=tf.int32)
    padding = [[0, missing]] + [[0, 0]] * (values.shape.rank - 1)
    member = Member(group, replica)
    all_values = member.all_gather(tf.pad(values, padding), size=size)
    all_indices = member.all_gather(tf.pad(indices, [[0, missing]]), size=size)
    # Each replica has sent `length` rows. Those beyond its count are padding, and are
    # left out.
    valid = tf.reshape(tf.sequence_mask(counts, length), [-1])
    return tf.boolean_mask(all_indices, valid), tf.boolean_mask(all_values, valid)


def _reduce_table(
    indices: tf.Tensor,
    values: tf.Tensor,
    table_rows: tf.Tensor,
    group: ProcessGroup,
    replica: int,
) -> tuple[tf.Tensor, tf.Tensor]:
    """All-reduce a sparse gradient as a dense table; return rows that any replica has.

    An additional column counts the rows that were added to each row of the table.

    Args:
        indices: Integer tensor of shape `[rows]`.
        values: Tensor of shape `[rows, ...]`.
        table_rows: Int32 scalar, number of rows of the table.
        group: `ProcessGroup` of the replicas.
        replica: Int, index of the calling replica among the local ones.

    Returns:
        Tuple of the indices and the values of the rows that any replica has.
    """
    row_size = tf.reduce_prod(tf.shape(values)[1:])
    flat = tf.reshape(values, [-1, row_size])
    touched = tf.concat([flat, tf.ones_like(flat[:, :1])], axis=1)
    table = tf.math.unsorted_segment_sum(touched, indices, table_rows)
    total = all_reduce_any_shape(tf.reshape(table, [-1]), group, replica)
    total = tf.reshape(total, [table_rows, row_size + 1])
    rows = tf.where(total[:, -1] > 0)[:, 0]
    shape = tf.concat([[-1], tf.shape(values)[1:]], axis=0)
    reduced = tf.reshape(tf.gather(total[:, :-1], rows), shape)
    # A replica whose part of the gradient is zeros knows its number of rows: none.
    reduced = tf.ensure_shape(reduced, [None, *values.shape[1:]])
    return tf.cast(rows, indices.dtype), reduced
