"""Rules of reductions: over rows to partial sums, over other axes to own rows."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.training.program.facts import Fact, own_rows, part, whole
from tfdp.training.program.sizes import ONE, Size
from tfdp.training.program.view import AS_HELD, WHOLE, Decision, View, operations

REDUCTIONS = operations("All Any EuclideanNorm Max Mean Min Prod Sum")
# Reductions to the index of an element.
_INDEX_REDUCTIONS = frozenset(("ArgMax", "ArgMin"))
# Reductions whose results on replicas are gathered, and reduced once more.
_REDUCED_TWICE = frozenset(("All", "Any", "Max", "Min", "Prod"))


def decide_reduction(view: View) -> Decision | None:
    """Decide how to build a reduction of own rows."""
    data = view.facts[0]
    if not data.is_rows or data.sizes is None:
        return None
    if view.type == "L2Loss":
        return Decision([AS_HELD], [part(())])
    if view.type in _INDEX_REDUCTIONS:
        axes = view.numbers(1)
        known = None if axes is None else {int(axes) % len(data.sizes)}
        return (
            None if known is None else _decide_over_other_axes(data, known, keeps=False)
        )
    return _decide_over_axes(view, data) if view.type in REDUCTIONS else None


def _decide_over_axes(view: View, data: Fact) -> Decision | None:
    """Decide how to build a reduction by whether its axes include that of rows."""
    assert data.sizes is not None
    certain, maybe = _reduced_axes(view, len(data.sizes))
    if certain is None or data.axis in maybe:
        return None
    keeps = bool(view.attribute("keep_dims"))
    if data.axis not in certain:
        if maybe and not keeps:
            return None
        return _decide_over_other_axes(data, certain, keeps=keeps)
    shape = None if maybe else _reduced_shape(data.sizes, certain, keeps=keeps)
    if view.type == "Sum":
        return Decision([AS_HELD, WHOLE], [part(shape)])
    if view.type == "Mean":
        if view.numbers(1) is None or view.op.outputs[0].dtype.is_integer:
            # Axes have to be known to divide by the number of entries. A mean of
            # integers is rounded, so that it is not the sum of rounded parts.
            return None
        build = functools.partial(_build_mean, others=sorted(certain - {data.axis}))
        return Decision([AS_HELD, WHOLE], [part(shape)], build)
    if view.type in _REDUCED_TWICE and data.sizes[data.axis] != ONE:
        return Decision(
            [AS_HELD, WHOLE], [whole(shape)], _build_reduced_twice, has_collective=True
        )
    return None


def _reduced_axes(view: View, rank: int) -> tuple[set[int] | None, frozenset[int]]:
    """Return the certain axes of a reduction, and further axes that it may have."""
    axes = view.numbers(1)
    if axes is not None:
        return {int(axis) % rank for axis in np.ravel(axes)}, frozenset()
    fact = view.facts[1]
    if fact.axes is None:
        return None, frozenset()
    return set(fact.axes), fact.maybe_axes


def _decide_over_other_axes(data: Fact, axes: set[int], *, keeps: bool) -> Any:
    """Decide how to build a reduction over other axes than that of rows."""
    if data.axis in axes:
        return None
    assert data.sizes is not None
    shape = _reduced_shape(data.sizes, axes, keeps=keeps)
    axis = data.axis
    if not keeps:
        axis -= sum(other < data.axis for other in axes)
    return Decision([AS_HELD, AS_HELD], [own_rows(shape, axis)])


def _reduced_shape(
    shape: tuple[Size, ...], axes: set[int], *, keeps: bool
) -> tuple[Size, ...]:
    """Return a shape after a reduction, whose axes it keeps as size one or drops."""
    if keeps:
        return tuple(ONE if axis in axes else n for axis, n in enumerate(shape))
    return tuple(n for axis, n in enumerate(shape) if axis not in axes)


def _build_mean(builder: Any, op: Any, inputs: list, others: list[int]) -> list:
    """Build a partial mean: the local sum over the number of entries of all replicas.

    The entries are counted along the axis of rows and the other axes of the reduction.
    """
    total = builder.copy(op, inputs, kind="Sum")[0]
    shape = builder.fact(op.inputs[0]).sizes
    count = builder.entries(op.inputs[0])
    for axis in others:
        is_number = shape[axis].kind == "number"
        count *= shape[axis].number if is_number else tf.shape(inputs[0])[axis]
    return [total / tf.cast(count, total.dtype)]


def _build_reduced_twice(builder: Any, op: Any, inputs: list) -> list:
    """Build a reduction of own rows, and the reduction of all replicas' results."""
    return [builder.replica.reduce_results(op.type, builder.copy(op, inputs)[0])]
