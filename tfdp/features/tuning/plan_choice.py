"""Choice of a step's plan: bucket sizes and algorithm."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tfdp.ground.options import ALGORITHMS, DEFAULT_BUCKET_MB, CommunicationOptions

_MB = 2**20


@dataclasses.dataclass(frozen=True)
class PlanChoice:
    """Bucket sizes and algorithm of a step's plan.

    Args:
        bucket_bytes: Int, largest size of a bucket.
        first_bucket_bytes: Int, largest size of the first one.
        algorithm: String, as in `CommunicationOptions`, or `None`, what is there.
            Defaults to `None`.

    Raises:
        ValueError: If one of them is something else.

    Example:

    >>> PlanChoice(4 * 2**20, 2**20).options(CommunicationOptions()).bucket_mb
    4.0
    >>> print(PlanChoice(100_000, 100_000))
    buckets of 0.0954 MB
    """

    bucket_bytes: int
    first_bucket_bytes: int
    algorithm: str | None = None

    def __post_init__(self) -> None:
        sizes = self.bucket_bytes, self.first_bucket_bytes
        are_sizes = all(type(size) is int and size > 0 for size in sizes)
        if not are_sizes or self.algorithm not in (None, *ALGORITHMS):
            raise ValueError(
                "A plan has sizes of at least one byte and a known algorithm. "
                f"Received: {self!r}"
            )

    @classmethod
    def from_dict(cls, entry: dict[str, Any]) -> PlanChoice:
        """Restore a choice from the dict that `dataclasses.asdict` made.

        Raises:
            TypeError, ValueError: If it is something else.
        """
        return cls(**entry)

    def options(self, base: CommunicationOptions) -> CommunicationOptions:
        """Options by which a step has this plan.

        Args:
            base: `CommunicationOptions` of the strategy, for all else.
        """
        size = self.bucket_bytes / _MB
        if size == DEFAULT_BUCKET_MB:
            # The default is made smaller for small models. This is no default.
            size = math.nextafter(size, math.inf)
        return dataclasses.replace(
            base,
            bucket_mb=size,
            first_bucket_mb=self.first_bucket_bytes / _MB,
            algorithm=self.algorithm or base.algorithm,
        )

    def __str__(self) -> str:
        return f"buckets of {self.bucket_bytes / _MB:.3g} MB"
