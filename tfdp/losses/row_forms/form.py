"""Form of a tensor: its dependence on the rows of a batch."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any


class Kind(enum.Enum):
    """Kind of dependence on the rows of a batch."""

    COUNT = "a constant, or a power of the number of rows"
    SHAPE = "a shape that contains the number of rows"
    ROWS = "one entry for each row, along an axis"
    TOTAL = "linear in sums over rows"
    STATISTIC = "another function of sums over rows"
    PAIRS = "entries that compare rows with each other, or with a mean of theirs"
    TERMS = "a sum of totals of different degree"
    UNKNOWN = "depends on the rows in a way that no rule covers"


@dataclasses.dataclass(frozen=True)
class Form:
    """Dependence of a tensor on the rows of a batch.

    Args:
        kind: `Kind`.
        degree: Int, the power of the number of rows by which it grows when every row
            is repeated: 0 for a mean, 1 for a sum.
        axis: Int, the axis of the rows, or `None` where that is unknown.
        replica_power: Int, power of the number of replicas by which a user has
            multiplied it.
        counts: Frozenset of ints: numbers of rows, where the shape of a batch is
            static.

    Example:

    >>> Form(Kind.COUNT).is_constant, Form(Kind.TOTAL, degree=1).is_constant
    (True, False)
    """

    kind: Kind
    degree: int = 0
    axis: int | None = None
    replica_power: int = 0
    counts: frozenset[int] = frozenset()

    @property
    def is_constant(self) -> bool:
        """Bool, whether it does not depend on the batch."""
        return self.kind is Kind.COUNT and self.degree == 0

    @property
    def has_rows(self) -> bool:
        """Bool, whether it has one entry for each row."""
        return self.kind is Kind.ROWS

    def with_axis(self, axis: int | None) -> Form:
        """Return the form with its rows along another axis."""
        return dataclasses.replace(self, axis=axis)


CONSTANT = Form(Kind.COUNT)
NUM_ROWS = Form(Kind.COUNT, 1)
MEAN = Form(Kind.TOTAL)
SUM = Form(Kind.TOTAL, 1)
STATISTIC = Form(Kind.STATISTIC)
PAIRS = Form(Kind.PAIRS)
TERMS = Form(Kind.TERMS)
UNKNOWN = Form(Kind.UNKNOWN)
ROWS = Form(Kind.ROWS, 0, 0)
ROWS_SOMEWHERE = Form(Kind.ROWS)

# A rule takes an operation, the forms of its inputs, of which at least one is no
# constant, and a function from a constant to the power of the number of replicas that
# it is; it returns the form of all outputs, or a list with that of each.
ReplicaPower = Callable[[Any], int]
Rule = Callable[[Any, list[Form], ReplicaPower], "Form | list[Form]"]


def are_constant(forms: list[Form]) -> bool:
    """Return whether none of some forms depends on the batch."""
    return all(form.is_constant for form in forms)
