"""Tensors that a step gathers or sums over replicas, with the lines that need them.

plan -> conversions, in the order of the program -> `Gather`s, and their fingerprint
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdp.ground import user_code
from tfdp.ground._compat import programs
from tfdp.ground.base.program_trace import ProgramTrace, tracing
from tfdp.ground.plans.gathers import Gather, StepGathers
from tfdp.training.program.facts import Fact, Form, own_rows, static_sizes, with_rows
from tfdp.training.program.plan import (
    Plan,
    ProgramProperties,
    in_order,
    is_conversion,
    make_plan,
)
from tfdp.training.program.rules.state import may_write_state, prints_or_summarizes
from tfdp.training.program.view import AS_IS, PART, WHOLE, Need
from tfdp.training.reduction.communication_plan import gradients_of_outputs
from tfdp.training.reduction.sparse import are_unique

# `tf.GradientTape` puts this prefix before the names of backward operations. Messages
# remove it, and say "the backward pass of" the layer instead.
_BACKWARD_PREFIX = "gradient_tape/"
_PACKAGE_FOLDER = str(Path(__file__).parent)


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A tensor of the program that is gathered, or summed over replicas.

    Args:
        tensor: Tensor of the program.
        fact: `Fact`, with the form in which replicas hold it: own rows are gathered,
            and other forms summed.
        op: `tf.Operation`, the first one that needs the tensor in another form; or the
            one that produces it, if an update or the result of the step needs it.
    """

    tensor: Any
    fact: Fact
    op: Any


def conversions_of(
    trace: ProgramTrace, plan: Plan, cuts: list[tuple[Any, bool]]
) -> list[Conversion]:
    """Return the tensors that a step gathers or sums over replicas, in program order.

    Args:
        trace: `ProgramTrace` of the step, with its effects (such as updates).
        plan: `Plan` of its graph: how replicas divide its operations.
        cuts: List of pairs of a tensor that the step returns, and whether it is
            returned as a partial sum.

    Returns:
        List of `Conversion`, one for each tensor.
    """
    conversions: dict[int, Conversion] = {}
    for of_graph, tensor, need, op in _needs(trace, plan, cuts):
        fact = of_graph.facts.get(id(tensor))
        if fact is not None and (need is None or is_conversion(fact, need)):
            conversions.setdefault(id(tensor), Conversion(tensor, fact, op))
    return list(conversions.values())


def conversions_before_update(
    conversions: list[Conversion],
    trace: ProgramTrace,
    plan: Plan,
    ids_in_update: set[int],
) -> list[Conversion]:
    """Return the conversions of a step, apart from those during and after its update.

    A conversion is a gather or a sum over replicas. The update itself gathers the rows
    of sparse gradients, and moving statistics are averaged after it. A sparse gradient
    whose values and indices are not sharded alike is converted before the update, so it
    is part of the result.

    Args:
        conversions: List of `Conversion` of the step.
        trace: `ProgramTrace` of the step.
        plan: `Plan` of its graph: how replicas divide its operations.
        ids_in_update: Set of ints, see `ids_gathered_by_update`.
    """
    converted = []
    for gradient in _sparse_gradients(trace, plan):
        fact = plan.facts.get(id(gradient.values))
        if id(gradient.values) in ids_in_update or fact is None:
            continue
        if not are_unique(gradient.indices):
            converted.append(Conversion(gradient.values, fact, gradient.values.op))
    return converted + [
        conversion
        for conversion in conversions
        if id(conversion.tensor) not in ids_in_update and not _is_statistic(conversion)
    ]


def ids_gathered_by_update(trace: ProgramTrace, plan: Plan) -> Iterator[int]:
    """Yield the `id`s of the values and indices of gradients that the update gathers.

    It gathers sparse gradients whose values and indices are sharded alike; the others
    are gathered or summed before it.

    Args:
        trace: `ProgramTrace` of the step.
        plan: `Plan` of its graph: how replicas divide its operations.
    """
    for gradient in _sparse_gradients(trace, plan):
        pair = gradient.values, gradient.indices
        facts = [plan.facts.get(id(tensor)) for tensor in pair]
        known = [fact for fact in facts if fact is not None and fact.is_rows]
        if len({fact.multiple for fact in known}) == 1 and len(known) == len(pair):
            yield from map(id, pair)


