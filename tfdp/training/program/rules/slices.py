"""Rules of slices that keep all rows; they return `None` for other slices.

`input_fact` and `input_sizes` are the `Fact` and the shape of the sliced tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfdp.training.program import sizes
from tfdp.training.program.facts import Fact, Form, own_rows, with_rows
from tfdp.training.program.sizes import Shape, Size, number
from tfdp.training.program.view import (
    AS_IS,
    WHOLE,
    Decision,
    Need,
    OperationView,
)


def decide_strided_slice(
    view: OperationView, input_fact: Fact, input_sizes: Shape
) -> Decision | None:
    """Decide how replicas slice their rows, as in `x[:, 1:]`.

    The decision is `None` unless the slice keeps all rows.
    """
    if any(fact.is_rows for fact in view.facts[1:]):
        return None
    axis = _axis_after_slice(view, input_fact)
    if axis is None:
        return None
    shape = view.output_sizes()
    if shape is None:
        return None
    needs = [AS_IS, *_needs_of_bounds(view.facts[1:])]
    return Decision(
        needs, [own_rows(with_rows(shape, axis, input_fact.multiple), axis)]
    )


def _needs_of_bounds(facts: Sequence[Fact]) -> list[Need]:
    """Return the form in which a slice needs each of its bounds, given their `Fact`s.

    Bounds that are computed from sizes are needed for a replica's own rows (`AS_IS`),
    and others whole.
    """
    return [AS_IS if fact.form is Form.SIZES else WHOLE for fact in facts]


def _axis_after_slice(view: OperationView, input_fact: Fact) -> int | None:
    """Return the axis of rows after a slice, or `None` unless it keeps all rows."""
    rank, source = len(input_fact.sizes or ()), view.facts[3].sizes
    if source is None or len(source) != 1 or source[0].kind != "number":
        return None
    count = int(source[0].number)
    new, ellipsis = view.attribute("new_axis_mask"), view.attribute("ellipsis_mask")
    skipped = rank - (count - bin(new).count("1") - bool(ellipsis))
    axis_in, axis_out, row_axis = 0, 0, None
    for item in range(count):
        bit = 1 << item
        if ellipsis & bit:
            if axis_in <= input_fact.axis < axis_in + skipped:
                row_axis = axis_out + input_fact.axis - axis_in
            axis_in, axis_out = axis_in + skipped, axis_out + skipped
        elif new & bit:
            axis_out += 1
        else:
            if axis_in == input_fact.axis:
                row_axis = axis_out
            if not _can_slice(
                view, item, input_fact, is_rows=axis_in == input_fact.axis
            ):
                return None
            axis_in += 1
            axis_out += not view.attribute("shrink_axis_mask") & bit
    return axis_out + input_fact.axis - axis_in if row_axis is None else row_axis


def _can_slice(
    view: OperationView, item: int, input_fact: Fact, *, is_rows: bool
) -> bool:
    """Return whether each replica can slice an axis of its rows as one device does.

    Args:
        view: `OperationView` of the slice.
        item: Int, index of the axis in `begin`, `end` and `strides` of the slice.
        input_fact: `Fact` of the sliced tensor.
        is_rows: Bool, whether the axis is that of rows, which must be taken whole. The
            bounds of another axis must not depend on the number of rows.
    """
    begin, end, strides = view.facts[1].value, view.facts[2].value, view.numbers(3)
    if not is_rows:
        # A bound that depends on the number of rows is computed from this replica's
        # rows. It would differ from the bound on one device, and cut the axis
        # elsewhere.
        return not _counts_rows(begin, item) and not _counts_rows(end, item)
    bit, own = 1 << item, (input_fact.sizes or ())[input_fact.axis]
    takes_first = view.attribute("begin_mask") & bit or _equals(begin, item, sizes.ZERO)
    takes_last = view.attribute("end_mask") & bit or _equals(end, item, own)
    has_step = strides is None or strides[item] != 1
    is_one = view.attribute("shrink_axis_mask") & bit
    return bool(takes_first and takes_last and not has_step and not is_one)


def _counts_rows(values: np.ndarray | None, index: int) -> bool:
    """Return whether `values` is known, with a multiple of the rows at `index`."""
    return values is not None and values[index].kind == "rows"


def _equals(values: np.ndarray | None, index: int, size: Size) -> bool:
    """Return whether an array of `Size` is known, and has this size at an index."""
    return values is not None and values[index] == size


def decide_strided_slice_grad(view: OperationView) -> Decision | None:
    """Decide how replicas build a `StridedSliceGrad`: each for its own rows.

    The decision is `None` if the slice drops rows, if the shape of the sliced tensor is
    not known or has no axis of rows, or if the incoming gradient has no rows.
    """
    shape, gradient = view.facts[0].value, view.facts[4]
    axis = None if shape is None else sizes.axis_of_rows(shape)
    if axis is None or not gradient.is_rows:
        return None
    source = own_rows(tuple(shape), axis)
    inner = OperationView(view.op, [source, *view.facts[1:4]], view.scope)
    if _axis_after_slice(inner, source) != gradient.axis:
        return None
    return Decision([*_needs_of_bounds(view.facts[:4]), AS_IS], [source])


def decide_slice(
    view: OperationView, input_fact: Fact, input_sizes: Shape
) -> Decision | None:
    """Decide how replicas build a `tf.slice` of their own rows.

    The decision is `None` if the slice drops rows, if a bound is not known, or if a
    bound of another axis depends on the number of rows.
    """
    begin, size = view.facts[1].value, view.facts[2].value
    if begin is None or size is None or begin[input_fact.axis] != sizes.ZERO:
        return None
    if size[input_fact.axis] not in (number(-1), input_sizes[input_fact.axis]):
        return None
    others = [axis for axis in range(len(input_sizes)) if axis != input_fact.axis]
    if any(_counts_rows(value, axis) for value in (begin, size) for axis in others):
        return None
    return Decision([AS_IS] * 3, same_rows(view, input_fact))


def same_rows(view: OperationView, input_fact: Fact) -> list[Fact]:
    """Return each output's `Fact`: own rows, along the same axis as in `input_fact`."""
    return [
        view.rows_output(input_fact.axis, input_fact.multiple, index)
        for index in range(len(view.op.outputs))
    ]
