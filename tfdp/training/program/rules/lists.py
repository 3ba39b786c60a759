"""Rules of lists of tensors, such as the states of a loop, and of optional values.

All items of a list are held in one form: the `Fact` of a list is that of its items.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.training.program import sizes
from tfdp.training.program.facts import (
    Fact,
    Form,
    have_equal_values,
    is_known,
    whole,
    with_rows,
)
from tfdp.training.program.view import (
    AS_IS,
    WHOLE,
    Decision,
    Need,
    OperationView,
    need_of,
)


def decide_list(view: OperationView) -> Decision | None:
    """Decide how replicas build an operation on a `TensorList` or an optional value.

    The decision is `None` for another operation, and if too little is known about the
    inputs, as for a read of a list without items.
    """
    return _LISTS[view.type](view) if view.type in _LISTS else None


def _empty(view: OperationView) -> Decision:
    """Decide how replicas build a new list, of the same length on every replica."""
    return Decision([AS_IS, WHOLE], [Fact(Form.EMPTY)], _build_empty)


def _build_empty(builder: Any, op: Any, replica_inputs: list) -> list:
    """Build a new list on this replica, whose items may have any number of rows.

    Returns:
        List of one tensor, the new list.
    """
    shape = tf.constant(_element_shape(op.inputs[0]), op.inputs[0].dtype)
    return builder.copy(op, [shape, replica_inputs[1]])


def _element_shape(shape_input: Any) -> Any:
    """Return the static shape of a list's items as ints, -1 where not known.

    `shape_input` is the tensor with the shape. With an unknown rank the result is -1.
    """
    shape = tf.get_static_value(shape_input, partial=True)
    if shape_input.shape.rank != 1 or shape_input.shape[0] is None:
        return -1
    if shape is None:
        shape = [None] * shape_input.shape[0]
    return [-1 if size is None else size for size in shape]


def _need_of_item(listed: Fact, item: Fact) -> tuple[Need, Fact]:
    """Return the form in which an item is added to a list, and the list's new `Fact`.

    All items have one form: own rows, a partial sum or the whole tensor, for example.
    The first item determines it.

    Args:
        listed: `Fact` of the list without the item.
        item: `Fact` of the item.

    Returns:
        Tuple of the `Need` of the item, and the `Fact` of the list with it.
    """
    if listed.form is Form.EMPTY:
        if item.form is Form.SIZES:
            return WHOLE, whole(item.sizes, item.value if is_known(item) else None)
        if item.form is Form.LOCAL:
            return WHOLE, whole(item.sizes)
        return AS_IS, Fact(item.form, item.axis, item.sizes)
    if listed.value is not None and not have_equal_values(listed, item):
        return WHOLE, whole(listed.sizes)
    listed = _with_sizes_of(listed, item)
    is_own = (
        listed.form is Form.LOCAL and listed.form_and_axis() != item.form_and_axis()
    )
    return WHOLE if is_own else need_of(listed), listed


def _with_sizes_of(listed: Fact, item: Fact) -> Fact:
    """Return a list's `Fact` after a new item: with the sizes common to all items.

    Args:
        listed: `Fact` of the list without the item.
        item: `Fact` of the item.
    """
    if listed.sizes == item.sizes or None in (listed.sizes, item.sizes):
        return listed
    shape = sizes.common([listed.sizes, item.sizes])
    if shape is not None and listed.is_rows and shape[listed.axis].kind != "rows":
        shape = with_rows(shape, listed.axis, None)
    return dataclasses.replace(listed, sizes=shape)


def _add_item(view: OperationView) -> Decision:
    """Decide how replicas add an item to a list, in the form of the list's items."""
    need, fact = _need_of_item(view.facts[0], view.facts[-1])
    return Decision([AS_IS, *[WHOLE] * (len(view) - 2), need], [fact])