def _sparse_gradients(trace: ProgramTrace, plan: Plan) -> Iterator[tf.IndexedSlices]:
    """Yield the sparse gradients that the update of a step receives."""
    for effect in trace.effects.get(plan.graph, ()):
        for tensor in effect.tensors:
            if isinstance(tensor, tf.IndexedSlices):
                yield tensor


def _is_statistic(conversion: Conversion) -> bool:
    """Return whether a conversion averages a value that is assigned to a variable.

    Each replica computes the value from its own rows, as BatchNormalization computes
    its moving mean.
    """
    is_assigned = conversion.op.type == "AssignVariableOp"
    return is_assigned and conversion.fact.form is Form.LOCAL


def _needs(
    trace: ProgramTrace, plan: Plan, cuts: list[tuple[Any, bool]]
) -> Iterator[tuple[Plan, Any, Need | None, Any]]:
    """Yield each tensor that operations, effects (updates) or results of a step need.

    Each item is a tuple of the `Plan` of a graph, a tensor in it, the form in which it
    is needed, and the operation that needs it. The form is a `Need`: own rows, a
    partial sum or the whole tensor; or `None` for a result that the operation itself
    reduces over replicas.

    Args:
        trace: `ProgramTrace` of the step.
        plan: `Plan` of its graph: how replicas divide its operations.
        cuts: List of pairs of a tensor that the step returns, and whether it is
            returned as a partial sum.
    """
    for inner, op in _live_operations(plan):
        decision = inner.decisions[op]
        for tensor, need in inner.needs(op):
            yield inner, tensor, need, op
        if decision.has_collective and op.outputs:
            yield inner, op.outputs[0], None, op
    for effect in trace.effects.get(plan.graph, ()):
        wanted = {"parts": PART, "whole": WHOLE}.get(effect.kind, AS_IS)
        for tensor in effect.symbolic_tensors():
            yield plan, tensor, wanted, tensor.op
    for tensor, is_part in cuts:
        yield plan, tensor, AS_IS if is_part else WHOLE, tensor.op


def _live_operations(plan: Plan) -> Iterator[tuple[Plan, Any]]:
    """Yield the operations that results or effects need, with the plan of their graph.

    A branch, a loop or a call is followed by the operations of its inner graphs, each
    with the `Plan` of its inner graph.
    """
    for op in in_order(plan.graph):
        if op in plan.live and op in plan.decisions:
            yield plan, op
            for inner in plan.decisions[op].plans:
                yield from _live_operations(inner)


def fingerprint_of(conversions: list[Conversion]) -> list[list[str]]:
    """Return the tensors that a step gathers or sums as strings, which workers compare.

    Args:
        conversions: List of `Conversion`, one for each of these tensors.

    Returns:
        List of pairs of strings, one for each `Conversion`: the form, dtype and shape
        of its tensor, with the type of its operation; and the operation with its line.
    """
    return [
        [
            f"{c.fact.form.value} {c.fact.axis} {c.tensor.dtype.name} "
            f"{_describe_shape(c)} for {c.op.type}",
            describe_operation(c.op),
        ]
        for c in conversions
    ]


def operations_of(
    trace: ProgramTrace, plan: Plan, results: Sequence[Any]
) -> list[tuple[str, Any]]:
    """Return the operations that a step's results, updates and writes depend on.

    Workers compare their signatures to find out whether all run the same step.
    Operations whose results are only printed may differ, so they are left out.

    Args:
        trace: `ProgramTrace` of the step.
        plan: `Plan` of its graph: how replicas divide its operations.
        results: Sequence of tensors that the step returns.

    Returns:
        List of pairs of a signature (a string with the operation's type and dtypes) and
        the operation, in order.
    """
    computing = {tensor.op for tensor in results}
    for effect in trace.effects.get(plan.graph, ()):
        computing |= {tensor.op for tensor in effect.symbolic_tensors()}
    computing |= {
        op for op in plan.live if may_write_state(op) and not prints_or_summarizes(op)
    }
    for op in reversed(in_order(plan.graph)):
        if op in computing:
            computing.update(tensor.op for tensor in op.inputs)
    return [
        (programs.signature_of(op), op)
        for inner, op in _live_operations(plan)
        if op in computing or inner is not plan
    ]


