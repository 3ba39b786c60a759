"""Choice of a step's plan, and a cache of tuned plans on disk, for the next run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from tfdp.ground.options import ALGORITHMS, DEFAULT_BUCKET_MB, CommunicationOptions
from tfdp.training.reduction.cache_file import cache_path, read_entries, store_entry

_MB = 2**20
# The text of a gain comes from a file and is printed, so a text with more characters is
# taken for a damaged entry.
_MAX_GAIN_LENGTH = 200


@dataclasses.dataclass(frozen=True)
class PlanChoice:
    """Bucket sizes and all-reduce algorithm, which determine a step's bucket plan.

    Args:
        bucket_bytes: Int, largest size of a bucket in bytes.
        first_bucket_bytes: Int, largest size of the first bucket in bytes.
        algorithm: String as in `CommunicationOptions`, or `None` for the strategy's.
            Defaults to `None`.

    Raises:
        ValueError: If an argument is invalid.

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

    def options(self, base: CommunicationOptions) -> CommunicationOptions:
        """Return a strategy's options with this choice's bucket sizes and algorithm.

        Args:
            base: `CommunicationOptions` of the strategy, for all other options.
        """
        size = self.bucket_bytes / _MB
        if size == DEFAULT_BUCKET_MB:
            # For a small model, a strategy makes buckets of the default size smaller.
            # The next larger float counts as a size that the user has chosen, which
            # stays.
            size = math.nextafter(size, math.inf)
        return dataclasses.replace(
            base,
            bucket_mb=size,
            first_bucket_mb=self.first_bucket_bytes / _MB,
            algorithm=self.algorithm or base.algorithm,
        )

    def __str__(self) -> str:
        return f"buckets of {self.bucket_bytes / _MB:.3g} MB"


@dataclasses.dataclass(frozen=True)
class KeptPlan:
    """Result of a trial, as it is stored in the cache.

    Args:
        choice: `PlanChoice` of the winner, or `None` if no plan beat the default.
        gain: String, description of the gain over the default, for messages.

    Raises:
        ValueError: If an argument is invalid.

    Example:

    >>> kept = KeptPlan(PlanChoice(2048, 1024), "12 % faster than the default [9, 14]")
    >>> KeptPlan.from_json(kept.to_json()) == kept
    True
    >>> KeptPlan.from_json("[]") is None
    True
    """

    choice: PlanChoice | None
    gain: str = ""

    def __post_init__(self) -> None:
        is_text = isinstance(self.gain, str) and len(self.gain) <= _MAX_GAIN_LENGTH
        if not is_text or not self.gain.isprintable():
            raise ValueError(f"A gain is a short text. Received: gain={self.gain!r}")

    def to_json(self) -> str:
        """Encode the plan as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> KeptPlan | None:
        """Decode a plan; return `None` if the text is not a valid plan."""
        try:
            entry = json.loads(text)
            choice = entry["choice"]
            plan_choice = None if choice is None else PlanChoice(**choice)
            return cls(plan_choice, entry["gain"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return None


def plans_path() -> pathlib.Path:
    """Return the path of the user's cache of tuned plans, `plans.json`."""
    return cache_path("plans.json")


def plan_key(cluster: str, variables: Sequence[Any], settings: Sequence[Any]) -> str:
    """Return the cache key of a plan, for a cluster, a model and settings.

    Args:
        cluster: String, see `tfdp.training.reduction.link_measure.cluster_key`.
        variables: Sequence of the trained Keras variables.
        settings: Sequence of other values that a step depends on; the `repr` of each
            must identify it.

    Returns:
        String, a digest.
    """
    shapes = [(tuple(variable.shape), str(variable.dtype)) for variable in variables]
    text = json.dumps([cluster, repr(shapes), *map(repr, settings)])
    return hashlib.sha256(text.encode()).hexdigest()


def load_plan(key: str, path: pathlib.Path | None = None) -> KeptPlan | None:
    """Load a plan from the cache.

    Args:
        key: String, see `plan_key`.
        path: Path of the file, or `None` for that of the user. Defaults to `None`.

    Returns:
        `KeptPlan`, or `None` if the file has none for this key or cannot be read.
    """
    text = read_entries(path or plans_path()).get(key)
    return KeptPlan.from_json(text) if isinstance(text, str) else None


def store_plan(key: str, plan: KeptPlan, path: pathlib.Path | None = None) -> bool:
    """Store a plan in the cache, and keep the other entries of the file.

    Args:
        key: String, see `plan_key`.
        plan: `KeptPlan` to store.
        path: Path of the file, or `None` for that of the user. Defaults to `None`.

    Returns:
        Bool, whether the file could be written.
    """
    return store_entry(path or plans_path(), key, plan.to_json())
