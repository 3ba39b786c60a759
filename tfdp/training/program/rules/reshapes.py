"""Rules of reshapes, which keep the axes before that of rows.

`input_fact` and `input_sizes` are the `Fact` and the shape of the reshaped tensor.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from tfdp.training.program import sizes
from tfdp.training.program.facts import Fact, own_rows, with_rows
from tfdp.training.program.sizes import ONE, Shape, Size, number, product
from tfdp.training.program.view import (
    AS_IS,
    Decision,
    OperationView,
)


def decide_reshape(
    view: OperationView, input_fact: Fact, input_sizes: Shape
) -> Decision | None:
    """Decide how replicas build a reshape: each reshapes its own rows.

    The reshape must keep the axes before that of rows. The decision is `None` for any
    other reshape, if its shape is not known, or if it may mix rows.
    """
    target = view.facts[1].value
    reshaped = None if target is None else _reshaped(input_fact, list(target))
    if reshaped is None:
        return None
    shape, axis = reshaped
    is_open = [
        size for i, size in enumerate(target) if size == number(-1) and i != axis
    ]
    build = _build_open_reshape if is_open else _build_reshape
    return Decision([AS_IS, AS_IS], [own_rows(shape, axis)], build)


def _reshaped(input_fact: Fact, target: list[Size]) -> tuple[Shape, int] | None:
    """Return shape and axis of rows after a reshape, or `None` if it may mix rows.

    Args:
        input_fact: `Fact` of the tensor before the reshape.
        target: List of `Size`, the shape input of the reshape; a -1 stands for a size
            that TensorFlow computes.
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
    """Return the entries for each row after a reshape as an int, or `None` if unknown.

    Entries are counted along the axis of rows: 2 after `[rows, 4]` becomes `[2 * rows,
    2]`.

    Args:
        input_fact: `Fact` of the tensor before the reshape.
        after: `Size`, product of the sizes after the axis of rows, before the reshape.
        inner: `Size`, product of the known sizes after the axis of rows in the target
            shape.
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

    An example is a reshape of [rows, 3] to [-1, 2].

    Args:
        input_fact: `Fact` of the tensor before the reshape.
        after: `Size`, product of the sizes after the axis of rows, before the reshape.
        inner: `Size`, product of the known sizes after the axis of rows in the target
            shape.
        size: `Size` of the axis of rows in the target shape.
    """
    assert input_fact.sizes is not None
    if size.kind == "rows" and size.number is not None:
        if input_fact.multiple is None or after.kind != "number":
            return False
        return bool(input_fact.multiple * after.number % size.number)
    if inner.kind != "number":
        # The size of a row in the target shape is not known. Such a row may end within
        # a row of the tensor, so the reshape may mix rows.
        return True
    if not inner.number:
        return False
    # Unknown sizes of a row can only multiply the product of its known sizes. If
    # `inner` divides this product, it divides the number of entries of a row.
    known = [
        n.number for n in input_fact.sizes[input_fact.axis + 1 :] if n.kind == "number"
    ]
    return bool((input_fact.multiple or 1) * math.prod(known) % inner.number)


def _open_size(input_fact: Fact, after: Size, inner: Size, size: Size) -> Size:
    """Return the size that replaces a -1 on another axis than that of rows.

    It is `FREE` unless all sizes that determine it are known numbers.

    Args:
        input_fact: `Fact` of the tensor before the reshape.
        after: `Size`, product of the sizes after the axis of rows, before the reshape.
        inner: `Size`, product of the known sizes after the axis of rows in the target
            shape.
        size: `Size` of the axis of rows in the target shape.
    """
    known = None not in (input_fact.multiple, size.number)
    if known and after.kind == inner.kind == "number" and inner.number:
        assert input_fact.multiple is not None
        return number(
            input_fact.multiple * after.number // (size.number * inner.number)
        )
    return sizes.FREE


def _build_reshape(builder: Any, op: Any, replica_inputs: list) -> list:
    """Build a reshape on this replica, or return its input if it changes nothing.

    Returns:
        List of one tensor, this replica's output of `op` from `replica_inputs`.
    """
    shape = builder.own_static_shape(op.outputs[0], builder.fact(op.outputs[0]))
    is_same = shape.is_fully_defined() and shape == replica_inputs[0].shape
    return replica_inputs[:1] if is_same else builder.copy(op, replica_inputs)


def _build_open_reshape(builder: Any, op: Any, replica_inputs: list) -> list:
    """Build a reshape whose shape has a -1, replaced by a computed size.

    TensorFlow cannot compute the size for a replica without rows.

    Returns:
        List of one tensor, this replica's output of `op` from `replica_inputs`.
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
