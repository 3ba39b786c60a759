"""Choice of a step's plan, and a cache of tuned ones, so that the next run has them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from tfdp.ground.options import ALGORITHMS, DEFAULT_BUCKET_MB, CommunicationOptions
from tfdp.training.reduction.cache_file import cache_path, read_entries, write_entries

_MB = 2**20
_MOST_TEXT = 200


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


@dataclasses.dataclass(frozen=True)
class KeptPlan:
    """What a trial has found, as it is kept.

    Args:
        choice: `PlanChoice`, or `None`: the default is not slower than others.
        gain: String, what it has gained over the default, for people.

    Raises:
        ValueError: If one of them is something else.

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
        is_text = isinstance(self.gain, str) and len(self.gain) <= _MOST_TEXT
        if not is_text or not self.gain.isprintable():
            raise ValueError(f"A gain is a short text. Received: gain={self.gain!r}")

    def to_json(self) -> str:
        """Encode the plan as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> KeptPlan | None:
        """Decode a plan; `None` for a text that holds none."""
        try:
            entry = json.loads(text)
            choice = entry["choice"]
            found = None if choice is None else PlanChoice(**choice)
            return cls(found, entry["gain"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return None


def plans_path() -> pathlib.Path:
    """Path of the user's file of tuned plans, `plans.json`, beside that of links."""
    return cache_path("plans.json")


def plan_key(cluster: str, variables: Sequence[Any], settings: Sequence[Any]) -> str:
    """Key of what a plan was tuned for.

    Args:
        cluster: String, see `tfdp.training.reduction.link_measure.cluster_key`.
        variables: Sequence of Keras variables, those that are trained.
        settings: Sequence of what else a step depends on, each with a `repr` that
            says what it is.

    Returns:
        String, a digest.
    """
    shapes = [(tuple(variable.shape), str(variable.dtype)) for variable in variables]
    text = json.dumps([cluster, repr(shapes), *map(repr, settings)])
    return hashlib.sha256(text.encode()).hexdigest()


def load_plan(key: str, path: pathlib.Path | None = None) -> KeptPlan | None:
    """Load a plan that was tuned before.

    Args:
        key: String, see `plan_key`.
        path: Path of the file, or `None` for the user's. Defaults to `None`.

    Returns:
        `KeptPlan`, or `None` if the file has none for this key or cannot be read.
    """
    text = read_entries(path or plans_path()).get(key)
    return KeptPlan.from_json(text) if isinstance(text, str) else None


def store_plan(key: str, plan: KeptPlan, path: pathlib.Path | None = None) -> bool:
    """Store a plan for another run; other entries of the file stay.

    Args:
        key: String, see `plan_key`.
        plan: `KeptPlan`.
        path: Path of the file, or `None` for the user's. Defaults to `None`.

    Returns:
        Bool, whether it could be written.
    """
    path = path or plans_path()
    return write_entries(path, {**read_entries(path), key: plan.to_json()})
