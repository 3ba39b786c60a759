"""Rules of variables, random numbers, lists and optional values."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp import _compat
from tfdp.base import xla
from tfdp.program import sizes
from tfdp.program.facts import (
    Fact,
    Form,
    have_same_value,
    own_rows,
    part,
    whole,
    with_rows,
)
from tfdp.program.view import (
    AS_HELD,
    PART,
    WHOLE,
    CannotDivideError,
    Decision,
    Need,
    View,
    rows_along,
)

ASSIGNMENTS = frozenset(
    ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
)
READS = frozenset(("ReadVariableOp",))


def decide_variable(view: View) -> Decision | None:
    """Decide a read or a write of a variable.

    States of metrics stay parts of a sum; any other variable has the program's value
    on every replica.
    """
    if view.type in (*READS, "RngReadAndSkip") and view.scope.is_shared(view.op):
        return _decide_shared(view)
    if view.type in READS:
        shape = view.output_sizes()
        is_part = view.scope.is_metric(view.op.inputs[0])
        return Decision([AS_HELD], [part(shape) if is_part else whole(shape)])
    if view.type in ASSIGNMENTS:
        is_part = view.scope.is_metric(view.op.inputs[0])
        return Decision([AS_HELD, PART if is_part else WHOLE], [])
    if view.type == "ResourceGather":
        indices = view.facts[1]
        if not indices.is_rows or view.attribute("batch_dims"):
            return None
        shape = view.output_sizes()
        if shape is None:
            return None
        found = with_rows(shape, indices.axis, indices.multiple)
        return Decision([AS_HELD, AS_HELD], [own_rows(found, indices.axis)])
    return None


def _decide_shared(view: View) -> Decision:
    (result,) = view.op.outputs
    if result.dtype == tf.string or not result.shape.is_fully_defined():
        raise CannotDivideError(
            view.op,
            "uses a state that was made outside of `strategy.scope()`, and that it "
            "writes",
            "Make it in the scope.",
        )
    needs = [AS_HELD] + [WHOLE] * (len(view) - 1)
    return Decision(needs, view.part_outputs(), _build_of_shared)


# Elements that one step of the generator gives, by operation.
_STATELESS = {
    "StatelessRandomUniformV2": None,
    "StatelessRandomNormalV2": None,
    "StatelessTruncatedNormalV2": None,
    "StatelessRandomUniformIntV2": None,
    "StatelessRandomUniformFullIntV2": None,
    "StatelessRandomUniform": None,
    "StatelessRandomNormal": None,
    "StatelessTruncatedNormal": None,
    "StatelessRandomUniformInt": None,
    "StatelessRandomGammaV3": None,
    "StatelessRandomBinomial": None,
    "StatelessRandomPoisson": None,
    "StatelessMultinomial": None,
}
# Of these a replica makes the block of its own rows only.
_SKIPS_AHEAD = frozenset(("StatelessRandomUniformV2", "StatelessRandomNormalV2"))


def decide_random(view: View) -> Decision | None:
    """Decide random numbers: those of one device, of which a replica has its rows."""
    if view.type not in _STATELESS:
        return None
    shape = view.facts[0].value
    if shape is None or view.type == "StatelessMultinomial":
        return None
    axes = [axis for axis, size in enumerate(shape) if size.kind == "rows"]
    if len(axes) != 1 or any(fact.is_rows for fact in view.facts):
        return None
    if any(size.kind == "unknown" for size in shape):
        return None  # The shape of a sparse tensor: it is whole.
    fact = own_rows(tuple(shape), axes[0])
    skips = view.type in _SKIPS_AHEAD and axes[0] == 0
    dtype = view.op.outputs[0].dtype
    if skips and dtype in (tf.float32, tf.float16, tf.bfloat16):
        needs: list[Need] = [AS_HELD] + [WHOLE] * (len(view) - 1)
        return Decision(needs, [fact], _build_own_block)
    return Decision([WHOLE] * len(view), [fact], _build_and_slice)


def _build_and_slice(builder: Any, op: Any, inputs: list) -> list:
    (fact,) = builder.facts_of(op.outputs)
    numbers = builder.copy(op, inputs)[0]
    return [builder.slice_rows(numbers, fact.axis, fact.multiple)]


def _build_own_block(builder: Any, op: Any, inputs: list) -> list:
    """Build the numbers of own rows: the generator skips those before them.

    Philox makes four numbers for each value of its counter: Salmon et al. 2011,
    https://doi.org/10.1145/2063384.2063405.
    """
    (fact,) = builder.facts_of(op.outputs)
    shape, key, counter, algorithm = inputs
    if xla.is_tracing():
        # XLA orders its numbers in another way, and has to know how many there are.
        stream = tf.cast(builder.replica.rank, tf.uint64) * tf.constant(
            2**32, tf.uint64
        )
        apart = tf.stack([counter[0], counter[1] + stream])
        return builder.copy(op, [shape, key, apart, algorithm])
    row_size = tf.reduce_prod(tf.cast(shape[1:], tf.int64))
    begin = tf.cast(builder.first_entry(fact.multiple, shape), tf.int64) * row_size
    size = tf.cast(shape[0], tf.int64) * row_size
    group = begin // 4
    offset = begin - group * 4
    length = (offset + size + 3) // 4 * 4
    low = counter[0] + tf.cast(group, tf.uint64)
    carry = tf.cast(low < counter[0], tf.uint64)
    ahead = tf.stack([low, counter[1] + carry])
    flat = builder.copy(
        op, [tf.cast(tf.reshape(length, [1]), shape.dtype), key, ahead, algorithm]
    )[0]
    own = tf.reshape(flat[offset : offset + size], shape)
    return [builder.with_shape(own, op.outputs[0], fact)]


def writes_state(op: Any) -> bool:
    """Return whether an operation writes a variable, a table or the like."""
    is_stateful = _compat.has_effect(op) and not _compat.has_function(op)
    return is_stateful and op.type not in _ONLY_READ


_ONLY_READ = frozenset(
    [
        *READS,
        "LookupTableExportV2",
        "LookupTableFindV2",
        "LookupTableSizeV2",
        "ResourceGather",
        "ResourceGatherNd",
        "VarHandleOp",
        "VarIsInitializedOp",
        "VariableShape",
    ]
)


def is_output(op: Any) -> bool:
    """Return whether an operation writes what a user reads: text, or a summary."""
    is_summary = op.type.startswith("Write") and "Summary" in op.type
    return is_summary or op.type == "PrintV2"


STATEFUL_RANDOM = frozenset(
    [
        "RandomUniform",
        "RandomStandardNormal",
        "TruncatedNormal",
        "RandomUniformInt",
        "RandomGamma",
        "RandomPoissonV2",
        "RandomShuffle",
        "Multinomial",
        "ParameterizedTruncatedNormal",
    ]
)


def decide_stateful_random(view: View) -> Decision | None:
    """Decide numbers of a generator that each operation has: the first replica's."""
    if view.type not in STATEFUL_RANDOM:
        return None
    shape = view.facts[0].value
    if shape is None or view.type in ("RandomShuffle", "Multinomial"):
        return Decision([WHOLE] * len(view), view.part_outputs(), _build_on_first)
    shape = tuple(shape)
    if view.type in ("RandomGamma", "RandomPoissonV2"):
        shape = (*shape, *(view.facts[1].sizes or ()))
    axes = [axis for axis, size in enumerate(shape) if size.kind == "rows"]
    if len(axes) != 1 or shape[axes[0]].number is None:
        return Decision([WHOLE] * len(view), [part(shape)], _build_on_first)
    return Decision(
        [WHOLE] * len(view),
        [own_rows(shape, axes[0])],
        _build_rows_of_first,
        has_collective=True,
    )


