"""Table of rules: operation type to the function that computes its outputs' form."""

from __future__ import annotations

from tfdp.losses.row_forms import arithmetic, axes, contractions, fallback, shapes
from tfdp.losses.row_forms.form import Rule

_LINEAR = (
    "Cast",
    "CheckNumerics",
    "DeepCopy",
    "EnsureShape",
    "Identity",
    "IdentityN",
    "Neg",
    "PreventGradient",
    "Snapshot",
    "StopGradient",
)
_REDUCTIONS = ("All", "Any", "ArgMax", "ArgMin", "Max", "Mean", "Min", "Prod", "Sum")
# Functions and conditionals, which `Forms` interprets, and loops, which it does not.
CALLS = ("If", "PartitionedCall", "StatefulPartitionedCall", "StatelessIf")
LOOPS = ("Case", "StatelessCase", "StatelessWhile", "While")
_ELEMENTWISE = (
    "Equal",
    "FloorDiv",
    "FloorMod",
    "Greater",
    "GreaterEqual",
    "Less",
    "LessEqual",
    "LogicalAnd",
    "LogicalOr",
    "Maximum",
    "Minimum",
    "MulNoNan",
    "NotEqual",
    "Pow",
    "Select",
    "SelectV2",
    "SquaredDifference",
    "Xdivy",
    "Xlogy",
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(_LINEAR, arithmetic.linear),
    **dict.fromkeys(arithmetic.SUMS, arithmetic.sum_of_inputs),
    "Mul": arithmetic.product,
    **dict.fromkeys(arithmetic.QUOTIENTS, arithmetic.quotient),
    **dict.fromkeys(_ELEMENTWISE, arithmetic.elementwise),
    **dict.fromkeys(_REDUCTIONS, axes.reduction),
    "L2Loss": axes.half_of_squares,
    "Pack": axes.pack,
    "ConcatV2": axes.concatenation,
    "Reshape": axes.reshape,
    "Transpose": axes.transpose,
    "ExpandDims": axes.expand,
    "Squeeze": axes.squeeze,
    "Shape": shapes.shape,
    "ShapeN": shapes.shape,
    "Size": shapes.size,
    "StridedSlice": shapes.part,
    "GatherV2": shapes.entry,
    "Range": shapes.positions,
    "MatMul": contractions.matmul,
    "BatchMatMulV2": contractions.matmul,
    "BatchMatMulV3": contractions.matmul,
    "Einsum": contractions.einsum,
    **dict.fromkeys((*CALLS, *LOOPS), fallback.opaque),
}
