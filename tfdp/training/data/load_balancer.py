"""Load balancing: division of a batch by weights that follow the workers' speed."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import tensorflow as tf

from tfdp.ground._compat import runtime
from tfdp.training.data.rows import count_of, has_rows, take_rows

# Weights are integers, so that all workers compute the same rows. This is the weight of
# each worker in an equal division, and about the mean of the weights in any other.
EQUAL = 1000
# The step times of equally fast workers vary by a few percent, so times within this
# percentage count as equal.
_NEGLIGIBLE_PERCENT = 5
# The search reverts a change that made steps slower. It tries again after at most this
# many measurements, because the speed of a host may change during a run.
_MAX_PATIENCE = 8


class LoadBalancer:
    """Weights by which rows are divided among replicas, the same on all workers.

    Args:
        num_workers: Int, number of workers.
        num_local: Int, replicas of each worker, which divide its rows equally.
    """

    def __init__(self, num_workers: int, num_local: int) -> None:
        self.worker_weights: tuple[int, ...] = (EQUAL,) * num_workers
        self._search = WeightSearch()
        self._num_local = num_local
        # Each step reads the weights from a variable, so that new weights apply without
        # a new trace, and on all workers from the same step on.
        self.weights = runtime.plain_variable(
            self._replica_weights(), tf.int64, "CPU:0"
        )

    def rows(self, num_rows: int) -> list[int]:
        """Return the number of rows of each worker.

        Args:
            num_rows: Int, rows of the global batch.
        """
        rows = rows_by_weight(num_rows, self._replica_weights()).numpy()
        return rows.reshape(-1, self._num_local).sum(axis=1).tolist()

    def update(self, num_rows: int, microseconds: Sequence[int]) -> None:
        """Update the weights from measured times; all workers pass the same arguments.

        Args:
            num_rows: Int, rows of the global batch.
            microseconds: Sequence of ints, time that each worker spends on its rows in
                a step with the current weights.
        """
        rows = self.rows(num_rows)
        self.set(self._search.next(self.worker_weights, rows, microseconds))

    def set(self, worker_weights: Sequence[int]) -> None:
        """Set the weights for the next steps; all workers pass the same arguments.

        Args:
            worker_weights: Sequence of positive ints.
        """
        self.worker_weights = tuple(worker_weights)
        self.weights.assign(self._replica_weights())

    def _replica_weights(self) -> list[int]:
        """Return the weight of each replica, which is that of its worker."""
        return [w for w in self.worker_weights for _ in range(self._num_local)]


class WeightSearch:
    """Search for the weights with the shortest step.

    Fewer rows do not always make a worker faster, for example with shared cores or
    noisy times. If the slowest worker takes longer than with the best weights so far,
    those weights are restored, and the wait before the next change doubles.

    `next` takes, for each worker, the current weight, its rows in a step, and the time
    in microseconds that it spends on them.

    Example:

    >>> search = WeightSearch()
    >>> search.next((1000, 1000), [8, 8], [100, 300])
    (1250, 750)
    >>> search.next((1250, 750), [10, 6], [400, 300])
    (1000, 1000)
    """

    def __init__(self) -> None:
        # A step takes as long as its slowest worker. The shortest step so far and its
        # weights are kept, to restore these weights after a change for the worse.
        self._best: tuple[int, tuple[int, ...]] | None = None
        self._patience = 1
        self._num_to_wait = 0

    def next(
        self, weights: tuple[int, ...], rows: Sequence[int], microseconds: Sequence[int]
    ) -> tuple[int, ...]:
        """Return the workers' weights to try next; all workers pass the same arguments.

        Args:
            weights: Tuple of ints, the current weights of the workers.
            rows: Sequence of ints, rows of each worker with `weights`.
            microseconds: Sequence of ints, time that each worker spends on its rows in
                a step.
        """
        if self._num_to_wait:
            self._num_to_wait -= 1
            return weights
        slowest = max(microseconds)
        least, best = self._best or (slowest, weights)
        if weights != best and not _is_close(slowest, least):
            self._best = None
            self._num_to_wait = self._patience
            self._patience = min(2 * self._patience, _MAX_PATIENCE)
            return best
        if weights == best or slowest < least:
            self._best = slowest, weights
        return next_weights(weights, rows, microseconds)


def next_weights(
    weights: Sequence[int], rows: Sequence[int], microseconds: Sequence[int]
) -> tuple[int, ...]:
    """Move the weights halfway towards equal times of all workers.

    The arithmetic is exact, so that all workers compute the same weights.

    Args:
        weights: Sequence of ints, the current weights of the workers.
        rows: Sequence of ints, rows of each worker with `weights`.
        microseconds: Sequence of ints, time that each worker spends on its rows in a
            step.

    Returns:
        Tuple of ints, the new weights; `weights` if the times are nearly equal.

    Example:

    >>> next_weights([1000, 1000], [8, 8], [100, 300])
    (1250, 750)
    >>> next_weights([1500, 500], [12, 4], [150, 152])
    (1500, 500)
    """
    if _is_close(max(microseconds), min(microseconds)):
        return tuple(weights)
    speeds = [Fraction(n, max(1, t)) for n, t in zip(rows, microseconds, strict=True)]
    whole, sum_of_speeds = EQUAL * len(weights), sum(speeds)
    aims = [whole * speed / sum_of_speeds for speed in speeds]
    moved = [(now + aim) / 2 for now, aim in zip(weights, aims, strict=True)]
    return tuple(max(1, round(weight)) for weight in moved)


def _is_close(longer: int, shorter: int) -> bool:
    """Return whether two times differ by at most `_NEGLIGIBLE_PERCENT` percent."""
    return 100 * longer <= (100 + _NEGLIGIBLE_PERCENT) * max(1, shorter)


def rows_by_weight(num_rows: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Compute the number of rows of each replica.

    Each replica gets one row; the other rows are divided by weight, with the method of
    the largest remainders. Equal weights give the division of
    `tfdp.training.data.rows`. A batch with fewer rows than replicas gives one row to
    each of the first replicas.

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
    num_left = tf.maximum(num_rows - count, 0)
    # Each replica is guaranteed one row. A replica's quota is its share of all rows by
    # weight. The other rows are divided in proportion to the parts of the quotas above
    # one row, which are multiplied by the sum of the weights here, to be integers.
    excess = tf.maximum(weights * num_rows - tf.reduce_sum(weights), 0)
    total = tf.maximum(tf.reduce_sum(excess), 1)
    # Integer division is exact, so all workers compute the same rows.
    whole, remainders = (
        excess * num_left // total,
        excess * num_left % total,
    )
    # The sort is stable, so among equal remainders the lower rank gets the row, on all
    # workers alike.
    order = tf.argsort(remainders, direction="DESCENDING", stable=True)
    position = tf.cast(tf.math.invert_permutation(order), tf.int64)
    rows = 1 + whole + tf.cast(position < num_left - tf.reduce_sum(whole), tf.int64)
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
        Tuple of nests of the structure of `batch`, one for each of `ranks`.

    Example:

    >>> parts = rows_of_ranks_by_weight(tf.range(8), [0, 1], [1, 3])
    >>> [part.numpy().tolist() for part in parts]
    [[0, 1], [2, 3, 4, 5, 6, 7]]
    """

    def take(tensor: Any, rank: int) -> Any:
        """Return a replica's rows of a tensor; all of a leaf that has no rows."""
        if not has_rows(tensor):
            # Each replica gets a copy: TensorFlow would merge one object for all
            # replicas into a value that they share.
            return tf.identity(tensor) if isinstance(tensor, tf.Tensor) else tensor
        rows = rows_by_weight(count_of(tensor), weights)
        return take_rows(tensor, tf.reduce_sum(rows[:rank]), rows[rank])

    return tuple(
        tf.nest.map_structure(lambda tensor, rank=rank: take(tensor, rank), batch)
        for rank in ranks
    )