def _build_on_first(builder: Any, op: Any, inputs: list) -> list:
    outputs = builder.copy(op, inputs)
    return [builder.once(tensor) for tensor in outputs]


def _build_rows_of_first(builder: Any, op: Any, inputs: list) -> list:
    """Build own rows of the first replica's numbers, so that what follows has rows."""
    (fact,) = builder.facts_of(op.outputs)
    (numbers,) = builder.copy(op, inputs)
    total = builder.sum(builder.once(numbers))
    builder.keep_whole(op.outputs[0], total)
    own = builder.slice_rows(total, fact.axis, fact.multiple)
    return [builder.with_shape(own, op.outputs[0], fact)]


# They run functions of Python, which may draw, count or write.
_PYTHON = frozenset(("EagerPyFunc", "PyFunc"))


def decide_python(view: View) -> Decision | None:
    """Decide a function of Python: the first replica calls it, once for a step."""
    if view.type not in _PYTHON:
        return None
    return Decision(
        [WHOLE] * len(view), view.whole_outputs(), _build_python, has_collective=True
    )


def _build_python(builder: Any, op: Any, inputs: list) -> list:
    """Call the function on the first replica, and give its results to all.

    The shapes of the results are not known where it is not called. TensorFlow keeps
    one tape for all calls of a function, which the gradient of the first call takes.
    """
    if builder.is_in_loop:
        return builder.copy(op, inputs)
    replica = builder.replica
    is_first = not replica.rank
    outputs = builder.copy(op, inputs) if is_first else [None] * len(op.outputs)
    # What the function reads was gathered with the help of the other replicas.
    with tf.control_dependencies([] if is_first else inputs):
        return [
            replica.share_of_first(own, tensor.dtype, tensor.shape)
            for own, tensor in zip(outputs, op.outputs, strict=True)
        ]


