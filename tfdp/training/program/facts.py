"""What a replica holds of each tensor of the one-device program."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.training.program.sizes import FREE, UNKNOWN, Size, number, rows


class Form(enum.Enum):
    """Form in which a replica holds a tensor of the program.

    ROWS: its own rows, a block along one axis. PART: a part of a sum over replicas.
    WHOLE: all of it, the same on every replica. SIZES: integers computed of sizes, of
    which a replica can make its own or the program's. LOCAL: a value of its own, of a
    layer that works on each replica's rows by themselves. EMPTY: a list that has no
    element yet.
    """

    ROWS = "rows"
    PART = "part"
    WHOLE = "whole"
    SIZES = "sizes"
    LOCAL = "local"
    EMPTY = "empty"


@dataclasses.dataclass(frozen=True, eq=False)
class Fact:
    """What is known of a tensor before the step is built for a replica.

    Args:
        form: `Form`.
        axis: Int, the axis of rows, if it has `Form.ROWS`. Defaults to 0.
        sizes: Tuple of `Size`, the shape of the program's tensor, or `None`.
        value: Array of `Size`, the integers that it has, or each item of a list, or
            `None`.
        maybe_axes: Frozenset of ints: of a list of axes, those that it may have beside
            those that it has for certain, `axes`. Defaults to none.
        axes: Frozenset of ints, or `None` if it is not known which it has.
    """

    form: Form
    axis: int = 0
    sizes: tuple[Size, ...] | None = None
    value: Any = None
    axes: frozenset[int] | None = None
    maybe_axes: frozenset[int] = frozenset()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fact):
            return NotImplemented
        same = self.held() == other.held() and self.sizes == other.sizes
        return same and have_same_value(self, other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def is_rows(self) -> bool:
        """Whether it is the replica's own rows."""
        return self.form is Form.ROWS

    @property
    def rank(self) -> int | None:
        """Number of axes, or `None`."""
        return None if self.sizes is None else len(self.sizes)

    @property
    def multiple(self) -> int | None:
        """Entries along the axis of rows for each row, or `None` if not known."""
        return None if self.sizes is None else self.sizes[self.axis].number

    @property
    def has_free_sizes(self) -> bool:
        """Whether all sizes, but that of its rows, are the same for any batch."""
        if self.sizes is None:
            return False
        return all(
            size.is_free
            for axis, size in enumerate(self.sizes)
            if not (self.is_rows and axis == self.axis)
        )

    def held(self) -> tuple:
        """What two tensors must agree in to be in one place, such as a loop's."""
        return self.form, self.axis if self.is_rows else 0


def have_same_value(one: Fact, other: Fact) -> bool:
    """Return whether two facts have the same value, or none."""
    if one.value is None or other.value is None:
        return one.value is other.value
    return one.value.shape == other.value.shape and bool(
        (one.value == other.value).all()
    )


def whole(sizes: Any = None, value: np.ndarray | None = None) -> Fact:
    """Return the fact of a tensor that every replica has."""
    return Fact(Form.WHOLE, sizes=sizes, value=value)


def integers(value: np.ndarray) -> Fact:
    """Return the fact of integers that are computed of sizes."""
    has_rows = any(size.kind == "rows" for size in value.ravel())
    shape = tuple(number(n) for n in value.shape)
    return Fact(Form.SIZES if has_rows else Form.WHOLE, sizes=shape, value=value)


def part(sizes: Any = None) -> Fact:
    """Return the fact of a part of a sum."""
    return Fact(Form.PART, sizes=sizes)


def own_rows(sizes: tuple[Size, ...], axis: int = 0) -> Fact:
    """Return the fact of own rows along an axis, whose size is a multiple of them."""
    if sizes[axis].kind != "rows":
        sizes = with_rows(sizes, axis, None)
    return Fact(Form.ROWS, axis, sizes)


def static_sizes(tensor: Any, *, is_free: bool) -> tuple[Size, ...] | None:
    """Return the sizes of a traced tensor, as far as TensorFlow knows them.

    Of a list, whose own shape says nothing of its items, nothing is known.

    Args:
        tensor: Tensor of the traced program.
        is_free: Bool, whether sizes that it does not know have no rows in them.
    """
    if tensor.shape.rank is None or tensor.dtype == tf.variant:
        return None
    other = FREE if is_free else UNKNOWN
    return tuple(other if n is None else number(n) for n in tensor.shape.as_list())


def with_rows(
    sizes: tuple[Size, ...], axis: int, multiple: int | None
) -> tuple[Size, ...]:
    """Return sizes with a multiple of the rows on one axis."""
    return (*sizes[:axis], rows(multiple), *sizes[axis + 1 :])


def is_known(fact: Fact) -> bool:
    """Return whether integers follow from the number of rows alone."""
    return fact.value is not None and all(s.is_counted for s in fact.value.ravel())
