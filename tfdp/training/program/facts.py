"""Facts: how a replica holds each tensor of the single-device program.

A fact is what is known of a tensor before the step is built: its form and its sizes.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.training.program.sizes import FREE, UNKNOWN, Size, number, rows


class Form(enum.Enum):
    """Form in which a replica holds a tensor of the program.

    ROWS: sharded, the replica's own block of rows along one axis. PART: a partial sum;
    the tensor is the sum over replicas. WHOLE: replicated, the same on every replica.
    SIZES: integers computed from sizes; a replica can compute them for its own rows or
    for the whole batch. LOCAL: a value of this replica alone, from a layer that handles
    the rows of each replica separately. EMPTY: a list that has no element yet.
    """

    ROWS = "rows"
    PART = "part"
    WHOLE = "whole"
    SIZES = "sizes"
    LOCAL = "local"
    EMPTY = "empty"


@dataclasses.dataclass(frozen=True, eq=False)
class Fact:
    """What is known about a tensor before the step is built for a replica.

    Args:
        form: `Form` in which a replica holds the tensor, such as its own rows, a
            partial sum or the whole tensor.
        axis: Int, the axis of rows of `Form.ROWS`. Defaults to 0.
        sizes: Tuple of `Size`, the shape of the program's tensor; or `None` if its rank
            is not known.
        value: Array of `Size`, the elements of a tensor of integers, or of each item of
            a list; or `None` if they are not known.
        axes: For a tensor that lists axes to sum over, as the gradient of a broadcast
            does: frozenset of ints, the axes that it always has. `None` for another
            tensor, or if they are not known.
        maybe_axes: Frozenset of ints, axes apart from `axes` that such a tensor may
            have, depending on sizes that are not known yet. Defaults to none.
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
        same = (
            self.form_and_axis() == other.form_and_axis() and self.sizes == other.sizes
        )
        return same and have_equal_values(self, other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def is_rows(self) -> bool:
        """Bool, whether a replica holds its own rows of the tensor."""
        return self.form is Form.ROWS

    @property
    def rank(self) -> int | None:
        """Number of axes, or `None` if not known."""
        return None if self.sizes is None else len(self.sizes)

    @property
    def multiple(self) -> int | None:
        """Number of entries along the axis of rows for each row; `None` if unknown."""
        return None if self.sizes is None else self.sizes[self.axis].number

    @property
    def has_free_sizes(self) -> bool:
        """Bool, whether at most the axis of rows has a size that depends on rows.

        That is, all other sizes are the same for any number of rows. It is `False` if
        the rank is not known.
        """
        if self.sizes is None:
            return False
        return all(
            size.is_free
            for axis, size in enumerate(self.sizes)
            if not (self.is_rows and axis == self.axis)
        )

    def form_and_axis(self) -> tuple:
        """Return a pair of the form and the axis of rows, 0 unless it is `ROWS`."""
        return self.form, self.axis if self.is_rows else 0


def have_equal_values(one: Fact, other: Fact) -> bool:
    """Return whether two `Fact`s have the same `value`, the elements of a tensor.

    They do if both are `None`, or if both are arrays of equal shape and all elements
    are equal; an element that is `UNKNOWN` equals only another unknown one.
    """
    if one.value is None or other.value is None:
        return one.value is other.value
    return one.value.shape == other.value.shape and bool(
        (one.value == other.value).all()
    )


def whole(sizes: Any = None, value: np.ndarray | None = None) -> Fact:
    """Return the `Fact` of a tensor that has the same value on every replica.

    Args:
        sizes: Tuple of `Size`, its shape, or `None` if not known. Defaults to `None`.
        value: Array of `Size`, its elements, or `None` if not known. Defaults to
            `None`.
    """
    return Fact(Form.WHOLE, sizes=sizes, value=value)


def integers(value: np.ndarray) -> Fact:
    """Return the `Fact` of a tensor of integers that are computed from sizes.

    Its form is `Form.SIZES` if an element is a multiple of the number of rows, and else
    `Form.WHOLE`. `value` is an array of `Size`, the elements of the tensor.
    """
    has_rows = any(size.kind == "rows" for size in value.ravel())
    shape = tuple(number(n) for n in value.shape)
    return Fact(Form.SIZES if has_rows else Form.WHOLE, sizes=shape, value=value)


def part(sizes: Any = None) -> Fact:
    """Return the `Fact` of a partial sum: the tensor is the sum over replicas.

    `sizes` is its shape, a tuple of `Size`, or `None` if not known.
    """
    return Fact(Form.PART, sizes=sizes)


def own_rows(sizes: tuple[Size, ...], axis: int = 0) -> Fact:
    """Return the `Fact` of a tensor whose rows are divided among replicas.

    Args:
        sizes: Tuple of `Size`, the shape of the tensor of all replicas. Along `axis`,
            any size but a multiple of the number of rows becomes an unknown multiple of
            it.
        axis: Int, the axis of rows. Defaults to 0.
    """
    if sizes[axis].kind != "rows":
        sizes = with_rows(sizes, axis, None)
    return Fact(Form.ROWS, axis, sizes)


def static_sizes(tensor: Any, *, is_free: bool) -> tuple[Size, ...] | None:
    """Return the shape of a traced tensor, as far as TensorFlow knows it.

    Args:
        tensor: Tensor of the traced program.
        is_free: Bool; if true, a size that TensorFlow does not know is `FREE`,
            independent of the number of rows; if false, it is `UNKNOWN`.

    Returns:
        Tuple of `Size`, or `None` for a tensor of unknown rank or a list, whose shape
        is not that of its items.
    """
    if tensor.shape.rank is None or tensor.dtype == tf.variant:
        return None
    other = FREE if is_free else UNKNOWN
    return tuple(other if n is None else number(n) for n in tensor.shape.as_list())


def with_rows(
    sizes: tuple[Size, ...], axis: int, multiple: int | None
) -> tuple[Size, ...]:
    """Return a shape in which the size of one axis becomes a multiple of the rows.

    The `multiple` is the number of entries for each row, or `None` if not known.
    """
    return (*sizes[:axis], rows(multiple), *sizes[axis + 1 :])


def is_known(fact: Fact) -> bool:
    """Return whether each element is a known number or a known multiple of the rows."""
    return fact.value is not None and all(s.is_counted for s in fact.value.ravel())
