"""Rules of operations that arrange elements: reshapes, slices, joins, gathers."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.training.program import sizes
from tfdp.training.program.facts import Fact, Form, integers, own_rows, part, with_rows
from tfdp.training.program.rules.rowwise import build_or_use_zero_row
from tfdp.training.program.sizes import ONE, Size, number, product
from tfdp.training.program.view import (
    AS_HELD,
    WHOLE,
    Decision,
    Need,
    View,
    rows_along,
    table,
)

# The sizes of a tensor of the program, by axis.
Shape = tuple[Size, ...]


def decide_layout(view: View) -> Decision | None:
    """Decide how replicas build an operation that arranges elements."""
    if view.type in _RULES_OF_ANY_INPUT:
        return _RULES_OF_ANY_INPUT[view.type](view)
    if view.type not in _RULES_OF_FIRST_INPUT:
        return None
    data = view.facts[1 if view.type == "Split" else 0]
    if not data.is_rows or data.sizes is None:
        return None
    return _RULES_OF_FIRST_INPUT[view.type](view, data, data.sizes)


def _reshape(view: View, input_fact: Fact, input_sizes: Shape) -> Decision | None:
    """Decide how replicas build a reshape that keeps the axes before that of rows."""
    target = view.facts[1].value
    reshaped = None if target is None else _reshaped(input_fact, list(target))
    if reshaped is None:
        return None
    shape, axis = reshaped
    is_open = [
        size for i, size in enumerate(target) if size == number(-1) and i != axis
    ]
    build = _build_open_reshape if is_open else _build_reshape
    return Decision([AS_HELD, AS_HELD], [own_rows(shape, axis)], build)


def _reshaped(input_fact: Fact, target: list[Size]) -> tuple[Shape, int] | None:
    """Return shape and axis of rows after a reshape, or `None` if rows are mixed.

    Args:
        input_fact: `Fact` of the tensor before the reshape.
        target: List of `Size`, the shape input of the reshape; -1 is unknown.
    """
    assert input_fact.sizes is not None
    before = product(input_fact.sizes[: input_fact.axis])
    after = product(input_fact.sizes[input_fact.axis + 1 :])
    if not after.is_free or not before.is_free:
        return None
    unknown = [i for i, size in enumerate(target) if size == number(-1)]
    for axis, size in enumerate(target):
        if not _are_equal(target[:axis], input_fact.sizes[: input_fact.axis]):
            continue
        rest = [other for i, other in enumerate(target) if i > axis]
        has_rows = size.kind == "rows" or unknown == [axis]
        is_static = size.kind == "number" and size.number > 1 and not unknown
        if not has_rows and not is_static:
            continue
        if any(not other.is_free for other in rest if other != number(-1)):
            return None
        inner = product(other for other in rest if other != number(-1))
        if _may_mix_rows(input_fact, after, inner, size):
            return None
        multiple = _multiple(input_fact, after, inner, size)
        if unknown and unknown != [axis]:
            (place,) = unknown
            if place < axis:
                return None
            missing = _open_size(input_fact, after, inner, size)
            target = [*target[:place], missing, *target[place + 1 :]]
        elif is_static and size.kind == "number":
            return None
        return with_rows(tuple(target), axis, multiple), axis
    return None


def _are_equal(shape: Any, other_shape: Any) -> bool:
    """Return whether shapes are known and equal, apart from axes of size one.

    A known shape has only sizes that are numbers.
    """
    sizes_of_one, sizes_of_other = (
        _without_trivial(shape),
        _without_trivial(other_shape),
    )
    are_known = all(size.kind == "number" for size in sizes_of_one)
    return are_known and sizes_of_one == sizes_of_other


def _without_trivial(shape: Any) -> list[Size]:
    """Return a shape without axes of size one."""
    return [size for size in shape if size != ONE]


def _multiple(input_fact: Fact, after: Size, inner: Size, size: Size) -> int | None:
    """Return the number of entries per row after a reshape, or `None` if not known.

    Args:
        input_fact: `Fact` of the tensor before the reshape.
        after: `Size`, product of the sizes after the axis of rows, before the reshape.
        inner: `Size`, product of the known sizes after it in the target shape.
        size: `Size` of the axis of rows in the target shape.
    """
    if size.kind == "rows":
        return size.number
    assert input_fact.sizes is not None
    if input_fact.multiple is None or after.kind != "number" or inner.kind != "number":
        same = after == inner and after.kind == "number"
        return input_fact.multiple if same else None
    if not inner.number:
        return None
    return input_fact.multiple * after.number // inner.number


def _may_mix_rows(input_fact: Fact, after: Size, inner: Size, size: Size) -> bool:
    """Return whether a reshape may put entries of two rows into one.

    An example is a reshape of [rows, 3] to [-1, 2]. The arguments are those of
    `_multiple`.
    """
    assert input_fact.sizes is not None
    if size.kind == "rows" and size.number is not None:
        if input_fact.multiple is None or after.kind != "number":
            return False
        return bool(input_fact.multiple * after.number % size.number)
    if inner.kind != "number":
        return True  # The unknown size may cut a row at any place.
    if not inner.number:
        return False
    # Unknown sizes of a row can only multiply the product of the known ones. If that
    # product is divisible, the number of entries of a row is.
    known = [
        n.number for n in input_fact.sizes[input_fact.axis + 1 :] if n.kind == "number"
    ]
    return bool((input_fact.multiple or 1) * math.prod(known) % inner.number)


def _open_size(input_fact: Fact, after: Size, inner: Size, size: Size) -> Size:
    """Return the size that replaces a -1 on another axis than that of rows.

    The arguments are those of `_multiple`.
    """
    known = None not in (input_fact.multiple, size.number)
    if known and after.kind == inner.kind == "number" and inner.number:
        assert input_fact.multiple is not None
        return number(
            input_fact.multiple * after.number // (size.number * inner.number)
        )
    return sizes.FREE


def _build_reshape(builder: Any, op: Any, replica_inputs: list) -> list:
    """Build a reshape on this replica, or return its input if it changes nothing."""
    shape = builder.own_static_shape(op.outputs[0], builder.fact(op.outputs[0]))
    is_same = shape.is_fully_defined() and shape == replica_inputs[0].shape
    return replica_inputs[:1] if is_same else builder.copy(op, replica_inputs)


def _build_open_reshape(builder: Any, op: Any, replica_inputs: list) -> list:
    """Build a reshape with a -1 on this replica, whose size is computed here.

    TensorFlow cannot compute it for a tensor without rows.
    """
    (fact,) = builder.facts_of(op.outputs)
    data, target = builder.facts_of(op.inputs)
    source, shape_input = replica_inputs
    parts: list[Any] = []
    for axis, size in enumerate(fact.sizes):
        if size.kind == "number":
            parts.append(size.number)
        elif target.value[axis] == number(-1):
            parts.append(None)
        else:
            parts.append(tf.cast(shape_input[axis], tf.int32))
    if None in parts:
        place = parts.index(None)
        shape = tf.shape(source)
        tail = [shape[i] for i in range(len(data.sizes)) if i != data.axis]
        total = tf.reduce_prod([*tail, builder.multiple(op.inputs[0])])
        known = [v for i, v in enumerate(parts) if i not in (place, fact.axis)]
        each = 1 if fact.multiple is None else fact.multiple
        parts[place] = total // tf.reduce_prod([*known, each])
    return [builder.with_shape(tf.reshape(source, parts), op.outputs[0], fact)]


def _transpose(view: View, input_fact: Fact, input_sizes: Shape) -> Decision | None:
    """Decide how replicas build a transpose of a row-sharded tensor.

    It moves the axis of rows.
    """
    permutation = view.numbers(1)
    if permutation is None:
        return None
    order = [int(axis) for axis in permutation]
    shape = tuple(input_sizes[axis] for axis in order)
    return Decision([AS_HELD, WHOLE], [own_rows(shape, order.index(input_fact.axis))])


def _expand_dims(view: View, input_fact: Fact, input_sizes: Shape) -> Decision | None:
    """Decide how replicas build an `ExpandDims`, which inserts an axis of size one."""
    place = view.numbers(1)
    if place is None:
        return None
    return Decision(
        [AS_HELD, WHOLE], [_with_axis(input_fact, input_sizes, int(place), ONE)]
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


def _squeeze(view: View, input_fact: Fact, input_sizes: Shape) -> Decision | None:
    """Decide how replicas build a `Squeeze`, which removes axes of size one."""
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
        """Remove these axes only: on this replica that of rows may have size one."""
        return [tf.squeeze(replica_inputs[0], sorted(taken))]

    return Decision([AS_HELD], [own_rows(shape, axis)], build)


def _broadcast(view: View) -> Decision | None:
    """Decide how replicas build a broadcast, of or to a row-sharded tensor."""
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
        return Decision([AS_HELD, AS_HELD], [own_rows(shape, axis)])
    row_axis = sizes.axis_of_rows(target)
    if row_axis is None or any(s.kind == "unknown" for s in target):
        return None
    place = row_axis - (rank - own)
    need = WHOLE
    if place >= 0 and data.sizes[place] != ONE:
        need = rows_along(place, may_broadcast=True)
    return Decision([need, AS_HELD], [own_rows(tuple(target), row_axis)])


def _fill(view: View) -> Decision | None:
    """Decide how replicas build a `Fill` whose shape has the number of rows."""
    shape = view.facts[0].value
    axis = None if shape is None else sizes.axis_of_rows(shape)
    if axis is None:
        return None
    return Decision([AS_HELD, WHOLE], [own_rows(tuple(shape), axis)])


def _range(view: View) -> Decision | None:
    """Decide how replicas build the range of row numbers: each has its own."""
    limit = view.facts[1].value
    if limit is None or (view.numbers(0), view.numbers(2)) != (0, 1):
        return None
    multiple = limit[()].number
    if limit[()].kind != "rows" or multiple is None:
        return None

    def build(builder: Any, op: Any, replica_inputs: list) -> list:
        """Build the numbers of this replica's rows."""
        dtype = op.outputs[0].dtype
        begin = tf.cast(builder.first_row * multiple, dtype)
        return [begin + tf.range(tf.cast(builder.own_rows * multiple, dtype))]

    return Decision([WHOLE, AS_HELD, WHOLE], [own_rows((sizes.rows(multiple),))], build)


