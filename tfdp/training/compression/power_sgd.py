"""`PowerSGD`: gradients of matrices as products of two low-rank matrices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.ground.arguments import checked_integer
from tfdp.training.compression.compressor import Compressor, GradientBucket, State
from tfdp.training.compression.replica_group import ReplicaGroup

# A matrix is compressed only if its two factors have at most this share of its
# elements, so that compression saves at least half of the matrix's bytes.
_LARGEST_SHARE = 0.5
# All replicas draw the initial factors with this seed, since the factors must be equal.
_SEED = 0


@dataclasses.dataclass(frozen=True)
class _Matrix:
    """Range and shape of a matrix in a bucket, and the rank of its factors.

    Args:
        begin: Int, position of its first element in the bucket.
        num_rows: Int, number of rows.
        num_columns: Int, number of columns.
        rank: Int, number of columns of the factors P and Q.
    """

    begin: int
    num_rows: int
    num_columns: int
    rank: int

    @property
    def size(self) -> int:
        """Int, number of elements of the matrix."""
        return self.num_rows * self.num_columns

    @property
    def stop(self) -> int:
        """Int, position in the bucket after the last element of the matrix."""
        return self.begin + self.size


@dataclasses.dataclass(frozen=True)
class PowerSGD(Compressor):
    """Low-rank gradients of matrices, by a step of power iteration.

    The gradient of a variable is reshaped to a matrix M, split between the axes where
    the factors are smallest. It travels as P = M Q and then, after P is made
    orthonormal, as Q = M^T P: two all-reduces of thin matrices, by the algorithm that
    is chosen for the bucket. The next step begins with this Q. The error M - P Q^T of
    each replica is added to its next gradient. Vectors, and matrices that would shrink
    to more than half their size, are not compressed.

    Args:
        rank: Int, number of columns of P and Q. Defaults to 4.
        start_step: Int, number of updates at the beginning that are not compressed.
            Defaults to 10.

    Raises:
        ValueError: If an argument is not an integer, or too small.

    Example:

    >>> PowerSGD(rank=2)
    PowerSGD(rank=2, start_step=10)

    Source: Vogels et al. 2019, https://arxiv.org/abs/1905.13727.
    """

    rank: int = 4
    start_step: int = 10

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", checked_integer("rank", self.rank, 1))
        start_step = checked_integer("start_step", self.start_step, 0)
        object.__setattr__(self, "start_step", start_step)

    def state(self, bucket: GradientBucket) -> State:
        """Return the initial state: zero errors, random factors Q, and zero updates."""
        matrices = self._matrices(bucket)
        count = sum(matrix.size for matrix in matrices)
        return {
            "residual": np.zeros([count], bucket.dtype),
            "factors": np.concatenate(
                [np.zeros([0], bucket.dtype)]
                + [_initial_factors(matrix).astype(bucket.dtype) for matrix in matrices]
            ),
            "steps": np.zeros([], "int64"),
        }

    def reduce(
        self, bucket: GradientBucket, state: State, group: ReplicaGroup
    ) -> tuple[tf.Tensor, State]:
        """Sum a bucket over the replicas, with low-rank factors of its matrices.

        It takes two all-reduces; or one, without compression, in the first `start_step`
        updates and for a bucket without matrices.

        Args:
            bucket: `GradientBucket`.
            state: Dict of tensors: `"residual"`, this replica's errors; `"factors"`,
                the Q of each matrix; `"steps"`, the number of updates so far.
            group: `ReplicaGroup`.

        Returns:
            Tuple of the sum, a tensor like `bucket.flat` that is equal on all replicas,
            and a dict, the new state.
        """
        matrices = self._matrices(bucket)
        if not matrices:
            return group.all_reduce(bucket.flat), state
        residual, factors, steps = (
            state[name] for name in ("residual", "factors", "steps")
        )

        def plain() -> list[tf.Tensor]:
            """Return the uncompressed sum, and the unchanged residual and factors."""
            return [group.all_reduce(bucket.flat), residual, factors]

        def compressed() -> list[tf.Tensor]:
            """Sum the bucket with low-rank factors of its matrices.

            Returns:
                List of the sum, this replica's new residual and the new factors.
            """
            return _reduce(bucket, matrices, residual, factors, group)

        if self.start_step:
            # The number of updates is equal on all replicas, so all of them take the
            # same branch and run the same collectives.
            flat, residual, factors = tf.cond(
                steps < self.start_step, plain, compressed
            )
        else:
            flat, residual, factors = compressed()
        return flat, {"residual": residual, "factors": factors, "steps": steps + 1}

    def wire_ratio(self, bucket: GradientBucket) -> float:
        """Return the bytes relative to an all-reduce, see `Compressor.wire_ratio`.

        They are those of the factors, and of the gradients that are not compressed.
        """
        matrices = self._matrices(bucket)
        saved = sum(
            matrix.size - matrix.rank * (matrix.num_rows + matrix.num_columns)
            for matrix in matrices
        )
        return 1 - saved / bucket.size

    def __str__(self) -> str:
        return f"PowerSGD of rank {self.rank}"

    def _matrices(self, bucket: GradientBucket) -> list[_Matrix]:
        """Return the gradients of a bucket that are compressed as matrices."""
        return list(self._find_matrices(bucket))

    def _find_matrices(self, bucket: GradientBucket) -> Iterator[_Matrix]:
        """Yield the gradients of a bucket that are compressed as matrices, in order."""
        begin = 0
        for entry in bucket.entries:
            size = entry.num_elements
            rows, columns = _rows_and_columns(entry.shape)
            rank = min(self.rank, rows, columns)
            if rank * (rows + columns) <= _LARGEST_SHARE * size:
                yield _Matrix(begin, rows, columns, rank)
            begin += size


def _rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """Split the axes of a variable into rows and columns with the smallest sum.

    The result is the number of rows, 1 for a vector, and the number of columns.

    Example: the projection of an attention layer to its heads.

    >>> _rows_and_columns((512, 8, 64))
    (512, 512)
    """
    cuts = [
        (math.prod(shape[:axis]), math.prod(shape[axis:]))
        for axis in reversed(range(1, len(shape)))
    ]
    return min(cuts, key=sum, default=(1, math.prod(shape)))


def _initial_factors(matrix: _Matrix) -> np.ndarray:
    """Return random elements of the first Q of a matrix, the same on all replicas."""
    random = np.random.default_rng(_SEED)
    return random.standard_normal(matrix.num_columns * matrix.rank)


def _reduce(
    bucket: GradientBucket,
    matrices: list[_Matrix],
    residual: tf.Tensor,
    factors: tf.Tensor,
    group: ReplicaGroup,
) -> list[tf.Tensor]:
    """Sum a bucket over the replicas, its matrices by their low-rank factors.

    Args:
        bucket: `GradientBucket`.
        matrices: List of `_Matrix`.
        residual: Tensor, the errors of all matrices end to end.
        factors: Tensor, the factors Q of all matrices end to end.
        group: `ReplicaGroup`.

    Returns:
        List of the sum, the new residual and the new factors.
    """
    flat: Any = bucket.flat
    rests = _ranges_between(matrices, bucket.size)
    errors = tf.split(residual, [matrix.size for matrix in matrices])
    wanted = [
        tf.reshape(flat[m.begin : m.stop] + error, [m.num_rows, m.num_columns])
        for m, error in zip(matrices, errors, strict=True)
    ]
    sizes = [matrix.num_columns * matrix.rank for matrix in matrices]
    right = [
        tf.reshape(part, [matrix.num_columns, matrix.rank])
        for matrix, part in zip(matrices, tf.split(factors, sizes), strict=True)
    ]
    left = [tf.matmul(m, q) for m, q in zip(wanted, right, strict=True)]
    *left, rest = _sum_together(
        [*left, tf.concat([flat[a:b] for a, b in rests] + [flat[:0]], axis=0)], group
    )
    # `qr` of a matrix uses a single thread, so its results are equal on all replicas.
    left = [tf.linalg.qr(p).q for p in left]
    local = [
        tf.matmul(m, p, transpose_a=True) for m, p in zip(wanted, left, strict=True)
    ]
    sums = _sum_together(local, group)
    errors = [
        m - tf.matmul(p, q, transpose_b=True)
        for m, p, q in zip(wanted, left, local, strict=True)
    ]
    products = [
        tf.matmul(p, q, transpose_b=True) for p, q in zip(left, sums, strict=True)
    ]
    means = [total / group.size for total in sums]
    parts = _in_order(matrices, products, rests, rest)
    return [_flattened(parts), _flattened(errors), _flattened(means)]


def _ranges_between(matrices: list[_Matrix], size: int) -> list[tuple[int, int]]:
    """Return the uncompressed ranges of a bucket: all that is not in its matrices.

    There is one before each matrix and one after the last, which may be empty.

    Returns:
        List of pairs of ints: first position, and the one after the last.
    """
    begins = [0, *(matrix.stop for matrix in matrices)]
    stops = [*(matrix.begin for matrix in matrices), size]
    return list(zip(begins, stops, strict=True))


def _in_order(
    matrices: list[_Matrix],
    products: list[tf.Tensor],
    rests: list[tuple[int, int]],
    rest: tf.Tensor,
) -> list[tf.Tensor]:
    """Return a bucket's reduced parts in order: uncompressed ranges and matrices.

    Args:
        matrices: List of `_Matrix`.
        products: List of tensors, the reduced gradients of the matrices.
        rests: List of ranges, from `_ranges_between`.
        rest: Tensor, the reduced elements of all these ranges end to end.
    """
    parts = tf.split(rest, [stop - begin for begin, stop in rests])
    ordered = [parts[0]]
    for product, part in zip(products, parts[1:], strict=True):
        ordered += [product, part]
    return ordered


def _sum_together(tensors: list[tf.Tensor], group: ReplicaGroup) -> list[tf.Tensor]:
    """Sum each of several tensors over the replicas, by one all-reduce for all.

    Returns:
        List of tensors like `tensors`.
    """
    total = group.all_reduce(_flattened(tensors))
    parts = tf.split(total, [tensor.shape.num_elements() for tensor in tensors])
    return [
        tf.reshape(part, tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def _flattened(tensors: list[tf.Tensor]) -> tf.Tensor:
    """Return one flat tensor with the elements of all tensors."""
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)
