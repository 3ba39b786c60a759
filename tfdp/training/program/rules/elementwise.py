"""Rules of element-wise operations, and of operations that are linear.

They return `None` where they do not apply. Partial sums are the replicas' addends of a
tensor; a local value is one of a replica alone, see `Form`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp.training.program import sizes
from tfdp.training.program.facts import Fact, Form, own_rows, whole, with_rows
from tfdp.training.program.sizes import ONE, number
from tfdp.training.program.view import (
    AS_IS,
    NOTHING,
    PART,
    WHOLE,
    Decision,
    Need,
    OperationView,
    operations,
    rows_along,
    table,
)

ELEMENTWISE = operations(
    """
    Abs Acos Acosh Add AddN AddV2 And Angle ApproximateEqual Asin Asinh Atan Atan2
    Atanh BesselI0e BesselI1e Bitcast BitwiseAnd BitwiseOr BitwiseXor Bucketize Cast
    Ceil CheckNumerics ClipByValue Complex ComplexAbs Conj Cos Cosh DeepCopy Digamma
    Div DivNoNan Elu EluGrad EnsureShape Equal Erf Erfc Erfinv Exp Expm1 Floor
    FloorDiv FloorMod Greater GreaterEqual Identity Igamma Igammac Imag Inv InvGrad
    IsFinite IsInf IsNan LeakyRelu LeakyReluGrad LeftShift Less LessEqual Lgamma Log
    Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Mul MulNoNan Ndtri Neg
    NextAfter NotEqual OnesLike Polygamma Pow PreventGradient Real RealDiv Reciprocal
    ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad RightShift Rint Round Rsqrt RsqrtGrad
    Select SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Snapshot Softplus
    SoftplusGrad Softsign SoftsignGrad Sqrt SqrtGrad Square SquaredDifference
    StopGradient Sub Tan Tanh TanhGrad TruncateDiv TruncateMod Xdivy Xlog1py Xlogy
    ZerosLike Zeta AsString RegexFullMatch RegexReplace StaticRegexFullMatch
    StaticRegexReplace StringLength StringLower StringStrip StringToHashBucket
    StringToHashBucketFast StringToHashBucketStrong StringToNumber StringUpper Substr
    """
)
# A gradient operation is linear in the upstream gradient, so the input with this index
# may be a partial sum.
_UPSTREAM_INPUT = table(
    {
        """
        EluGrad LeakyReluGrad Relu6Grad ReluGrad SeluGrad SoftplusGrad SoftsignGrad
        """: 0,
        "InvGrad ReciprocalGrad RsqrtGrad SigmoidGrad SqrtGrad TanhGrad": 1,
    }
)
# These operations are linear in the input with this index: applied to the addend of
# each replica, they return the addends of their result.
_LINEAR_IN = _UPSTREAM_INPUT | table(
    {
        """
        BroadcastTo Cast Conj Cumsum DeepCopy EnsureShape ExpandDims GatherNd GatherV2
        Identity Imag MatrixBandPart MatrixDiagPartV3 MatrixDiagV3 MirrorPad Neg Pad
        PadV2 PreventGradient Real Reshape ReverseV2 Roll Slice Snapshot SplitV Squeeze
        StopGradient StridedSlice Sum Mean Tile Transpose Unpack UnsortedSegmentSum
        """: 0,
        "Split": 1,
        "StridedSliceGrad": 4,
    }
)
# An operation that pads is linear only if it pads with 0. The padding value is the
# input with this index.
_PADDED_WITH = {"MatrixDiagPartV3": 2, "MatrixDiagV3": 4, "PadV2": 2}
# These products are linear in each input by itself, so one input may be a partial sum,
# but not two.
_PRODUCTS = operations("BatchMatMul BatchMatMulV2 Einsum MatMul Mul MulNoNan")
# These operations are linear in all inputs together: given partial sums in all inputs,
# they return a partial sum.
_SUMS = operations("Add AddN AddV2 Pack Sub ConcatV2")
# These operations read only the shape of their input. Each addend of a partial sum has
# the shape of the sum, so a replica's own addend suffices.
_SHAPE_ONLY = operations("OnesLike Rank Shape ShapeN Size ZerosLike")
# These operations do not broadcast. So each replica needs its own rows of all operands,
# also where the axis of rows has size one.
_NOT_BROADCASTING = frozenset(("AddN", *_UPSTREAM_INPUT))


def decide_zeros(view: OperationView) -> Decision | None:
    """Decide how replicas build `OnesLike` or `ZerosLike` without the input's value.

    A loop then does not keep the input for its gradient. The decision is `None` for
    another operation, for lists and strings, or if a size of the input is neither a
    known number nor a known multiple of the number of rows.
    """
    if view.type not in ("OnesLike", "ZerosLike") or view.op.outputs[0].dtype in (
        tf.variant,
        tf.string,
    ):
        return None
    fact = view.facts[0]
    if fact.sizes is None or not all(size.is_counted for size in fact.sizes):
        return None
    form = Form.ROWS if fact.is_rows else Form.WHOLE
    return Decision([NOTHING], [Fact(form, fact.axis, fact.sizes)], _build_zeros)


def _build_zeros(builder: Any, op: Any, replica_inputs: list) -> list:
    """Build zeros or ones in the shape that the output has on this replica.

    Returns:
        List of one tensor, this replica's output of `op`.
    """
    (fact,), (result,) = builder.facts_of(op.outputs), op.outputs
    make = tf.zeros if op.type == "ZerosLike" else tf.ones
    zeros = make(builder.shape_of(fact), result.dtype)
    return [builder.with_shape(zeros, result, fact)]


def decide_linear(view: OperationView) -> Decision | None:
    """Decide how replicas apply a linear operation to partial sums: each to its own.

    The results are partial sums as well. The decision is `None` if no input is a
    partial sum, or if the operation is not linear in those that are.
    """
    if view.type in _SHAPE_ONLY:
        return Decision([AS_IS] * len(view), view.whole_outputs())
    parts = [i for i, fact in enumerate(view.facts) if fact.form is Form.PART]
    if not parts:
        return None
    if view.type in _SUMS:
        linear = list(range(len(view) - (view.type == "ConcatV2")))
    elif view.type in ("Select", "SelectV2"):
        linear = [1, 2]
    else:
        linear = _linear_inputs(view, parts)
    if not set(parts) <= set(linear):
        return None
    needs = [PART if index in linear else WHOLE for index in range(len(view))]
    return Decision(needs, view.part_outputs(_sizes_of_partial_sum(view)))


def _sizes_of_partial_sum(view: OperationView) -> Any:
    """Return the shape of an operation's output that is a partial sum.

    A static shape does not suffice: with a batch of one row, the axis of rows would
    look like one that broadcasts.

    Returns:
        Tuple of `Size`, with multiples of the number of rows; or `None` if the inputs
        do not determine it, and only TensorFlow's static shape is known.
    """
    if view.type in ("BroadcastTo", "Reshape", "Tile"):
        return _shape_from_second_input(view)
    shapes = [fact.sizes for fact in view.facts if fact.sizes is not None]
    if view.type not in ELEMENTWISE or len(shapes) < len(view):
        return None
    return sizes.broadcast(shapes)


def _shape_from_second_input(view: OperationView) -> Any:
    """Return the output shape of a `BroadcastTo`, `Reshape` or `Tile`.

    Returns:
        Tuple of `Size`; or `None` if the second input, the shape or the multiples, is
        not known or has a -1.
    """
    data, target = view.facts[0].sizes, view.facts[1].value
    if target is None or any(size == number(-1) for size in target):
        return None
    if view.type != "Tile":
        return tuple(target)
    if data is None:
        return None
    return tuple(a * b for a, b in zip(data, target, strict=True))


def _linear_inputs(view: OperationView, parts: list[int]) -> list[int]:
    """Return the index of the input in which an operation is linear, in a list.

    It may be a partial sum if all other inputs are whole, as the data of a `Pad`.

    Args:
        view: `OperationView` of the operation.
        parts: List of ints, indices of the inputs that are partial sums.

    Returns:
        List of one int, which need not be in `parts`; or an empty list if there is no
        such input.
    """
    kind, dtype = view.type, view.op.outputs[0].dtype if view.op.outputs else tf.bool
    if kind in ("Cast", "Mean") and not dtype.is_floating:
        # A `Cast` or a `Mean` to integers rounds, and rounding is not linear.
        return []
    if kind in _PADDED_WITH:
        added = view.numbers(_PADDED_WITH[kind])
        if added is None or added.any():
            return []
    if kind in _LINEAR_IN:
        return [_LINEAR_IN[kind]]
    if len(parts) > 1 or not (dtype.is_floating or dtype.is_complex):
        return []
    is_quotient = kind in ("RealDiv", "Div", "DivNoNan") and parts == [0]
    return parts if is_quotient or kind in _PRODUCTS else []


def decide_elementwise(view: OperationView) -> Decision | None:
    """Decide how replicas build an element-wise operation: each on its own rows.

    The decision is `None` for another operation, or if the operands' rows do not match.
    """
    if view.type not in ELEMENTWISE:
        return None
    if view.type == "Bitcast":
        source, result = view.op.inputs[0].dtype, view.op.outputs[0].dtype
        if source.size != result.size:
            return None
    ranks = [fact.rank for fact in view.facts]
    rank = None if None in ranks else max(r for r in ranks if r is not None)
    if rank is None:
        return _decide_unknown_rank(view)
    axes = [
        rank - fact.rank + fact.axis if fact.is_rows and fact.rank is not None else None
        for fact in view.facts
    ]
    if _selects_by_vector(view):
        return None
    axis = next(own for own in axes if own is not None)
    multiples = {
        fact.multiple for fact, own in zip(view.facts, axes, strict=True) if own == axis
    }
    if len(multiples) > 1:
        return None
    needs = [_need_of_operand(view, fact, axis - rank) for fact in view.facts]
    shapes = [fact.sizes for fact in view.facts if fact.sizes is not None]
    shape = with_rows(sizes.broadcast(shapes), axis, multiples.pop())
    build = _build_ensure_shape if view.type == "EnsureShape" else None
    return Decision(needs, [own_rows(shape, axis)], build)


def _need_of_operand(view: OperationView, fact: Fact, axis: int) -> Need:
    """Return the `Need` of an operand of an operation on row-sharded tensors.

    An operand that broadcasts along the axis of rows is needed whole, and any other one
    as the replica's own rows.

    Args:
        view: `OperationView` of the operation.
        fact: `Fact` of the operand.
        axis: Negative int, the axis of rows, counted from the end.
    """
    assert fact.sizes is not None
    place = len(fact.sizes) + axis
    if view.type in _NOT_BROADCASTING:
        return rows_along(place)
    if place < 0 or fact.sizes[place] == ONE:
        return WHOLE
    return rows_along(place, may_broadcast=True)


def _selects_by_vector(view: OperationView) -> bool:
    """Return whether an operation is a `Select` of whole rows by a vector of bools.

    The vector selects along the first axis; it does not broadcast to the last one.
    """
    ranks = [fact.rank for fact in view.facts]
    return view.type == "Select" and ranks[0] == 1 and ranks[1] != 1


def _decide_unknown_rank(view: OperationView) -> Decision | None:
    """Decide how replicas build an element-wise operation of unknown rank.

    Each replica computes its own rows if one input has rows and all others are scalars.
    Otherwise the decision is `None`.
    """
    others = [fact for fact in view.facts if not fact.is_rows]
    own = [fact for fact in view.facts if fact.is_rows]
    if len(own) != 1 or any(fact.rank != 0 for fact in others):
        return None
    needs = [AS_IS if fact.is_rows else WHOLE for fact in view.facts]
    return Decision(needs, [own[0]])


def _build_ensure_shape(builder: object, op: object, replica_inputs: list) -> list:
    """Build `tf.ensure_shape` without a check of this replica's number of rows.

    Returns:
        List of one tensor, this replica's output of `op` from `replica_inputs`.
    """
    fact: Fact = builder.facts_of(op.inputs)[0]  # type: ignore[attr-defined]
    shape = op.get_attr("shape")  # type: ignore[attr-defined]
    sizes_ = tf.TensorShape(shape).as_list()
    sizes_[fact.axis] = None
    return [tf.ensure_shape(replica_inputs[0], sizes_)]


def compares_with_itself(op: Any) -> bool:
    """Return whether an operation is `Equal` of a bool scalar and itself."""
    if op.type != "Equal" or op.inputs[0] is not op.inputs[1]:
        return False
    return op.inputs[0].dtype == tf.bool and op.inputs[0].shape.rank == 0


def decide_local(view: OperationView) -> Decision | None:
    """Decide how replicas build an operation on values of one replica alone.

    Such local values exist inside of a layer that handles the rows of each replica
    separately. Results are local as well, unless other inputs are rows or partial sums.
    The decision is `None` if no input is local, or if an operation that is not
    element-wise has rows as another input.
    """
    if Form.LOCAL not in view.forms():
        return None
    if compares_with_itself(view.op):
        return Decision([AS_IS] * len(view), [whole(())])
    if Form.ROWS in view.forms():
        if view.type not in ELEMENTWISE:
            return None
        of_rows = [fact for fact in view.facts if fact.is_rows]
        return Decision([AS_IS] * len(view), [of_rows[0]])
    if Form.PART in view.forms():
        decision = _decide_parts_by_local(view)
        if decision is not None:
            return decision
    return Decision([AS_IS] * len(view), [Fact(Form.LOCAL)] * len(view.op.outputs))


def _decide_parts_by_local(view: OperationView) -> Decision | None:
    """Decide how replicas build a linear operation on partial sums and local values.

    An example is the gradient of a product with a value of this replica alone. Local
    values are used as they are, and the results are partial sums. The decision is
    `None` if the operation is not linear in its partial sums.
    """
    facts = [
        whole(fact.sizes) if fact.form is Form.LOCAL else fact for fact in view.facts
    ]
    decision = decide_linear(OperationView(view.op, facts, view.scope))
    if decision is None or any(fact.form is not Form.PART for fact in decision.outputs):
        return None
    needs = [
        AS_IS if fact.form is Form.LOCAL and need == WHOLE else need
        for fact, need in zip(view.facts, decision.needs, strict=True)
    ]
    return Decision(needs, decision.outputs, _build_zero_without_rows)


def _build_zero_without_rows(builder: Any, op: Any, replica_inputs: list) -> list:
    """Copy an operation that returns partial sums; zeros on a replica without rows.

    Values of such a replica alone are undefined, on any device and with XLA: means of
    no rows are NaN.

    Args:
        builder: `Builder` of the replica's program.
        op: `tf.Operation` of the program to copy.
        replica_inputs: List of the replica's tensors, one for each input of `op`.

    Returns:
        List of the replica's partial sums, one for each output of `op`.
    """
    outputs = builder.copy(op, replica_inputs)
    if not builder.replica.rows.may_be_empty:
        return outputs
    has_rows = builder.own_rows > 0
    return [tf.where(has_rows, own, tf.zeros_like(own)) for own in outputs]