def _build_of_shared(builder: Any, op: Any, inputs: list) -> list:
    """Read a state that the replicas of a worker share, and that the step writes.

    TensorFlow orders all that a step does with it, so that other replicas would read
    what the first one wrote.
    """
    if not builder.replica.is_writer:
        return [tf.zeros(tensor.shape, tensor.dtype) for tensor in op.outputs]
    return [builder.once(tensor) for tensor in builder.copy(op, inputs)]


def decide_list(view: View) -> Decision | None:
    """Decide a list of tensors, such as the states of a loop's steps."""
    if not view.type.startswith(("TensorList", "EmptyTensorList", "Optional")):
        return None
    return _LISTS[view.type](view) if view.type in _LISTS else None


def _empty(view: View) -> Decision:
    """Decide a new list: it is as long as the program's on every replica."""
    return Decision([AS_HELD, WHOLE], [Fact(Form.EMPTY)], _build_empty)


def _build_empty(builder: Any, op: Any, inputs: list) -> list:
    """Build a list whose elements may have another number of rows on each replica."""
    dtype = op.get_attr("element_dtype")
    shape = _element_shape(op.inputs[0])
    if op.type == "EmptyTensorList":
        return [
            tf.raw_ops.EmptyTensorList(
                element_shape=shape, max_num_elements=inputs[1], element_dtype=dtype
            )
        ]
    return [
        tf.raw_ops.TensorListReserve(
            element_shape=shape, num_elements=inputs[1], element_dtype=dtype
        )
    ]


def _element_shape(given: Any) -> Any:
    """Return what is known of the elements' shape: at least the number of axes."""
    found = tf.get_static_value(given, partial=True)
    if given.shape.rank != 1 or given.shape[0] is None:
        return -1
    if found is None:
        found = [None] * given.shape[0]
    return np.array([-1 if size is None else size for size in found], np.int32)


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
    if listed.held() == item.held():
        return AS_HELD, listed
    if listed.is_rows:
        return rows_along(listed.axis), listed
    return (PART if listed.form is Form.PART else WHOLE), listed


def _with_sizes_of(listed: Fact, item: Fact) -> Fact:
    """Return the fact of a list with an item that may have another shape."""
    if listed.sizes == item.sizes or None in (listed.sizes, item.sizes):
        return listed
    shape = sizes.common([listed.sizes, item.sizes])
    if shape is not None and listed.is_rows and shape[listed.axis].kind != "rows":
        shape = with_rows(shape, listed.axis, None)
    return dataclasses.replace(listed, sizes=shape)


def _set_item(view: View) -> Decision:
    need, fact = _item_need(view.facts[0], view.facts[2])
    return Decision([AS_HELD, WHOLE, need], [_as_list(fact)])


