"""Sizes of the program's tensors, with the number of rows of a batch as an unknown.

A step is traced for any number of rows. Whether a reshape keeps rows apart, or a sum
runs over rows, follows from sizes as multiples of that number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Size:
    """A size, or another integer that is computed from sizes.

    Args:
        kind: String: `"number"`, known; `"rows"`, a multiple of the number of rows of
            the batch; `"splits"`, the number of rows plus one, as for the row splits of
            a ragged tensor; `"free"`, unknown but independent of the number of rows;
            `"unknown"`.
        number: Int or float, the known number, or the multiple of the rows. `None` if
            not known.
    """

    kind: str
    number: Any = None

    def __mul__(self, other: Size) -> Size:
        if self.kind == other.kind == "number":
            return number(self.number * other.number)
        if ZERO in (self, other):
            return ZERO
        if {self.kind, other.kind} == {"rows", "number"}:
            multiple, factor = (self, other) if self.kind == "rows" else (other, self)
            return _multiplied(multiple, factor.number)
        if {self.kind, other.kind} == {"rows", "free"}:
            return rows(None)
        return _free_or_unknown(self, other)

    def __add__(self, other: Size) -> Size:
        if {self, other} == {ONE, rows(1)}:
            return SPLITS
        return self._sum_or_difference(other, lambda a, b: a + b)

    def __sub__(self, other: Size) -> Size:
        if (self, other) == (SPLITS, ONE):
            return rows(1)
        return self._sum_or_difference(other, lambda a, b: a - b)

    def _sum_or_difference(self, other: Size, combine: Callable) -> Size:
        """Return the sum of two sizes, or their difference, as `combine` computes it.

        If it is not known, the result is `FREE` if neither size depends on the number
        of rows, and `UNKNOWN` otherwise.

        Args:
            other: `Size` to add or subtract.
            combine: Callable of two numbers that returns their sum or difference.
        """
        if self.kind == other.kind == "number":
            return number(combine(self.number, other.number))
        if other == ZERO:
            return self
        if self.kind == other.kind == "rows" and None not in (
            self.number,
            other.number,
        ):
            multiple = combine(self.number, other.number)
            return rows(multiple) if multiple > 0 else UNKNOWN if multiple else ZERO
        return _free_or_unknown(self, other)

    def __floordiv__(self, other: Size) -> Size:
        if self.kind == other.kind == "number":
            return number(self.number // other.number) if other.number else UNKNOWN
        if other == ONE:
            return self
        if self.kind == "rows" and other.kind in ("rows", "number"):
            return self._quotient(other)
        return _free_or_unknown(self, other)

    def _quotient(self, other: Size) -> Size:
        """Divide this multiple of the rows by another one, or by a number.

        The result is `UNKNOWN` unless it is a whole number or a multiple of the rows.
        An unknown multiple divided by the rows is `FREE`.
        """
        of_rows = other.kind == "rows"
        if self.number is None:
            return FREE if of_rows and other.number == 1 else UNKNOWN
        if not other.number or self.number % other.number:
            return UNKNOWN
        quotient = self.number // other.number
        return number(quotient) if of_rows else rows(quotient)

    def __mod__(self, other: Size) -> Size:
        if self.kind == other.kind == "number" and other.number:
            return number(self.number % other.number)
        return _free_or_unknown(self, other)

    def maximum(self, other: Size) -> Size:
        """Return the larger size.

        If it is not known which one is larger, the result is `FREE` if neither size
        depends on the number of rows, and `UNKNOWN` otherwise. A multiple of the rows
        counts as larger than 0 and 1, as if no batch were empty.
        """
        if self.kind == other.kind == "number":
            return number(max(self.number, other.number))
        for one, another in ((self, other), (other, self)):
            is_small = another.kind == "number" and another.number <= 1
            if one.kind == "rows" and (one == another or is_small):
                return one
        return _free_or_unknown(self, other)

    def minimum(self, other: Size) -> Size:
        """Return the smaller size if both are numbers, or the common one if equal.

        Otherwise it is `FREE` if neither size depends on the number of rows, and
        `UNKNOWN` if one does, as for a multiple of the rows and a number.
        """
        if self.kind == other.kind == "number":
            return number(min(self.number, other.number))
        return self if self == other else _free_or_unknown(self, other)

    @property
    def is_counted(self) -> bool:
        """Bool, whether the size is a known number, or a known multiple of the rows."""
        return self.number is not None and self.kind in ("number", "rows")

    @property
    def is_free(self) -> bool:
        """Bool, whether the size is the same for any number of rows."""
        return self.kind in ("number", "free")


Shape = tuple[Size, ...]


def number(value: Any) -> Size:
    """Return the `Size` of a known number."""
    return Size("number", value.item() if isinstance(value, np.generic) else value)


def rows(multiple: int | None = 1) -> Size:
    """Return the `Size` of a multiple of the rows; `None` is an unknown multiple."""
    return Size("rows", None if multiple is None else int(multiple))


FREE = Size("free")
UNKNOWN = Size("unknown")
SPLITS = Size("splits")
ZERO = number(0)
ONE = number(1)


def _multiplied(size: Size, factor: Any) -> Size:
    """Multiply `size`, a multiple of the rows, by a number.

    The result is `UNKNOWN` unless the product is a positive, whole multiple.
    """
    if factor <= 0:
        return UNKNOWN
    if size.number is None:
        return rows(None) if float(factor).is_integer() else UNKNOWN
    product = size.number * factor
    return rows(product) if float(product).is_integer() else UNKNOWN


def _free_or_unknown(*sizes: Size) -> Size:
    """Return `FREE` if no size depends on the number of rows, else `UNKNOWN`."""
    return FREE if all(size.is_free for size in sizes) else UNKNOWN


def product(sizes: Iterable[Size]) -> Size:
    """Return the product of sizes as a `Size`; 1 without any."""
    result = ONE
    for size in sizes:
        result = result * size
    return result


def array(values: Any) -> np.ndarray:
    """Return an array of `Size` from an array of numbers or a sequence of `Size`."""
    if isinstance(values, np.ndarray) and values.dtype != object:
        return array([number(n) for n in values.ravel()]).reshape(values.shape)
    result = np.empty(len(values), object)
    result[:] = list(values)
    return result


def numbers(values: np.ndarray | None) -> np.ndarray | None:
    """Return an array of `Size` as numbers, or `None` unless all of them are known."""
    if values is None or any(size.kind != "number" for size in values.ravel()):
        return None
    flat = [size.number for size in values.ravel()]
    dtype = None if flat else np.int64
    return np.array(flat, dtype).reshape(values.shape)


def broadcast(shapes: list[tuple[Size, ...]]) -> tuple[Size, ...]:
    """Return the shape to which operands of these shapes broadcast.

    Args:
        shapes: List of tuples of `Size`, at least one.
    """
    rank = max(len(shape) for shape in shapes)
    aligned = [(ONE,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(_broadcast_axis(list(axis)) for axis in zip(*aligned, strict=True))


def _broadcast_axis(sizes: list[Size]) -> Size:
    """Return the size of an axis after a broadcast, from its size in each operand.

    If sizes other than one differ, a multiple of the rows takes precedence.
    """
    others = [size for size in sizes if size != ONE]
    for kind in ("rows", "splits", "number", "unknown", "free"):
        match = next((size for size in others if size.kind == kind), None)
        if match is not None:
            return match
    return ONE


def axis_of_rows(shape: Iterable[Size]) -> int | None:
    """Return the axis whose size is a multiple of the rows, or `None` without one.

    It is also `None` if there are several.
    """
    axes = [axis for axis, size in enumerate(shape) if size.kind == "rows"]
    return axes[0] if len(axes) == 1 else None


def common(shapes: Sequence[Any]) -> Any:
    """Return a shape that holds for several shapes: what is known of all of them.

    Args:
        shapes: Sequence of tuples of `Size`, or `None` for an unknown shape.

    Returns:
        Tuple of `Size`, or `None` if a shape is unknown, or if ranks differ. A size in
        which shapes differ is `FREE` if it never depends on the number of rows, and
        else `UNKNOWN`.
    """
    if any(shape is None or len(shape) != len(shapes[0]) for shape in shapes):
        return None
    return tuple(
        same[0] if len(set(same)) == 1 else _free_or_unknown(*same)
        for same in zip(*shapes, strict=True)
    )
