"""Rules of shapes and their parts, one of which is the number of rows."""

from __future__ import annotations

from typing import Any

from tfdp import _compat
from tfdp.losses.row_forms.fallback import fallback
from tfdp.losses.row_forms.form import (
    CONSTANT,
    NUM_ROWS,
    ROWS,
    UNKNOWN,
    Form,
    Kind,
    ReplicaPower,
)


def shape(op: Any, inputs: list[Form], replica_power_of: ReplicaPower) -> list[Form]:
    """Rule of `tf.shape`."""
    del op, replica_power_of
    return [_shape_of(form) for form in inputs]


def _shape_of(form: Form) -> Form:
    if form.has_rows:
        return Form(Kind.SHAPE, 1, form.axis)
    return Form(Kind.SHAPE, 1) if form.kind is Kind.UNKNOWN else CONSTANT


def size(op: Any, inputs: list[Form], replica_power_of: ReplicaPower) -> Form:
    """Rule of `tf.size`."""
    del op, replica_power_of
    return NUM_ROWS if inputs[0].kind in (Kind.ROWS, Kind.UNKNOWN) else CONSTANT


def part(op: Any, inputs: list[Form], replica_power_of: ReplicaPower) -> Any:
    """Rule of a slice: of a shape one of its numbers, or some of them."""
    form = inputs[0]
    if form.kind is not Kind.SHAPE:
        return fallback(op, inputs, replica_power_of)
    begin, end = (_compat.constant_value(op.inputs[index]) for index in (1, 2))
    if form.axis is None or begin is None or end is None or begin.size != 1:
        return UNKNOWN
    if op.node_def.attr["shrink_axis_mask"].i:
        return NUM_ROWS if int(begin[0]) == form.axis else CONSTANT
    first = 0 if op.node_def.attr["begin_mask"].i else int(begin[0])
    last = None if op.node_def.attr["end_mask"].i else int(end[0])
    if first < 0 or (last is not None and last < 0):
        is_within = form.axis == 0 and first == 0
    else:
        is_within = first <= form.axis and (last is None or form.axis < last)
    return Form(Kind.SHAPE, 1, form.axis - first) if is_within else CONSTANT


def entry(op: Any, inputs: list[Form], replica_power_of: ReplicaPower) -> Any:
    """Rule of `tf.gather`: of a shape one of its numbers."""
    form, index = inputs[0], _compat.constant_value(op.inputs[1])
    if form.kind is not Kind.SHAPE or index is None or index.shape != ():
        return fallback(op, inputs, replica_power_of)
    return NUM_ROWS if form.axis == int(index) else CONSTANT


def positions(op: Any, inputs: list[Form], replica_power_of: ReplicaPower) -> Any:
    """Rule of `tf.range`: of the number of rows one number for each."""
    if any(form.kind is Kind.COUNT and form.degree for form in inputs):
        return ROWS
    return fallback(op, inputs, replica_power_of)
