"""Division of a global batch among replicas by weight."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp.data.rows import count_of, has_rows, take_rows


def rows_by_weight(num_rows: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Compute the number of rows of each replica.

    Each gets one; the others go by weight, in whole rows by largest remainder. Equal
    weights make the parts of `tfdp.data.rows`. A batch of fewer rows than replicas has
    one for each of the first.

    Args:
        num_rows: Scalar int64 tensor, the rows of the batch.
        weights: Tensor of shape `[num_replicas]`, int64, positive. The square of the
            rows times the sum of the weights must stay below 2 ** 63.

    Returns:
        Tensor of shape `[num_replicas]`, int64, which sums to `num_rows`.

    Example:

    >>> rows_by_weight(10, [1000, 3000]).numpy().tolist()
    [3, 7]
    >>> rows_by_weight(10, [1, 9999, 10000]).numpy().tolist()
    [1, 4, 5]

    Source: largest remainders are the method of Hamilton and Hare.
    """
    num_rows = tf.cast(num_rows, tf.int64)
    weights = tf.cast(weights, tf.int64)
    count = tf.size(weights, tf.int64)
    left = tf.maximum(num_rows - count, 0)
    # By how much a replica's quota is above the row that it has in any case.
    above = tf.maximum(weights * num_rows - tf.reduce_sum(weights), 0)
    total = tf.maximum(tf.reduce_sum(above), 1)
    whole, rest = above * left // total, above * left % total  # [num_replicas]
    # Of equal remainders the first one comes first.
    order = tf.argsort(rest, direction="DESCENDING", stable=True)
    place = tf.cast(tf.math.invert_permutation(order), tf.int64)
    rows = 1 + whole + tf.cast(place < left - tf.reduce_sum(whole), tf.int64)
    one_each = tf.cast(tf.range(count) < num_rows, tf.int64)
    return tf.where(num_rows < count, one_each, rows)


def rows_of_ranks_by_weight(batch: Any, ranks: list[int], weights: tf.Tensor) -> tuple:
    """Take the rows of some replicas from a nest of batched tensors.

    Args:
        batch: Nest of tensors, ragged or sparse ones too, with the rows along
            the first axis; scalars and `None` are given to every replica.
        ranks: List of ints, the replicas.
        weights: Tensor of shape `[num_replicas]`, int64, see `rows_by_weight`.

    Returns:
        Tuple of such nests, one for each of `ranks`.

    Example:

    >>> parts = rows_of_ranks_by_weight(tf.range(8), [0, 1], [1, 3])
    >>> [part.numpy().tolist() for part in parts]
    [[0, 1], [2, 3, 4, 5, 6, 7]]
    """

    def take(tensor: Any, rank: int) -> Any:
        if not has_rows(tensor):
            # One object for all replicas would not be a value of each.
            return tf.identity(tensor) if isinstance(tensor, tf.Tensor) else tensor
        rows = rows_by_weight(count_of(tensor), weights)
        return take_rows(tensor, tf.reduce_sum(rows[:rank]), rows[rank])

    return tuple(
        tf.nest.map_structure(lambda tensor, rank=rank: take(tensor, rank), batch)
        for rank in ranks
    )
