"""Branches, loops and calls of a program, as a replica builds them.

What decides a branch or the end of a loop is whole, and so alike on all replicas: the
collectives inside meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp import _compat
from tfdp.program.facts import Fact
from tfdp.program.view import AS_HELD, WHOLE, Decision, Need, need_of


def build(builder: Any, op: Any, decision: Decision, inputs: list) -> list:
    """Build a branch, a loop or a call on a replica."""
    if op.type in ("While", "StatelessWhile"):
        return _build_loop(builder, op, decision, inputs)
    if _compat.is_call(op):
        (plan,) = decision.plans
        inner = _nested(builder, plan, op.inputs, {})
        inner.run()
        results = _compat.results_of_call(op, plan.graph)
        return [inner.get(tensor, AS_HELD) for tensor in results]
    return _build_branches(builder, op, decision, inputs)


def _nested(
    builder: Any,
    plan: Any,
    outer: Sequence[Any],
    given: dict[int, Any],
    *,
    is_loop: bool = False,
) -> Any:
    """Return a builder for a graph inside, in the graph that is the default."""
    sources = {
        id(placeholder): tensor
        for placeholder, tensor in zip(plan.graph.inputs, outer, strict=True)
        if id(placeholder) not in given
    }
    return builder.inside(plan, given, sources, is_loop=is_loop)


def _build_branches(builder: Any, op: Any, decision: Decision, inputs: list) -> list:
    needs: Sequence[Need] = decision.details

    def branch(plan: Any) -> Callable:
        def compute() -> list:
            inner = _nested(builder, plan, op.inputs[1:], {})
            inner.run()
            return [
                tf.identity(inner.get(tensor, need))
                for tensor, need in zip(plan.graph.outputs, needs, strict=True)
            ]

        return compute

    plans = decision.plans
    if op.type in ("Case", "StatelessCase"):
        found = tf.switch_case(inputs[0], [branch(plan) for plan in plans])
    else:
        predicate = inputs[0]
        if predicate.dtype != tf.bool:
            predicate = tf.not_equal(predicate, tf.zeros_like(predicate))
        found = tf.cond(predicate, branch(plans[0]), branch(plans[1]))
    flat = tf.nest.flatten(found)
    return [
        _shaped(builder, own, tensor, fact)
        for own, tensor, fact in zip(flat, op.outputs, decision.outputs, strict=True)
    ]


def _shaped(builder: Any, own: Any, tensor: Any, fact: Fact) -> Any:
    if own.dtype in (tf.variant, tf.resource):
        return own
    return builder.with_shape(own, tensor, fact)


def _build_loop(builder: Any, op: Any, decision: Decision, inputs: list) -> list:
    cond_plan, body_plan = decision.plans
    is_same: Sequence[bool] = decision.details
    changed = [
        index
        for index, same in enumerate(is_same)
        if not same and builder.plan.is_needed(op, index)
    ]
    facts = decision.outputs
    # Each loop of TensorFlow counts its passes, the one that is built here, too.
    is_counter = changed[:1] == [0] and len(changed) > 1
    is_counter = is_counter and _counts_passes(op, body_plan.graph)
    changed = changed[1:] if is_counter else changed

    def given_to(graph: Any, values: Sequence[Any]) -> dict[int, Any]:
        given = {
            id(graph.inputs[index]): value
            for index, value in zip(changed, values, strict=True)
        }
        if is_counter:
            given[id(graph.inputs[0])] = _compat.counter_of_passes()
        return given

    def cond(*values: Any) -> Any:
        inner = _nested(
            builder,
            cond_plan,
            op.inputs,
            given_to(cond_plan.graph, values),
            is_loop=True,
        )
        inner.run()
        return inner.get(cond_plan.graph.outputs[0], WHOLE)

    def body(*values: Any) -> list:
        inner = _nested(
            builder,
            body_plan,
            op.inputs,
            given_to(body_plan.graph, values),
            is_loop=True,
        )
        inner.run()
        return [
            _shaped(
                builder,
                inner.get(body_plan.graph.outputs[index], need_of(facts[index])),
                op.outputs[index],
                facts[index],
            )
            for index in changed
        ]

    initial = [inputs[index] for index in changed]
    shapes = [
        None
        if value.dtype in (tf.variant, tf.resource)
        else builder.own_static_shape(op.outputs[index], facts[index])
        for index, value in zip(changed, initial, strict=True)
    ]
    invariants = [
        value.shape if shape is None else shape
        for value, shape in zip(initial, shapes, strict=True)
    ]
    found = tf.while_loop(
        cond,
        body,
        initial,
        shape_invariants=invariants,
        parallel_iterations=op.get_attr("parallel_iterations"),
    )
    outputs = list(inputs)
    for index, value in zip(changed, found, strict=True):
        outputs[index] = value
    if is_counter:
        outputs[0] = found[0].op.outputs[0]
    return outputs


def _counts_passes(op: Any, body: Any) -> bool:
    """Return whether the first variable of a loop counts its passes from zero."""
    before, after = body.inputs[0], body.outputs[0].op
    while after.type == "Identity":  # in the loop of a gradient
        after = after.inputs[0].op
    return (
        before.dtype == tf.int32
        and tf.get_static_value(op.inputs[0]) == 0
        and after.type in ("Add", "AddV2")
        and after.inputs[0] is before
        and tf.get_static_value(after.inputs[1]) == 1
    )
