"""Functions of means and sums over the rows of all replicas.

A quotient of two sums, such as a mean over a mask or a dice loss, and a root of a mean
are no means over rows: that of one device is not the replicas' average. But they are
functions of a few means and sums. All-reduced, these are those of one device; the
function is computed of them again, and its derivatives say how each replica's part of
them counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp import _compat
from tfdp.losses.row_forms.form import Kind
from tfdp.losses.row_forms.forms import Forms
from tfdp.losses.training_group import context_and_share

_LINEAR = (Kind.COUNT, Kind.TERMS, Kind.TOTAL)


@dataclasses.dataclass(frozen=True)
class GlobalStatistic:
    """Function of means and sums over the rows of all replicas.

    Args:
        value: Tensor, the same on all replicas.
        inputs: List of tensors, this replica's means and sums.
        derivatives: List of tensors, one for each of `inputs` and of its shape.
    """

    value: tf.Tensor
    inputs: list[tf.Tensor]
    derivatives: list[tf.Tensor]


def global_statistic(
    forms: Forms,
    tensor: tf.Tensor,
    as_mean: Callable[[tf.Tensor], tf.Tensor],
    most_elements: int | None = None,
) -> GlobalStatistic | None:
    """Compute a function of means and sums from those of all replicas.

    Args:
        forms: `Forms`.
        tensor: Scalar tensor of the form `STATISTIC`.
        as_mean: Callable that turns a mean or a sum of this replica into a number
            whose average over replicas, each by its rows, is that of one device.
        most_elements: Int, elements that may be all-reduced, or `None` for any number.
            Defaults to `None`.

    Returns:
        `GlobalStatistic`, or `None` where it depends on rows in another way, such as
        by their maximum.
    """
    found = _operations(forms, tensor)
    if found is None or _compat.in_loop_of_replica():
        return None
    context, weight = context_and_share()
    if context is None:
        return None
    operations, inputs = found
    sizes = [value.shape.num_elements() for value in inputs]
    if most_elements is not None and sum(n or most_elements + 1 for n in sizes) > (
        most_elements
    ):
        return None
    parts = [
        tf.math.multiply_no_nan(as_mean(value), tf.cast(weight, value.dtype))
        for value in inputs
    ]
    totals = context.all_reduce(tf.distribute.ReduceOp.SUM, parts)
    new = {value.ref(): total for value, total in zip(inputs, totals, strict=True)}
    for operation in operations:
        sources = [new.get(source.ref(), source) for source in operation.inputs]
        copies = _compat.copy_of_operation(operation, sources)
        new.update(
            (old.ref(), copy)
            for old, copy in zip(operation.outputs, copies, strict=True)
        )
    value = new[tensor.ref()]
    derivatives = tf.gradients(
        value, totals, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    return GlobalStatistic(tf.stop_gradient(value), inputs, derivatives)


def _operations(forms: Forms, tensor: tf.Tensor) -> tuple[list, list] | None:
    """Return the operations of a function, oldest first, and its means and sums."""
    operations: dict[str, Any] = {}
    inputs: dict[Any, tf.Tensor] = {}
    queue = [tensor]
    while queue:
        value = queue.pop()
        form = forms.of(value)
        if form.is_constant:
            continue
        # The terms of a larger tensor may be of other shapes.
        is_whole = form.kind is not Kind.TERMS or value.shape.rank == 0
        if form.kind in _LINEAR and value.dtype.is_floating and is_whole:
            inputs[value.ref()] = value
        elif form.kind is Kind.STATISTIC and _compat.is_pure(value.op):
            operations[value.op.name] = value.op
            queue += value.op.inputs
        else:
            return None
    # Replicas reduce them in one order: that in which they were traced.
    ordered = sorted(inputs.values(), key=_compat.op_position)
    return sorted(operations.values(), key=_compat.op_age), ordered
