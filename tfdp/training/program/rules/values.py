"""Rules of integers that are computed from sizes: shapes, axes, counts.

A function of one view computes what the operation returns, as an array of `Size`, whose
elements are numbers or multiples of the number of rows. It returns `None` if that is
not known before the step runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.ground.base import xla
from tfdp.training.program import sizes
from tfdp.training.program.facts import Fact, Form, integers
from tfdp.training.program.sizes import FREE, ONE, UNKNOWN, Size, array, product
from tfdp.training.program.view import AS_IS, WHOLE, Decision, OperationView, table

# Values of a tensor with more elements are not computed while a step is planned, since
# that takes time. Shapes and lists of axes are far smaller.
_MAX_ELEMENTS = 64


def _shape(view: OperationView, index: int = 0) -> np.ndarray | None:
    """Return the shape of an input as an array of `Size`, or `None` if not known."""
    shape = view.facts[index].sizes
    return None if shape is None else array(shape)


def _scalar(size: Size) -> np.ndarray:
    """Return an array of rank 0 that holds a size."""
    return array([size]).reshape(())


def _size(view: OperationView) -> np.ndarray | None:
    """Return the result of `tf.size` as an array of one `Size`; `None` if unknown."""
    shape = view.facts[0].sizes
    return None if shape is None else _scalar(product(shape))


def _rank(view: OperationView) -> np.ndarray | None:
    """Return the result of `tf.rank` as an array of one `Size`; `None` if unknown."""
    rank = view.facts[0].rank
    return None if rank is None else _scalar(sizes.number(rank))


def _moved(move: Callable, data: slice = slice(1)) -> Callable:
    """Return a function that computes the output of an operation that moves elements.

    An example is `tf.slice` of a tensor that holds a shape. The function takes an
    `OperationView`, reads the inputs from it, calls `move` if all of them are known,
    and returns an array of `Size`. It returns `None` if an input or the output is not
    known before the step runs, or if the operation would fail.

    Args:
        move: Callable, called as `move(view, *inputs)` with one array for each input.
            It returns the output, or `None` if that is not known.
        data: Slice that selects the inputs whose elements are moved. They are arrays of
            `Size`, and all other inputs are arrays of numbers. Defaults to the first
            input.
    """

    def value(view: OperationView) -> np.ndarray | None:
        """Return the result of `move` on the operation's inputs, as an array of `Size`.

        It is `None` if an input or the result is not known, or if `move` fails.
        """
        moved = range(len(view))[data]
        inputs = [
            fact.value if index in moved else view.numbers(index)
            for index, fact in enumerate(view.facts)
        ]
        if any(given is None for given in inputs):
            return None
        try:
            result = move(view, *inputs)
        except (IndexError, ValueError):
            # The operation would fail with these values. The plan raises no error,
            # because the operation may lie in a branch that never runs.
            return None
        return _scalar(result) if isinstance(result, Size) else result

    return value


def _strided_slice(
    view: OperationView, data: Any, begin: Any, end: Any, strides: Any
) -> Any:
    """Return a slice such as `x[1:, 0]` of `data`, an array of `Size`.

    The bounds and strides are vectors of numbers, one for each index, as those of
    `tf.strided_slice`. The result is `None` for a slice with an ellipsis or a new axis.
    """
    if view.attribute("ellipsis_mask") or view.attribute("new_axis_mask"):
        return None
    index: list[Any] = []
    for axis, (first, last, stride) in enumerate(zip(begin, end, strides, strict=True)):
        bit = 1 << axis
        if view.attribute("shrink_axis_mask") & bit:
            index.append(int(first))
            continue
        start = None if view.attribute("begin_mask") & bit else int(first)
        stop = None if view.attribute("end_mask") & bit else int(last)
        index.append(slice(start, stop, int(stride)))
    return data[tuple(index)]


def _slice(view: OperationView, data: Any, begin: Any, size: Any) -> Any:
    """Return `tf.slice` of `data`, an array of `Size`; or `None` if it would fail."""
    ends = np.where(size == -1, data.shape, begin + size)
    if (begin < 0).any() or (ends < begin).any() or (ends > data.shape).any():
        return None
    return data[tuple(map(slice, begin.astype(int), ends.astype(int)))]


def _gather(view: OperationView, data: Any, indices: Any, axis: Any) -> Any:
    """Return the result of `tf.gather`, or `None` if it is not known.

    It is not known with `batch_dims`, or with a negative index. Such an index does not
    count from the end: TensorFlow raises an error for it, and XLA returns 0.

    Args:
        view: `OperationView` of the operation.
        data: Array of `Size`, the elements to take from.
        indices: Array of numbers.
        axis: Array of one number.

    Returns:
        Array of `Size`, or `None`.
    """
    if view.attribute("batch_dims") or (indices < 0).any():
        return None
    return np.take(data, indices.astype(int), axis.item())


def _select(view: OperationView, condition: Any, one: Any, other: Any) -> Any:
    """Return `tf.where` as an array of `Size`; `None` unless `condition` is scalar."""
    if condition.ndim:
        return None
    return np.broadcast_arrays(one, other)[0 if condition else 1]


def _fill(view: OperationView, dims: Any, value: Any) -> Any:
    """Return the result of `tf.fill`, an array; `None` if it has over 64 elements.

    Args:
        view: `OperationView` of the operation.
        dims: Array of numbers, the shape of the result.
        value: Array of rank 0 of `Size`, the element.

    Returns:
        Array of `Size`, or `None`.
    """
    if np.prod(dims) > _MAX_ELEMENTS:
        return None
    return np.full(dims.astype(int), value[()], object)


def _reduction(combine: Callable[[Iterable[Size]], Size]) -> Callable:
    """Return a function that computes the reduction of an input, a vector of sizes.

    The function takes an `OperationView`, and returns an array of `Size`, or `None` if
    the result is not known. `combine` reduces the elements to one `Size`.
    """

    def value(view: OperationView) -> np.ndarray | None:
        """Return the reduction as an array of `Size`, or `None` if not known."""
        axes, data = view.numbers(1), view.facts[0].value
        if axes is None or data.ndim == 0:
            return None if axes is None else data
        if data.ndim != 1 or list(np.ravel(axes)) not in ([0], [-1]):
            return None
        total = _scalar(combine(data))
        return total.reshape([1]) if view.attribute("keep_dims") else total

    return value


def _range(view: OperationView) -> np.ndarray | None:
    """Return the result of `tf.range` as an array of `Size`, or `None` if not known."""
    start, limit, delta = (view.numbers(i) for i in (0, 1, 2))
    if start is None or limit is None or delta is None or not delta:
        return None
    result = np.arange(start.item(), limit.item(), delta.item())
    return array(result) if result.size <= _MAX_ELEMENTS else None


def _elementwise(combine: Callable[[Size, Size], Size]) -> Callable:
    """Return a function that computes an element-wise operation on two arrays of sizes.

    The function takes the `OperationView` of the operation, whose two inputs have known
    elements, and returns an array of `Size`. `combine` computes one element from two.
    """

    def value(view: OperationView) -> np.ndarray | None:
        """Return the result of the operation as an array of `Size`."""
        first, second = np.broadcast_arrays(*(fact.value for fact in view.facts))
        result = np.empty(first.shape, object)
        for index in np.ndindex(first.shape):
            result[index] = combine(first[index], second[index])
        return result

    return value


def _comparison(compare: Callable[[Any, Any], Any]) -> Callable:
    """Return a function that compares the elements of two arrays of sizes.

    The function takes an `OperationView`, and returns an array of `Size`. `compare`
    compares two numbers.
    """

    def combine(one: Size, other: Size) -> Size:
        """Return the truth of a comparison as a `Size`, known only for two numbers."""
        if one.kind == other.kind == "number":
            return sizes.number(bool(compare(one.number, other.number)))
        return FREE if one.is_free and other.is_free else UNKNOWN

    return _elementwise(combine)


def _invert_permutation(view: OperationView) -> np.ndarray | None:
    """Return an inverted permutation as an array of `Size`, or `None` if not known."""
    permutation = view.numbers(0)
    return None if permutation is None else array(np.argsort(permutation))


def _stitch(view: OperationView) -> np.ndarray | None:
    """Return the result of `tf.dynamic_stitch` as an array of `Size`.

    It is `None` if an index is not known, or stands for several elements. Positions
    without an index are `UNKNOWN`.
    """
    count = len(view) // 2
    places = [view.numbers(index) for index in range(count)]
    shapes = [None if place is None else place.shape for place in places]
    if shapes != [fact.value.shape for fact in view.facts[count:]]:
        return None
    largest = [int(np.max(p)) for p in places if p is not None and p.size]
    length = 1 + max(largest, default=-1)
    result = np.empty(length, object)
    result[:] = UNKNOWN
    for place, fact in zip(places, view.facts[count:], strict=True):
        assert place is not None
        result[place.ravel()] = fact.value.ravel()
    return result


def _cast(view: OperationView) -> np.ndarray | None:
    """Return the result of a `tf.cast` to numbers as an array of `Size`, or `None`.

    It is `None` if the result is not known, or if the cast is to another dtype.
    """
    dtype, known = view.op.outputs[0].dtype, view.numbers(0)
    if not (dtype.is_integer or dtype.is_floating):
        return None
    if known is None:
        return view.facts[0].value
    return array(known.astype(dtype.as_numpy_dtype))


# The output of these operations follows from the shape of the input, so it may be known
# where the input's elements are not. Operations in `_VALUES_FROM_VALUES` need the
# elements of all inputs.
_VALUES_FROM_SHAPES: dict[str, Callable[[OperationView], np.ndarray | None]] = table(
    {"Shape TensorListElementShape": _shape, "Size": _size, "Rank": _rank}
)
_VALUES_FROM_VALUES: dict[str, Callable[[OperationView], np.ndarray | None]] = table(
    {
        "Add AddV2": _elementwise(operator.add),
        "BroadcastArgs": lambda view: array(
            sizes.broadcast([tuple(fact.value) for fact in view.facts])
        ),
        "Cast": _cast,
        "ConcatV2": _moved(
            lambda _, *inputs: np.concatenate(inputs[:-1], inputs[-1].item()), slice(-1)
        ),
        "DynamicStitch": _stitch,
        "Equal": _comparison(operator.eq),
        "ExpandDims": _moved(
            lambda view, data, axis: np.expand_dims(data, axis.item())
        ),
        "Fill": _moved(_fill, slice(1, 2)),
        "FloorDiv": _elementwise(operator.floordiv),
        "FloorMod": _elementwise(operator.mod),
        "GatherV2": _moved(_gather),
        "Greater": _comparison(operator.gt),
        "GreaterEqual": _comparison(operator.ge),
        "Identity StopGradient": lambda view: view.facts[0].value,
        "InvertPermutation": _invert_permutation,
        "Less": _comparison(operator.lt),
        "LessEqual": _comparison(operator.le),
        "Maximum": _elementwise(Size.maximum),
        "Minimum": _elementwise(Size.minimum),
        "Mul": _elementwise(operator.mul),
        "NotEqual": _comparison(operator.ne),
        "Pack": _moved(
            lambda view, *inputs: np.stack(inputs, view.attribute("axis")), slice(None)
        ),
        "Prod": _reduction(product),
        "Range": _range,
        "Reshape": _moved(lambda _, data, shape: data.reshape(shape.astype(int))),
        "Select SelectV2": _moved(_select, slice(1, 3)),
        "Slice": _moved(_slice),
        "Squeeze": _moved(
            lambda view, data: np.squeeze(
                data, tuple(view.attribute("squeeze_dims")) or None
            )
        ),
        "StridedSlice": _moved(_strided_slice),
        "Sub": _elementwise(operator.sub),
        "Sum": _reduction(lambda data: sum(data, sizes.ZERO)),
    }
)


def decide_values(view: OperationView) -> Decision | None:
    """Decide how replicas build an operation whose results are known from sizes.

    Results are small arrays of integers, such as shapes. The decision is `None` if they
    are not known before the step runs.
    """
    if view.type == "BroadcastGradientArgs":
        return _decide_broadcast_axes(view)
    if view.type == "ShapeN":
        return _decide_shapes(view)
    value = None
    if view.type in _VALUES_FROM_SHAPES:
        value = _VALUES_FROM_SHAPES[view.type](view)
    elif view.type in _VALUES_FROM_VALUES and all(
        f.value is not None for f in view.facts
    ):
        value = _VALUES_FROM_VALUES[view.type](view)
    if value is None or not _is_recordable(value):
        return None
    fact = integers(value)
    # A result that is not a multiple of the number of rows, such as a ratio of two
    # sizes, is the same on all replicas: each computes it for the whole batch.
    is_of_all = fact.form is Form.WHOLE and Form.SIZES in view.forms()
    return Decision([WHOLE if is_of_all else AS_IS] * len(view), [fact])


def _is_recordable(value: np.ndarray) -> bool:
    """Return whether a plan may record an array of `Size` as the value of a tensor.

    It must have at most `_MAX_ELEMENTS` elements, none of the kind `"unknown"`, and not
    both of the kinds `"rows"` and `"splits"`.
    """
    kinds = {size.kind for size in value.ravel()}
    is_mixed = {"rows", "splits"} <= kinds
    return value.size <= _MAX_ELEMENTS and "unknown" not in kinds and not is_mixed


def _decide_shapes(view: OperationView) -> Decision | None:
    """Decide how replicas build `tf.shape_n`, the shapes of several tensors.

    The decision is `None` if one of the shapes is not known.
    """
    values = [_shape(view, index) for index in range(len(view))]
    known = [value for value in values if value is not None and _is_recordable(value)]
    if len(known) < len(values):
        return None
    outputs = [integers(value) for value in known]
    return Decision([AS_IS] * len(view), outputs, _build_shapes)


def _build_shapes(builder: Any, op: Any, replica_inputs: list) -> list:
    """Build the shapes of several tensors, with this replica's number of rows.

    Returns:
        List of integer tensors, one for each output of `op`.
    """
    return [builder.shape(op, index, of_all=False) for index in range(len(op.outputs))]


def _decide_broadcast_axes(view: OperationView) -> Decision | None:
    """Decide how replicas build the axes over which a broadcast gradient is summed.

    The decision is `None` if the shape of an operand is not known.
    """
    shapes = [fact.value for fact in view.facts]
    if any(shape is None for shape in shapes):
        return None
    rank = max(len(shape) for shape in shapes)
    aligned = [[ONE] * (rank - len(shape)) + list(shape) for shape in shapes]
    outputs = []
    for own, other, shape in zip(aligned, reversed(aligned), shapes, strict=True):
        certain, maybe = set(), set()
        for axis in range(rank):
            if axis < rank - len(shape) or own[axis] == ONE:
                certain.add(axis)
            elif (
                own[axis].kind in ("free", "unknown") and own[axis] != other[axis]
            ) or (own[axis].kind == "free" and other[axis].kind == "free"):
                maybe.add(axis)
        value = None if maybe else array(np.array(sorted(certain), np.int32))
        outputs.append(
            Fact(
                Form.WHOLE,
                sizes=(FREE,),
                value=value,
                axes=frozenset(certain),
                maybe_axes=frozenset(maybe),
            )
        )
    is_known = all(fact.value is not None for fact in outputs)
    need = AS_IS if is_known else WHOLE
    return Decision([need] * len(view), outputs, build=_build_axes)


def _build_axes(builder: Any, op: Any, replica_inputs: list) -> list:
    """Build the axes over which a broadcast gradient is summed.

    They are constants if known, or else computed from sizes of the whole batch.
    A replica with one row or none would compute other axes from its own sizes.

    Returns:
        List of integer tensors, one for each output of `op`.
    """
    facts = builder.facts_of(op.outputs)
    if all(fact.value is not None for fact in facts):
        return [
            builder.constant(sizes.numbers(fact.value), tensor.dtype)
            for fact, tensor in zip(facts, op.outputs, strict=True)
        ]
    program_axes = builder.copy(op, replica_inputs)
    if isinstance(builder.replica.rows.total, int) or xla.is_tracing():
        return program_axes
    # In a batch of one row TensorFlow takes the axis of rows for a broadcast axis, and
    # returns it as an axis to sum over. The plan expects the rows to be kept, so the
    # axis of rows is removed from the result.
    return [
        _allowed_axes(axes, fact)
        for axes, fact in zip(program_axes, facts, strict=True)
    ]


def _allowed_axes(axes: tf.Tensor, fact: Fact) -> tf.Tensor:
    """Return only those axes over which the plan expects that a gradient is summed.

    Args:
        axes: Tensor of shape `[num_axes]`, the axes to sum a broadcast gradient over.
        fact: `Fact` of this tensor; its `axes` and `maybe_axes` are kept.
    """
    may = tf.constant(sorted((fact.axes or frozenset()) | fact.maybe_axes), axes.dtype)
    return tf.boolean_mask(axes, tf.reduce_any(axes[:, tf.newaxis] == may, 1))