def describe_operation(op: Any) -> str:
    """Describe an operation and the user's line, or the layer, that creates it."""
    return f"`{op.type}` ({place_of(op)})"


def _describe_shape(conversion: Conversion) -> list:
    """Return the shape of a converted tensor, such as `["rows", 3, "free"]`.

    It is `[None]` for a tensor of unknown rank.
    """
    sizes = conversion.fact.sizes
    if sizes is None:
        return [None]
    return [size.number if size.kind == "number" else size.kind for size in sizes]


def gathers_of(conversions: list[Conversion]) -> tuple[Gather, ...]:
    """Return a `Gather` for each conversion of a tensor that is larger than one number.

    A conversion is a tensor that a step gathers or sums over replicas.
    """
    gathers = [gather_of(conversion) for conversion in conversions]
    return tuple(g for g in gathers if g.power or g.bytes_each > 8)


def gather_of(conversion: Conversion) -> Gather:
    """Return the `Gather` of a conversion: operation, line in the script, and bytes.

    It describes to the user a tensor that a step gathers or sums over replicas.
    """
    fact, tensor = conversion.fact, conversion.tensor
    bytes_each, power, is_exact = max(tensor.dtype.size, 1), 0, fact.sizes is not None
    is_exact &= tensor.dtype != tf.string
    for size in fact.sizes or ():
        power += size.kind == "rows"
        if size.kind in ("number", "rows") and size.number is not None:
            bytes_each *= size.number
        else:
            is_exact = False
    if fact.is_rows and fact.sizes is None:
        power = 1
    is_sum = fact.form is not Form.ROWS
    place = place_of(conversion.op)
    return Gather(conversion.op.type, place, is_sum, bytes_each, power, is_exact)


def user_line_of(op: Any) -> tuple[str, int] | None:
    """Return file and number of the user's line that creates an operation.

    The result is `None` if only code of Keras and other packages creates it.
    """
    frames = programs.stack_of(op)
    starts = [i for i, f in enumerate(frames) if f.filename.startswith(_PACKAGE_FOLDER)]
    inside = frames[starts[-1] :] if starts else frames
    for frame in reversed(inside):
        if user_code.is_user_file(frame.filename):
            return frame.filename, frame.lineno
    return None


def place_of(op: Any) -> str:
    """Describe the user's line that creates an operation of a step, or its layer.

    Returns:
        String, such as "train.py:12: `y = f(x)`", or the layer's name scope.
    """
    line = user_line_of(op)
    if line is not None:
        return user_code.describe_line(*line)
    name, back = op.name, ""
    if name.startswith(_BACKWARD_PREFIX):
        name, back = name.removeprefix(_BACKWARD_PREFIX), "the backward pass of "
    scope = name.rpartition("/")[0]
    return f"{back}{scope}" if scope else f"{back}operation {name!r}"


def gathers_of_model(model: Any) -> StepGathers:
    """Return what the forward and backward pass of a model would gather.

    Both passes are planned, but not run.

    Args:
        model: Keras model with symbolic inputs.

    Returns:
        `StepGathers` for any number of rows, without the gathers of a loss.
    """
    graph = programs.ProgramGraph()
    trace = ProgramTrace(graph)
    facts: dict[int, Fact] = {}
    with graph.as_default(), tracing(trace):
        inputs = []
        for spec in tf.nest.flatten(model.inputs):
            shape = tf.TensorShape([None, *spec.shape[1:]])
            tensor = tf.compat.v1.placeholder(spec.dtype, shape)
            sizes = static_sizes(tensor, is_free=True)
            assert sizes is not None
            facts[id(tensor)] = own_rows(with_rows(sizes, 0, 1))
            inputs.append(tensor)
        gradients = gradients_of_outputs(model, inputs)
    needed = tf.nest.flatten(gradients, expand_composites=True)
    needed = [tensor for tensor in needed if tensor is not None]
    plan = make_plan(graph, facts, needed, ProgramProperties(lambda _: False, {}))
    return StepGathers(None, gathers_of(conversions_of(trace, plan, [])))
