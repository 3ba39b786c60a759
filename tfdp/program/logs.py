"""Logs of a step: parts are summed after it, by one message, and computed with there.

step on each replica -> parts of metrics' states -> summed -> results of metrics
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp import _compat
from tfdp.program.facts import Form
from tfdp.program.plan import Plan, Scope, in_order


@dataclasses.dataclass
class LogTail:
    """The operations of a program that only its logs need.

    Args:
        results: Nest of tensors of the program and other values, the logs.
        cuts: List of pairs of a tensor that each replica returns, and whether it is a
            part of a sum.
        operations: List of operations between these and the logs, in order.
    """

    results: Any
    cuts: list[tuple[Any, bool]]
    operations: list[Any]

    def compute(self, values: Sequence[Any]) -> Any:
        """Compute the logs.

        Args:
            values: Sequence of tensors, the values of `cuts`.

        Returns:
            Nest like `results`.
        """
        known = {
            id(tensor): value
            for (tensor, _), value in zip(self.cuts, values, strict=True)
        }
        for op in self.operations:
            inputs = [known[id(tensor)] for tensor in op.inputs]
            outputs = _compat.OperationTemplate(op).build(inputs)
            known.update(zip(map(id, op.outputs), outputs, strict=True))
        return tf.nest.map_structure(
            lambda result: (
                known.get(id(result), result)
                if tf.is_symbolic_tensor(result)
                else result
            ),
            self.results,
        )


def tail_of(plan: Plan, results: Any, scope: Scope) -> LogTail:
    """Find the part of a program that only its logs need."""
    in_step = _needed_by_effects(plan, scope)
    outputs = [t for t in tf.nest.flatten(results) if tf.is_symbolic_tensor(t)]
    order = [op for op in in_order(plan.graph) if op in plan.live and op not in in_step]
    after = set(order)
    needed = [t for t in outputs if t.op not in after]
    needed += [t for op in order for t in op.inputs if t.op not in after]
    cuts, seen = [], set()
    for tensor in needed:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            is_part = plan.fact(tensor).form is Form.PART and (
                tensor.dtype.is_floating or tensor.dtype.is_integer
            )
            cuts.append((tensor, is_part))
    plan.live = in_step
    return LogTail(results, cuts, order)


def _needed_by_effects(plan: Plan, scope: Scope) -> set:
    """Return the operations that a step cannot leave until after it."""
    pending = []
    for effect in scope.effects.get(plan.graph, ()):
        pending += [t.op for t in effect.tensors if t.graph is plan.graph]
    for op in plan.live:
        is_tied = (
            _compat.has_effect(op)
            or _compat.has_function(op)
            or (not op.inputs and op.type != "Const")
            or any(t.dtype in (tf.variant, tf.resource, tf.string) for t in op.outputs)
        )
        if is_tied or any(
            plan.facts[id(t)].form in (Form.ROWS, Form.LOCAL)
            for t in op.inputs
            if id(t) in plan.facts
        ):
            pending.append(op)
    found: set = set()
    while pending:
        op = pending.pop()
        if op not in found:
            found.add(op)
            pending += [t.op for t in op.inputs] + list(op.control_inputs)
    return found
