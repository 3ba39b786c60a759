"""Construction of branches, loops and calls of a program on a replica.

The condition of a branch or a loop is whole, and so the same on all replicas: all of
them take part in the collectives inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.ground._compat import programs
from tfdp.training.program.rules.state import STATEFUL_RANDOM
from tfdp.training.program.view import AS_IS, WHOLE, Decision, Need, need_of


def build(builder: Any, op: Any, decision: Decision, inputs: list) -> list:
    """Build a branch, a loop or a call on a replica.

    Args:
        builder: `Builder` of the graph around the operation.
        op: `tf.Operation` of the program.
        decision: `Decision` for the operation, with a plan for each inner graph.
        inputs: List of this replica's tensors, the inputs of the operation.

    Returns:
        List of this replica's outputs.
    """
    if op.type in ("While", "StatelessWhile"):
        return _build_loop(builder, op, decision, inputs)
    if programs.is_call(op):
        (plan,) = decision.plans
        inner = builder.build_inner_graph(plan, op.inputs)
        results = programs.results_of_call(op, plan.graph)
        return [inner.get(tensor, AS_IS) for tensor in results]
    return _build_branches(builder, op, decision, inputs)


def _build_branches(builder: Any, op: Any, decision: Decision, inputs: list) -> list:
    """Build an `If` or a `Case` on a replica.

    Args:
        builder: `Builder` of the graph around the operation.
        op: `tf.Operation` of the program.
        decision: `Decision` for the operation, with a plan for each branch.
        inputs: List of this replica's tensors, the condition or index first.

    Returns:
        List of this replica's outputs.
    """
    needs: Sequence[Need] = decision.details

    def branch(plan: Any) -> Callable:
        """Return a function without arguments that builds the branch with this plan.

        The function returns the branch's results on this replica, a list of tensors.
        """

        def compute() -> list:
            """Build the branch; return its results in forms common to all branches."""
            inner = builder.build_inner_graph(plan, op.inputs[1:])
            return [
                tf.identity(inner.get(tensor, need))
                for tensor, need in zip(plan.graph.outputs, needs, strict=True)
            ]

        return compute

    plans = decision.plans
    if op.type in ("Case", "StatelessCase"):
        results = tf.switch_case(inputs[0], [branch(plan) for plan in plans])
    else:
        predicate = inputs[0]
        if predicate.dtype != tf.bool:
            predicate = tf.not_equal(predicate, tf.zeros_like(predicate))
        results = tf.cond(predicate, branch(plans[0]), branch(plans[1]))
    flat = tf.nest.flatten(results)
    return [
        builder.with_shape(own, tensor, fact)
        for own, tensor, fact in zip(flat, op.outputs, decision.outputs, strict=True)
    ]


def _build_loop(builder: Any, op: Any, decision: Decision, inputs: list) -> list:
    """Build a `While` with only those of its loop variables that change and are needed.

    Args:
        builder: `Builder` of the graph around the loop.
        op: `tf.Operation` of the program, the loop.
        decision: `Decision` for the loop, with the plans of its condition and its body.
        inputs: List of this replica's tensors, the initial loop variables.

    Returns:
        List of this replica's loop variables after the loop. Variables that the built
        loop leaves out have their initial values, except a counter of iterations.
    """
    cond_plan, body_plan = decision.plans
    is_same: Sequence[bool] = decision.details
    changed = [
        index
        for index, same in enumerate(is_same)
        if not same and builder.plan.is_needed(op, index)
    ]
    facts = decision.outputs
    # `tf.while_loop` adds a counter of iterations as the first variable of a loop. If
    # the program's loop has such a counter already, the new loop leaves it out.
    is_counter = changed[:1] == [0] and len(changed) > 1
    is_counter = is_counter and _counts_iterations(op, body_plan.graph)
    changed = changed[1:] if is_counter else changed

    def build_inner_graph(plan: Any, values: Sequence[Any]) -> Any:
        """Build the condition or the body of the loop, and return its `Builder`.

        Args:
            plan: `Plan` of the condition or of the body.
            values: Sequence of this replica's values of the loop variables that the
                built loop has.
        """
        values_by_input = {
            id(plan.graph.inputs[index]): value
            for index, value in zip(changed, values, strict=True)
        }
        if is_counter:
            values_by_input[id(plan.graph.inputs[0])] = programs.while_loop_counter()
        return builder.build_inner_graph(plan, op.inputs, values_by_input)

    def cond(*values: Any) -> Any:
        """Build the condition, a bool tensor, for values of changed variables."""
        inner = build_inner_graph(cond_plan, values)
        return inner.get(cond_plan.graph.outputs[0], WHOLE)

    def body(*values: Any) -> list:
        """Build an iteration of the loop; return the changed variables after it."""
        inner = build_inner_graph(body_plan, values)
        results = [
            inner.get(body_plan.graph.outputs[index], need_of(facts[index]))
            for index in changed
        ]
        return [
            builder.with_shape(own, op.outputs[index], facts[index])
            for own, index in zip(results, changed, strict=True)
        ]

    initial = [inputs[index] for index in changed]
    invariants = [
        value.shape
        if value.dtype in (tf.variant, tf.resource)
        else builder.own_static_shape(op.outputs[index], facts[index])
        for index, value in zip(changed, initial, strict=True)
    ]
    # Parallel iterations draw random numbers in an order that may differ between
    # replicas. So a loop that draws random numbers runs one iteration at a time.
    is_random = any(map(_draws, (cond_plan, body_plan)))
    final = tf.while_loop(
        cond,
        body,
        initial,
        shape_invariants=invariants,
        parallel_iterations=1 if is_random else op.get_attr("parallel_iterations"),
    )
    outputs = list(inputs)
    for index, value in zip(changed, final, strict=True):
        outputs[index] = value
    if is_counter:
        outputs[0] = final[0].op.outputs[0]
    return outputs


def _draws(plan: Any) -> bool:
    """Return whether a planned graph draws random numbers of stateful generators.

    Draws in branches, loops and calls inside of the graph count as well.
    """
    return any(
        op.type in STATEFUL_RANDOM or any(map(_draws, decision.plans))
        for op, decision in plan.decisions.items()
    )


def _counts_iterations(op: Any, body: Any) -> bool:
    """Return whether a loop's first variable counts its iterations: 0, 1, 2 and so on.

    Args:
        op: `tf.Operation` of the program, the loop.
        body: `tf.Graph` of the loop's body.
    """
    before, after = body.inputs[0], body.outputs[0].op
    # In the loop of a gradient, an `Identity` may lie between the addition to the
    # counter and the output, so the search for the addition skips `Identity`.
    while after.type == "Identity":
        after = after.inputs[0].op
    return (
        before.dtype == tf.int32
        and tf.get_static_value(op.inputs[0]) == 0
        and after.type in ("Add", "AddV2")
        and after.inputs[0] is before
        and tf.get_static_value(after.inputs[1]) == 1
    )