def _tile(view: View) -> Decision | None:
    """Decide how replicas build a tile along other axes than rows, or once per row."""
    data, times = view.facts[0], view.facts[1].value
    if data.sizes is None or times is None:
        return None
    shape = tuple(a * b for a, b in zip(data.sizes, times, strict=True))
    if data.is_rows:
        if times[data.axis] != ONE or any(not t.is_free for t in times):
            return None
        return Decision([AS_HELD, AS_HELD], [own_rows(shape, data.axis)])
    axis = sizes.axis_of_rows(times)
    if axis is None or data.sizes[axis] != ONE:
        return None
    return Decision([WHOLE, AS_HELD], [own_rows(shape, axis)])


def _join(view: View) -> Decision | None:
    """Decide how replicas build a concatenation or a stack."""
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


def _join_rows(view: View, facts: Sequence[Fact], axis: int) -> Decision | None:
    """Decide how replicas build a concatenation of rows, such as real and fake images.

    The inputs are gathered, and each replica has its block of the concatenated rows.

    Args:
        view: `View` of the concatenation.
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
    """Concatenate inputs that hold all rows, and return this replica's rows of it."""
    (joined,), (result,) = builder.copy(op, replica_inputs), op.outputs
    builder.cache_whole(result, joined)
    return [builder.take_rows(result, joined)]


