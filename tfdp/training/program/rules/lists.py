"""Rules of lists of tensors, such as the states of a loop's steps, and of optionals."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.training.program import sizes
from tfdp.training.program.facts import (
    Fact,
    Form,
    have_same_value,
    is_known,
    whole,
    with_rows,
)
from tfdp.training.program.view import AS_HELD, WHOLE, Decision, Need, View, need_of


def decide_list(view: View) -> Decision | None:
    """Decide a list of tensors, such as the states of a loop's steps."""
    return _LISTS[view.type](view) if view.type in _LISTS else None


def _empty(view: View) -> Decision:
    """Decide a new list: it is as long as the program's on every replica."""
    return Decision([AS_HELD, WHOLE], [Fact(Form.EMPTY)], _build_empty)


def _build_empty(builder: Any, op: Any, inputs: list) -> list:
    """Build a list whose elements may have another number of rows on each replica."""
    shape = tf.constant(_element_shape(op.inputs[0]), op.inputs[0].dtype)
    return builder.copy(op, [shape, inputs[1]])


def _element_shape(given: Any) -> Any:
    """Return what is known of the elements' shape: at least the number of axes."""
    found = tf.get_static_value(given, partial=True)
    if given.shape.rank != 1 or given.shape[0] is None:
        return -1
    if found is None:
        found = [None] * given.shape[0]
    return [-1 if size is None else size for size in found]


def _item_need(listed: Fact, item: Fact) -> tuple[Need, Fact]:
    """Return the form in which an item is put into a list, and the list's then."""
    if listed.form is Form.EMPTY:
        if item.form is Form.SIZES:
            return WHOLE, whole(item.sizes, item.value if is_known(item) else None)
        if item.form is Form.LOCAL:
            return WHOLE, whole(item.sizes)
        return AS_HELD, Fact(item.form, item.axis, item.sizes)
    if listed.value is not None and not have_same_value(listed, item):
        return WHOLE, whole(listed.sizes)
    listed = _with_sizes_of(listed, item)
    is_own = listed.form is Form.LOCAL and listed.held() != item.held()
    return WHOLE if is_own else need_of(listed), listed


def _with_sizes_of(listed: Fact, item: Fact) -> Fact:
    """Return the fact of a list with an item that may have another shape."""
    if listed.sizes == item.sizes or None in (listed.sizes, item.sizes):
        return listed
    shape = sizes.common([listed.sizes, item.sizes])
    if shape is not None and listed.is_rows and shape[listed.axis].kind != "rows":
        shape = with_rows(shape, listed.axis, None)
    return dataclasses.replace(listed, sizes=shape)


def _put(view: View) -> Decision:
    need, fact = _item_need(view.facts[0], view.facts[-1])
    return Decision([AS_HELD, *[WHOLE] * (len(view) - 2), need], [fact])


def _get_item(view: View) -> Decision | None:
    listed = view.facts[0]
    if listed.form is Form.EMPTY:
        return None
    needs = [AS_HELD, WHOLE, _shape_need(listed)]
    return Decision(needs, [_item(view, listed, 0)], _build_of_own_shape)


def _shape_need(listed: Fact) -> Need:
    """Return the need of the shape of items, which is the replica's own of own rows."""
    return AS_HELD if listed.is_rows else WHOLE


def _pop(view: View) -> Decision | None:
    listed = view.facts[0]
    if listed.form is Form.EMPTY:
        return None
    return Decision([AS_HELD, AS_HELD], [listed, _item(view, listed, 1)], _build_pop)


def _item(view: View, listed: Fact, index: int) -> Fact:
    shape, known = listed.sizes, view.output_sizes(index)
    if listed.value is not None:
        return Fact(Form.SIZES, sizes=shape, value=listed.value)
    if shape is None:
        shape = known
        if listed.is_rows and shape is not None:
            shape = with_rows(shape, listed.axis, None)
    elif known is not None and len(known) == len(shape):
        # Items of a list may have other shapes.
        own = listed.axis if listed.is_rows else None
        shape = tuple(
            static if static.kind == "number" and axis != own else size
            for axis, (size, static) in enumerate(zip(shape, known, strict=True))
        )
    return Fact(listed.form, listed.axis, shape)


