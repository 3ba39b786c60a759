"""What a step gathers from all replicas, since an operation needs the whole batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfdp.ground.text import pluralize

# Less is not worth a sentence: labels, logits of a few classes, moments of a layer.
_LEAST_ROW_BYTES, _LEAST_SUM_BYTES = 2**10, 2**16
# So many are named in one sentence.
_MOST_NAMED = 3


@dataclasses.dataclass(frozen=True)
class Gather:
    """A tensor of a step that replicas gather or sum up, for an operation.

    Args:
        operation: String, TensorFlow's type of the operation that needs it.
        place: String, the user's line or the layer that makes the operation.
        is_sum: Bool, whether parts are summed; or else rows are gathered.
        bytes_each: Int, bytes of the whole tensor for a batch of one row.
        power: Int, how its bytes grow with the rows of a batch: 0, not at all; 1, as
            they do; 2, as their square.
        is_exact: Bool, whether all other sizes are known; one that is not counts as 1.

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
        """Return the bytes of the whole tensor, or `None` where rows are not known."""
        if self.power and rows is None:
            return None
        return self.bytes_each * (rows or 1) ** self.power

    def is_large(self, rows: int | None) -> bool:
        """Return whether it is worth a sentence, by its bytes for each row."""
        if not self.power:
            return self.bytes_each >= _LEAST_SUM_BYTES
        if rows is None:
            return self.power > 1 or self.bytes_each >= _LEAST_ROW_BYTES
        return self.bytes_each * rows ** (self.power - 1) >= _LEAST_ROW_BYTES

    def describe(self, rows: int | None) -> str:
        """Describe its bytes and what they are for."""
        found = self.num_bytes(rows)
        if found is None:
            square = " and row" if self.power > 1 else ""
            text = f"{pluralize(self.bytes_each, 'byte')} for each row{square}"
        else:
            text = megabytes(found)
        at_least = "" if self.is_exact else "at least "
        return f"{at_least}{text} for `{self.operation}` ({self.place})"


@dataclasses.dataclass(frozen=True)
class StepGathers:
    """All that a step gathers.

    Args:
        rows: Int, rows of a global batch, or `None` where they are not known.
        gathers: Tuple of `Gather`, in the order of the step.
    """

    rows: int | None = None
    gathers: tuple[Gather, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Int, bytes of a step, of tensors whose size is known."""
        return sum(gather.num_bytes(self.rows) or 0 for gather in self.gathers)

    @property
    def large(self) -> tuple[Gather, ...]:
        """The gathers that are worth a sentence."""
        return tuple(g for g in self.gathers if g.is_large(self.rows))

    def __str__(self) -> str:
        return "\n".join(f"  {g.describe(self.rows)}" for g in self.gathers)

    @property
    def largest(self) -> tuple[int, Gather] | None:
        """The largest gather of a known size, and its bytes; or `None`."""
        known = [(g.num_bytes(self.rows) or 0, g) for g in self.gathers]
        return max(known, key=lambda pair: pair[0], default=None)

    def describe(self, gathers: Sequence[Gather]) -> str:
        """List some of them, the largest first."""
        ordered = sorted(
            gathers, key=lambda g: g.num_bytes(self.rows or 1) or 0, reverse=True
        )
        named = [gather.describe(self.rows) for gather in ordered[:_MOST_NAMED]]
        if len(ordered) > _MOST_NAMED:
            named.append(f"and {len(ordered) - _MOST_NAMED:,} more")
        return "; ".join(named)


def megabytes(num_bytes: int) -> str:
    """Return bytes as megabytes (2**20 bytes), of little ones as bytes.

    Example:

    >>> megabytes(3 * 2**20), megabytes(12)
    ('3.0 MB', '12 bytes')
    """
    if num_bytes < 2**16:
        return pluralize(num_bytes, "byte")
    return f"{num_bytes / 2**20:.1f} MB"