def _unstack(view: View, input_fact: Fact, input_sizes: Shape) -> Decision | None:
    """Decide how replicas build an unstack along another axis than that of rows."""
    split = view.attribute("axis") % len(input_sizes)
    if split == input_fact.axis:
        return None
    shape = (*input_sizes[:split], *input_sizes[split + 1 :])
    fact = own_rows(shape, input_fact.axis - (split < input_fact.axis))
    return Decision([AS_HELD], [fact] * len(view.op.outputs))


def _split(view: View, input_fact: Fact, input_sizes: Shape) -> Decision | None:
    """Decide how replicas build a split along another axis than that of rows."""
    is_even = view.type == "Split"
    axis = view.numbers(0 if is_even else 2)
    if axis is None or int(axis) % len(input_sizes) == input_fact.axis:
        return None
    needs = [WHOLE, AS_HELD] if is_even else [AS_HELD, WHOLE, WHOLE]
    return Decision(needs, _same_rows(view, input_fact))


def _same_rows(view: View, input_fact: Fact) -> list[Fact]:
    """Return the `Fact`s of outputs that have the rows of an input on the same axis."""
    return [
        view.rows_output(input_fact.axis, input_fact.multiple, index)
        for index in range(len(view.op.outputs))
    ]


def _strided_slice(view: View, input_fact: Fact, input_sizes: Shape) -> Decision | None:
    """Decide how replicas build a slice such as `x[:, 1:]`, which keeps all rows."""
    if any(fact.is_rows for fact in view.facts[1:]):
        return None
    axis = _axis_after_slice(view, input_fact)
    if axis is None:
        return None
    shape = view.output_sizes()
    if shape is None:
        return None
    needs = [AS_HELD, *_needs_of_bounds(view.facts[1:])]
    return Decision(
        needs, [own_rows(with_rows(shape, axis, input_fact.multiple), axis)]
    )


