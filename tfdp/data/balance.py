"""Which part of the global batch each worker gets when it follows their speed."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import tensorflow as tf

from tfdp import _compat
from tfdp.data.weighted_rows import rows_by_weight

# The weight of a worker that has as much as it would without any weights.
EQUAL = 1000
# Times that differ by fewer percent are equal.
_NEGLIGIBLE_PERCENT = 5
# So many measurements pass at most before a move that was taken back is tried again:
# a host may become slow later on.
_MOST_PATIENCE = 8


class Balance:
    """The weights by which rows are given to replicas, the same on all workers.

    Args:
        num_workers: Int.
        num_local: Int, replicas of a worker, which share its rows.
    """

    def __init__(self, num_workers: int, num_local: int) -> None:
        self.of_workers: tuple[int, ...] = (EQUAL,) * num_workers
        self._search = Search()
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

    def follow(self, num_rows: int, microseconds: Sequence[int]) -> None:
        """Moves the weights by what was measured; called by all workers alike.

        Args:
            num_rows: Int, rows of the global batch.
            microseconds: Sequence of ints, what a step took each worker for its own
                part with the weights that are in force.
        """
        rows = self.rows(num_rows)
        self.set(self._search.next(self.of_workers, rows, microseconds))

    def set(self, of_workers: Sequence[int]) -> None:
        """Changes the weights from the next step on; called by all workers alike.

        Args:
            of_workers: Sequence of positive ints.
        """
        self.of_workers = tuple(of_workers)
        self.weights.assign(self._of_replicas())

    def _of_replicas(self) -> list[int]:
        return [w for w in self.of_workers for _ in range(self._num_local)]


class Search:
    """Looks for weights with which a step is shorter, and leaves those with which not.

    Where cores are shared, or times are mostly noise, giving a worker fewer rows need
    not make it faster. A move after which the slowest worker takes longer than it did
    at its best is taken back, and the next one is tried later each time.

    Example:

    >>> search = Search()
    >>> search.next((1000, 1000), [8, 8], [100, 300])
    (1250, 750)
    >>> search.next((1250, 750), [10, 6], [400, 300])
    (1000, 1000)
    """

    def __init__(self) -> None:
        # The time of the slowest worker and the weights with which it was least.
        self._best: tuple[int, tuple[int, ...]] | None = None
        self._patience = 1
        self._num_to_wait = 0

    def next(
        self, weights: tuple[int, ...], rows: Sequence[int], microseconds: Sequence[int]
    ) -> tuple[int, ...]:
        """The weights to try next; the same on all workers, for all tell it the same.

        Args:
            weights: Tuple of ints, those of the workers now.
            rows: Sequence of ints, what each worker has of a batch with them.
            microseconds: Sequence of ints, what a step took each for its own part.
        """
        if self._num_to_wait:
            self._num_to_wait -= 1
            return weights
        slowest = max(microseconds)
        least, best = self._best or (slowest, weights)
        if weights != best and not _is_close(slowest, least):
            self._best = None
            self._num_to_wait = self._patience
            self._patience = min(2 * self._patience, _MOST_PATIENCE)
            return best
        if weights == best or slowest < least:
            self._best = slowest, weights
        return next_weights(weights, rows, microseconds)


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
    if _is_close(max(microseconds), min(microseconds)):
        return tuple(weights)
    speeds = [Fraction(n, max(1, t)) for n, t in zip(rows, microseconds, strict=True)]
    whole, sum_of_speeds = EQUAL * len(weights), sum(speeds)
    aims = [whole * speed / sum_of_speeds for speed in speeds]
    moved = [(now + aim) / 2 for now, aim in zip(weights, aims, strict=True)]
    return tuple(max(1, round(weight)) for weight in moved)


def _is_close(longer: int, shorter: int) -> bool:
    return 100 * longer <= (100 + _NEGLIGIBLE_PERCENT) * max(1, shorter)
