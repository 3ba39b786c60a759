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
from tfdp.training.program.view import AS_HELD, WHOLE, Decision, View, table

# Largest number of elements of a tensor whose values are computed before the step runs.
# Shapes and lists of axes are far smaller.
_MAX_ELEMENTS = 64


def _shape(view: View, index: int = 0) -> np.ndarray | None:
    """Return the shape of an input as an array of `Size`, or `None` if not known."""
    shape = view.facts[index].sizes
    return None if shape is None else array(shape)


def _scalar(size: Size) -> np.ndarray:
    """Return an array of rank 0 that holds a size."""
    return array([size]).reshape(())


def _size(view: View) -> np.ndarray | None:
    """Return the result of `tf.size` as an array of `Size`, or `None` if not known."""
    shape = view.facts[0].sizes
    return None if shape is None else _scalar(product(shape))


def _rank(view: View) -> np.ndarray | None:
    """Return the result of `tf.rank` as an array of `Size`, or `None` if not known."""
    rank = view.facts[0].rank
    return None if rank is None else _scalar(sizes.number(rank))


def _strided_slice(view: View) -> np.ndarray | None:
    """Return a slice such as `x[1:, 0]` as an array of `Size`, or `None` if unknown."""
    data = view.facts[0].value
    begin, end, strides = (view.numbers(i) for i in (1, 2, 3))
    if data is None or begin is None or end is None or strides is None:
        return None
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
    try:
        result = data[tuple(index)]
    except IndexError:
        return None
    return _as_array(result)


def _pack(view: View) -> np.ndarray | None:
    """Return the result of `tf.stack` as an array of `Size`, or `None` if not known."""
    if view.attribute("axis") != 0:
        return None
    values = [fact.value for fact in view.facts]
    return np.stack(values) if values else None


def _concat(view: View) -> np.ndarray | None:
    """Return the result of `tf.concat` of vectors of `Size`, or `None` if not known."""
    axis = view.numbers(len(view) - 1)
    values = [fact.value for fact in view.facts[:-1]]
    if axis is None or any(value.ndim != 1 for value in values):
        return None
    return np.concatenate(values)


def _gather(view: View) -> np.ndarray | None:
    """Return the result of `tf.gather` as an array of `Size`, or `None` if unknown."""
    indices, axis = view.numbers(1), view.numbers(2)
    data = view.facts[0].value
    if indices is None or axis is None or axis != 0 or data.ndim != 1:
        return None
    if indices.size and not 0 <= indices.min() <= indices.max() < data.size:
        # The operation would fail, but may lie in a branch that never runs.
        return None
    return _as_array(data[indices])


def _as_array(value: Any) -> np.ndarray:
    """Wrap a `Size` that NumPy's indexing returned into an array; keep an array."""
    return value if isinstance(value, np.ndarray) else _scalar(value)


def _slice(view: View) -> np.ndarray | None:
    """Return the result of `tf.slice` as an array of `Size`, or `None` if not known."""
    begin, size = view.numbers(1), view.numbers(2)
    if begin is None or size is None:
        return None
    return view.facts[0].value[
        tuple(
            slice(int(first), None if count < 0 else int(first + count))
            for first, count in zip(begin, size, strict=True)
        )
    ]


def _reshape(view: View) -> np.ndarray | None:
    """Return the result of `tf.reshape` as an array of `Size`, or `None` if unknown."""
    shape = view.numbers(1)
    return None if shape is None else view.facts[0].value.reshape(shape.astype(int))


def _reduction(combine: Callable[[Iterable[Size]], Size]) -> Callable:
    """Return a function that reduces a vector of sizes, as `tf.reduce_prod` does.

    `combine` reduces the elements of the vector to one `Size`.
    """

    def value(view: View) -> np.ndarray | None:
        """Return the reduction as an array of `Size`, or `None` if not known."""
        axes, data = view.numbers(1), view.facts[0].value
        if axes is None or data.ndim == 0:
            return None if axes is None else data
        if data.ndim != 1 or list(np.ravel(axes)) not in ([0], [-1]):
            return None
        total = _scalar(combine(data))
        return total.reshape([1]) if view.attribute("keep_dims") else total

    return value