def _needs_of_bounds(facts: Sequence[Fact]) -> list[Need]:
    """Return the needed forms of the bounds of a slice.

    Bounds that are computed from sizes are those for a replica's rows, others are
    whole.
    """
    return [AS_HELD if fact.form is Form.SIZES else WHOLE for fact in facts]


def _axis_after_slice(view: View, input_fact: Fact) -> int | None:
    """Return the axis of rows after a slice, or `None` unless it keeps all rows."""
    rank, source = len(input_fact.sizes or ()), view.facts[3].sizes
    if source is None or len(source) != 1 or source[0].kind != "number":
        return None
    count = int(source[0].number)
    new, ellipsis = view.attribute("new_axis_mask"), view.attribute("ellipsis_mask")
    skipped = rank - (count - bin(new).count("1") - bool(ellipsis))
    axis_in, axis_out, row_axis = 0, 0, None
    for item in range(count):
        bit = 1 << item
        if ellipsis & bit:
            if axis_in <= input_fact.axis < axis_in + skipped:
                row_axis = axis_out + input_fact.axis - axis_in
            axis_in, axis_out = axis_in + skipped, axis_out + skipped
        elif new & bit:
            axis_out += 1
        else:
            if axis_in == input_fact.axis:
                row_axis = axis_out
            if not _can_slice(
                view, item, input_fact, is_rows=axis_in == input_fact.axis
            ):
                return None
            axis_in += 1
            axis_out += not view.attribute("shrink_axis_mask") & bit
    return axis_out + input_fact.axis - axis_in if row_axis is None else row_axis


def _can_slice(view: View, item: int, input_fact: Fact, *, is_rows: bool) -> bool:
    """Return whether an axis can be sliced on each replica as on one device.

    Args:
        view: `View` of the slice.
        item: Int, position of the axis in the bounds.
        input_fact: `Fact` of the sliced tensor.
        is_rows: Bool, whether the axis is that of rows.
    """
    begin, end, strides = view.facts[1].value, view.facts[2].value, view.numbers(3)
    if not is_rows:
        # A bound that holds the number of rows would be that of own rows, and would
        # cut another axis at another place than on one device.
        return not _counts_rows(begin, item) and not _counts_rows(end, item)
    bit, own = 1 << item, (input_fact.sizes or ())[input_fact.axis]
    takes_first = view.attribute("begin_mask") & bit or _equals(begin, item, sizes.ZERO)
    takes_last = view.attribute("end_mask") & bit or _equals(end, item, own)
    has_step = strides is None or strides[item] != 1
    is_one = view.attribute("shrink_axis_mask") & bit
    return bool(takes_first and takes_last and not has_step and not is_one)


