"""Logs of a step: partial sums are all-reduced after it, and logs computed from them.

step on each replica -> parts of metrics' states -> summed -> results of metrics
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.ground._compat import programs
from tfdp.training.program.facts import Form
from tfdp.training.program.plan import Plan, ProgramProperties, in_order
from tfdp.training.program.rules.state import READS
from tfdp.training.program.view import AS_IS, WHOLE

# Logs need one value from those of all replicas. It is their sum, their mean weighted
# by rows, or the value of any replica if all have the same.
SUM, MEAN, SAME = "sum", "mean", "same"


@dataclasses.dataclass
class LogTail:
    """Operations that only logs need: they run after the step, on merged values.

    Args:
        results: Nest of tensors of the program and other values, the logs.
        cuts: List of triples: a tensor at which the program is cut, which each replica
            returns; whether it is returned as a partial sum, not whole; and how the
            replicas' values are merged: by a sum, `SUM`; by a mean weighted by rows,
            `MEAN`; or not, since they are equal, `SAME`.
        operations: List of operations from these tensors to the logs, in order.
    """

    results: Any
    cuts: list[tuple[Any, bool, str]]
    operations: list[Any]

    def values(self, builder: Any) -> list:
        """Return the values from which logs are computed after the step on a replica.

        Args:
            builder: `Builder` of the replica's step.

        Returns:
            List of the number of rows of the replica, a float64 scalar, and its value
            of each tensor in `cuts`; those of the kind `MEAN` are multiplied by rows.
        """
        rows = tf.cast(builder.replica.rows.own, tf.float64)
        group_rows = tf.cast(builder.replica.rows.total, tf.float64)
        outputs = [rows]
        for tensor, is_part, kind in self.cuts:
            value = builder.get(tensor, AS_IS if is_part else WHOLE)
            if kind == MEAN:
                weight = group_rows if is_part else rows
                value = tf.math.multiply_no_nan(tf.cast(value, tf.float64), weight)
            outputs.append(value)
        return outputs

    def compute(self, values: Sequence[list], add_up: Callable[[list], list]) -> Any:
        """Merge the values of the replicas, and compute the logs from them.

        Args:
            values: Sequence of lists, one for each item that the method `values`
                returns, with that item on each local replica.
            add_up: Callable that sums lists of tensors over all replicas.

        Returns:
            Nest like `results`, the logs.
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
            outputs = programs.OperationTemplate(op).build(inputs)
            known.update(zip(map(id, op.outputs), outputs, strict=True))
        return tf.nest.map_structure(
            lambda result: known.get(id(result), result), self.results
        )


def find_log_tail(
    plan: Plan, results: Any, scope: ProgramProperties, *, is_of_all: bool
) -> LogTail:
    """Remove from a plan the operations that only its logs need, and return them.

    Args:
        plan: `Plan` of the step, whose `live` is changed.
        results: Nest of tensors and other values that the step returns.
        scope: `ProgramProperties` of the plan.
        is_of_all: Bool, whether all replicas share the program and merge their logs in
            each step. If false, numbers are averaged over replicas, weighted by rows,
            but metrics' states are summed.

    Returns:
        `LogTail` with the removed operations, which run after the step.
    """
    in_step = _bound_to_step(plan, scope)
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


def _bound_to_step(plan: Plan, scope: ProgramProperties) -> set:
    """Return the set of operations that must run within the step, not after it.

    Examples are updates of variables, and operations on rows. All operations that they
    depend on are included.
    """
    pending = []
    for effect in scope.effects.get(plan.graph, ()):
        pending += [t.op for t in effect.symbolic_tensors() if t.graph is plan.graph]
    for op in plan.live:
        # Operations on a `TensorList`, of the dtype variant, stay in the step, because
        # a replica cannot return a list for use after the step.
        is_bound = (
            programs.has_effect(op)
            or programs.has_function(op)
            or (not op.inputs and op.type != "Const")
            or any(t.dtype in (tf.variant, tf.resource, tf.string) for t in op.outputs)
            or any(t.dtype == tf.variant for t in op.inputs)
        )
        if is_bound or any(
            plan.facts[id(t)].form in (Form.ROWS, Form.LOCAL)
            for t in op.inputs
            if id(t) in plan.facts
        ):
            pending.append(op)
    bound: set = set()
    while pending:
        op = pending.pop()
        if op not in bound:
            bound.add(op)
            pending += [t.op for t in op.inputs] + list(op.control_inputs)
    return bound