def _range(view: View) -> np.ndarray | None:
    """Return the result of `tf.range` as an array of `Size`, or `None` if not known."""
    start, limit, delta = (view.numbers(i) for i in (0, 1, 2))
    if start is None or limit is None or delta is None or not delta:
        return None
    result = np.arange(start.item(), limit.item(), delta.item())
    return array(result) if result.size <= _MAX_ELEMENTS else None


def _elementwise(combine: Callable[[Size, Size], Size]) -> Callable:
    """Return a function that computes an element-wise operation on two inputs.

    `combine` computes one element from two of type `Size`.
    """

    def value(view: View) -> np.ndarray | None:
        """Return the result of the operation as an array of `Size`, by elements."""
        first, second = np.broadcast_arrays(*(fact.value for fact in view.facts))
        result = np.empty(first.shape, object)
        for index in np.ndindex(first.shape):
            result[index] = combine(first[index], second[index])
        return result

    return value


def _comparison(compare: Callable[[Any, Any], Any]) -> Callable:
    """Return a function that computes an element-wise comparison of two inputs.

    `compare` compares two numbers.
    """

    def combine(one: Size, other: Size) -> Size:
        """Compare two sizes; the result is known if both are numbers."""
        if one.kind == other.kind == "number":
            return sizes.number(bool(compare(one.number, other.number)))
        return FREE if one.is_free and other.is_free else UNKNOWN

    return _elementwise(combine)


def _select(view: View) -> np.ndarray | None:
    """Return `tf.where` by a known scalar as an array of `Size`, or else `None`."""
    condition = view.numbers(0)
    if condition is None or condition.ndim:
        return None
    values = np.broadcast_arrays(view.facts[1].value, view.facts[2].value)
    return values[0 if condition else 1]


def _invert_permutation(view: View) -> np.ndarray | None:
    """Return an inverted permutation as an array of `Size`, or `None` if not known."""
    permutation = view.numbers(0)
    return None if permutation is None else array(np.argsort(permutation))


def _broadcast_args(view: View) -> np.ndarray | None:
    """Return the array of `Size` that `tf.broadcast_dynamic_shape` returns."""
    shapes = [tuple(fact.value) for fact in view.facts]
    return array(sizes.broadcast(shapes))


def _fill(view: View) -> np.ndarray | None:
    """Return the result of `tf.fill` as an array of `Size`, or `None` if not known."""
    dims = view.numbers(0)
    if dims is None or np.prod(dims) > _MAX_ELEMENTS:
        return None
    result = np.empty(dims.astype(int), object)
    result[...] = view.facts[1].value[()]
    return result


def _stitch(view: View) -> np.ndarray | None:
    """Return the result of `tf.dynamic_stitch` as an array of `Size`.

    It is `None` if an index is not known. Positions without an index are `UNKNOWN`.
    """
    count = len(view) // 2
    places = [view.numbers(index) for index in range(count)]
    if any(place is None for place in places):
        return None
    largest = [int(np.max(p)) for p in places if p is not None and p.size]
    length = 1 + max(largest, default=-1)
    result = np.empty(length, object)
    result[:] = UNKNOWN
    for place, fact in zip(places, view.facts[count:], strict=True):
        assert place is not None
        result[place.ravel()] = fact.value.ravel()
    return result


def _cast(view: View) -> np.ndarray | None:
    """Return the array of `Size` of a `tf.cast` to numbers, or `None` if not known."""
    dtype, known = view.op.outputs[0].dtype, view.numbers(0)
    if not (dtype.is_integer or dtype.is_floating):
        return None
    if known is None:
        return view.facts[0].value
    return array(known.astype(dtype.as_numpy_dtype))


