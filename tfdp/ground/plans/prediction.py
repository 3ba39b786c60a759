"""Prediction of a step: seconds of communication, and the exposed part of it."""

from __future__ import annotations

import dataclasses

# The backward pass takes about twice as long as the forward pass, so this is its
# fraction of a step's compute time.
BACKWARD_FRACTION = 2 / 3


@dataclasses.dataclass(frozen=True)
class BucketPrediction:
    """Predicted seconds of one bucket.

    Args:
        num_bytes: Int, size of the bucket's gradients.
        seconds: Float, duration of the bucket's all-reduce.
    """

    num_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class StepPrediction:
    """Predicted seconds of a training step on many replicas.

    Args:
        buckets: Tuple of `BucketPrediction`, in launch order.
        compute_seconds: Float, duration of the step on one replica.
        overlap: Float from 0 to 1, the fraction of `compute_seconds`, at its end, in
            which gradients become ready. Defaults to the backward pass, 2/3.

    Example: the second of two buckets is ready when the backward pass ends.

    >>> bucket = BucketPrediction(1000, seconds=0.01)
    >>> step = StepPrediction((bucket, bucket), compute_seconds=0.09)
    >>> round(step.exposed_seconds, 6), round(step.efficiency, 6)
    (0.01, 0.9)
    """

    buckets: tuple[BucketPrediction, ...]
    compute_seconds: float
    overlap: float = BACKWARD_FRACTION

    @property
    def communication_seconds(self) -> float:
        """Float, seconds of all buckets, one after another."""
        return sum(bucket.seconds for bucket in self.buckets)

    @property
    def exposed_seconds(self) -> float:
        """Float, seconds from the end of the backward pass to that of the last bucket.

        Buckets become ready in proportion to the bytes so far. A bucket is launched
        when it is ready and the previous bucket is done.
        """
        total_bytes = sum(bucket.num_bytes for bucket in self.buckets)
        window = self.overlap * self.compute_seconds
        # Times are in seconds since the end of the backward pass, so the last `done` is
        # the exposed time. Buckets become ready from `-window` on.
        ready_bytes, done = 0, -window
        for bucket in self.buckets:
            ready_bytes += bucket.num_bytes
            ready = -window * (1 - ready_bytes / total_bytes) if total_bytes else 0.0
            done = max(done, ready) + bucket.seconds
        return max(0.0, done)

    @property
    def step_seconds(self) -> float:
        """Float, seconds of a step on all replicas: compute, then exposed seconds."""
        return self.compute_seconds + self.exposed_seconds

    @property
    def efficiency(self) -> float:
        """Float, weak-scaling efficiency: time on one replica over that on all."""
        if not self.step_seconds:
            return 1.0
        return self.compute_seconds / self.step_seconds
