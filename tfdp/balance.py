"""Which part of the global batch each worker gets when it follows their speed."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import tensorflow as tf

from tfdp import _compat
from tfdp.weighted_rows import rows_by_weight

# The weight of a worker that has as much as it would without any weights.
EQUAL = 1000
# Workers whose times differ by fewer percent are equally fast.
_NEGLIGIBLE_PERCENT = 5


class Balance:
    """The weights by which rows are given to replicas, the same on all workers.

    Args:
        num_workers: Int.
        num_local: Int, replicas of a worker, which share its rows.
    """

    def __init__(self, num_workers: int, num_local: int) -> None:
        self.of_workers: tuple[int, ...] = (EQUAL,) * num_workers
        self._num_local = num_local
        # Read by each step, so that all workers change at the same one.
        self.weights = _compat.plain_variable(self._of_replicas(), tf.int64, "CPU:0")

    def rows(self, num_rows: int) -> list[int]:
        """How many rows of a batch each worker has.

        Args:
            num_rows: Int, rows of the global batch.
        """
        rows = rows_by_weight(num_rows, self._of_replicas()).numpy()
        return rows.reshape(-1, self._num_local).sum(axis=1).tolist()

    def set(self, of_workers: Sequence[int]) -> None:
        """Changes the weights from the next step on; called by all workers alike.

        Args:
            of_workers: Sequence of positive ints.
        """
        self.of_workers = tuple(of_workers)
        self.weights.assign(self._of_replicas())

    def _of_replicas(self) -> list[int]:
        return [w for w in self.of_workers for _ in range(self._num_local)]


def next_weights(
    weights: Sequence[int], rows: Sequence[int], microseconds: Sequence[int]
) -> tuple[int, ...]:
    """Weights that go half of the way to where all workers take equally long.

    In whole numbers, so that all workers compute the same.

    Args:
        weights: Sequence of ints, those of the workers now.
        rows: Sequence of ints, what each worker has of a batch with them.
        microseconds: Sequence of ints, what a step takes each for its own part.

    Returns:
        Tuple of ints.

    Example:

    >>> next_weights([1000, 1000], [8, 8], [100, 300])
    (1250, 750)
    >>> next_weights([1500, 500], [12, 4], [150, 152])
    (1500, 500)
    """
    least, most = max(1, min(microseconds)), max(microseconds)
    if 100 * most <= (100 + _NEGLIGIBLE_PERCENT) * least:
        return tuple(weights)
    speeds = [Fraction(n, max(1, t)) for n, t in zip(rows, microseconds, strict=True)]
    whole, sum_of_speeds = EQUAL * len(weights), sum(speeds)
    aims = [whole * speed / sum_of_speeds for speed in speeds]
    moved = [(now + aim) / 2 for now, aim in zip(weights, aims, strict=True)]
    return tuple(max(1, round(weight)) for weight in moved)
