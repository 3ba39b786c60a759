"""Plan of a step: what a replica holds of each tensor, found before anything is built.

    traced program -> facts of its inputs -> a `Decision` for each operation, in order

It is a pure function of the program, which is alike on all workers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.ground import _compat
from tfdp.training.program import sizes
from tfdp.training.program.facts import Fact, Form, static_sizes, whole
from tfdp.training.program.liveness import LOOPS, find_live
from tfdp.training.program.rules import decide
from tfdp.training.program.rules.elementwise import is_true
from tfdp.training.program.sizes import array
from tfdp.training.program.view import (
    AS_HELD,
    NOTHING,
    PART,
    WHOLE,
    CannotDivideError,
    Decision,
    Kind,
    Need,
    View,
    need_of,
    rows_along,
)

_BRANCHES = frozenset(("If", "StatelessIf", "Case", "StatelessCase"))
# Passes over a loop until the forms of its variables are found.
_MOST_PASSES = 8


@dataclasses.dataclass
class Plan:
    """Decisions for the operations of one graph of the program.

    Args:
        graph: The graph.
        facts: Dict from the `id` of a tensor to its `Fact`.
        decisions: Dict from an operation to its `Decision`.
        live: Set of operations that something needs.
        needed: Set of the `id`s of tensors that something needs.
        sums: Set of the `id`s of parts of which something needs the sum.
    """

    graph: Any
    facts: dict[int, Fact]
    decisions: dict[Any, Decision] = dataclasses.field(default_factory=dict)
    live: set = dataclasses.field(default_factory=set)
    needed: set[int] = dataclasses.field(default_factory=set)
    sums: set[int] = dataclasses.field(default_factory=set)

    def fact(self, tensor: Any) -> Fact:
        """Return what is known of a tensor of the graph."""
        return self.facts[id(tensor)]

    def is_needed(self, op: Any, index: int) -> bool:
        """Return whether an operation needs an input: of a loop, each variable."""
        if self.is_loop(op):
            return id(op.outputs[index]) in self.needed
        decision = self.decisions.get(op)
        return decision is None or decision.needs[index] is not NOTHING

    def is_loop(self, op: Any) -> bool:
        """Return whether an operation is a loop that a replica builds."""
        return op.type in LOOPS and bool(self.decisions[op].plans)

    def needs(self, op: Any) -> list[tuple[Any, Need]]:
        """Return the inputs that an operation needs, each with its form."""
        if op not in self.decisions:
            return []
        pairs = zip(op.inputs, self.decisions[op].needs, strict=True)
        return [pair for i, pair in enumerate(pairs) if self.is_needed(op, i)]

    def conversions(self) -> Iterator[tuple[Any, Any, Fact]]:
        """Yield what other replicas have to give: operation, input, its `Fact`."""
        for op in self.live:
            for tensor, need in self.needs(op):
                fact = self.facts.get(id(tensor))
                if fact is not None and is_conversion(fact, need):
                    yield op, tensor, fact


@dataclasses.dataclass
class Scope:
    """What the rules know beside an operation.

    Args:
        is_metric: Callable of a resource tensor: whether it is a metric's state.
        effects: Dict from a graph to the effects in it, see
            `tfdp.ground.base.program_trace`.
        is_shared: Callable of an operation: whether the replicas of a worker share the
            state that it uses, and the program writes that. Defaults to never.
        whole: Set of operations that run whole since another one needs their lists
            whole.
        unread: Set of operations whose results nothing needs: each replica makes its
            own.
    """

    is_metric: Callable[[Any], bool]
    effects: Mapping[Any, Sequence[Any]]
    is_shared: Callable[[Any], bool] = lambda op: False
    whole: set[Any] = dataclasses.field(default_factory=set)
    unread: set[Any] = dataclasses.field(default_factory=set)


def make_plan(
    graph: Any, inputs: Mapping[int, Fact], outputs: Sequence[Any], scope: Scope
) -> Plan:
    """Plan a graph of the program.

    Args:
        graph: The graph.
        inputs: Dict from the `id` of a placeholder to its `Fact`.
        outputs: Sequence of tensors of the graph that are needed.
        scope: `Scope`.
    """
    scope.unread.update(_unread(graph))
    while True:
        plan, before = Plan(graph, dict(inputs)), len(scope.whole)
        for op in in_order(graph):
            _plan_operation(plan, op, scope)
        if len(scope.whole) == before:
            break
    find_live(plan, outputs, scope)
    for op, tensor, fact in plan.conversions():
        _check_conversion(op, tensor, fact)
        if fact.form is Form.PART:
            plan.sums.add(id(tensor))
    return plan


def in_order(graph: Any) -> list[Any]:
    """Return the operations of a graph, each after those that it reads.

    The lists in which a loop keeps values for its gradient are inputs that it gets
    after it was made.
    """
    done: set = set()
    return [op for last in graph.get_operations() for op in with_inputs(last, done)]


def with_inputs(last: Any, done: set) -> list[Any]:
    """Return an operation after those of its inputs that are not done; add them."""
    found, pending = [], [last]
    while pending:
        op = pending[-1]
        before = [
            tensor.op
            for tensor in op.inputs
            if tensor.graph is op.graph and tensor.op not in done
        ]
        if before and op not in done:
            pending += before
            continue
        pending.pop()
        if op not in done:
            done.add(op)
            found.append(op)
    return found


def _unread(graph: Any) -> Iterator[Any]:
    """Yield the operations that end in a comparison with itself, whatever they give.

    By such a comparison what `tf.recompute_grad` computes again waits for the gradient.
    """
    for comparison in graph.get_operations():
        if not is_true(comparison):
            continue
        readers, op = {comparison}, comparison.inputs[0].op
        while op.inputs and readers.issuperset(
            reader for tensor in op.outputs for reader in tensor.consumers()
        ):
            yield op
            readers, op = {op}, op.inputs[0].op


def _check_conversion(op: Any, tensor: Any, fact: Fact) -> None:
    """Raise where something would have to be gathered that cannot be.

    Raises:
        CannotDivideError: With the operation that needs it.
    """
    is_text = tensor.dtype == tf.string and not (fact.is_rows and not fact.axis)
    if tensor.dtype in (tf.variant, tf.resource) or is_text:
        raise CannotDivideError(
            op,
            f"reads a {tensor.dtype.name} of all rows, which no collective carries",
            "Use `tf.stack` in place of a `TensorArray`, and read strings in "
            "`dataset.map`.",
        )


def _plan_operation(plan: Plan, op: Any, scope: Scope) -> None:
    if op.type == "Const":
        _set(plan, op, Decision([], [_constant(op)]))
        return
    if op.type in ("Placeholder", "PlaceholderWithDefault") and op.outputs:
        tensor = op.outputs[0]
        plan.facts.setdefault(id(tensor), whole(static_sizes(tensor, is_free=True)))
        return
    # Another tensor is of an outer graph, or a resource that is captured.
    facts = [
        plan.facts.get(id(tensor)) or whole(static_sizes(tensor, is_free=True))
        for tensor in op.inputs
    ]
    decision = _decide(View(op, facts, scope))
    for tensor, fact, need in zip(op.inputs, facts, decision.needs, strict=True):
        is_divided = fact.form in (Form.ROWS, Form.PART)
        if tensor.dtype == tf.variant and need.kind is Kind.WHOLE and is_divided:
            # Lists cannot be gathered: what puts something into them is.
            scope.whole.add(tensor.op)
    _set(plan, op, decision)


def _decide(view: View) -> Decision:
    op, kind = view.op, view.type
    if op in view.scope.whole:
        return _run_whole(view)
    if op in view.scope.unread:
        return Decision([AS_HELD] * len(view), [Fact(Form.LOCAL)] * len(op.outputs))
    if kind in _WITH_GRAPHS:
        return _WITH_GRAPHS[kind](view)
    if _compat.is_call(op):
        return _plan_call(view)
    if kind == "IdentityN":
        return Decision([AS_HELD] * len(view), view.facts)
    marker = _compat.marker_of(op) if kind == "Identity" else ""
    return _plan_marker(view, marker) if marker else decide(view)


def _run_whole(view: View) -> Decision:
    """Decide an operation whose lists another one needs whole."""
    inputs = list(zip(view.facts, view.op.inputs, strict=True))
    facts = [_whole_like(fact, tensor) for fact, tensor in inputs]
    inner = View(view.op, facts, view.scope)
    if view.type in LOOPS:
        found = _plan_loop(inner, may_divide=False)
    elif view.type in _BRANCHES:
        found = _plan_branches(inner)
    else:
        found = decide(inner)
    needs = [
        AS_HELD if tensor.dtype == tf.resource or fact.form is Form.EMPTY else WHOLE
        for fact, tensor in inputs
    ]
    return dataclasses.replace(found, needs=needs)


def _whole_like(fact: Fact, tensor: Any) -> Fact:
    """Return the fact of a tensor once it is whole.

    Its sizes are not followed as multiples of the rows: what is made by them inside is
    whole, too.
    """
    if fact.form is Form.EMPTY or tensor.dtype == tf.resource:
        return fact
    shape = fact.sizes
    if shape is None:
        return whole(static_sizes(tensor, is_free=False))
    return whole(tuple(s if s.is_free else sizes.UNKNOWN for s in shape))


def _set(plan: Plan, op: Any, decision: Decision) -> None:
    plan.decisions[op] = decision
    for tensor, fact in zip(op.outputs, decision.outputs, strict=True):
        plan.facts[id(tensor)] = fact


def _constant(op: Any) -> Fact:
    tensor = op.outputs[0]
    dtype, count = tensor.dtype, tensor.shape.num_elements()
    is_number = dtype.is_integer or dtype.is_floating or dtype.is_bool
    is_small = count is not None and count <= 64
    found = tf.get_static_value(tensor) if is_number and is_small else None
    value = None if found is None else array(np.asarray(found))
    return whole(static_sizes(tensor, is_free=True), value)


def _plan_marker(view: View, marker: str) -> Decision:
    """Begin or end of a layer that works on each replica's rows by themselves.

    Or a part that is summed at once, with others that are.
    """
    fact = view.facts[0]
    if marker == "whole":
        return Decision([WHOLE], [whole(fact.sizes)])
    if marker == "rows of a replica":
        return Decision([rows_along(0)], [Fact(Form.LOCAL)])
    if marker == "rows of all":
        shape = view.output_sizes()
        assert shape is not None
        return Decision([AS_HELD], [Fact(Form.ROWS, 0, (sizes.rows(1), *shape[1:]))])
    is_part = fact.form is Form.PART  # "part of a replica"
    return Decision([AS_HELD], [Fact(Form.LOCAL) if is_part else fact])


# Branches, loops, calls.


def _plan_inside(
    graph: Any,
    facts: Sequence[Fact],
    scope: Scope,
    outputs: Sequence[Any] | None = None,
) -> Plan:
    """Plan a graph inside of an operation, by the facts of its inputs."""
    inputs = {id(own): fact for own, fact in zip(graph.inputs, facts, strict=True)}
    return make_plan(
        graph, inputs, graph.outputs if outputs is None else outputs, scope
    )


def _plan_call(view: View) -> Decision:
    graph = _compat.function_graph(view.op)
    results = _compat.results_of_call(view.op, graph)
    plan = _plan_inside(graph, view.facts, view.scope, results)
    outputs = [plan.fact(tensor) for tensor in results]
    return Decision([AS_HELD] * len(view), outputs, plans=[plan])


def _plan_branches(view: View) -> Decision:
    graphs = _compat.branch_graphs(view.op)
    plans = [_plan_inside(graph, view.facts[1:], view.scope) for graph in graphs]
    outputs, needs = [], []
    for tensors in zip(*(graph.outputs for graph in graphs), strict=True):
        facts = [p.fact(t) for p, t in zip(plans, tensors, strict=True)]
        need, fact = _common(facts)
        if need is WHOLE and _is_list(tensors[0]):
            view.scope.whole.update(tensor.op for tensor in tensors)
        needs.append(need)
        outputs.append(fact)
    outputs += view.whole_outputs()[len(outputs) :]
    return Decision(
        [WHOLE] + [AS_HELD] * (len(view) - 1), outputs, plans=plans, details=needs
    )


def _common(facts: Sequence[Fact]) -> tuple[Need, Fact]:
    """Return the form that the results of all branches can have."""
    given = [fact for fact in facts if fact.form is not Form.EMPTY]
    if not given:
        return AS_HELD, facts[0]
    shape = sizes.common([fact.sizes for fact in given])
    forms = {fact.form for fact in given}
    if len({fact.held() for fact in given}) == 1 and Form.SIZES not in forms:
        multiples = {fact.multiple for fact in given} if given[0].is_rows else {0}
        if len(multiples) == 1:
            first = given[0]
            return AS_HELD, Fact(first.form, first.axis, shape)
    if forms == {Form.PART, Form.WHOLE} and Form.PART in forms:
        return PART, Fact(Form.PART, sizes=shape)
    return WHOLE, whole(shape)


def _plan_loop(view: View, *, may_divide: bool = True) -> Decision:
    scope = view.scope
    cond, body = _compat.loop_graphs(view.op)
    is_same = [
        output is given for output, given in zip(body.outputs, body.inputs, strict=True)
    ]
    facts = [
        fact if same or _is_list(given) else _without_value(fact)
        for fact, same, given in zip(view.facts, is_same, body.inputs, strict=True)
    ]
    for _ in range(_MOST_PASSES):
        body_plan = _plan_inside(body, facts, scope)
        after = [
            fact
            if same
            else _joined(fact, body_plan.fact(output), is_list=_is_list(output))
            for fact, output, same in zip(facts, body.outputs, is_same, strict=True)
        ]
        if after == facts:
            break
        facts = after
    else:
        raise CannotDivideError(
            view.op,
            "changes in each pass what a replica holds of its variables",
            "Use an operation on the whole batch in place of the loop.",
        )
    cond_plan = _plan_inside(cond, facts, scope)
    is_converted = any(
        is_conversion(body_plan.fact(output), need_of(fact))
        for fact, output, same in zip(facts, body.outputs, is_same, strict=True)
        if not same
    )
    if may_divide and (
        is_converted or _converts(cond_plan, scope) or _converts(body_plan, scope)
    ):
        # Replicas of one process would wait for each other inside of a loop.
        scope.whole.add(view.op)
    needs = [
        AS_HELD if same else need_of(fact)
        for fact, same in zip(facts, is_same, strict=True)
    ]
    return Decision(needs, facts, plans=[cond_plan, body_plan], details=is_same)


def _without_value(fact: Fact) -> Fact:
    if fact.form is Form.SIZES:
        return whole(fact.sizes)
    return Fact(fact.form, fact.axis, fact.sizes)


def _converts(plan: Plan, scope: Scope) -> bool:
    """Return whether something of a graph has to be gathered or summed up."""
    if scope.effects.get(plan.graph):
        return False  # As it is: an update inside of a loop says so.
    decisions = [plan.decisions[op] for op in plan.live if op in plan.decisions]
    return any(True for _ in plan.conversions()) or any(
        decision.has_collective
        or any(_converts(inner, scope) for inner in decision.plans)
        for decision in decisions
    )


def is_conversion(fact: Fact, need: Need) -> bool:
    """Return whether other replicas have to give what is needed of a tensor."""
    if fact.form is Form.PART:
        return need.kind in (Kind.WHOLE, Kind.ROWS)
    if fact.is_rows:
        is_other = need.kind is Kind.ROWS and need.axis != fact.axis
        return is_other or need.kind in (Kind.WHOLE, Kind.PART)
    return fact.form is Form.LOCAL and need.kind is Kind.WHOLE


def _is_list(tensor: Any) -> bool:
    return tensor.dtype == tf.variant


def _joined(before: Fact, after: Fact, *, is_list: bool) -> Fact:
    """Return the fact of a loop's variable that has had both."""
    if before.form is Form.EMPTY or after.form is Form.EMPTY:
        found = after if before.form is Form.EMPTY else before
        return found if is_list else _without_value(found)
    if is_list and before == after:
        return before
    after = _without_value(after)
    shape = sizes.common([before.sizes, after.sizes])
    if before.held() == after.held():
        return Fact(before.form, before.axis, shape)
    first = (before.sizes or (sizes.UNKNOWN,) * (after.axis + 1))[after.axis]
    is_whole_first = before.form is Form.WHOLE and not is_list
    if is_whole_first and after.is_rows and first.kind == "rows":
        # States that begin alike for all rows, such as zeros.
        return Fact(Form.ROWS, after.axis, after.sizes)
    if {before.form, after.form} == {Form.WHOLE, Form.PART}:
        return Fact(Form.PART, sizes=shape)
    return whole(shape)


_WITH_GRAPHS = {
    **dict.fromkeys(_BRANCHES, _plan_branches),
    **dict.fromkeys(LOOPS, _plan_loop),
}
