"""How long a step communicates, bucket by bucket, and what of it training waits for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from tfdp.buckets import Bucket
from tfdp.cluster import Topology
from tfdp.cost_model import Algorithm, choose
from tfdp.links import Links

# A backward pass takes about twice as long as the forward pass before it.
BACKWARD_SHARE = 2 / 3

# Bytes of an element on the wire. Narrower elements travel as they are.
_WIRE_ITEMSIZE = 2


@dataclasses.dataclass(frozen=True)
class BucketPrediction:
    """How one bucket is reduced.

    Args:
        num_bytes: Int, size of its gradients.
        algorithm: `Algorithm`.
        seconds: Float, how long that takes.
    """

    num_bytes: int
    algorithm: Algorithm
    seconds: float


@dataclasses.dataclass(frozen=True)
class StepPrediction:
    """How long a training step takes on many replicas.

    Args:
        buckets: Tuple of `BucketPrediction`, in launch order.
        compute_seconds: Float, what the step takes on one replica.
        overlap: Float from 0 to 1, the last part of it, in which gradients
            become ready. Defaults to the backward pass, 2/3.

    Example: the second of two buckets is ready when the backward pass ends.

    >>> bucket = BucketPrediction(1000, Algorithm("ring"), seconds=0.01)
    >>> step = StepPrediction((bucket, bucket), compute_seconds=0.09)
    >>> round(step.exposed_seconds, 6), round(step.efficiency, 6)
    (0.01, 0.9)
    """

    buckets: tuple[BucketPrediction, ...]
    compute_seconds: float
    overlap: float = BACKWARD_SHARE

    @property
    def communication_seconds(self) -> float:
        """Seconds of all buckets, one after the other."""
        return sum(bucket.seconds for bucket in self.buckets)

    @property
    def exposed_seconds(self) -> float:
        """Seconds from the end of the backward pass to that of the last bucket.

        A bucket is ready in proportion to the bytes up to it, and is launched
        then, or when the one before it is done.
        """
        total_bytes = sum(bucket.num_bytes for bucket in self.buckets)
        window = self.overlap * self.compute_seconds
        ready_bytes, done = 0, -window  # seconds; the backward pass ends at 0
        for bucket in self.buckets:
            ready_bytes += bucket.num_bytes
            ready = -window * (1 - ready_bytes / total_bytes) if total_bytes else 0.0
            done = max(done, ready) + bucket.seconds
        return max(0.0, done)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step on all replicas."""
        return self.compute_seconds + self.exposed_seconds

    @property
    def efficiency(self) -> float:
        """Weak scaling: the time of one replica over that of all, at most 1."""
        if not self.step_seconds:
            return 1.0
        return self.compute_seconds / self.step_seconds


def predict_buckets(
    buckets: Iterable[Bucket],
    topology: Topology,
    links: Links,
    *,
    algorithm: Algorithm | None = None,
    compress_inner: bool = False,
    compress_outer: bool = False,
) -> tuple[BucketPrediction, ...]:
    """Predicts how each bucket is reduced, and how long that takes.

    Args:
        buckets: Iterable of `tfdp.buckets.Bucket`.
        topology: `Topology`.
        links: `Links`.
        algorithm: `Algorithm`, or `None` for the fastest one for each bucket.
            Defaults to `None`.
        compress_inner: Bool, whether 16 bits of an element travel inside nodes.
            Defaults to `False`.
        compress_outer: Bool, the same across nodes. Defaults to `False`.

    Returns:
        Tuple of `BucketPrediction`.

    Raises:
        ValueError: If a hierarchical algorithm meets nodes of unequal size.

    Example:

    >>> from tfdp.buckets import Entry
    >>> from tfdp.links import DEFAULT_LINKS
    >>> bucket = Bucket((0,), (Entry("w", (1000,), "float32", 4),), "float32")
    >>> node = Topology((tuple(range(8)),))
    >>> (found,) = predict_buckets([bucket], node, DEFAULT_LINKS["ring"])
    >>> print(found.algorithm, found.num_bytes)
    tree 4000
    """
    candidates = None if algorithm is None else (algorithm,)
    found = []
    for bucket in buckets:
        wire = min(1.0, _WIRE_ITEMSIZE / bucket.entries[0].itemsize)
        chosen, seconds = choose(
            bucket.num_bytes,
            topology,
            links,
            candidates,
            inner_wire=wire if compress_inner else 1.0,
            outer_wire=wire if compress_outer else 1.0,
        )
        found.append(BucketPrediction(bucket.num_bytes, chosen, seconds))
    return tuple(found)
