"""Rules of loops and functions, and of operations without one of their own."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tfdp import _compat
from tfdp.losses.row_forms.form import (
    PAIRS,
    ROWS_SOMEWHERE,
    STATISTIC,
    UNKNOWN,
    Form,
    Kind,
    ReplicaPower,
)

# Which input of an operation has the axes that it works along.
_AXIS_INPUT = {"Roll": 2, "ReverseV2": 1, "Cumsum": 1, "Cumprod": 1}


def opaque(op: Any, inputs: list[Form], replica_power_of: ReplicaPower) -> list[Form]:
    """Rule of a loop, or of a function without a graph."""
    del inputs, replica_power_of
    return [
        UNKNOWN if output.shape.rank == 0 else ROWS_SOMEWHERE for output in op.outputs
    ]


def fallback(op: Any, inputs: list[Form], replica_power_of: ReplicaPower) -> Any:
    """Rule of any other operation: rows stay rows where the first axis is as long."""
    del replica_power_of
    kinds = {form.kind for form in inputs}
    if Kind.PAIRS in kinds or (Kind.ROWS in kinds and _mixes_rows(op, inputs)):
        return PAIRS
    if Kind.ROWS in kinds:
        return [_of_rows(op, inputs, output) for output in op.outputs]
    shapes = [form for form in inputs if form.kind is Kind.SHAPE]
    if shapes:
        rows = Form(Kind.ROWS, 0, shapes[0].axis)
        return [rows if output.shape.rank != 0 else UNKNOWN for output in op.outputs]
    if kinds & {Kind.TOTAL, Kind.STATISTIC, Kind.TERMS}:
        return STATISTIC
    return UNKNOWN


def _mixes_rows(op: Any, inputs: list[Form]) -> bool:
    """Return whether an operation moves rows, adds them up in turn or selects some."""
    if op.type == "Where":  # of a mask: what it selects has another number of rows
        return inputs[0].axis == 0
    if inputs[0].axis != 0:
        return False
    if op.type == "TopKV2":
        return op.inputs[0].shape.rank == 1
    place = _AXIS_INPUT.get(op.type)
    axes = None if place is None else _compat.constant_value(op.inputs[place])
    rank = op.inputs[0].shape.rank
    return axes is not None and bool(rank) and 0 in np.ravel(axes) % rank


def _of_rows(op: Any, inputs: list[Form], output: Any) -> Form:
    """Return the form of one output of an operation on rows."""
    if output.shape.rank == 0:
        return UNKNOWN
    tensor, form = next(
        pair for pair in zip(op.inputs, inputs, strict=True) if pair[1].has_rows
    )
    if form.axis != 0 or not tensor.shape.rank or output.shape.rank is None:
        return ROWS_SOMEWHERE
    has_rows = output.shape[0] is None or output.shape[0] == tensor.shape[0]
    return dataclasses.replace(form, degree=0) if has_rows else STATISTIC
