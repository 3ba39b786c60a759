"""Links of a cluster: latency and bandwidth inside nodes and across them."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdp.ground.arguments import checked_bool, checked_number


@dataclasses.dataclass(frozen=True)
class Link:
    """Cost model of a link: a message takes `alpha + bytes * beta` seconds.

    Args:
        alpha_seconds: Float, alpha, seconds until the first byte arrives.
        seconds_per_byte: Float, beta, the inverse of the bandwidth.

    Raises:
        ValueError: If an argument is negative or not finite.

    Example:

    >>> Link(alpha_seconds=0.001, seconds_per_byte=1e-6).seconds(num_bytes=1000)
    0.002
    """

    alpha_seconds: float
    seconds_per_byte: float

    def __post_init__(self) -> None:
        for field in ("alpha_seconds", "seconds_per_byte"):
            object.__setattr__(self, field, _not_negative(field, getattr(self, field)))

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds that a message of this size takes."""
        return self.alpha_seconds + num_bytes * self.seconds_per_byte


@dataclasses.dataclass(frozen=True)
class Links:
    """Links of a cluster with identical nodes.

    Args:
        inside: `Link` between two replicas of a node.
        across: `Link` of one node to the others, in one direction. The replicas of
            the node share it.
        operation_seconds: Float, seconds to launch one operation of an algorithm.
            Defaults to `0.0`.
        is_inside_shared: Bool, whether messages inside a node share one link too,
            such as the cores and memory of a CPU node. Defaults to `False`.

    Raises:
        ValueError: If a number is negative or not finite, or an argument has the wrong
            type.

    Example:

    >>> links = Links(inside=Link(2e-6, 1 / 200e9), across=Link(10e-6, 1 / 12.5e9))
    >>> links.across.alpha_seconds
    1e-05
    """

    inside: Link
    across: Link
    operation_seconds: float = 0.0
    is_inside_shared: bool = False

    def __post_init__(self) -> None:
        for field in ("inside", "across"):
            if not isinstance(getattr(self, field), Link):
                raise ValueError(
                    f"`{field}` must be a `tfdp.options.Link`. "
                    f"Received: {field}={getattr(self, field)!r}"
                )
        seconds = _not_negative("operation_seconds", self.operation_seconds)
        object.__setattr__(self, "operation_seconds", seconds)
        is_shared = checked_bool("is_inside_shared", self.is_inside_shared)
        object.__setattr__(self, "is_inside_shared", is_shared)

    @classmethod
    def from_dict(cls, entry: dict[str, Any]) -> Links:
        """Restore links from a dict that `dataclasses.asdict` has created.

        Example:

        >>> links = Links(Link(0.5, 0.25), Link(1.0, 0.5))
        >>> Links.from_dict(dataclasses.asdict(links)) == links
        True
        """
        levels = {name: Link(**entry[name]) for name in ("inside", "across")}
        return cls(**{**entry, **levels})


def _not_negative(name: str, value: float) -> float:
    """Check that an argument is a number of at least 0, and return it."""
    return checked_number(name, value, "a number that is not negative", least=0)


# If the links are not measured, these are assumed, by backend. `"ring"`: TensorFlow's
# gRPC over loopback, and 10 Gbit/s Ethernet. `"direct"` and `"mpi"`: shared memory, and
# 10 Gbit/s Ethernet. `"nccl"`: NVLink at the bandwidth of large all-reduces, and one
# 100 Gbit/s adapter for each node.
DEFAULT_LINKS = {
    "ring": Links(Link(300e-6, 1e-9), Link(500e-6, 0.8e-9), 100e-6, True),
    "direct": Links(Link(100e-6, 0.3e-9), Link(200e-6, 0.8e-9), 50e-6, True),
    "mpi": Links(Link(300e-6, 0.5e-9), Link(500e-6, 0.8e-9), 50e-6, True),
    "nccl": Links(Link(2e-6, 5e-12), Link(10e-6, 80e-12), 10e-6, False),
}
