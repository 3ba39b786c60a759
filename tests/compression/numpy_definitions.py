"""The compressors in NumPy, for all replicas at once: what the graphs must do."""

from __future__ import annotations

import numpy as np


class Quantized:
    """`BlockQuantized` with error feedback over some members.

    Args:
        bits: Int.
        block: Int.
    """

    def __init__(self, bits: int, block: int) -> None:
        self._most, self._block = 2 ** (bits - 1) - 1, block
        self._residuals: np.ndarray | None = None
        self._sum_residuals: np.ndarray | None = None

    def rounded(self, rows: np.ndarray) -> np.ndarray:
        """Rounds rows to codes, a scale for each block, and back."""
        missing = -rows.shape[1] % self._block
        blocks = np.pad(rows, [(0, 0), (0, missing)])
        blocks = blocks.reshape(len(rows), -1, self._block)
        scales = abs(blocks).max(axis=2, keepdims=True) * np.float32(1 / self._most)
        divisors = np.where(scales > 1e-37, scales, np.inf).astype(scales.dtype)
        found = np.rint(blocks / divisors) * scales
        return found.reshape(len(rows), -1)[:, : rows.shape[1]]

    def scattered(self, vectors: np.ndarray) -> np.ndarray:
        """Sums vectors of shape `[members, n]`; row i is the slice of member i."""
        size = len(vectors)
        if self._residuals is None:
            self._residuals = np.zeros_like(vectors)
        wanted = vectors + self._residuals
        slices = wanted.reshape(size, size, -1)
        sent = np.stack([self.rounded(rows) for rows in slices])
        self._residuals = wanted - sent.reshape(wanted.shape)
        return sent.sum(axis=0)

    def reduced(self, vectors: np.ndarray) -> np.ndarray:
        """Sums vectors of shape `[members, n]`."""
        size, length = vectors.shape
        missing = -length % (size * self._block)
        sums = self.scattered(np.pad(vectors, [(0, 0), (0, missing)]))
        if self._sum_residuals is None:
            self._sum_residuals = np.zeros_like(sums)
        wanted = sums + self._sum_residuals
        found = self.rounded(wanted)
        self._sum_residuals = wanted - found
        return found.reshape(-1)[:length]


class QuantizedInLevels:
    """The same inside nodes of two members and across them, or only across.

    Args:
        bits: Int.
        block: Int.
        inner: Bool, whether inside nodes too.
    """

    def __init__(self, bits: int, block: int, *, inner: bool) -> None:
        self._inner = [Quantized(bits, block) for _ in range(2)] if inner else None
        self._outer = [Quantized(bits, block) for _ in range(2)]

    def reduced(self, vectors: np.ndarray) -> np.ndarray:
        """Sums vectors of shape `[4, n]`, of an even n."""
        nodes = vectors.reshape(2, 2, -1)
        if self._inner is None:
            slices = nodes.sum(axis=1).reshape(2, 2, -1)  # [node, slice, n / 2]
        else:
            slices = np.stack(
                [own.scattered(n) for own, n in zip(self._inner, nodes, strict=True)]
            )
        sums = [own.reduced(slices[:, index]) for index, own in enumerate(self._outer)]
        if self._inner is not None:
            sums = [self._inner[0].rounded(piece[np.newaxis])[0] for piece in sums]
        return np.concatenate(sums)


class Largest:
    """`TopK` over some members.

    Args:
        ratio: Float.
        momentum: Float.
    """

    def __init__(self, ratio: float, momentum: float = 0.0) -> None:
        self._ratio, self._momentum = ratio, momentum
        self._waiting: np.ndarray | None = None

    def reduced(self, vectors: np.ndarray) -> np.ndarray:
        """Sums vectors of shape `[members, n]`."""
        if self._waiting is None:
            self._waiting = np.zeros_like(vectors)
            self._velocity = np.zeros_like(vectors)
        self._velocity = self._momentum * self._velocity + vectors
        self._waiting = self._waiting + self._velocity
        count = int(np.ceil(self._ratio * vectors.shape[1]))
        total = np.zeros_like(vectors[0])
        for waiting, velocity in zip(self._waiting, self._velocity, strict=True):
            places = np.argsort(-abs(waiting))[:count]
            total[places] += waiting[places]
            waiting[places] = velocity[places] = 0
        return total


class LargestAcrossNodes:
    """`TopK` of each slice of the sums of nodes of two members.

    Args:
        ratio: Float.
    """

    def __init__(self, ratio: float) -> None:
        self._outer = [Largest(ratio) for _ in range(2)]

    def reduced(self, vectors: np.ndarray) -> np.ndarray:
        """Sums vectors of shape `[4, n]`, of an even n."""
        sums = vectors.reshape(2, 2, -1).sum(axis=1)
        slices = sums.reshape(2, 2, -1)  # [node, slice, n / 2]
        return np.concatenate(
            [own.reduced(slices[:, index]) for index, own in enumerate(self._outer)]
        )


class LowRank:
    """`PowerSGD` of one matrix and what follows it.

    Args:
        shape: Pair of ints, of the matrix.
        rank: Int.
        start_step: Int.
    """

    def __init__(self, shape: tuple[int, int], rank: int, start_step: int) -> None:
        self._shape, self._start_step = shape, start_step
        random = np.random.default_rng(0)
        self._right = random.standard_normal(shape[1] * rank).reshape(shape[1], rank)
        self._residuals: np.ndarray | float = 0.0
        self._steps = 0

    def reduced(self, vectors: np.ndarray) -> np.ndarray:
        """Sums vectors of shape `[members, n]`."""
        self._steps += 1
        if self._steps <= self._start_step:
            return vectors.sum(axis=0)
        size = self._shape[0] * self._shape[1]
        wanted = vectors[:, :size].reshape(-1, *self._shape) + self._residuals
        left, _ = np.linalg.qr(sum(m @ self._right for m in wanted))
        own = [m.T @ left for m in wanted]
        right = sum(own)
        self._residuals = np.stack(
            [m - left @ q.T for m, q in zip(wanted, own, strict=True)]
        )
        self._right = right / len(vectors)
        product = (left @ right.T).ravel()
        return np.concatenate([product, vectors[:, size:].sum(axis=0)])