def _push(view: View) -> Decision:
    need, fact = _item_need(view.facts[0], view.facts[1])
    return Decision([AS_HELD, need], [_as_list(fact)])


def _as_list(fact: Fact) -> Fact:
    return Fact(fact.form, fact.axis, fact.sizes, fact.value)


def is_known(fact: Fact) -> bool:
    """Return whether integers follow from the number of rows alone."""
    return fact.value is not None and all(s.is_counted for s in fact.value.ravel())


def _get_item(view: View) -> Decision | None:
    listed = view.facts[0]
    if listed.form is Form.EMPTY:
        return None
    needs = [AS_HELD, WHOLE, _shape_need(listed)]
    return Decision(needs, [_item(view, listed, 0)], _build_without_shape)


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


def _build_without_shape(builder: Any, op: Any, inputs: list) -> list:
    (fact,) = builder.facts_of(op.outputs)
    shape = (
        inputs[2] if fact.form is not Form.ROWS else builder.own_shape(fact, inputs[2])
    )
    item = tf.raw_ops.TensorListGetItem(
        input_handle=inputs[0],
        index=inputs[1],
        element_shape=shape,
        element_dtype=op.get_attr("element_dtype"),
    )
    return [builder.with_shape(item, op.outputs[0], fact)]


def _build_pop(builder: Any, op: Any, inputs: list) -> list:
    fact = builder.facts_of(op.outputs)[1]
    known = builder.own_static_shape(op.outputs[1], fact)
    # Grappler knows of it, too, and leaves out what need not be computed.
    shape = -1 if known.rank is None else [-1 if n is None else n for n in known]
    rest, item = tf.raw_ops.TensorListPopBack(
        input_handle=inputs[0],
        element_shape=tf.constant(shape, tf.int32),
        element_dtype=op.get_attr("element_dtype"),
    )
    return [rest, builder.with_shape(item, op.outputs[1], fact)]


def _stack(view: View) -> Decision | None:
    listed = view.facts[0]
    if listed.form is Form.EMPTY or listed.sizes is None:
        return None
    count = sizes.FREE
    if view.attribute("num_elements", -1) >= 0:
        count = sizes.number(view.attribute("num_elements"))
    fact = Fact(listed.form, listed.axis + 1, (count, *listed.sizes))
    return Decision([AS_HELD, _shape_need(listed)], [fact], _build_stack)


def _build_stack(builder: Any, op: Any, inputs: list) -> list:
    (fact,) = builder.facts_of(op.outputs)
    inner = Fact(fact.form, fact.axis - 1, (fact.sizes or ())[1:])
    shape = (
        inputs[1] if fact.form is not Form.ROWS else builder.own_shape(inner, inputs[1])
    )
    stacked = tf.raw_ops.TensorListStack(
        input_handle=inputs[0],
        element_shape=shape,
        element_dtype=op.get_attr("element_dtype"),
        num_elements=op.get_attr("num_elements"),
    )
    return [builder.with_shape(stacked, op.outputs[0], fact)]


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
    shape = -1 if rank is None else np.full([rank - 1], -1, np.int32)
    return [tf.raw_ops.TensorListFromTensor(tensor=inputs[0], element_shape=shape)]


def _length(view: View) -> Decision:
    return Decision([AS_HELD] * len(view), view.whole_outputs())


def _optional(view: View) -> Decision | None:
    if len(view) != 1:
        return None
    need, fact = _item_need(Fact(Form.EMPTY), view.facts[0])
    return Decision([need], [_as_list(fact)])


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


def _none(view: View) -> Decision:
    return Decision([], [Fact(Form.EMPTY)])


_LISTS = {
    "EmptyTensorList": _empty,
    "OptionalFromValue": _optional,
    "OptionalGetValue": _optional_value,
    "OptionalNone": _none,
    "TensorListFromTensor": _from_tensor,
    "TensorListGetItem": _get_item,
    "TensorListLength": _length,
    "TensorListPopBack": _pop,
    "TensorListPushBack": _push,
    "TensorListReserve": _empty,
    "TensorListSetItem": _set_item,
    "TensorListStack": _stack,
}
