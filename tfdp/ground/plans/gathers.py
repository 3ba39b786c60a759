"""Gathers of a step: tensors of all replicas, for operations on the whole batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfdp.ground.text import pluralize

# Gathers of at least this size are reported: bytes per row of the batch, or in all if
# the size does not depend on the batch. Labels, logits of few classes and moments are
# smaller, and cost little.
_MIN_ROW_BYTES, _MIN_SUM_BYTES = 2**10, 2**16
# A message names only this many gathers, since a step may have too many to read.
_MAX_NAMED = 3


@dataclasses.dataclass(frozen=True)
class Gather:
    """A tensor that replicas gather or sum for an operation on the global batch.

    Args:
        operation: String, TensorFlow's type of the operation that needs it.
        place: String, the user's line or the layer that creates the operation.
        is_sum: Bool, whether replicas sum their tensors, instead of gathering rows.
        bytes_each: Int, bytes of the whole tensor for a batch of one row.
        power: Int, the exponent of the rows of a batch in the tensor's bytes: 0, 1 or
            2.
        is_exact: Bool, whether all other dimensions are known; an unknown one counts
            as 1.

    Example:

    >>> gather = Gather("Svd", "train.py:8", False, 4096, 1, True)
    >>> gather.num_bytes(256), gather.is_large(256)
    (1048576, True)
    >>> print(gather.describe(256))
    1.0 MB for `Svd` (train.py:8)
    """

    operation: str
    place: str
    is_sum: bool
    bytes_each: int
    power: int
    is_exact: bool

    def num_bytes(self, rows: int | None) -> int | None:
        """Return the bytes of the gathered or summed tensor.

        Args:
            rows: Int, rows of the global batch, or `None` if unknown.

        Returns:
            Int, or `None` if the bytes depend on unknown rows.
        """
        if self.power and rows is None:
            return None
        return self.bytes_each * (rows or 1) ** self.power

    def is_large(self, rows: int | None) -> bool:
        """Return whether the gather is large enough to report.

        The limit is 1 KiB for each row of the batch, or 64 KiB in all for a tensor
        whose bytes do not depend on the rows.

        Args:
            rows: Int, rows of the global batch, or `None` if unknown: then every tensor
                whose bytes grow with the square of the rows is large.
        """
        if not self.power:
            return self.bytes_each >= _MIN_SUM_BYTES
        if rows is None:
            return self.power > 1 or self.bytes_each >= _MIN_ROW_BYTES
        return self.bytes_each * rows ** (self.power - 1) >= _MIN_ROW_BYTES

    def describe(self, rows: int | None) -> str:
        """Describe the bytes of the gather, its operation and its place.

        Args:
            rows: Int, rows of the global batch, or `None` if unknown.

        Returns:
            String such as ``"1.0 MB for `Svd` (train.py:8)"``.
        """
        num_bytes = self.num_bytes(rows)
        if num_bytes is None:
            square = " and row" if self.power > 1 else ""
            text = f"{pluralize(self.bytes_each, 'byte')} for each row{square}"
        else:
            text = megabytes(num_bytes)
        at_least = "" if self.is_exact else "at least "
        return f"{at_least}{text} for `{self.operation}` ({self.place})"


@dataclasses.dataclass(frozen=True)
class StepGathers:
    """All tensors that a step gathers or sums for operations on the global batch.

    Args:
        rows: Int, rows of a global batch, or `None` if unknown.
        gathers: Tuple of `Gather`, in the order of the step.
    """

    rows: int | None = None
    gathers: tuple[Gather, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Int, the sum of the gathers' known bytes."""
        return sum(gather.num_bytes(self.rows) or 0 for gather in self.gathers)

    @property
    def large(self) -> tuple[Gather, ...]:
        """Tuple of the gathers that are large enough to report."""
        return tuple(g for g in self.gathers if g.is_large(self.rows))

    def __str__(self) -> str:
        """Return a line for each gather, as `Gather.describe` formats it."""
        return "\n".join(f"  {g.describe(self.rows)}" for g in self.gathers)

    @property
    def largest(self) -> tuple[int, Gather] | None:
        """Tuple of the bytes of the largest gather and the gather.

        It is `None` if the step has no gathers. Bytes that depend on unknown rows count
        as 0.
        """
        known = [(g.num_bytes(self.rows) or 0, g) for g in self.gathers]
        return max(known, key=lambda pair: pair[0], default=None)

    def describe(self, gathers: Sequence[Gather]) -> str:
        """Return a text with the three largest `gathers` and the number of others."""
        ordered = sorted(
            gathers, key=lambda g: g.num_bytes(self.rows or 1) or 0, reverse=True
        )
        named = [gather.describe(self.rows) for gather in ordered[:_MAX_NAMED]]
        if len(ordered) > _MAX_NAMED:
            named.append(f"and {len(ordered) - _MAX_NAMED:,} more")
        return "; ".join(named)


def megabytes(num_bytes: int) -> str:
    """Format a size in megabytes (2**20 bytes), or in bytes if it is small.

    Example:

    >>> megabytes(3 * 2**20), megabytes(12)
    ('3.0 MB', '12 bytes')
    """
    if num_bytes < 2**16:
        return pluralize(num_bytes, "byte")
    return f"{num_bytes / 2**20:.1f} MB"
