"""Rules of reductions, and of operations that move the axis of rows."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdp import _compat
from tfdp.losses.row_forms.arithmetic import added
from tfdp.losses.row_forms.fallback import fallback
from tfdp.losses.row_forms.form import (
    NUM_ROWS,
    ROWS_SOMEWHERE,
    STATISTIC,
    SUM,
    UNKNOWN,
    Form,
    Kind,
    ReplicaPower,
)


def reduction(op: Any, inputs: list[Form], replica_power_of: ReplicaPower) -> Form:
    """Rule of a sum, mean, maximum and the like over some axes."""
    del replica_power_of
    form, is_linear = inputs[0], op.type in ("Sum", "Mean")
    if form.kind is Kind.SHAPE:
        return NUM_ROWS if op.type == "Prod" else UNKNOWN
    if not form.has_rows:
        keeps = is_linear or form.kind in (Kind.PAIRS, Kind.UNKNOWN, Kind.COUNT)
        return form if keeps else STATISTIC
    if op.outputs[0].shape.rank != 0:
        axes, rank = _compat.constant_value(op.inputs[1]), op.inputs[0].shape.rank
        if form.axis is None or rank is None or axes is None:
            return ROWS_SOMEWHERE
        reduced = {int(axis) % rank for axis in axes.reshape(-1)}
        before = [axis for axis in reduced if axis < form.axis]
        if form.axis not in reduced:
            keeps_axes = op.node_def.attr["keep_dims"].b
            return form.with_axis(form.axis - (0 if keeps_axes else len(before)))
    return _total(op, form) if is_linear else STATISTIC


def _total(op: Any, form: Form) -> Form:
    """Return the form of a sum or a mean over rows."""
    shape = op.inputs[0].shape
    rows = None if form.axis is None or shape.rank is None else shape[form.axis]
    sizes = (shape.num_elements(), rows)
    counts = form.counts | {size for size in sizes if size is not None}
    degree = form.degree + (op.type == "Sum")
    return Form(Kind.TOTAL, degree, None, form.replica_power, counts)


def half_of_squares(
    op: Any, inputs: list[Form], replica_power_of: ReplicaPower
) -> Form:
    """Rule of `tf.nn.l2_loss`."""
    del op, replica_power_of
    return SUM if inputs[0].has_rows else STATISTIC


def pack(op: Any, inputs: list[Form], replica_power_of: ReplicaPower) -> Any:
    """Rule of `tf.stack`: of losses, which Keras sums up afterwards, or shapes."""
    if all(form.kind is Kind.COUNT for form in inputs):
        axes = [index for index, form in enumerate(inputs) if form.degree]
        is_shape = op.outputs[0].dtype.is_integer
        return Form(Kind.SHAPE, 1, axes[0]) if is_shape else UNKNOWN
    rows = next((form for form in inputs if form.has_rows), None)
    if rows is None:
        is_of_scalars = op.inputs[0].shape.rank == 0
        return (
            added(inputs) if is_of_scalars else fallback(op, inputs, replica_power_of)
        )
    place = op.node_def.attr["axis"].i
    if rows.axis is None or place < 0:
        return rows.with_axis(None)
    return rows.with_axis(rows.axis + (place <= rows.axis))


def concatenation(op: Any, inputs: list[Form], replica_power_of: ReplicaPower) -> Any:
    """Rule of `tf.concat`: of batches, or of the parts of a shape."""
    rows = next((form for form in inputs if form.has_rows), None)
    if rows is not None:
        # Concatenated batches are a batch of more rows.
        length = op.outputs[0].shape[0] if rows.axis == 0 else None
        counts = rows.counts if length is None else rows.counts | {length}
        return dataclasses.replace(rows, counts=counts)
    is_shape = any(form.kind is Kind.SHAPE for form in inputs)
    if not is_shape or op.outputs[0].shape.rank != 1:
        return fallback(op, inputs, replica_power_of)
    before = 0
    for tensor, form in zip(op.inputs, inputs, strict=True):
        if form.kind is Kind.SHAPE and form.axis is not None:
            return Form(Kind.SHAPE, 1, before + form.axis)
        if tensor.shape.rank != 1 or tensor.shape[0] is None:
            break
        before += tensor.shape[0]
    return Form(Kind.SHAPE, 1)


def reshape(op: Any, inputs: list[Form], replica_power_of: ReplicaPower) -> Any:
    """Rule of `tf.reshape`: rows stay first, or are where the shape has them."""
    form, shape = inputs
    if not form.has_rows:
        is_new = form.kind is Kind.COUNT
        return fallback(op, inputs, replica_power_of) if is_new else form
    if shape.kind is Kind.SHAPE and shape.axis is not None:
        return form.with_axis(shape.axis)
    return form.with_axis(0 if form.axis == 0 else None)


def transpose(op: Any, inputs: list[Form], replica_power_of: ReplicaPower) -> Form:
    """Rule of `tf.transpose`."""
    del replica_power_of
    form, order = inputs[0], _compat.constant_value(op.inputs[1])
    if not form.has_rows or form.axis is None or order is None:
        return form.with_axis(None)
    return form.with_axis(order.tolist().index(form.axis))


def expand(op: Any, inputs: list[Form], replica_power_of: ReplicaPower) -> Form:
    """Rule of `tf.expand_dims`."""
    del replica_power_of
    form, place = inputs[0], _compat.constant_value(op.inputs[1])
    rank = op.outputs[0].shape.rank
    if not form.has_rows or form.axis is None or place is None or rank is None:
        return form.with_axis(None)
    return form.with_axis(form.axis + (int(place.reshape(-1)[0]) % rank <= form.axis))


def squeeze(op: Any, inputs: list[Form], replica_power_of: ReplicaPower) -> Form:
    """Rule of `tf.squeeze`."""
    del replica_power_of
    form, rank = inputs[0], op.inputs[0].shape.rank
    places = list(op.node_def.attr["squeeze_dims"].list.i)
    if not form.has_rows or form.axis is None:
        return form
    if rank is None or not places:
        return form.with_axis(0 if form.axis == 0 else None)
    return form.with_axis(form.axis - sum(place % rank < form.axis for place in places))
