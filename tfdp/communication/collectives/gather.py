"""All-gather of rows in rank order, with unequal numbers of rows per replica."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import Member, ProcessGroup, padded_length
from tfdp.communication.coordination.progress import progress

# Collectives do not support the first dtype of each pair, so its elements are sent in
# the second one, a wider dtype that has all their values.
_COLLECTIVE_DTYPES = {
    tf.bool: tf.int32,
    tf.int8: tf.int32,
    tf.int16: tf.int32,
    tf.uint8: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
}


def gather_rows(
    tensor: tf.Tensor, axis: Any, group: ProcessGroup, replica: int, rank: int
) -> tf.Tensor:
    """All-gather tensors of unequal length along an axis.

    Args:
        tensor: Tensor whose other dimensions agree on every replica.
        axis: Int or scalar integer tensor, the axis to concatenate.
        group: `ProcessGroup`.
        replica: Int, index of the calling replica among the local ones.
        rank: Int, index of the calling replica among all of them.

    Returns:
        The concatenation, ordered by rank.

    Raises:
        ValueError: If `axis` is static and not one of the tensor's axes.
    """
    with tf.device(group.devices[replica]):
        rows, restore = _axis_first(tensor, axis)
        joined, _ = gather_first_axis(rows, group, replica, rank)
        return restore(joined)


def gather_first_axis(
    rows: tf.Tensor, group: ProcessGroup, replica: int, rank: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """All-gather tensors of unequal length along the first axis.

    Args:
        rows: Tensor whose other dimensions agree on every replica.
        group: `ProcessGroup`.
        replica: Int, index of the calling replica among the local ones.
        rank: Int, index of the calling replica among all of them.

    Returns:
        Tuple of the concatenation, ordered by rank, and the size of each rank's tensor
        (rows times elements of a row), `[group.size]`, int32.
    """
    if rows.dtype == tf.string:
        return _gather_strings(rows, group, replica, rank)
    member = Member(group, replica)
    progress.record_reduction(f"gather {rows.dtype.name} {rows.shape[1:]}")
    with tf.device(group.devices[replica]):
        shape = tf.shape(rows)
        flat = tf.reshape(
            tf.cast(rows, _COLLECTIVE_DTYPES.get(rows.dtype, rows.dtype)), [-1]
        )
        # TensorFlow orders the members of a group by device name, with task 10 before
        # task 2, so each replica's rank is gathered along with its length; and so is
        # its number of rows, which a row without elements does not show.
        own = tf.stack([rank, tf.size(flat), shape[0]])[tf.newaxis]
        table = member.all_gather(own)
        counts = table[:, 1]
        length, size = padded_length(tf.reduce_max(counts))
        sent = tf.pad(flat, [[0, length - tf.size(flat)]])
        gathered = member.all_gather(sent, size=size)
        padded = tf.reshape(gathered, [group.size, length])
        by_rank = tf.argsort(table[:, 0])
        valid = tf.sequence_mask(tf.gather(counts, by_rank), length)
        joined = tf.boolean_mask(tf.gather(padded, by_rank), valid)
        num_rows = tf.reduce_sum(table[:, 2:], axis=0)  # [1]
        joined = tf.reshape(joined, tf.concat([num_rows, shape[1:]], axis=0))
        joined = tf.cast(joined, rows.dtype)
        if rows.shape.rank is not None:
            joined = tf.ensure_shape(joined, [None, *rows.shape[1:]])
        return joined, tf.gather(counts, by_rank)


def _gather_strings(
    rows: tf.Tensor, group: ProcessGroup, replica: int, rank: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """All-gather strings as bytes and lengths, since no collective carries them.

    Arguments are those of `gather_first_axis`, and so is the result: the concatenation,
    and the number of strings of each rank.
    """
    flat = tf.reshape(rows, [-1])
    own_bytes = tf.io.decode_raw(tf.strings.reduce_join(flat), tf.uint8)
    own_lengths = tf.reshape(tf.strings.length(flat), tf.shape(rows))
    lengths, counts = gather_first_axis(own_lengths, group, replica, rank)
    joined, _ = gather_first_axis(own_bytes, group, replica, rank)
    letters = tf.constant([bytes([value]) for value in range(256)])
    text = tf.strings.reduce_join(tf.gather(letters, tf.cast(joined, tf.int32)))
    sizes = tf.reshape(lengths, [-1])
    begins = tf.cumsum(sizes, exclusive=True)
    strings = tf.strings.substr(tf.fill(tf.shape(sizes), text), begins, sizes)
    strings = tf.reshape(strings, tf.shape(lengths))
    return tf.ensure_shape(strings, lengths.shape), counts


def _axis_first(tensor: tf.Tensor, axis: Any) -> tuple:
    """Move `axis` to the front; return the tensor and a function that moves it back.

    Returns:
        Tuple of the transposed tensor, and a function from a gathered tensor to the
        same tensor with its first axis moved back to `axis`.

    Raises:
        ValueError: If `axis` is static and not one of the tensor's axes.
    """
    if isinstance(axis, int) and axis == 0:
        return tensor, lambda joined: joined
    known, dimensions = tf.get_static_value(axis), tensor.shape.rank
    if None not in (known, dimensions) and not -dimensions <= known < dimensions:
        raise ValueError(
            f"`axis` must be one of the {dimensions} axes of the tensor to gather. "
            f"Received: {known}"
        )
    rank = tf.rank(tensor)
    axis = tf.convert_to_tensor(axis)
    axis += tf.where(axis < 0, tf.cast(rank, axis.dtype), 0)
    before = tf.range(axis)
    order = tf.concat([[axis], before, tf.range(axis + 1, rank)], 0)
    inverse = tf.concat([before + 1, [0], tf.range(axis + 1, rank)], 0)
    return (
        tf.transpose(tensor, order),
        lambda joined: tf.transpose(joined, inverse),
    )
