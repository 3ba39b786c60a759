"""Rules of reductions: over rows they give parts of sums, over other axes rows."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.training.program.facts import Fact, own_rows, part, whole
from tfdp.training.program.sizes import ONE, Size
from tfdp.training.program.view import AS_HELD, WHOLE, Decision, View, operations

REDUCTIONS = operations("All Any EuclideanNorm Max Mean Min Prod Sum")
_ARGUMENTS = frozenset(("ArgMax", "ArgMin"))
_PARTIAL = frozenset(("All", "Any", "Max", "Min", "Prod"))


def decide_reduction(view: View) -> Decision | None:
    """Decide a reduction of own rows."""
    data = view.facts[0]
    if not data.is_rows or data.sizes is None:
        return None
    if view.type == "L2Loss":
        return Decision([AS_HELD], [part(())])
    if view.type in _ARGUMENTS:
        axes = view.numbers(1)
        known = None if axes is None else {int(axes) % len(data.sizes)}
        return None if known is None else _over_others(data, known, keeps=False)
    return _decide_over_axes(view, data) if view.type in REDUCTIONS else None


def _decide_over_axes(view: View, data: Fact) -> Decision | None:
    assert data.sizes is not None
    certain, maybe = _axes(view, len(data.sizes))
    if certain is None or data.axis in maybe:
        return None
    keeps = bool(view.attribute("keep_dims"))
    if data.axis not in certain:
        if maybe and not keeps:
            return None
        return _over_others(data, certain, keeps=keeps)
    shape = None if maybe else _reduced(data.sizes, certain, keeps=keeps)
    if view.type == "Sum":
        return Decision([AS_HELD, WHOLE], [part(shape)])
    if view.type == "Mean":
        if view.numbers(1) is None or view.op.outputs[0].dtype.is_integer:
            return None  # A mean of integers is rounded.
        build = functools.partial(_build_mean, others=sorted(certain - {data.axis}))
        return Decision([AS_HELD, WHOLE], [part(shape)], build)
    if view.type in _PARTIAL and data.sizes[data.axis] != ONE:
        return Decision(
            [AS_HELD, WHOLE], [whole(shape)], _build_partial, has_collective=True
        )
    return None


def _axes(view: View, rank: int) -> tuple[set[int] | None, frozenset[int]]:
    """Return the axes of a reduction, and those that it may have beside them."""
    found = view.numbers(1)
    if found is not None:
        return {int(axis) % rank for axis in np.ravel(found)}, frozenset()
    fact = view.facts[1]
    if fact.axes is None:
        return None, frozenset()
    return set(fact.axes), fact.maybe_axes


def _over_others(data: Fact, axes: set[int], *, keeps: bool) -> Any:
    if data.axis in axes:
        return None
    assert data.sizes is not None
    shape = _reduced(data.sizes, axes, keeps=keeps)
    axis = data.axis
    if not keeps:
        axis -= sum(other < data.axis for other in axes)
    return Decision([AS_HELD, AS_HELD], [own_rows(shape, axis)])


def _reduced(
    shape: tuple[Size, ...], axes: set[int], *, keeps: bool
) -> tuple[Size, ...]:
    if keeps:
        return tuple(ONE if axis in axes else n for axis, n in enumerate(shape))
    return tuple(n for axis, n in enumerate(shape) if axis not in axes)


def _build_mean(builder: Any, op: Any, inputs: list, others: list[int]) -> list:
    """Build a part of a mean: the sum divided by the entries of all replicas.

    The entries are those along the axis of rows and along the others that are reduced.
    """
    total = builder.copy(op, inputs, kind="Sum")[0]
    shape = builder.fact(op.inputs[0]).sizes
    count = builder.entries(op.inputs[0])
    for axis in others:
        is_number = shape[axis].kind == "number"
        count *= shape[axis].number if is_number else tf.shape(inputs[0])[axis]
    return [total / tf.cast(count, total.dtype)]


def _build_partial(builder: Any, op: Any, inputs: list) -> list:
    """Build a reduction of each replica's rows, and that of all their results."""
    return [builder.replica.reduce_results(op.type, builder.copy(op, inputs)[0])]