def _build_of_own_shape(builder: Any, op: Any, inputs: list) -> list:
    """Build an item, or a stack of all, whose last input is the shape of an item."""
    (fact,) = builder.facts_of(op.outputs)
    item = fact
    if op.type == "TensorListStack":
        item = Fact(fact.form, fact.axis - 1, (fact.sizes or ())[1:])
    *given, shape = inputs
    (found,) = builder.copy(op, [*given, builder.own_shape(item, shape)])
    return [builder.with_shape(found, op.outputs[0], fact)]


def _build_pop(builder: Any, op: Any, inputs: list) -> list:
    fact = builder.facts_of(op.outputs)[1]
    known = builder.own_static_shape(op.outputs[1], fact)
    # Grappler knows of it, too, and leaves out what need not be computed.
    shape = -1 if known.rank is None else [-1 if n is None else n for n in known]
    rest, item = builder.copy(op, [inputs[0], tf.constant(shape, tf.int32)])
    return [rest, builder.with_shape(item, op.outputs[1], fact)]


def _stack(view: View) -> Decision | None:
    listed = view.facts[0]
    if listed.form is Form.EMPTY or listed.sizes is None:
        return None
    count = sizes.FREE
    if view.attribute("num_elements", -1) >= 0:
        count = sizes.number(view.attribute("num_elements"))
    fact = Fact(listed.form, listed.axis + 1, (count, *listed.sizes))
    return Decision([AS_HELD, _shape_need(listed)], [fact], _build_of_own_shape)


def _from_tensor(view: View) -> Decision | None:
    data = view.facts[0]
    if data.sizes is None or (data.is_rows and data.axis == 0):
        return None
    if data.form not in (Form.ROWS, Form.WHOLE, Form.PART):
        return None
    fact = Fact(data.form, max(data.axis - 1, 0), data.sizes[1:])
    return Decision([AS_HELD, AS_HELD], [fact], _build_from_tensor)


def _build_from_tensor(builder: Any, op: Any, inputs: list) -> list:
    # Its rank is known, since the gradient of a loop keeps the shape of elements.
    rank = inputs[0].shape.rank
    shape = -1 if rank is None else np.full([rank - 1], -1)
    return builder.copy(op, [inputs[0], tf.constant(shape, op.inputs[1].dtype)])


def _optional(view: View) -> Decision | None:
    if len(view) != 1:
        return None
    need, fact = _item_need(Fact(Form.EMPTY), view.facts[0])
    return Decision([need], [fact])


def _optional_value(view: View) -> Decision | None:
    if len(view.op.outputs) != 1 or view.facts[0].form is Form.EMPTY:
        return None
    return Decision([AS_HELD], [_item(view, view.facts[0], 0)], _build_optional_value)


def _build_optional_value(builder: Any, op: Any, inputs: list) -> list:
    (fact,) = builder.facts_of(op.outputs)
    shape = builder.own_static_shape(op.outputs[0], fact)
    (value,) = tf.raw_ops.OptionalGetValue(
        optional=inputs[0],
        output_types=[op.outputs[0].dtype],
        output_shapes=[shape],
    )
    return [value]


_LISTS = {
    "EmptyTensorList": _empty,
    "OptionalFromValue": _optional,
    "OptionalGetValue": _optional_value,
    "OptionalNone": lambda view: Decision([], [Fact(Form.EMPTY)]),
    "TensorListFromTensor": _from_tensor,
    "TensorListGetItem": _get_item,
    "TensorListLength": lambda view: Decision([AS_HELD], view.whole_outputs()),
    "TensorListPopBack": _pop,
    "TensorListPushBack": _put,
    "TensorListReserve": _empty,
    "TensorListSetItem": _put,
    "TensorListStack": _stack,
}
