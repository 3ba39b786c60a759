"""What of a program is needed at all: by its results, and by what it changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tfdp.ground import _compat
from tfdp.training.program.facts import Fact, Form, is_known
from tfdp.training.program.view import Decision, operations

LOOPS = frozenset(("While", "StatelessWhile"))

_PRUNED = operations(
    """
    ReadVariableOp ResourceGather VariableShape Placeholder RandomUniform
    RandomStandardNormal TruncatedNormal RandomUniformInt EmptyTensorList
    TensorListReserve VarIsInitializedOp LookupTableFindV2 LookupTableSizeV2
    """
)


def find_live(plan: Any, outputs: Sequence[Any], scope: Any) -> None:
    """Find the operations and tensors of a graph that something needs."""
    graph = plan.graph
    plan.live, plan.needed = set(), set()
    tensors = [*outputs]
    for effect in scope.effects.get(graph, ()):
        tensors += effect.symbolic_tensors()
    pending = [op for op in graph.get_operations() if _must_run(op)]
    for op, decision in plan.decisions.items():
        for effect in _effects_inside(decision, scope):
            # A branch that updates variables, whatever it returns.
            pending.append(op)
            tensors += effect.symbolic_tensors()
    while tensors or pending:
        for tensor in tensors:
            is_new = tensor.graph is graph and id(tensor) not in plan.needed
            if is_new and not _follows_from_rows(plan.facts.get(id(tensor))):
                plan.needed.add(id(tensor))
                # Loops come last, once it is known which variables are needed.
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
                _find_live_variables(plan, op, scope)
            tensors = [t for i, t in enumerate(op.inputs) if plan.is_needed(op, i)]


def _must_run(op: Any) -> bool:
    return _compat.has_effect(op) and op.type not in _PRUNED


def _follows_from_rows(fact: Fact | None) -> bool:
    """Whether a replica makes a tensor of the number of rows, without its operation."""
    return fact is not None and fact.form is Form.SIZES and is_known(fact)


def _find_live_variables(plan: Any, op: Any, scope: Any) -> None:
    """Find the variables of a loop that something needs, in it or after it.

    A list in which it keeps shapes for its gradient is none where they follow from the
    number of rows.
    """
    cond, body = plan.decisions[op].plans
    tested, given = cond.graph.inputs, body.graph.inputs
    before = -1
    while len(plan.needed) > before:
        before = len(plan.needed)
        find_live(
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
            if id(given[index]) in body.needed or id(tested[index]) in cond.needed
        }


def _effects_inside(decision: Decision, scope: Any) -> Iterator[Any]:
    """Yield the effects in the branches of an operation, and in theirs."""
    for inner in decision.plans:
        yield from scope.effects.get(inner.graph, ())
        for own in inner.decisions.values():
            yield from _effects_inside(own, scope)
