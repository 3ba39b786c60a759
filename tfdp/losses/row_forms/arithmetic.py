"""Rules of element-wise functions: sums, products, quotients and others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfdp import _compat
from tfdp.losses.row_forms.form import (
    MEAN,
    PAIRS,
    STATISTIC,
    TERMS,
    UNKNOWN,
    Form,
    Kind,
    ReplicaPower,
)

SUMS = ("Add", "AddN", "AddV2", "Sub")
QUOTIENTS = ("DivNoNan", "RealDiv")
_OF_ALL_ROWS = (Kind.STATISTIC, Kind.TERMS, Kind.TOTAL)


def linear(op: Any, inputs: list[Form], replica_power_of: ReplicaPower) -> Any:
    """Rule of operations that change no more than the sign or the dtype."""
    del replica_power_of
    return inputs if op.type == "IdentityN" else inputs[0]


def sum_of_inputs(op: Any, inputs: list[Form], replica_power_of: ReplicaPower) -> Form:
    """Rule of a sum or a difference."""
    if any(form.kind in (Kind.ROWS, Kind.SHAPE) for form in inputs):
        return elementwise(op, inputs, replica_power_of)
    return added(inputs)


def added(inputs: Sequence[Form]) -> Form:
    """Return the form of a sum of numbers without rows."""
    kinds = {form.kind for form in inputs}
    if kinds == {Kind.COUNT}:
        return max(inputs, key=lambda form: form.degree)  # rows - 1 are as rows
    if Kind.TERMS in kinds:
        return TERMS
    # A constant is a mean: the replicas' weights add up to one.
    if any(form.degree or form.replica_power for form in inputs):
        alike = {(form.kind, form.degree, form.replica_power) for form in inputs}
        return inputs[0] if len(alike) == 1 else TERMS
    for kind in (Kind.PAIRS, Kind.STATISTIC, Kind.UNKNOWN):
        if kind in kinds:
            return Form(kind)
    return MEAN


def product(op: Any, inputs: list[Form], replica_power_of: ReplicaPower) -> Form:
    """Rule of a product of two tensors."""
    return _scaled(op, inputs, replica_power_of, sign=1)


def quotient(op: Any, inputs: list[Form], replica_power_of: ReplicaPower) -> Form:
    """Rule of a quotient of two tensors."""
    return _scaled(op, inputs, replica_power_of, sign=-1)


def _scaled(
    op: Any, inputs: list[Form], replica_power_of: ReplicaPower, sign: int
) -> Form:
    """Return the form of a product (sign 1) or of a quotient (sign -1)."""
    place = int(sign > 0 and inputs[1].kind is not Kind.COUNT)
    scaled, factor = inputs[place], inputs[1 - place]
    if factor.kind is not Kind.COUNT:
        return elementwise(op, inputs, replica_power_of)
    if scaled.kind is Kind.SHAPE:
        return scaled
    constant = op.inputs[1 - place]
    if _means_num_rows(op, scaled, factor, constant, sign):
        factor = Form(Kind.COUNT, -sign)
    elif factor.is_constant:
        power = replica_power_of(constant)
        # A loss is divided by the number of replicas; what is multiplied by it are
        # the rows of a replica.
        if scaled.kind is Kind.COUNT or sign * power < 0:
            factor = dataclasses.replace(factor, replica_power=power)
    if scaled.kind is Kind.TERMS:
        return UNKNOWN if factor.degree else scaled
    result = dataclasses.replace(
        scaled,
        degree=scaled.degree + sign * factor.degree,
        replica_power=scaled.replica_power + sign * factor.replica_power,
    )
    return _aligned(result, op, place) if result.has_rows else result


def _means_num_rows(
    op: Any, scaled: Form, factor: Form, constant: Any, sign: int
) -> bool:
    """Return whether a constant divides by the number of rows of a static batch."""
    # A sum, or one number for each row, as losses are before they are added up.
    is_column = scaled.has_rows and op.outputs[0].shape.rank == 1
    if not factor.is_constant or not (scaled.degree > 0 or is_column):
        return False
    value = _compat.constant_value(constant)
    if value is None or value.shape != () or float(value) == 0.0:
        return False
    divisor = float(value) if sign < 0 else 1.0 / float(value)
    return any(abs(divisor - count) < 1e-6 * count for count in scaled.counts)


def elementwise(op: Any, inputs: list[Form], replica_power_of: ReplicaPower) -> Form:
    """Rule of any element-wise function."""
    del replica_power_of
    kinds = {form.kind for form in inputs}
    if Kind.PAIRS in kinds:
        return PAIRS
    if Kind.ROWS in kinds:
        return _of_entries(op, inputs)
    if kinds & {Kind.TOTAL, Kind.STATISTIC, Kind.TERMS}:
        return STATISTIC
    if Kind.SHAPE in kinds:
        return next(form for form in inputs if form.kind is Kind.SHAPE)
    if kinds == {Kind.COUNT}:
        return max(inputs, key=lambda form: form.degree)
    return UNKNOWN


def _of_entries(op: Any, inputs: list[Form]) -> Form:
    """Return the form of a function of rows, and of values that all rows have."""
    rows = [
        _aligned(form, op, index) for index, form in enumerate(inputs) if form.has_rows
    ]
    if len({form.axis for form in rows} - {None}) > 1:
        return PAIRS
    # Less their mean, say; a length that is counted over rows changes no number.
    is_number = op.outputs[0].dtype.is_floating
    for tensor, form in zip(op.inputs, inputs, strict=True):
        if is_number and tensor.dtype.is_floating and form.kind in _OF_ALL_ROWS:
            return PAIRS
    if any(form.degree for form in rows):
        is_linear = op.type in (*SUMS, "Mul", *QUOTIENTS)
        return rows[0] if is_linear and len(rows) == 1 else UNKNOWN
    return rows[0]


def _aligned(form: Form, op: Any, index: int) -> Form:
    """Return the form of rows after broadcasting, which counts axes from the last."""
    before, after = op.inputs[index].shape.rank, op.outputs[0].shape.rank
    if form.axis is None or before is None or after is None:
        return form.with_axis(None)
    return form.with_axis(form.axis + after - before)
