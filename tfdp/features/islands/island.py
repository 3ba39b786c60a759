"""Islands: workers that train as separate jobs and average their weights at a hub."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from typing import Any

from tfdp.communication.cluster import tf_config
from tfdp.communication.cluster.address import split_address
from tfdp.ground.base.feature import JobPart

_KEY = "island"


@dataclasses.dataclass(frozen=True)
class Island:
    """Index of this island among the islands of a job, and the address of their hub.

    Args:
        index: Int, index of this island.
        count: Int, number of islands.
        hub: String, `"host:port"` of the hub.
        secret: String, by which the hub and its islands authenticate each other.

    Raises:
        ValueError: If a field has a wrong type or is out of range.

    Example:

    >>> Island(1, 4, "a:29500", "0123456789abcdef").index
    1

    Source: Douillard et al. 2023, https://arxiv.org/abs/2311.08105, whose islands of
    devices are poorly connected.
    """

    index: int
    count: int
    hub: str
    secret: str = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        numbers = self.index, self.count
        if any(type(number) is not int for number in numbers) or not (
            0 <= self.index < self.count
        ):
            raise ValueError(
                "'island' in the 'tfdp' key of TF_CONFIG needs an 'index' below its "
                f"'count'. Received: index={self.index!r}, count={self.count!r}"
            )
        if not isinstance(self.secret, str) or not self.secret:
            raise ValueError(
                "'island' in the 'tfdp' key of TF_CONFIG needs the 'secret' of its hub"
            )
        split_address(self.hub)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Island | None:
        """Return the island of this process, or `None` if it is not part of one.

        An island is a group of workers that averages its weights with other groups over
        a slow link. The launcher describes it by the key `"island"` in `TF_CONFIG`.

        Args:
            environ: Mapping of environment variables. Defaults to `os.environ`.

        Raises:
            ValueError: If the entry of the island in `TF_CONFIG` is malformed.

        Example:

        >>> Island.from_environment({}) is None
        True
        """
        text = environ.get("TF_CONFIG", "")
        entry = tf_config.read_settings(text).get(_KEY) if text.strip() else None
        if entry is None:
            return None
        fields = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(entry, dict) or set(entry) != fields:
            raise ValueError(
                "'island' in the 'tfdp' key of TF_CONFIG must be an object with "
                f"{', '.join(sorted(fields))}"
            )
        return cls(**entry)

    @property
    def part(self) -> JobPart:
        """`JobPart` of this island: its rows of each batch, and the seed of the job.

        The seed is derived from `secret`, and so is the same on all islands.
        """
        digest = hashlib.sha256(self.secret.encode()).digest()
        seed = int.from_bytes(digest[:4], "big") >> 1
        return JobPart(f"island{self.index}", self.index, self.count, seed)

    def add_to(self, config: dict[str, Any]) -> None:
        """Add this island to the `tfdp` key of a `TF_CONFIG`, in place.

        Args:
            config: Dict, the value of `TF_CONFIG` before it is written as JSON.
        """
        config.setdefault("tfdp", {})[_KEY] = dataclasses.asdict(self)