# Functions that return the output as an array of `Size`, or `None` if it is not known:
# from the shape of the input, and from the values of all inputs.
_VALUES_FROM_SHAPES: dict[str, Callable[[View], np.ndarray | None]] = table(
    {"Shape TensorListElementShape": _shape, "Size": _size, "Rank": _rank}
)
_VALUES_FROM_VALUES: dict[str, Callable[[View], np.ndarray | None]] = table(
    {
        "Add AddV2": _elementwise(operator.add),
        "BroadcastArgs": _broadcast_args,
        "Cast": _cast,
        "ConcatV2": _concat,
        "DynamicStitch": _stitch,
        "Equal": _comparison(operator.eq),
        "ExpandDims": lambda view: (
            view.facts[0].value[np.newaxis] if view.facts[0].value.ndim == 0 else None
        ),
        "Fill": _fill,
        "FloorDiv": _elementwise(operator.floordiv),
        "FloorMod": _elementwise(operator.mod),
        "GatherV2": _gather,
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
        "Pack": _pack,
        "Prod": _reduction(product),
        "Range": _range,
        "Reshape": _reshape,
        "Select SelectV2": _select,
        "Slice": _slice,
        "Squeeze": lambda view: (
            view.facts[0].value.reshape(())
            if view.facts[0].value.shape == (1,)
            else None
        ),
        "StridedSlice": _strided_slice,
        "Sub": _elementwise(operator.sub),
        "Sum": _reduction(lambda data: sum(data, sizes.ZERO)),
    }
)


def decide_values(view: View) -> Decision | None:
    """Decide how replicas build an operation whose known results follow from sizes."""
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
    if value is None or not _can_follow(value):
        return None
    fact = integers(value)
    # A result that is not a multiple of the number of rows, such as a ratio of two
    # sizes, is the same on all replicas: each computes it for the whole batch.
    is_of_all = fact.form is Form.WHOLE and Form.SIZES in view.forms()
    return Decision([WHOLE if is_of_all else AS_HELD] * len(view), [fact])


def _can_follow(value: np.ndarray) -> bool:
    """Return whether an array of `Size` is small, and known well enough to be used."""
    kinds = {size.kind for size in value.ravel()}
    is_mixed = {"rows", "splits"} <= kinds
    return value.size <= _MAX_ELEMENTS and "unknown" not in kinds and not is_mixed


def _decide_shapes(view: View) -> Decision | None:
    """Decide how replicas build `tf.shape_n`, the shapes of several tensors."""
    values = [_shape(view, index) for index in range(len(view))]
    known = [value for value in values if value is not None and _can_follow(value)]
    if len(known) < len(values):
        return None
    outputs = [integers(value) for value in known]
    return Decision([AS_HELD] * len(view), outputs, _build_shapes)


def _build_shapes(builder: Any, op: Any, replica_inputs: list) -> list:
    """Build the shapes of several tensors, with this replica's number of rows."""
    return [builder.shape(op, index, of_all=False) for index in range(len(op.outputs))]


def _decide_broadcast_axes(view: View) -> Decision | None:
    """Decide how replicas build the axes over which a broadcast gradient is summed."""
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
    need = AS_HELD if is_known else WHOLE
    return Decision([need] * len(view), outputs, build=_build_axes)


def _build_axes(builder: Any, op: Any, replica_inputs: list) -> list:
    """Build the axes as constants if known, or else from sizes of the whole batch.

    A replica with one row or none would compute other axes from its own sizes.
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
    # In a batch of one row TensorFlow takes the axis of rows for a broadcast one, and
    # adds it to the axes to sum over. The plan expects rows along this axis, so it is
    # removed.
    return [
        _allowed_axes(axes, fact)
        for axes, fact in zip(program_axes, facts, strict=True)
    ]


def _allowed_axes(axes: tf.Tensor, fact: Fact) -> tf.Tensor:
    """Keep only the axes that, according to the `Fact`, a tensor of axes may have."""
    may = tf.constant(sorted((fact.axes or frozenset()) | fact.maybe_axes), axes.dtype)
    return tf.boolean_mask(axes, tf.reduce_any(axes[:, tf.newaxis] == may, 1))