def _get_item(view: OperationView) -> Decision | None:
    """Decide how replicas build a read of an item of a list.

    The item has the form of the list's items, such as own rows. The decision is `None`
    for a list without items.
    """
    listed = view.facts[0]
    if listed.form is Form.EMPTY:
        return None
    needs = [AS_IS, WHOLE, _shape_need(listed)]
    return Decision(needs, [_fact_of_item(view, listed, 0)], _build_with_item_shape)


def _shape_need(listed: Fact) -> Need:
    """Return the `Need` of the shape of items, an input of each read of a list.

    For row-sharded items it is `AS_IS`, since `_build_with_item_shape` sets the number
    of rows on the replica; otherwise `WHOLE`. `listed` is the `Fact` of the list.
    """
    return AS_IS if listed.is_rows else WHOLE


def _pop(view: OperationView) -> Decision | None:
    """Decide how replicas remove the last item of a list.

    The outputs are the shorter list, and the item in the form of the list's items, such
    as own rows. The decision is `None` for a list without items.
    """
    listed = view.facts[0]
    if listed.form is Form.EMPTY:
        return None
    return Decision(
        [AS_IS, AS_IS], [listed, _fact_of_item(view, listed, 1)], _build_pop
    )


def _fact_of_item(view: OperationView, listed: Fact, index: int) -> Fact:
    """Return the `Fact` of an item that an operation reads from a list.

    Args:
        view: `OperationView` of the operation.
        listed: `Fact` of the list.
        index: Int, index of the output that is the item.
    """
    shape, known = listed.sizes, view.output_sizes(index)
    if listed.value is not None:
        return Fact(Form.SIZES, sizes=shape, value=listed.value)
    if shape is None:
        shape = known
        if listed.is_rows and shape is not None:
            shape = with_rows(shape, listed.axis, None)
    elif known is not None and len(known) == len(shape):
        # The items of one list may differ in shape. A static size of this output is
        # more exact than the size that all items have in common.
        own = listed.axis if listed.is_rows else None
        shape = tuple(
            static if static.kind == "number" and axis != own else size
            for axis, (size, static) in enumerate(zip(shape, known, strict=True))
        )
    return Fact(listed.form, listed.axis, shape)


def _build_with_item_shape(builder: Any, op: Any, replica_inputs: list) -> list:
    """Build a read of one item of a list, or of all of them, on this replica.

    Args:
        builder: `Builder` of the graph.
        op: `tf.Operation` of the program, whose last input is the shape of an item.
        replica_inputs: List of this replica's tensors, the inputs. In the shape, the
            size of the axis of rows is replaced by that on this replica.

    Returns:
        List of this replica's only output.
    """
    (fact,) = builder.facts_of(op.outputs)
    item = fact
    if op.type == "TensorListStack":
        item = Fact(fact.form, fact.axis - 1, (fact.sizes or ())[1:])
    *others, shape = replica_inputs
    (result,) = builder.copy(op, [*others, builder.item_shape(item, shape)])
    return [builder.with_shape(result, op.outputs[0], fact)]


def _build_pop(builder: Any, op: Any, replica_inputs: list) -> list:
    """Build the removal of a list's last item on this replica.

    Args:
        builder: `Builder` of the replica's program.
        op: `tf.Operation` of the program, a `TensorListPopBack`.
        replica_inputs: List of this replica's inputs of `op`. The first one is the
            list. The second, the item's shape, is replaced by that on this replica.

    Returns:
        List of this replica's shorter list and its item.
    """
    fact = builder.facts_of(op.outputs)[1]
    known = builder.own_static_shape(op.outputs[1], fact)
    # The shape is passed as a constant, so that Grappler can remove operations that
    # need only the shape of the item.
    shape = -1 if known.rank is None else [-1 if n is None else n for n in known]
    rest, item = builder.copy(op, [replica_inputs[0], tf.constant(shape, tf.int32)])
    return [rest, builder.with_shape(item, op.outputs[1], fact)]


