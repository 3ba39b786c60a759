"""How a traced number depends on the rows of a batch: a mean, a sum, or neither.

On N replicas a mean over a replica's rows counts by its part of all rows, and a sum
over its rows counts in full. Which of the two a loss is, a user's code does not say,
but its graph does. This is an abstract interpretation of it: each tensor has a form,
and each operation a rule for the form of what it makes.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdp import _compat


class Kind(enum.Enum):
    """What a tensor has to do with the rows of a batch."""

    COUNT = "a constant, or a power of the number of rows"
    SHAPE = "a shape that contains the number of rows"
    ROWS = "one entry for each row, along an axis"
    TOTAL = "linear in sums over rows"
    STATISTIC = "another function of sums over rows"
    PAIRS = "entries that compare rows with each other"
    TERMS = "a sum of totals of different degree"
    UNKNOWN = "depends on the rows in a way that no rule covers"


@dataclasses.dataclass(frozen=True)
class Form:
    """How a tensor depends on the rows of a batch.

    Args:
        kind: `Kind`.
        degree: Int, the power of the number of rows by which it grows when every row
            is repeated: 0 for a mean, 1 for a sum.
        axis: Int, where the rows lie, or `None` where that is unknown.
        by_hand: Int, how often it was multiplied by the number of replicas.
        counts: Frozenset of ints: numbers that mean the number of rows here, where
            the shape of a batch is static.
    """

    kind: Kind
    degree: int = 0
    axis: int | None = None
    by_hand: int = 0
    counts: frozenset[int] = frozenset()

    @property
    def is_constant(self) -> bool:
        """Whether it does not depend on the batch."""
        return self.kind is Kind.COUNT and self.degree == 0


CONSTANT = Form(Kind.COUNT)
NUM_ROWS = Form(Kind.COUNT, 1)
MEAN = Form(Kind.TOTAL)
SUM = Form(Kind.TOTAL, 1)
STATISTIC = Form(Kind.STATISTIC)
PAIRS = Form(Kind.PAIRS)
TERMS = Form(Kind.TERMS)
UNKNOWN = Form(Kind.UNKNOWN)
ROWS = Form(Kind.ROWS, 0, 0)
ROWS_SOMEWHERE = Form(Kind.ROWS)

_LINEAR = {
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
}
_SUMS = {"Add", "AddV2", "AddN", "Sub"}
_QUOTIENTS = {"DivNoNan", "RealDiv"}
_REDUCTIONS = {"All", "Any", "ArgMax", "ArgMin", "Max", "Mean", "Min", "Prod", "Sum"}
_CALLS = {
    "Case",
    "If",
    "PartitionedCall",
    "StatefulPartitionedCall",
    "StatelessCase",
    "StatelessIf",
    "StatelessWhile",
    "While",
}
_ELEMENTWISE = {
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
}


class Forms:
    """The forms of the tensors of a replica's step while it is traced.

    Args:
        batch: Iterable of tensors with rows along their first axis.
        num_replicas: Int; a product with it, or a quotient by it, is noted as made by
            hand once `counts_replicas` is set.
        told: Set of strings, what a user has been told of, or `None`.
    """

    def __init__(
        self, batch: Iterable[Any], num_replicas: int, told: set[str] | None = None
    ) -> None:
        self.num_replicas = num_replicas
        self.told = set() if told is None else told
        self.counts_replicas = False
        self.may_divide = False
        self._found: dict[tuple[int, str], Form] = {}
        self._captured: dict[int, dict[str, Any]] = {}
        # The rows of a batch of static shape.
        self._num_rows: frozenset[int] = frozenset()
        for tensor in batch:
            rows = tensor.shape[0] if tensor.shape.rank else None
            counts = frozenset() if rows is None else frozenset([rows])
            self._num_rows |= counts
            self.set(tensor, dataclasses.replace(ROWS, counts=counts))

    def set(self, tensor: Any, form: Form) -> None:
        """States the form of a tensor, whatever its operation is."""
        self._found[_key(tensor)] = form

    def first_time(self, subject: str) -> bool:
        """Whether a user has not been told of a subject yet; it is noted."""
        is_new = subject not in self.told
        self.told.add(subject)
        return is_new

    def of(self, tensor: Any) -> Form:
        """The form of a symbolic tensor; of anything else a constant's.

        Args:
            tensor: Tensor of the graph that is traced.
        """
        if not tf.is_symbolic_tensor(tensor):
            return CONSTANT
        if _key(tensor) not in self._found:
            for op in self._ancestors(tensor):
                self._apply_rule(op)
        return self._found[_key(tensor)]

    def _ancestors(self, tensor: Any) -> list:
        """The operations that a tensor is made of and that have no form, in order."""
        seen: dict[int, Any] = {}
        queue = [tensor.op]
        while queue:
            op = queue.pop()
            if id(op) in seen:
                continue
            seen[id(op)] = op
            queue += [x.op for x in op.inputs if _key(x) not in self._found]
        return sorted(seen.values(), key=_compat.op_age)

    def _apply_rule(self, op: Any) -> None:
        inputs = [self._found[_key(tensor)] for tensor in op.inputs]
        rule = _RULES.get(op.type, _other)
        if op.type == "Placeholder":
            forms: Any = self._of_captured(op)
        elif "Random" in op.type and self._num_rows and _are_constant(inputs):
            forms = [self._of_noise(output) for output in op.outputs]
        elif all(form.is_constant for form in inputs):
            forms = CONSTANT
        else:
            forms = rule(self, op, inputs)
        if isinstance(forms, Form):
            forms = [forms] * len(op.outputs)
        for output, form in zip(op.outputs, forms, strict=True):
            if _key(output) not in self._found:
                self.set(output, form)

    def _of_noise(self, output: Any) -> Form:
        """The form of random numbers: one for each row where there are as many."""
        is_batch = bool(output.shape.rank) and output.shape[0] in self._num_rows
        return (
            dataclasses.replace(ROWS, counts=self._num_rows) if is_batch else CONSTANT
        )

    def _of_captured(self, op: Any) -> Form:
        """The form of what a branch or an inner function takes from outside."""
        graph = op.graph
        if id(graph) not in self._captured:
            pairs = getattr(graph, "captures", ())
            self._captured[id(graph)] = {own.name: outer for outer, own in pairs}
        outer = self._captured[id(graph)].get(op.outputs[0].name)
        return CONSTANT if outer is None else self.of(outer)

    def power_by_hand(self, tensor: Any) -> int:
        """What power of the number of replicas a constant factor is, if any.

        Args:
            tensor: Scalar tensor.

        Returns:
            1, -1 or 0.
        """
        return self.power_of_count(tensor) if self.counts_replicas else 0

    def power_of_count(self, tensor: Any) -> int:
        """What power of the number of replicas a constant happens to be: 1, -1, 0."""
        value = _static(tensor)
        if value is None or value.shape != ():
            return 0
        if abs(float(value) - self.num_replicas) < 1e-6:
            return 1
        return -1 if abs(float(value) * self.num_replicas - 1.0) < 1e-6 else 0


# The rules: each takes `Forms`, an operation and the forms of its inputs, of which at
# least one is no constant, and returns the form of all outputs or of each.


def _linear(forms: Forms, op: Any, inputs: list[Form]) -> Any:
    return inputs if op.type == "IdentityN" else inputs[0]


def _sum_of_terms(forms: Forms, op: Any, inputs: list[Form]) -> Form:
    if any(form.kind in (Kind.ROWS, Kind.SHAPE) for form in inputs):
        return _elementwise(forms, op, inputs)
    return _added(inputs)


def _added(inputs: Sequence[Form]) -> Form:
    """The form of a sum of numbers without rows."""
    kinds = {form.kind for form in inputs}
    if kinds == {Kind.COUNT}:
        return max(inputs, key=lambda form: form.degree)  # rows - 1 are as rows
    if Kind.TERMS in kinds:
        return TERMS
    # A constant is a mean: the replicas' weights add up to one.
    means = [form for form in inputs if form.degree == 0 and not form.by_hand]
    if len(means) < len(inputs):
        first = inputs[0]
        is_alike = all(
            (form.kind, form.degree, form.by_hand)
            == (first.kind, first.degree, first.by_hand)
            for form in inputs
        )
        return first if is_alike else TERMS
    for kind in (Kind.PAIRS, Kind.STATISTIC, Kind.UNKNOWN):
        if kind in kinds:
            return Form(kind)
    return MEAN


def _product(forms: Forms, op: Any, inputs: list[Form]) -> Form:
    return _scaled(forms, op, inputs, sign=1)


def _quotient(forms: Forms, op: Any, inputs: list[Form]) -> Form:
    return _scaled(forms, op, inputs, sign=-1)


def _scaled(forms: Forms, op: Any, inputs: list[Form], sign: int) -> Form:
    """The form of a product (sign 1) or quotient (sign -1)."""
    first, second = inputs
    factor = op.inputs[1]
    if sign > 0 and second.kind is not Kind.COUNT:
        first, second, factor = second, first, op.inputs[0]
    if second.kind is not Kind.COUNT:
        return _elementwise(forms, op, inputs)
    if first.kind is not Kind.SHAPE:
        rank = op.outputs[0].shape.rank
        second = _as_count(second, first, factor, sign, forms, rank)
        if first.kind is Kind.TERMS and second.degree:
            return UNKNOWN
        degree = first.degree + sign * second.degree
        by_hand = first.by_hand + sign * second.by_hand
        scaled = dataclasses.replace(first, degree=degree, by_hand=by_hand)
        return _aligned(scaled, op, 0) if first.kind is Kind.ROWS else scaled
    return first


def _as_count(
    second: Form, first: Form, factor: Any, sign: int, forms: Forms, rank: int | None
) -> Form:
    """What a constant factor means: rows of a static batch, or replicas."""
    if not second.is_constant:
        return second
    value = _static(factor)
    # One number for each row, as losses are before they are added up.
    is_column = first.kind is Kind.ROWS and len(first.counts) > 0 and rank == 1
    if value is not None and value.shape == () and (first.degree > 0 or is_column):
        number = float(value) if sign < 0 else 1.0 / (float(value) or float("inf"))
        if any(abs(number - count) < 1e-6 * count for count in first.counts):
            return Form(Kind.COUNT, sign * -1 if sign > 0 else 1)
    power = forms.power_by_hand(factor)
    return dataclasses.replace(second, by_hand=power)


def _elementwise(forms: Forms, op: Any, inputs: list[Form]) -> Form:
    """Any function of entries in the same place."""
    kinds = {form.kind for form in inputs}
    if Kind.PAIRS in kinds:
        return PAIRS
    if Kind.ROWS in kinds:
        found = [
            _aligned(form, op, index)
            for index, form in enumerate(inputs)
            if form.kind is Kind.ROWS
        ]
        if len({form.axis for form in found} - {None}) > 1:
            return PAIRS
        degrees = {form.degree for form in found}
        is_sum = op.type in _SUMS or op.type in ("Mul", *_QUOTIENTS)
        if degrees != {0} and not (is_sum and len(found) == 1):
            return UNKNOWN
        return found[0]
    if kinds & {Kind.TOTAL, Kind.STATISTIC, Kind.TERMS}:
        return STATISTIC
    if Kind.SHAPE in kinds:
        return next(form for form in inputs if form.kind is Kind.SHAPE)
    if kinds == {Kind.COUNT}:
        return max(inputs, key=lambda form: form.degree)
    return UNKNOWN


def _aligned(form: Form, op: Any, index: int) -> Form:
    """The form of rows in the result of a broadcast, counted from the last axis."""
    before, after = op.inputs[index].shape.rank, op.outputs[0].shape.rank
    if form.axis is None or before is None or after is None:
        return dataclasses.replace(form, axis=None)
    return dataclasses.replace(form, axis=form.axis + after - before)


def _reduction(forms: Forms, op: Any, inputs: list[Form]) -> Form:
    form, source = inputs[0], op.inputs[0]
    if form.kind is Kind.SHAPE:
        return NUM_ROWS if op.type == "Prod" else UNKNOWN
    is_linear = op.type in ("Sum", "Mean")
    if form.kind is not Kind.ROWS:
        keeps = is_linear or form.kind in (Kind.PAIRS, Kind.UNKNOWN, Kind.COUNT)
        return form if keeps else STATISTIC
    rank, axes = source.shape.rank, _static(op.inputs[1])
    if op.outputs[0].shape.rank == 0:
        is_over_rows = True
    elif form.axis is None or rank is None or axes is None:
        return ROWS_SOMEWHERE if op.outputs[0].shape.rank != 0 else UNKNOWN
    else:
        reduced = {int(axis) % rank for axis in axes.reshape(-1)}
        is_over_rows = form.axis in reduced
        if not is_over_rows:
            left = sum(axis < form.axis for axis in reduced)
            keeps = op.node_def.attr["keep_dims"].b
            return dataclasses.replace(form, axis=form.axis - (0 if keeps else left))
    if not is_linear:
        return STATISTIC
    sizes = source.shape.num_elements()
    counts = form.counts | (frozenset() if sizes is None else frozenset([sizes]))
    degree = form.degree + (op.type == "Sum")
    return Form(Kind.TOTAL, degree, None, form.by_hand, counts)


def _half_of_squares(forms: Forms, op: Any, inputs: list[Form]) -> Form:
    return SUM if inputs[0].kind is Kind.ROWS else STATISTIC


def _shape(forms: Forms, op: Any, inputs: list[Form]) -> list[Form]:
    return [_shape_of(form) for form in inputs]


def _shape_of(form: Form) -> Form:
    if form.kind is Kind.ROWS:
        return Form(Kind.SHAPE, 1, form.axis)
    return Form(Kind.SHAPE, 1) if form.kind is Kind.UNKNOWN else CONSTANT


def _size(forms: Forms, op: Any, inputs: list[Form]) -> Form:
    return NUM_ROWS if inputs[0].kind in (Kind.ROWS, Kind.UNKNOWN) else CONSTANT


def _slice(forms: Forms, op: Any, inputs: list[Form]) -> Form:
    form = inputs[0]
    if form.kind is not Kind.SHAPE:
        return _other(forms, op, inputs)
    begin, end = _static(op.inputs[1]), _static(op.inputs[2])
    if form.axis is None or begin is None or end is None or begin.size != 1:
        return UNKNOWN
    first = int(begin[0])
    if op.node_def.attr["shrink_axis_mask"].i:
        return NUM_ROWS if first == form.axis else CONSTANT
    has_begin = not op.node_def.attr["begin_mask"].i
    has_end = not op.node_def.attr["end_mask"].i
    first = first if has_begin else 0
    is_within = first <= form.axis and (not has_end or form.axis < int(end[0]))
    if first < 0 or (has_end and int(end[0]) < 0):
        is_within = form.axis == 0 and not has_begin
    return Form(Kind.SHAPE, 1, form.axis - first) if is_within else CONSTANT


def _gather(forms: Forms, op: Any, inputs: list[Form]) -> Form:
    form, index = inputs[0], _static(op.inputs[1])
    if form.kind is not Kind.SHAPE or index is None or index.shape != ():
        return _other(forms, op, inputs)
    return NUM_ROWS if form.axis == int(index) else CONSTANT


def _pack(forms: Forms, op: Any, inputs: list[Form]) -> Form:
    if all(form.kind is Kind.COUNT for form in inputs):
        axes = [index for index, form in enumerate(inputs) if form.degree]
        is_shape = op.outputs[0].dtype.is_integer
        return Form(Kind.SHAPE, 1, axes[0]) if is_shape else UNKNOWN
    rank = op.inputs[0].shape.rank
    if rank == 0 and not any(form.kind is Kind.ROWS for form in inputs):
        return _added(inputs)
    found = next((form for form in inputs if form.kind is Kind.ROWS), None)
    if found is None or found.axis is None:
        return _other(forms, op, inputs)
    at = op.node_def.attr["axis"].i
    axis = found.axis + (0 <= at <= found.axis)
    return dataclasses.replace(found, axis=axis if at >= 0 else None)


def _concat(forms: Forms, op: Any, inputs: list[Form]) -> Form:
    kinds = {form.kind for form in inputs}
    if Kind.ROWS in kinds:
        # Batches one after the other are a batch of more rows.
        rows = next(form for form in inputs if form.kind is Kind.ROWS)
        length = op.outputs[0].shape[0] if rows.axis == 0 else None
        counts = rows.counts | (frozenset() if length is None else {length})
        return dataclasses.replace(rows, counts=counts)
    if Kind.SHAPE not in kinds or op.outputs[0].shape.rank != 1:
        return _other(forms, op, inputs)
    before = 0
    for tensor, form in zip(op.inputs, inputs, strict=True):
        if form.kind is Kind.SHAPE and form.axis is not None:
            return Form(Kind.SHAPE, 1, before + form.axis)
        if tensor.shape.rank != 1 or tensor.shape[0] is None:
            break
        before += tensor.shape[0]
    return Form(Kind.SHAPE, 1)


def _reshape(forms: Forms, op: Any, inputs: list[Form]) -> Form:
    form, shape = inputs
    if form.kind is not Kind.ROWS:
        return form if form.kind is not Kind.COUNT else _other(forms, op, inputs)
    axis = 0 if form.axis == 0 else None
    if shape.kind is Kind.SHAPE and shape.axis is not None:
        axis = shape.axis
    return dataclasses.replace(form, axis=axis)


def _transpose(forms: Forms, op: Any, inputs: list[Form]) -> Form:
    form, order = inputs[0], _static(op.inputs[1])
    if form.kind is not Kind.ROWS:
        return form
    is_known = form.axis is not None and order is not None
    axis = order.tolist().index(form.axis) if is_known else None
    return dataclasses.replace(form, axis=axis)


def _expand(forms: Forms, op: Any, inputs: list[Form]) -> Form:
    form, at = inputs[0], _static(op.inputs[1])
    rank = op.outputs[0].shape.rank
    if form.kind is not Kind.ROWS or form.axis is None:
        return form
    if at is None or rank is None:
        return dataclasses.replace(form, axis=None)
    place = int(at.reshape(-1)[0]) % rank
    return dataclasses.replace(form, axis=form.axis + (place <= form.axis))


def _squeeze(forms: Forms, op: Any, inputs: list[Form]) -> Form:
    form, rank = inputs[0], op.inputs[0].shape.rank
    if form.kind is not Kind.ROWS or form.axis is None:
        return form
    places = list(op.node_def.attr["squeeze_dims"].list.i)
    if rank is None or not places:
        return dataclasses.replace(form, axis=0 if form.axis == 0 else None)
    removed = sum(place % rank < form.axis for place in places)
    return dataclasses.replace(form, axis=form.axis - removed)


def _matmul(forms: Forms, op: Any, inputs: list[Form]) -> Form:
    left, right = inputs
    names = {"MatMul": ("transpose_a", "transpose_b")}
    flags = names.get(op.type, ("adj_x", "adj_y"))
    adjoint = [op.node_def.attr[name].b for name in flags]
    ranks = [tensor.shape.rank for tensor in op.inputs]
    if None in ranks:
        return _other(forms, op, inputs)
    # Of each operand: "batch", "free" (an axis of the result) or "summed".
    roles = [
        _role(form, rank, is_left=index == 0, is_adjoint=adjoint[index])
        for index, (form, rank) in enumerate(zip((left, right), ranks, strict=True))
    ]
    degree = left.degree + right.degree
    return _contracted(forms, op, inputs, roles, degree)


def _role(form: Form, rank: int, *, is_left: bool, is_adjoint: bool) -> str:
    if form.kind is not Kind.ROWS:
        return "none"
    if form.axis is None:
        return "unknown"
    if form.axis < rank - 2:
        return "batch"
    is_last = form.axis == rank - 1
    return "summed" if is_last == (is_left != is_adjoint) else "free"


def _contracted(
    forms: Forms, op: Any, inputs: list[Form], roles: list[str], degree: int
) -> Form:
    """The form of a product of matrices, by what it does with the axes of rows."""
    if any(form.kind is Kind.PAIRS for form in inputs) or roles == ["free", "free"]:
        return PAIRS
    if "unknown" in roles:
        return ROWS_SOMEWHERE
    if "batch" in roles:
        return Form(Kind.ROWS, degree, 0)
    if set(roles) == {"summed"} or sorted(roles) == ["none", "summed"]:
        others = [f for f, r in zip(inputs, roles, strict=True) if r == "none"]
        return Form(Kind.TOTAL, degree + 1) if _are_constant(others) else STATISTIC
    if "free" not in roles or "summed" in roles:
        return _other(forms, op, inputs)
    rank = op.outputs[0].shape.rank
    return Form(Kind.ROWS, degree, rank - 2 + roles.index("free"))


def _are_constant(inputs: Iterable[Form]) -> bool:
    return all(form.is_constant for form in inputs)


def _einsum(forms: Forms, op: Any, inputs: list[Form]) -> Form:
    equation = op.node_def.attr["equation"].s.decode()
    sources, result = equation.split("->")
    if "." in equation:
        return _other(forms, op, inputs)
    letters = set()
    for form, labels in zip(inputs, sources.split(","), strict=True):
        if form.kind is Kind.PAIRS:
            return PAIRS
        if form.kind is Kind.ROWS:
            if form.axis is None:
                return ROWS_SOMEWHERE
            letters.add(labels[form.axis])
    if not letters:
        return _other(forms, op, inputs)
    kept = [letter for letter in letters if letter in result]
    if len(kept) > 1:
        return PAIRS
    degree = sum(form.degree for form in inputs if form.kind is Kind.ROWS)
    if kept:
        return Form(Kind.ROWS, degree, result.index(kept[0]))
    return Form(Kind.TOTAL, degree + 1) if len(letters) == 1 else STATISTIC


def _range(forms: Forms, op: Any, inputs: list[Form]) -> Form:
    return ROWS


def _call(forms: Forms, op: Any, inputs: list[Form]) -> list[Form]:
    """A function or a loop, which is not looked into."""
    return [
        UNKNOWN if output.shape.rank == 0 else ROWS_SOMEWHERE for output in op.outputs
    ]


def _collective(forms: Forms, op: Any, inputs: list[Form]) -> Form:
    """What all replicas have together is the same on each."""
    return CONSTANT


def _other(forms: Forms, op: Any, inputs: list[Form]) -> Any:
    """Any other operation: rows stay rows where the first axis is as long."""
    if op.type.startswith("Collective"):
        return CONSTANT
    kinds = {form.kind for form in inputs}
    if Kind.PAIRS in kinds:
        return PAIRS
    shapes = [form for form in inputs if form.kind is Kind.SHAPE]
    if shapes and Kind.ROWS not in kinds:
        axis = shapes[0].axis
        return [
            Form(Kind.ROWS, 0, axis) if output.shape.rank != 0 else UNKNOWN
            for output in op.outputs
        ]
    if Kind.ROWS in kinds:
        return [_of_rows(op, inputs, output) for output in op.outputs]
    if kinds & {Kind.TOTAL, Kind.STATISTIC, Kind.TERMS}:
        return STATISTIC
    return UNKNOWN


def _of_rows(op: Any, inputs: list[Form], output: Any) -> Form:
    if output.shape.rank == 0:
        return UNKNOWN
    for tensor, form in zip(op.inputs, inputs, strict=True):
        if form.kind is not Kind.ROWS:
            continue
        if form.axis != 0 or not tensor.shape.rank or output.shape.rank is None:
            return ROWS_SOMEWHERE
        has_rows = output.shape[0] == tensor.shape[0] or output.shape[0] is None
        return dataclasses.replace(form, degree=0) if has_rows else STATISTIC
    return UNKNOWN


_RULES: dict[str, Callable[[Forms, Any, list[Form]], Any]] = {
    **dict.fromkeys(_LINEAR, _linear),
    **dict.fromkeys(_SUMS, _sum_of_terms),
    **dict.fromkeys(_QUOTIENTS, _quotient),
    **dict.fromkeys(_REDUCTIONS, _reduction),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_CALLS, _call),
    "Mul": _product,
    "L2Loss": _half_of_squares,
    "Shape": _shape,
    "ShapeN": _shape,
    "Size": _size,
    "StridedSlice": _slice,
    "GatherV2": _gather,
    "Pack": _pack,
    "ConcatV2": _concat,
    "Reshape": _reshape,
    "Transpose": _transpose,
    "ExpandDims": _expand,
    "Squeeze": _squeeze,
    "MatMul": _matmul,
    "BatchMatMulV2": _matmul,
    "BatchMatMulV3": _matmul,
    "Einsum": _einsum,
    "Range": _range,
}


def _key(tensor: Any) -> tuple[int, str]:
    return id(tensor.graph), tensor.name


def _static(tensor: Any) -> Any:
    """The value of a tensor that is known while tracing, or `None`."""
    return _compat.constant_value(tensor)