def _counts_rows(values: np.ndarray | None, index: int) -> bool:
    """Return whether an element of an array is a multiple of the number of rows."""
    return values is not None and values[index].kind == "rows"


def _equals(values: np.ndarray | None, index: int, size: Size) -> bool:
    """Return whether an element of an array is known and equal to a size."""
    return values is not None and values[index] == size


def _strided_slice_grad(view: View) -> Decision | None:
    """Decide how replicas build the gradient of a slice that keeps all rows."""
    shape, gradient = view.facts[0].value, view.facts[4]
    axis = None if shape is None else sizes.axis_of_rows(shape)
    if axis is None or not gradient.is_rows:
        return None
    source = own_rows(tuple(shape), axis)
    inner = View(view.op, [source, *view.facts[1:4]], view.scope)
    if _axis_after_slice(inner, source) != gradient.axis:
        return None
    return Decision([*_needs_of_bounds(view.facts[:4]), AS_HELD], [source])


def _slice(view: View, input_fact: Fact, input_sizes: Shape) -> Decision | None:
    """Decide how replicas build a `tf.slice` that keeps all rows."""
    begin, size = view.facts[1].value, view.facts[2].value
    if begin is None or size is None or begin[input_fact.axis] != sizes.ZERO:
        return None
    if size[input_fact.axis] not in (number(-1), input_sizes[input_fact.axis]):
        return None
    others = [axis for axis in range(len(input_sizes)) if axis != input_fact.axis]
    if any(_counts_rows(value, axis) for value in (begin, size) for axis in others):
        return None
    return Decision([AS_HELD] * 3, _same_rows(view, input_fact))


def _pad(view: View, input_fact: Fact, input_sizes: Shape) -> Decision | None:
    """Decide how replicas build a padding of other axes than that of rows."""
    padding = view.numbers(1)
    if padding is None or padding[input_fact.axis].any():
        return None
    needs = [rows_along(input_fact.axis)] + [WHOLE] * (len(view) - 1)
    outputs = _same_rows(view, input_fact)
    if not view.type.startswith("MirrorPad"):
        return Decision(needs, outputs)
    # TensorFlow raises an error where it mirrors a tensor without rows, along any axis.
    return None if input_fact.axis else Decision(needs, outputs, build_or_use_zero_row)


def _concat_offset(view: View) -> Decision | None:
    """Decide how replicas build the offsets of a concatenation, from sizes."""
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
    return Decision([AS_HELD] * len(view), outputs)


def _gather(view: View) -> Decision | None:
    """Decide how replicas build a gather from a table, or within each row."""
    data, indices = view.facts[0], view.facts[1]
    axis = view.numbers(2)
    if axis is None or data.sizes is None or indices.sizes is None:
        return None
    rank = len(data.sizes)
    place, batched = int(axis) % rank, int(view.attribute("batch_dims") or 0)
    if batched < 0:
        batched += len(indices.sizes)
    outer, inner = data.sizes[:place], data.sizes[place + 1 :]
    shape = (*outer, *indices.sizes[batched:], *inner)
    if data.is_rows and not indices.is_rows:
        if data.axis == place:
            return None
        if data.axis < batched:
            needs = [AS_HELD, rows_along(data.axis), WHOLE]
            return Decision(needs, [own_rows(shape, data.axis)])
        shift = len(indices.sizes) - batched - 1
        own = data.axis if data.axis < place else data.axis + shift
        return Decision([AS_HELD, WHOLE, WHOLE], [own_rows(shape, own)])
    if indices.is_rows and not data.is_rows:
        if indices.axis < batched:
            needs = [rows_along(indices.axis), AS_HELD, WHOLE]
            row_sizes = with_rows(shape, indices.axis, indices.multiple)
            return Decision(needs, [own_rows(row_sizes, indices.axis)])
        own = place + indices.axis - batched
        return Decision([WHOLE, AS_HELD, WHOLE], [own_rows(shape, own)])
    if data.axis == indices.axis and data.axis < batched and data.axis != place:
        return Decision([AS_HELD, AS_HELD, WHOLE], [own_rows(shape, data.axis)])
    return None


