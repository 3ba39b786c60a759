"""Logs of a step: parts are summed after it, by one message, and computed with there.

step on each replica -> parts of metrics' states -> summed -> results of metrics
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.ground import _compat
from tfdp.training.program.facts import Form
from tfdp.training.program.plan import Plan, Scope, in_order
from tfdp.training.program.rules.state import READS
from tfdp.training.program.view import AS_HELD, WHOLE

# How a value of each replica becomes that of all: added up; a mean, in which replicas
# count by their rows; or the same on all.
SUM, MEAN, SAME = "sum", "mean", "same"


@dataclasses.dataclass
class LogTail:
    """The operations of a program that only its logs need.

    Args:
        results: Nest of tensors of the program and other values, the logs.
        cuts: List of triples of a tensor that each replica returns, whether it is a
            part of a sum, and how it becomes that of all replicas.
        operations: List of operations between these and the logs, in order.
    """

    results: Any
    cuts: list[tuple[Any, bool, str]]
    operations: list[Any]

    def values(self, builder: Any) -> list:
        """Return what a replica returns: its rows, and what `cuts` are of them.

        Args:
            builder: `Builder` of its step.
        """
        rows = tf.cast(builder.replica.rows.own, tf.float64)
        group_rows = tf.cast(builder.replica.rows.total, tf.float64)
        found = [rows]
        for tensor, is_part, kind in self.cuts:
            value = builder.get(tensor, AS_HELD if is_part else WHOLE)
            if kind == MEAN:
                weight = group_rows if is_part else rows
                value = tf.math.multiply_no_nan(tf.cast(value, tf.float64), weight)
            found.append(value)
        return found

    def compute(self, values: Sequence[list], add_up: Callable[[list], list]) -> Any:
        """Compute the logs.

        Args:
            values: Sequence of lists, what `values` has returned on each local replica.
            add_up: Callable that sums lists of tensors over all replicas.

        Returns:
            Nest like `results`.
        """
        kinds = [SUM, *(kind for _, _, kind in self.cuts)]
        if MEAN not in kinds:
            kinds[0] = SAME
        sums = iter(
            add_up(
                [own for own, kind in zip(values, kinds, strict=True) if kind != SAME]
            )
        )
        rows, *merged = [
            own[0] if kind == SAME else next(sums)
            for own, kind in zip(values, kinds, strict=True)
        ]
        known = {}
        for (tensor, _, kind), value in zip(self.cuts, merged, strict=True):
            mean = tf.math.divide_no_nan(value, rows) if kind == MEAN else value
            known[id(tensor)] = tf.cast(mean, tensor.dtype) if kind == MEAN else value
        for op in self.operations:
            inputs = [known[id(tensor)] for tensor in op.inputs]
            outputs = _compat.OperationTemplate(op).build(inputs)
            known.update(zip(map(id, op.outputs), outputs, strict=True))
        return tf.nest.map_structure(
            lambda result: known.get(id(result), result), self.results
        )


def tail_of(plan: Plan, results: Any, scope: Scope, *, is_of_all: bool) -> LogTail:
    """Find the part of a program that only its logs need.

    Args:
        plan: `Plan` of the step.
        results: Nest, what the step returns.
        scope: `Scope` of the plan.
        is_of_all: Bool, whether the program is that of all replicas. If each group
            has one of its own, numbers are averaged over groups, but metrics' states
            are added up.
    """
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
            is_state = tensor.op.type in READS and scope.is_metric(tensor.op.inputs[0])
            kind = SUM if is_part else SAME
            if not is_of_all and not is_state and tensor.dtype.is_floating:
                kind = MEAN
            cuts.append((tensor, is_part, kind))
    plan.live &= in_step
    return LogTail(results, cuts, order)


def _needed_by_effects(plan: Plan, scope: Scope) -> set:
    """Return the operations that a step cannot leave until after it."""
    pending = []
    for effect in scope.effects.get(plan.graph, ()):
        pending += [t.op for t in effect.symbolic_tensors() if t.graph is plan.graph]
    for op in plan.live:
        is_tied = (
            _compat.has_effect(op)
            or _compat.has_function(op)
            or (not op.inputs and op.type != "Const")
            or any(t.dtype in (tf.variant, tf.resource, tf.string) for t in op.outputs)
            # No replica returns a list.
            or any(t.dtype == tf.variant for t in op.inputs)
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