def _stack(view: OperationView) -> Decision | None:
    """Decide how replicas build a stack of all items of a list.

    The stack has the items' form, with the axis of rows shifted by one. The decision is
    `None` if the list is empty or its items' shape is not known.
    """
    listed = view.facts[0]
    if listed.form is Form.EMPTY or listed.sizes is None:
        return None
    count = sizes.FREE
    if view.attribute("num_elements", -1) >= 0:
        count = sizes.number(view.attribute("num_elements"))
    fact = Fact(listed.form, listed.axis + 1, (count, *listed.sizes))
    return Decision([AS_IS, _shape_need(listed)], [fact], _build_with_item_shape)


def _from_tensor(view: OperationView) -> Decision | None:
    """Decide how replicas build a list of a tensor's slices along its first axis.

    The decision is `None` if that is the axis of rows, or if the shape is not known.
    """
    data = view.facts[0]
    if data.sizes is None or (data.is_rows and data.axis == 0):
        return None
    if data.form not in (Form.ROWS, Form.WHOLE, Form.PART):
        return None
    fact = Fact(data.form, max(data.axis - 1, 0), data.sizes[1:])
    return Decision([AS_IS, AS_IS], [fact], _build_from_tensor)


def _build_from_tensor(builder: Any, op: Any, replica_inputs: list) -> list:
    """Build the list of a tensor's slices along its first axis, on this replica.

    Inputs are the tensor and the shape of a slice. The shape is replaced by one with -1
    for each axis, since slices may have any number of rows on a replica.

    Returns:
        List of one tensor, the new list.
    """
    # The gradient of a loop needs the rank of the items. So if the rank is known, the
    # shape has a -1 for each axis; otherwise it is the scalar -1, for any rank.
    rank = replica_inputs[0].shape.rank
    shape = -1 if rank is None else np.full([rank - 1], -1)
    return builder.copy(op, [replica_inputs[0], tf.constant(shape, op.inputs[1].dtype)])


def _optional_from_value(view: OperationView) -> Decision | None:
    """Decide how replicas build an optional value, in the form of the value itself.

    The decision is `None` if the optional holds several tensors, or none.
    """
    if len(view) != 1:
        return None
    need, fact = _need_of_item(Fact(Form.EMPTY), view.facts[0])
    return Decision([need], [fact])


def _optional_value(view: OperationView) -> Decision | None:
    """Decide how replicas read an optional value; `None` for one without a value."""
    if len(view.op.outputs) != 1 or view.facts[0].form is Form.EMPTY:
        return None
    return Decision(
        [AS_IS], [_fact_of_item(view, view.facts[0], 0)], _build_optional_value
    )


def _build_optional_value(builder: Any, op: Any, replica_inputs: list) -> list:
    """Build a read of an optional value on this replica.

    Args:
        builder: `Builder` of the replica's program.
        op: `tf.Operation` of the program, an `OptionalGetValue`.
        replica_inputs: List with this replica's optional.

    Returns:
        List with the value. Its static shape has this replica's number of rows.
    """
    (fact,) = builder.facts_of(op.outputs)
    shape = builder.own_static_shape(op.outputs[0], fact)
    (value,) = tf.raw_ops.OptionalGetValue(
        optional=replica_inputs[0],
        output_types=[op.outputs[0].dtype],
        output_shapes=[shape],
    )
    return [value]


_LISTS = {
    "EmptyTensorList": _empty,
    "OptionalFromValue": _optional_from_value,
    "OptionalGetValue": _optional_value,
    "OptionalNone": lambda view: Decision([], [Fact(Form.EMPTY)]),
    "TensorListFromTensor": _from_tensor,
    "TensorListGetItem": _get_item,
    "TensorListLength": lambda view: Decision([AS_IS], view.whole_outputs()),
    "TensorListPopBack": _pop,
    "TensorListPushBack": _add_item,
    "TensorListReserve": _empty,
    "TensorListSetItem": _add_item,
    "TensorListStack": _stack,
}
