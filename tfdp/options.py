"""What a user can choose about communication."""

from __future__ import annotations

import dataclasses
import math

ALGORITHMS = ("auto", "ring")
BACKENDS = ("auto", "nccl", "ring")
_LATER_ALGORITHMS = ("hierarchical", "halving_doubling", "tree")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommunicationOptions:
    """How gradients travel between replicas.

    Args:
        bucket_mb: Float, largest size of a bucket in megabytes (2**20 bytes).
            Gradients are concatenated into buckets and a bucket is reduced by
            one collective. A variable larger than this has a bucket of its
            own. Defaults to `25.0`.
        first_bucket_mb: Float, largest size of the first bucket in megabytes.
            It is smaller so that communication starts early in the backward
            pass. Defaults to `1.0`.
        algorithm: String, the all-reduce algorithm: `"auto"` or `"ring"`.
            Defaults to `"auto"`.
        backend: String, the library that moves the bytes: `"nccl"` (GPUs),
            `"ring"` (TensorFlow's own, over memory and gRPC), or `"auto"`,
            NCCL where every replica has a physical GPU of its own. Defaults
            to `"auto"`.
        timeout_seconds: Float or `None`, how long workers wait for each other
            at start-up and a collective for its peers. `None` waits for ever
            and warns. Defaults to `None`.

    Raises:
        ValueError: If a value is out of range or unknown.

    Example:

    >>> options = CommunicationOptions(bucket_mb=8)
    >>> options.bucket_bytes
    8388608

    Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating
    Data Parallel Training", https://arxiv.org/abs/2006.15704, for buckets and
    their default sizes.
    """

    bucket_mb: float = 25.0
    first_bucket_mb: float = 1.0
    algorithm: str = "auto"
    backend: str = "auto"
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        for field in ("bucket_mb", "first_bucket_mb"):
            _check_positive(field, getattr(self, field), "a size in megabytes")
        if self.timeout_seconds is not None:
            _check_positive(
                "timeout_seconds", self.timeout_seconds, "a number of seconds or None"
            )
        if self.algorithm in _LATER_ALGORITHMS:
            raise ValueError(
                f'`algorithm="{self.algorithm}"` is not there yet. Use "ring" or '
                f'"auto". Received: algorithm={self.algorithm!r}'
            )
        _check_one_of("algorithm", self.algorithm, ALGORITHMS)
        _check_one_of("backend", self.backend, BACKENDS)

    @property
    def bucket_bytes(self) -> int:
        """Largest size of a bucket, in bytes."""
        return int(self.bucket_mb * 2**20)

    @property
    def first_bucket_bytes(self) -> int:
        """Largest size of the first bucket, in bytes."""
        return int(min(self.first_bucket_mb, self.bucket_mb) * 2**20)


def _check_positive(name: str, value: object, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"`{name}` must be {what}. Received: {name}={value!r}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(
            f"`{name}` must be {what}, greater than zero. Received: {name}={value!r}"
        )


def _check_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        listed = ", ".join(f'"{item}"' for item in allowed)
        raise ValueError(
            f"`{name}` must be one of {listed}. Received: {name}={value!r}"
        )
