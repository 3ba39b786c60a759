"""Rules of operations that arrange elements; joins, and what adds or moves an axis.

They return `None` if the operation mixes rows, or if sizes that they need are unknown.
`input_fact` and `input_sizes` are the `Fact` and the shape of the input of own rows.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.training.program import sizes
from tfdp.training.program.facts import Fact, integers, own_rows, with_rows
from tfdp.training.program.rules.indexing import (
    decide_gather,
    decide_scatter,
    decide_segment_sum,
)
from tfdp.training.program.rules.reshapes import decide_reshape
from tfdp.training.program.rules.rowwise import build_or_use_zero_row
from tfdp.training.program.rules.slices import (
    decide_slice,
    decide_strided_slice,
    decide_strided_slice_grad,
    same_rows,
)
from tfdp.training.program.sizes import ONE, Shape, Size, number
from tfdp.training.program.view import (
    AS_IS,
    WHOLE,
    Decision,
    OperationView,
    rows_along,
    table,
)


def decide_layout(view: OperationView) -> Decision | None:
    """Decide how replicas build an operation that moves or repeats elements.

    Each replica runs it on its own rows. The decision is `None` for another operation,
    or if this one would mix rows.
    """
    if view.type in _RULES_OF_ANY_INPUT:
        return _RULES_OF_ANY_INPUT[view.type](view)
    if view.type not in _RULES_OF_FIRST_INPUT:
        return None
    data = view.facts[1 if view.type == "Split" else 0]
    if not data.is_rows or data.sizes is None:
        return None
    return _RULES_OF_FIRST_INPUT[view.type](view, data, data.sizes)


def _transpose(
    view: OperationView, input_fact: Fact, input_sizes: Shape
) -> Decision | None:
    """Decide how replicas build a transpose of a row-sharded tensor.

    The transpose may move the axis of rows. The decision is `None` if the permutation
    is not known.
    """
    permutation = view.numbers(1)
    if permutation is None:
        return None
    order = [int(axis) for axis in permutation]
    shape = tuple(input_sizes[axis] for axis in order)
    return Decision([AS_IS, WHOLE], [own_rows(shape, order.index(input_fact.axis))])


def _expand_dims(
    view: OperationView, input_fact: Fact, input_sizes: Shape
) -> Decision | None:
    """Decide how replicas insert an axis of size one into their rows (`ExpandDims`).

    The decision is `None` if the index of the axis is not known.
    """
    place = view.numbers(1)
    if place is None:
        return None
    return Decision(
        [AS_IS, WHOLE], [_with_axis(input_fact, input_sizes, int(place), ONE)]
    )


def _with_axis(input_fact: Fact, input_sizes: Shape, place: int, size: Size) -> Fact:
    """Return the `Fact` of a row-sharded tensor after the insertion of an axis.

    Args:
        input_fact: `Fact` before the insertion.
        input_sizes: Tuple of `Size`, the shape before the insertion.
        place: Int, index of the new axis; negative from the end.
        size: `Size` of the new axis.
    """
    axis = place % (len(input_sizes) + 1)
    shape = (*input_sizes[:axis], size, *input_sizes[axis:])
    return own_rows(shape, input_fact.axis + (axis <= input_fact.axis))


def _squeeze(
    view: OperationView, input_fact: Fact, input_sizes: Shape
) -> Decision | None:
    """Decide how replicas remove axes of size one from their rows (`Squeeze`).

    The decision is `None` if the axis of rows would be removed, or if sizes are not
    known.
    """
    taken = {axis % len(input_sizes) for axis in view.attribute("squeeze_dims") or ()}
    if not taken:
        taken = {axis for axis, size in enumerate(input_sizes) if size == ONE}
        if any(s.kind in ("free", "unknown") for s in input_sizes):
            return None
    if input_fact.axis in taken:
        return None
    shape = tuple(size for axis, size in enumerate(input_sizes) if axis not in taken)
    axis = input_fact.axis - sum(other < input_fact.axis for other in taken)

    def build(builder: Any, op: Any, replica_inputs: list) -> list:
        """Remove the axes that the program removes, by their indices.

        TensorFlow would also remove the axis of rows on a replica with a single row,
        which must keep it.

        Returns:
            List of one tensor, this replica's output of `op` from `replica_inputs`.
        """
        return [tf.squeeze(replica_inputs[0], sorted(taken))]

    return Decision([AS_IS], [own_rows(shape, axis)], build)


def _broadcast(view: OperationView) -> Decision | None:
    """Decide how replicas build a broadcast: each its own rows of the result.

    The decision is `None` if shapes are not known, if the result has no axis of rows,
    or if the size of another axis may depend on the number of rows.
    """
    data, target = view.facts[0], view.facts[1].value
    if target is None or data.sizes is None:
        return None
    rank, own = len(target), len(data.sizes)
    if data.is_rows:
        axis = rank - own + data.axis
        if target[axis].kind != "rows" or target[axis].number != data.multiple:
            return None
        if any(not s.is_free for i, s in enumerate(target) if i != axis):
            return None
        shape = with_rows(tuple(target), axis, data.multiple)
        return Decision([AS_IS, AS_IS], [own_rows(shape, axis)])
    row_axis = sizes.axis_of_rows(target)
    if row_axis is None or any(s.kind == "unknown" for s in target):
        return None
    place = row_axis - (rank - own)
    need = WHOLE
    if place >= 0 and data.sizes[place] != ONE:
        need = rows_along(place, may_broadcast=True)
    return Decision([need, AS_IS], [own_rows(tuple(target), row_axis)])


def _fill(view: OperationView) -> Decision | None:
    """Decide how replicas build a `Fill`: each fills its own rows.

    The decision is `None` if the shape has no axis of rows, or is not known.
    """
    shape = view.facts[0].value
    axis = None if shape is None else sizes.axis_of_rows(shape)
    if axis is None:
        return None
    return Decision([AS_IS, WHOLE], [own_rows(tuple(shape), axis)])


def _range(view: OperationView) -> Decision | None:
    """Decide how replicas build a range of row numbers: each builds its own.

    The decision is `None` for any other range.
    """
    limit = view.facts[1].value
    if limit is None or (view.numbers(0), view.numbers(2)) != (0, 1):
        return None
    multiple = limit[()].number
    if limit[()].kind != "rows" or multiple is None:
        return None

    def build(builder: Any, op: Any, replica_inputs: list) -> list:
        """Build the numbers of this replica's rows, which continue those of others.

        Returns:
            List of one tensor, this replica's output of `op`.
        """
        dtype = op.outputs[0].dtype
        begin = tf.cast(builder.first_row * multiple, dtype)
        return [begin + tf.range(tf.cast(builder.own_rows * multiple, dtype))]

    return Decision([WHOLE, AS_IS, WHOLE], [own_rows((sizes.rows(multiple),))], build)


def _tile(view: OperationView) -> Decision | None:
    """Decide how to build a `Tile` that keeps rows, or repeats data for each row.

    Each replica builds its own rows of the result. The decision is `None` for any other
    `Tile`.
    """
    data, times = view.facts[0], view.facts[1].value
    if data.sizes is None or times is None:
        return None
    shape = tuple(a * b for a, b in zip(data.sizes, times, strict=True))
    if data.is_rows:
        if times[data.axis] != ONE or any(not t.is_free for t in times):
            return None
        return Decision([AS_IS, AS_IS], [own_rows(shape, data.axis)])
    axis = sizes.axis_of_rows(times)
    if axis is None or data.sizes[axis] != ONE:
        return None
    return Decision([WHOLE, AS_IS], [own_rows(shape, axis)])


def _join(view: OperationView) -> Decision | None:
    """Decide how replicas build a concatenation or a stack of row-sharded tensors.

    Each replica joins its own rows, unless they are joined along the axis of rows, see
    `_join_rows`. The decision is `None` if a shape or the axis is not known, or if
    inputs differ in their numbers of entries for each row.
    """
    is_stack = view.type == "Pack"
    count = len(view) if is_stack else len(view) - 1
    facts = view.facts[:count]
    if any(fact.sizes is None for fact in facts):
        return None
    rank = len(facts[0].sizes or ())
    joined = view.attribute("axis") if is_stack else view.numbers(count)
    if joined is None:
        return None
    joined = int(joined) % (rank + is_stack)
    own = next(fact for fact in facts if fact.is_rows)
    axis = own.axis
    if not is_stack and joined == axis:
        return _join_rows(view, facts, axis)
    if len({f.multiple for f in facts if f.is_rows}) > 1:
        return None
    needs = [rows_along(axis)] * count
    shape = list(own.sizes or ())
    if is_stack:
        shape.insert(joined, number(count))
        axis += joined <= axis
    else:
        total = sizes.ZERO
        for fact in facts:
            assert fact.sizes is not None
            total = total + fact.sizes[joined]
        shape[joined] = total
    return Decision(
        needs + [WHOLE] * (len(view) - count), [own_rows(tuple(shape), axis)]
    )


def _join_rows(
    view: OperationView, facts: Sequence[Fact], axis: int
) -> Decision | None:
    """Decide how replicas build a concatenation of rows, such as real and fake images.

    The inputs are gathered, and each replica has its block of the concatenated rows.
    The decision is `None` if their number is not a known multiple of the batch's rows.

    Args:
        view: `OperationView` of the concatenation.
        facts: Sequence of `Fact`, one for each joined tensor.
        axis: Int, the axis of rows, along which they are joined.
    """
    counts = [fact.sizes[axis] for fact in facts if fact.sizes is not None]
    total = functools.reduce(operator.add, counts)
    if total.kind != "rows" or total.number is None:
        return None
    shape = with_rows(facts[0].sizes or (), axis, total.number)
    return Decision([WHOLE] * len(view), [own_rows(shape, axis)], _build_joined_rows)


def _build_joined_rows(builder: Any, op: Any, replica_inputs: list) -> list:
    """Concatenate inputs that hold all rows, and return this replica's rows of it.

    Returns:
        List of one tensor, this replica's output of `op` from `replica_inputs`.
    """
    (joined,), (result,) = builder.copy(op, replica_inputs), op.outputs
    builder.cache_whole(result, joined)
    return [builder.take_rows(result, joined)]


def _unstack(
    view: OperationView, input_fact: Fact, input_sizes: Shape
) -> Decision | None:
    """Decide how replicas unstack their own rows.

    The decision is `None` if the tensor is unstacked along the axis of rows.
    """
    split = view.attribute("axis") % len(input_sizes)
    if split == input_fact.axis:
        return None
    shape = (*input_sizes[:split], *input_sizes[split + 1 :])
    fact = own_rows(shape, input_fact.axis - (split < input_fact.axis))
    return Decision([AS_IS], [fact] * len(view.op.outputs))


def _split(
    view: OperationView, input_fact: Fact, input_sizes: Shape
) -> Decision | None:
    """Decide how replicas split their own rows.

    The decision is `None` if the tensor is split along the axis of rows, or along an
    axis that is not known.
    """
    is_even = view.type == "Split"
    axis = view.numbers(0 if is_even else 2)
    if axis is None or int(axis) % len(input_sizes) == input_fact.axis:
        return None
    needs = [WHOLE, AS_IS] if is_even else [AS_IS, WHOLE, WHOLE]
    return Decision(needs, same_rows(view, input_fact))


def _pad(view: OperationView, input_fact: Fact, input_sizes: Shape) -> Decision | None:
    """Decide how replicas pad their own rows.

    The decision is `None` if rows would be added, or if the padding is not known. It is
    `None` for a mirrored padding as well, unless the rows lie along the first axis.
    """
    padding = view.numbers(1)
    if padding is None or padding[input_fact.axis].any():
        return None
    needs = [rows_along(input_fact.axis)] + [WHOLE] * (len(view) - 1)
    outputs = same_rows(view, input_fact)
    if not view.type.startswith("MirrorPad"):
        return Decision(needs, outputs)
    # TensorFlow cannot mirror a tensor without rows. A replica without rows pads a row
    # of zeros instead, which is supported only for rows along the first axis.
    return None if input_fact.axis else Decision(needs, outputs, build_or_use_zero_row)


def _concat_offset(view: OperationView) -> Decision | None:
    """Decide how replicas build `ConcatOffset`: where inputs begin in a concatenation.

    The offsets are integers computed from sizes, so they may be multiples of the rows.
    The decision is `None` if they are not known.
    """
    axis = view.numbers(0)
    shapes = [fact.value for fact in view.facts[1:]]
    if axis is None or any(shape is None for shape in shapes):
        return None
    outputs, offset = [], sizes.ZERO
    for shape in shapes:
        assert shape is not None
        place = int(axis) % len(shape)
        values = [sizes.ZERO] * len(shape)
        values[place] = offset
        if offset.kind == "unknown":
            return None
        offset = offset + shape[place]
        outputs.append(integers(sizes.array(values)))
    return Decision([AS_IS] * len(view), outputs)


def _one_hot(
    view: OperationView, input_fact: Fact, input_sizes: Shape
) -> Decision | None:
    """Decide how replicas build one-hot vectors of their own rows; never `None`."""
    depth, place = view.facts[1].value, view.attribute("axis")
    size = depth[()] if depth is not None else sizes.FREE
    return Decision(
        [AS_IS, WHOLE, WHOLE, WHOLE],
        [_with_axis(input_fact, input_sizes, place, size)],
    )


def _operate_along_axes(
    view: OperationView, input_fact: Fact, input_sizes: Shape
) -> Decision | None:
    """Decide how replicas build an operation along axes, such as a running sum.

    The decision is `None` if one of these axes is that of rows, or if they are not
    known.
    """
    axes = view.numbers(2 if view.type == "Roll" else 1)
    if axes is None or input_fact.axis in {
        int(a) % len(input_sizes) for a in np.ravel(axes)
    }:
        return None
    return Decision([AS_IS] + [WHOLE] * (len(view) - 1), [input_fact])


# The output rows of these operations are those of one input, the data. So their rules
# receive its fact and sizes with the view. A rule returns `None` if the operation mixes
# rows, or if sizes that it depends on are not known.
_RULES_OF_FIRST_INPUT = table(
    {
        "CumulativeLogsumexp Cumprod Cumsum ReverseV2 Roll": _operate_along_axes,
        "ExpandDims": _expand_dims,
        "MirrorPad MirrorPadGrad Pad PadV2": _pad,
        "OneHot": _one_hot,
        "Reshape": decide_reshape,
        "Slice": decide_slice,
        "Split SplitV": _split,
        "Squeeze": _squeeze,
        "StridedSlice": decide_strided_slice,
        "Transpose": _transpose,
        "Unpack": _unstack,
    }
)
# Rows may come from any input of these operations, also from one that is a shape. So
# their rules receive the view alone, and look for the input with rows themselves.
_RULES_OF_ANY_INPUT = table(
    {
        "BroadcastTo": _broadcast,
        "ConcatOffset": _concat_offset,
        "ConcatV2 Pack": _join,
        "Fill": _fill,
        "GatherV2": decide_gather,
        "Range": _range,
        "ScatterNd": decide_scatter,
        "StridedSliceGrad": decide_strided_slice_grad,
        "Tile": _tile,
        "UnsortedSegmentSum": decide_segment_sum,
    }
)