def _segment_sum(view: View) -> Decision | None:
    """Decide how replicas build sums by segment, as in the gradient of a gather."""
    data, ids = view.facts[0], view.facts[1]
    if data.sizes is None or ids.sizes is None:
        return None
    axis = data.axis if data.is_rows else ids.axis
    if axis >= len(ids.sizes) or (
        ids.is_rows and data.is_rows and ids.axis != data.axis
    ):
        return None
    segments = view.facts[2].value
    count = segments[()] if segments is not None else sizes.FREE
    shape = (count, *data.sizes[len(ids.sizes) :])
    return Decision([rows_along(axis), rows_along(axis), WHOLE], [part(shape)])


def _scatter(view: View) -> Decision | None:
    """Decide how replicas build the sum of rows at indices, a partial sum."""
    indices, updates = view.facts[0], view.facts[1]
    own = indices if indices.is_rows else updates
    if own.axis != 0 or indices.sizes is None or len(indices.sizes) < 2:
        return None
    if indices.is_rows and updates.is_rows and updates.axis:
        return None
    target = view.facts[2].value
    if target is None or view.facts[2].form is Form.SIZES:
        return None
    return Decision([rows_along(), rows_along(), WHOLE], [part(tuple(target))])


def _one_hot(view: View, input_fact: Fact, input_sizes: Shape) -> Decision | None:
    """Decide how replicas build one-hot vectors of row-sharded indices."""
    depth, place = view.facts[1].value, view.attribute("axis")
    size = depth[()] if depth is not None else sizes.FREE
    return Decision(
        [AS_HELD, WHOLE, WHOLE, WHOLE],
        [_with_axis(input_fact, input_sizes, place, size)],
    )


def _operate_along_axes(
    view: View, input_fact: Fact, input_sizes: Shape
) -> Decision | None:
    """Decide how replicas build an operation along axes, such as a running sum.

    It is not divided if one of these axes is that of rows.
    """
    axes = view.numbers(2 if view.type == "Roll" else 1)
    if axes is None or input_fact.axis in {
        int(a) % len(input_sizes) for a in np.ravel(axes)
    }:
        return None
    return Decision([AS_HELD] + [WHOLE] * (len(view) - 1), [input_fact])


# Rules for operations whose first input has own rows. They receive the view of the
# operation, and the fact and the sizes of that input. All return `None` if the
# operation mixes rows, or if sizes that they depend on are not known.
_RULES_OF_FIRST_INPUT = table(
    {
        "CumulativeLogsumexp Cumprod Cumsum ReverseV2 Roll": _operate_along_axes,
        "ExpandDims": _expand_dims,
        "MirrorPad MirrorPadGrad Pad PadV2": _pad,
        "OneHot": _one_hot,
        "Reshape": _reshape,
        "Slice": _slice,
        "Split SplitV": _split,
        "Squeeze": _squeeze,
        "StridedSlice": _strided_slice,
        "Transpose": _transpose,
        "Unpack": _unstack,
    }
)
# Rules that find the input of own rows themselves. They receive the view of the
# operation.
_RULES_OF_ANY_INPUT = table(
    {
        "BroadcastTo": _broadcast,
        "ConcatOffset": _concat_offset,
        "ConcatV2 Pack": _join,
        "Fill": _fill,
        "GatherV2": _gather,
        "Range": _range,
        "ScatterNd": _scatter,
        "StridedSliceGrad": _strided_slice_grad,
        "Tile": _tile,
        "UnsortedSegmentSum": _segment_sum,
    }
)
