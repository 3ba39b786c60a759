"""Search for the operations and tensors that a program's results and effects need.

An effect is an action between two operations, such as an update of variables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tfdp.ground._compat import programs
from tfdp.training.program.facts import Fact, Form, is_known
from tfdp.training.program.view import Decision, operations

LOOPS = frozenset(("While", "StatelessWhile"))

# TensorFlow marks these operations as stateful, but a step without them is the same if
# their results are not used. So they are left out then.
PRUNED = operations(
    """
    ReadVariableOp ResourceGather VariableShape Placeholder RandomUniform
    RandomStandardNormal TruncatedNormal RandomUniformInt EmptyTensorList
    TensorListReserve VarIsInitializedOp LookupTableFindV2 LookupTableSizeV2
    """
)


def mark_live(plan: Any, outputs: Sequence[Any], scope: Any) -> None:
    """Set `live` and `needed` of a plan: what outputs and effects depend on.

    `live` is set to the operations that must be built, `needed` to the `id`s of the
    tensors of the graph that they read, without those that follow from the number of
    rows.

    Args:
        plan: `Plan` that is changed.
        outputs: Sequence of tensors of its graph that are needed outside.
        scope: `ProgramProperties` of the program, with its effects, such as updates.
    """
    graph = plan.graph
    plan.live, plan.needed = set(), set()
    tensors = [*outputs]
    for effect in scope.effects.get(graph, ()):
        tensors += effect.symbolic_tensors()
    pending = [op for op in graph.get_operations() if _must_run(op)]
    for op, decision in plan.decisions.items():
        for effect in _effects_inside(decision, scope):
            # An operation whose inner graphs, such as branches, update variables must
            # run, even if its results are not used.
            pending.append(op)
            tensors += effect.symbolic_tensors()
    while tensors or pending:
        for tensor in tensors:
            is_new = tensor.graph is graph and id(tensor) not in plan.needed
            if is_new and not _follows_from_rows(plan.facts.get(id(tensor))):
                plan.needed.add(id(tensor))
                # Which variables of a loop are needed is known only when all readers of
                # its outputs have been visited. So loops are inserted at the front, to
                # be popped last.
                pending.insert(
                    0 if tensor.op.type in LOOPS else len(pending), tensor.op
                )
        tensors = []
        if pending:
            op = pending.pop()
            if op.type in LOOPS and op in pending:
                continue
            pending += [other for other in op.control_inputs if other not in plan.live]
            plan.live.add(op)
            if op in plan.decisions and plan.is_loop(op):
                _mark_live_variables(plan, op, scope)
            tensors = [t for i, t in enumerate(op.inputs) if plan.is_needed(op, i)]


def _must_run(op: Any) -> bool:
    """Return whether an operation must run even if its results are not used."""
    return programs.has_effect(op) and op.type not in PRUNED


def _follows_from_rows(fact: Fact | None) -> bool:
    """Return whether all elements of a tensor are sizes that follow from the rows.

    `fact` is the `Fact` of the tensor, or `None` if nothing is known about it: the
    result is then `False`.
    """
    return fact is not None and fact.form is Form.SIZES and is_known(fact)


def _mark_live_variables(plan: Any, op: Any, scope: Any) -> None:
    """Add to `plan.needed` the loop variables that the loop or its readers need.

    A list that keeps shapes for the gradient is not needed where these shapes follow
    from the number of rows.

    Args:
        plan: `Plan` of the graph that has the loop; its `needed` is changed.
        op: `tf.Operation`, the loop.
        scope: `ProgramProperties` of the program.
    """
    cond, body = plan.decisions[op].plans
    cond_inputs, body_inputs = cond.graph.inputs, body.graph.inputs
    before = -1
    while len(plan.needed) > before:
        before = len(plan.needed)
        mark_live(
            body,
            [
                result
                for output, result in zip(op.outputs, body.graph.outputs, strict=True)
                if id(output) in plan.needed
            ],
            scope,
        )
        plan.needed |= {
            id(output)
            for index, output in enumerate(op.outputs)
            if id(body_inputs[index]) in body.needed
            or id(cond_inputs[index]) in cond.needed
        }


def _effects_inside(decision: Decision, scope: Any) -> Iterator[Any]:
    """Yield the effects, such as updates, in all graphs inside of an operation.

    Args:
        decision: `Decision` for the operation, with the plans of its branches, loop or
            call.
        scope: `ProgramProperties` of the program, with its effects.
    """
    for inner in decision.plans:
        yield from scope.effects.get(inner.graph, ())
        for own in inner.decisions.values():
            yield from _effects_inside(own, scope)
