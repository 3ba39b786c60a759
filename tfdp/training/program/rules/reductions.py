"""Rules of reductions: over rows to partial sums, over other axes to own rows.

They return `None` if the axes of the reduction are not known well enough.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.training.program.facts import Fact, own_rows, part, whole
from tfdp.training.program.sizes import ONE, Size
from tfdp.training.program.view import AS_IS, WHOLE, Decision, OperationView, operations

REDUCTIONS = operations("All Any EuclideanNorm Max Mean Min Prod Sum")
# These reductions return the index of an element. Along the axis of rows it would count
# from a replica's first row, so they are divided only along other axes.
_INDEX_REDUCTIONS = frozenset(("ArgMax", "ArgMin"))
# For these reductions, the reduction of the replicas' results is that of all rows. So
# the results, which are smaller than the rows, are gathered and reduced once more.
_REDUCED_TWICE = frozenset(("All", "Any", "Max", "Min", "Prod"))


def decide_reduction(view: OperationView) -> Decision | None:
    """Decide how replicas build a reduction of a row-sharded tensor.

    A sum or a mean over rows becomes a partial sum. For a maximum and the like, the
    replicas' results are gathered and reduced again. Over other axes each replica
    reduces its own rows. The decision is `None` for another operation, or if the axes
    are not known.
    """
    input_fact = view.facts[0]
    if not input_fact.is_rows or input_fact.sizes is None:
        return None
    if view.type == "L2Loss":
        return Decision([AS_IS], [part(())])
    if view.type in _INDEX_REDUCTIONS:
        axes = view.numbers(1)
        known = None if axes is None else {int(axes) % len(input_fact.sizes)}
        return (
            None
            if known is None
            else _decide_over_other_axes(input_fact, known, keeps=False)
        )
    return _decide_over_axes(view, input_fact) if view.type in REDUCTIONS else None


def _decide_over_axes(view: OperationView, input_fact: Fact) -> Decision | None:
    """Decide how replicas build a reduction; along rows, sums become partial sums.

    `input_fact` is the `Fact` of the reduced tensor. The decision is `None` if the axes
    are not known well enough, or if the reduction along rows cannot be divided.
    """
    assert input_fact.sizes is not None
    certain, maybe = _reduced_axes(view, len(input_fact.sizes))
    if certain is None or input_fact.axis in maybe:
        return None
    keeps = bool(view.attribute("keep_dims"))
    if input_fact.axis not in certain:
        if maybe and not keeps:
            return None
        return _decide_over_other_axes(input_fact, certain, keeps=keeps)
    shape = None if maybe else _reduced_shape(input_fact.sizes, certain, keeps=keeps)
    if view.type == "Sum":
        return Decision([AS_IS, WHOLE], [part(shape)])
    if view.type == "Mean":
        if view.numbers(1) is None or view.op.outputs[0].dtype.is_integer:
            # A partial mean is a sum divided by the number of all entries, so the axes
            # must be known. A mean of integers is rounded, and so not a sum of partial
            # means.
            return None
        build = functools.partial(
            _build_mean, others=sorted(certain - {input_fact.axis})
        )
        return Decision([AS_IS, WHOLE], [part(shape)], build)
    if view.type in _REDUCED_TWICE and input_fact.sizes[input_fact.axis] != ONE:
        return Decision(
            [AS_IS, WHOLE], [whole(shape)], _build_reduced_twice, has_collective=True
        )
    return None


def _reduced_axes(
    view: OperationView, rank: int
) -> tuple[set[int] | None, frozenset[int]]:
    """Return the certain axes of a reduction, and further axes that it may have.

    `rank` is that of the input.

    Returns:
        Tuple of a set of ints, or `None` if the axes are not known; and a frozenset of
        ints, axes that depend on sizes that are not known yet.
    """
    axes = view.numbers(1)
    if axes is not None:
        return {int(axis) % rank for axis in np.ravel(axes)}, frozenset()
    fact = view.facts[1]
    if fact.axes is None:
        return None, frozenset()
    return set(fact.axes), fact.maybe_axes


def _decide_over_other_axes(input_fact: Fact, axes: set[int], *, keeps: bool) -> Any:
    """Decide how replicas build a reduction over other axes than that of rows.

    Args:
        input_fact: `Fact` of the reduced tensor.
        axes: Set of ints, the axes of the reduction.
        keeps: Bool; if true, these axes remain, with size one; if false, they are
            removed.

    Returns:
        `Decision`, or `None` if an axis is that of rows.
    """
    if input_fact.axis in axes:
        return None
    assert input_fact.sizes is not None
    shape = _reduced_shape(input_fact.sizes, axes, keeps=keeps)
    axis = input_fact.axis
    if not keeps:
        axis -= sum(other < input_fact.axis for other in axes)
    return Decision([AS_IS, AS_IS], [own_rows(shape, axis)])


def _reduced_shape(
    shape: tuple[Size, ...], axes: set[int], *, keeps: bool
) -> tuple[Size, ...]:
    """Return the shape after a reduction.

    Args:
        shape: Tuple of `Size`, the shape before the reduction.
        axes: Set of ints, the axes of the reduction.
        keeps: Bool; if true, these axes remain, with size one; if false, they are
            removed.
    """
    if keeps:
        return tuple(ONE if axis in axes else n for axis, n in enumerate(shape))
    return tuple(n for axis, n in enumerate(shape) if axis not in axes)


def _build_mean(builder: Any, op: Any, replica_inputs: list, others: list[int]) -> list:
    """Build a partial mean: this replica's sum divided by the global number of entries.

    Entries are counted along the axis of rows and `others`, the other axes of the
    reduction. The partial means of all replicas add up to the mean.

    Returns:
        List of one tensor, this replica's output of `op` from `replica_inputs`.
    """
    total = builder.copy(op, replica_inputs, kind="Sum")[0]
    shape = builder.fact(op.inputs[0]).sizes
    count = builder.entries(op.inputs[0])
    for axis in others:
        is_number = shape[axis].kind == "number"
        count *= shape[axis].number if is_number else tf.shape(replica_inputs[0])[axis]
    return [total / tf.cast(count, total.dtype)]


def _build_reduced_twice(builder: Any, op: Any, replica_inputs: list) -> list:
    """Build a reduction of this replica's rows, and then of all replicas' results.

    Returns:
        List of one tensor, this replica's output of `op` from `replica_inputs`.
    """
    return [
        builder.replica.reduce_results(op.type, builder.copy(op, replica_inputs)[0])
    ]
