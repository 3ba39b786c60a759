"""Rules of matrix products, which may compare rows with each other."""

from __future__ import annotations

from typing import Any

from tfdp.losses.row_forms.fallback import fallback
from tfdp.losses.row_forms.form import (
    PAIRS,
    ROWS_SOMEWHERE,
    STATISTIC,
    Form,
    Kind,
    ReplicaPower,
    are_constant,
)


def matmul(op: Any, inputs: list[Form], replica_power_of: ReplicaPower) -> Any:
    """Rule of a product of two matrices, or of two batches of them."""
    names = (
        ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
    )
    ranks = [tensor.shape.rank for tensor in op.inputs]
    if None in ranks:
        return fallback(op, inputs, replica_power_of)
    roles = [
        _role(form, rank, is_left=index == 0, is_adjoint=op.node_def.attr[name].b)
        for index, (form, rank, name) in enumerate(
            zip(inputs, ranks, names, strict=True)
        )
    ]
    if any(form.kind is Kind.PAIRS for form in inputs) or roles == ["free", "free"]:
        return PAIRS
    if "unknown" in roles:
        return ROWS_SOMEWHERE
    degree = inputs[0].degree + inputs[1].degree
    if "batch" in roles:
        return Form(Kind.ROWS, degree, 0)
    if "summed" in roles and "free" not in roles:
        rest = [f for f, role in zip(inputs, roles, strict=True) if role == "none"]
        return Form(Kind.TOTAL, degree + 1) if are_constant(rest) else STATISTIC
    if sorted(roles) == ["free", "none"]:
        axis = op.outputs[0].shape.rank - 2 + roles.index("free")
        return Form(Kind.ROWS, degree, axis)
    return fallback(op, inputs, replica_power_of)


def _role(form: Form, rank: int, *, is_left: bool, is_adjoint: bool) -> str:
    """Return the role of an operand's rows in a product.

    Returns:
        `"none"` without rows, `"batch"` where each has a product of its own,
        `"summed"`, `"free"` where they are an axis of the result, or `"unknown"`.
    """
    if not form.has_rows:
        return "none"
    if form.axis is None:
        return "unknown"
    if form.axis < rank - 2:
        return "batch"
    is_last = form.axis == rank - 1
    return "summed" if is_last == (is_left != is_adjoint) else "free"


def einsum(op: Any, inputs: list[Form], replica_power_of: ReplicaPower) -> Any:
    """Rule of `tf.einsum`."""
    equation = op.node_def.attr["equation"].s.decode()
    sources, result = equation.split("->")
    rows = [form for form in inputs if form.has_rows]
    if any(form.kind is Kind.PAIRS for form in inputs):
        return PAIRS
    if "." in equation or not rows:
        return fallback(op, inputs, replica_power_of)
    if any(form.axis is None for form in rows):
        return ROWS_SOMEWHERE
    letters = {
        labels[form.axis]
        for form, labels in zip(inputs, sources.split(","), strict=True)
        if form.axis is not None and form.has_rows
    }
    kept = [letter for letter in letters if letter in result]
    degree = sum(form.degree for form in rows)
    if len(kept) > 1:
        return PAIRS
    if kept:
        return Form(Kind.ROWS, degree, result.index(kept[0]))
    return Form(Kind.TOTAL, degree + 1) if len(letters) == 1 else STATISTIC
