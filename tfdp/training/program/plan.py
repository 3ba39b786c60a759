"""Plan of a step: how a replica holds each tensor, before any operation is built.

    traced program -> facts of its inputs -> a `Decision` for each operation, in order

The plan is a pure function of the program, so it is the same on all workers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.ground._compat import programs
from tfdp.training.program import sizes
from tfdp.training.program.facts import Fact, Form, static_sizes, whole
from tfdp.training.program.liveness import LOOPS, mark_live
from tfdp.training.program.rules import decide
from tfdp.training.program.rules.elementwise import compares_with_itself
from tfdp.training.program.sizes import array
from tfdp.training.program.view import (
    AS_IS,
    NOTHING,
    PART,
    WHOLE,
    CannotDivideError,
    Decision,
    Need,
    NeededForm,
    OperationView,
    need_of,
    rows_along,
)

_BRANCHES = frozenset(("If", "StatelessIf", "Case", "StatelessCase"))
# The body of a loop is planned again until it returns each loop variable in the `Form`
# in which it receives it. If a form still changes after planning the body this many
# times, the step is refused.
_MAX_PASSES = 8


@dataclasses.dataclass
class Plan:
    """How replicas divide one graph of the program: a `Decision` for each operation.

    Args:
        graph: `tf.Graph` that is planned.
        facts: Dict from the `id` of a tensor to its `Fact`: how a replica holds it (its
            own rows, a partial sum or the whole tensor), and its sizes.
        decisions: Dict from an operation to its `Decision`: the forms of its inputs
            that it needs, and how a replica builds it.
        live: Set of operations that results or effects (such as updates) need.
        needed: Set of the `id`s of tensors that results or effects need.
        sums: Set of the `id`s of partial sums whose totals an operation needs.
    """

    graph: Any
    facts: dict[int, Fact]
    decisions: dict[Any, Decision] = dataclasses.field(default_factory=dict)
    live: set = dataclasses.field(default_factory=set)
    needed: set[int] = dataclasses.field(default_factory=set)
    sums: set[int] = dataclasses.field(default_factory=set)

    def fact(self, tensor: Any) -> Fact:
        """Return the `Fact` of a tensor: how replicas hold it, and its sizes."""
        return self.facts[id(tensor)]

    def is_needed(self, op: Any, index: int) -> bool:
        """Return whether an operation's input, or a loop's variable, is needed.

        A loop's variable is needed if the loop or a later operation depends on it.

        Args:
            op: `tf.Operation` of the graph.
            index: Int, index of the input, or of the loop variable.
        """
        if self.is_loop(op):
            return id(op.outputs[index]) in self.needed
        decision = self.decisions.get(op)
        return decision is None or decision.needs[index] is not NOTHING

    def is_loop(self, op: Any) -> bool:
        """Return whether an operation is a loop, with a plan of its body."""
        return op.type in LOOPS and bool(self.decisions[op].plans)

    def needs(self, op: Any) -> list[tuple[Any, Need]]:
        """Return the inputs that an operation needs, and the form of each.

        Returns:
            List of pairs of a tensor and its `Need`: own rows, a partial sum or the
            whole tensor, for example.
        """
        if op not in self.decisions:
            return []
        pairs = zip(op.inputs, self.decisions[op].needs, strict=True)
        return [pair for i, pair in enumerate(pairs) if self.is_needed(op, i)]

    def conversions(self) -> Iterator[tuple[Any, Any, Fact]]:
        """Yield the inputs of operations that must be gathered or summed over replicas.

        Each item is a tuple of an operation, an input of it, and the input's `Fact`.
        """
        for op in self.live:
            for tensor, need in self.needs(op):
                fact = self.facts.get(id(tensor))
                if fact is not None and is_conversion(fact, need):
                    yield op, tensor, fact


@dataclasses.dataclass
class ProgramProperties:
    """Properties of the whole program that the rules of operations look up.

    Args:
        is_metric: Callable of a resource tensor, which returns whether it is the state
            of a metric.
        effects: Dict from a graph to its effects, actions such as updates, see
            `tfdp.ground.base.program_trace`.
        is_shared: Callable of an operation, which returns whether its state is shared
            by the replicas of a worker and written by the program. Defaults to never.
        whole: Set of operations that run on the whole batch: those that return a list
            which is needed whole, and loops that would otherwise have a collective.
        unread: Set of operations whose values no result depends on; each replica
            computes them from its own rows.
        num_loops: Int, number of loops around the graph that is being planned.
    """

    is_metric: Callable[[Any], bool]
    effects: Mapping[Any, Sequence[Any]]
    is_shared: Callable[[Any], bool] = lambda op: False
    whole: set[Any] = dataclasses.field(default_factory=set)
    unread: set[Any] = dataclasses.field(default_factory=set)
    num_loops: int = 0


def make_plan(
    graph: Any,
    inputs: Mapping[int, Fact],
    outputs: Sequence[Any],
    scope: ProgramProperties,
) -> Plan:
    """Decide how replicas divide and build each operation of a graph, in order.

    Args:
        graph: `tf.Graph` to plan.
        inputs: Dict from the `id` of a placeholder to its `Fact`: how replicas hold it.
        outputs: Sequence of tensors of the graph that are needed.
        scope: `ProgramProperties` of the program. Operations that must run on the whole
            batch are added to it.

    Returns:
        `Plan` of the graph.

    Raises:
        CannotDivideError: If a tensor has to be gathered that no collective can carry.
    """
    scope.unread.update(_find_unread(graph))
    while True:
        plan, before = Plan(graph, dict(inputs)), len(scope.whole)
        for op in in_order(graph):
            _plan_operation(plan, op, scope)
        if len(scope.whole) == before:
            break
    mark_live(plan, outputs, scope)
    for op, tensor, fact in plan.conversions():
        _check_conversion(op, tensor, fact)
        if fact.form is Form.PART:
            plan.sums.add(id(tensor))
    return plan


def in_order(graph: Any) -> list[Any]:
    """Return the operations of a graph, each after its inputs.

    The order of creation is not enough: TensorFlow adds inputs to a loop after its
    creation, the lists that keep values for the gradient.
    """
    done: set = set()
    return [op for last in graph.get_operations() for op in with_inputs(last, done)]


def with_inputs(last: Any, done: set) -> list[Any]:
    """Return an operation and all that it depends on, each after its inputs.

    Args:
        last: `tf.Operation`, the last item of the result.
        done: Set of operations that are left out; those returned are added to it.
    """
    ordered, pending = [], [last]
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
            ordered.append(op)
    return ordered


def _find_unread(graph: Any) -> Iterator[Any]:
    """Yield operations whose results serve only to compare a tensor with itself.

    `tf.recompute_grad` uses such a comparison to delay the second forward pass until
    the gradient arrives. Its result does not depend on the compared value.
    """
    for comparison in graph.get_operations():
        if not compares_with_itself(comparison):
            continue
        readers, op = {comparison}, comparison.inputs[0].op
        while op.inputs and readers.issuperset(
            reader for tensor in op.outputs for reader in tensor.consumers()
        ):
            yield op
            readers, op = {op}, op.inputs[0].op


def _check_conversion(op: Any, tensor: Any, fact: Fact) -> None:
    """Check that a collective can carry a tensor that is gathered or summed.

    Args:
        op: Operation that needs the tensor from all replicas.
        tensor: Symbolic tensor, an input of the operation.
        fact: `Fact` of the tensor, what each replica has of it.

    Raises:
        CannotDivideError: For a variant or a resource, and for strings that are not
            sharded along their first axis.
    """
    is_text = tensor.dtype == tf.string and not (fact.is_rows and not fact.axis)
    if tensor.dtype in (tf.variant, tf.resource) or is_text:
        raise CannotDivideError(
            op,
            f"needs a {tensor.dtype.name} tensor of the whole batch, which cannot be "
            "gathered",
            "Use `tf.stack` in place of a `TensorArray`, and read strings in "
            "`dataset.map`.",
        )


def _plan_operation(plan: Plan, op: Any, scope: ProgramProperties) -> None:
    """Add an operation to the plan: its decision, and the facts of its outputs.

    If the operation needs a whole list that would be divided, the operation that
    returns the list is added to `scope.whole`, and `make_plan` plans the graph again.
    """
    if op.type == "Const":
        _set_decision(plan, op, Decision([], [_fact_of_constant(op)]))
        return
    if op.type in ("Placeholder", "PlaceholderWithDefault") and op.outputs:
        tensor = op.outputs[0]
        plan.facts.setdefault(id(tensor), whole(static_sizes(tensor, is_free=True)))
        return
    # A tensor without a fact belongs to an outer graph or is a captured resource. It
    # counts as whole, because its value is the same on all replicas.
    facts = [
        plan.facts.get(id(tensor)) or whole(static_sizes(tensor, is_free=True))
        for tensor in op.inputs
    ]
    decision = _decide(OperationView(op, facts, scope))
    for tensor, fact, need in zip(op.inputs, facts, decision.needs, strict=True):
        is_divided = fact.form in (Form.ROWS, Form.PART)
        if tensor.dtype == tf.variant and need.kind is NeededForm.WHOLE and is_divided:
            # No collective can carry a list, so the operation that returns this list
            # runs on the whole batch.
            scope.whole.add(tensor.op)
    _set_decision(plan, op, decision)


def _decide(view: OperationView) -> Decision:
    """Decide how replicas build an operation of any type.

    The decision for an operation with inner graphs, such as a loop, follows from plans
    of these graphs; that for a marker, an identity operation that tfdp has put into the
    program, from the marker's name; and any other one from the rules for its type.
    """
    op, kind = view.op, view.type
    if op in view.scope.whole:
        return _run_whole(view)
    if op in view.scope.unread:
        return Decision([AS_IS] * len(view), [Fact(Form.LOCAL)] * len(op.outputs))
    if kind in _WITH_GRAPHS:
        return _WITH_GRAPHS[kind](view)
    if programs.is_call(op):
        return _plan_call(view)
    if kind == "IdentityN":
        return Decision([AS_IS] * len(view), view.facts)
    marker = programs.marker_of(op) if kind == "Identity" else ""
    return _plan_marker(view, marker) if marker else decide(view)


def _run_whole(view: OperationView) -> Decision:
    """Decide how replicas build an operation that must run on the whole batch.

    Every replica then runs all of it, on inputs that are gathered or summed.
    """
    inputs = list(zip(view.facts, view.op.inputs, strict=True))
    facts = [_fact_when_whole(fact, tensor) for fact, tensor in inputs]
    inner = OperationView(view.op, facts, view.scope)
    if view.type in LOOPS:
        decision = _plan_loop(inner, may_divide=False)
    elif view.type in _BRANCHES:
        decision = _plan_branches(inner)
    else:
        decision = decide(inner)
    needs = [
        AS_IS if tensor.dtype == tf.resource or fact.form is Form.EMPTY else WHOLE
        for fact, tensor in inputs
    ]
    # A loop may add partial sums to a variable, such as a metric's state. So its
    # initial value must be a partial sum as well as the addends: a whole one would
    # count on every replica.
    needs = [
        PART if inner_need is PART else need
        for inner_need, need in zip(decision.needs, needs, strict=True)
    ]
    return dataclasses.replace(decision, needs=needs)


def _fact_when_whole(fact: Fact, tensor: Any) -> Fact:
    """Return the `Fact` that a tensor has after its rows were gathered.

    Sizes that depend on the rows count as unknown, so tensors that are created from
    them are whole as well.

    Args:
        fact: `Fact` of the tensor before.
        tensor: Tensor of the program.
    """
    if fact.form is Form.EMPTY or tensor.dtype == tf.resource:
        return fact
    shape = fact.sizes
    if shape is None:
        return whole(static_sizes(tensor, is_free=False))
    return whole(tuple(s if s.is_free else sizes.UNKNOWN for s in shape))


def _set_decision(plan: Plan, op: Any, decision: Decision) -> None:
    """Store an operation's decision in the plan, and the facts of its outputs."""
    plan.decisions[op] = decision
    for tensor, fact in zip(op.outputs, decision.outputs, strict=True):
        plan.facts[id(tensor)] = fact


def _fact_of_constant(op: Any) -> Fact:
    """Return the `Fact` of a `Const`, with its value if it has at most 64 elements."""
    tensor = op.outputs[0]
    dtype, count = tensor.dtype, tensor.shape.num_elements()
    is_number = dtype.is_integer or dtype.is_floating or dtype.is_bool
    is_small = count is not None and count <= 64
    static_value = tf.get_static_value(tensor) if is_number and is_small else None
    value = None if static_value is None else array(np.asarray(static_value))
    return whole(static_sizes(tensor, is_free=True), value)


def _plan_marker(view: OperationView, marker: str) -> Decision:
    """Decide how to build a marker that tfdp has put into the program.

    A marker begins or ends a layer that handles the rows of each replica separately,
    or requests a form of its input.

    Args:
        view: `OperationView` of the marker, an `Identity` operation.
        marker: String: `"whole"` makes the tensor whole; `"rows of a replica"` turns
            each replica's own rows into a local value; `"rows of all"` turns such local
            values into rows again; `"part of a replica"` turns a partial sum into a
            local value. Others leave the form as it is.
    """
    fact = view.facts[0]
    if marker == "whole":
        return Decision([WHOLE], [whole(fact.sizes)])
    if marker == "rows of a replica":
        return Decision([rows_along(0)], [Fact(Form.LOCAL)])
    if marker == "rows of all":
        shape = view.output_sizes()
        assert shape is not None
        return Decision([AS_IS], [Fact(Form.ROWS, 0, (sizes.rows(1), *shape[1:]))])
    # A partial sum with the marker "part of a replica" must not be summed over
    # replicas, so it becomes a local value. With any other marker the input keeps its
    # form.
    is_part = fact.form is Form.PART
    return Decision([AS_IS], [Fact(Form.LOCAL) if is_part else fact])


def _plan_inside(
    graph: Any,
    facts: Sequence[Fact],
    scope: ProgramProperties,
    outputs: Sequence[Any] | None = None,
) -> Plan:
    """Decide how replicas divide the graph of a branch, a loop or a call.

    Args:
        graph: `tf.Graph` of the branch, the loop or the call.
        facts: Sequence of `Fact`, one for each input of the graph: whether a replica
            holds its own rows, a partial sum or the whole value of it.
        scope: `ProgramProperties` of the program.
        outputs: Sequence of tensors that are needed, or `None` for the graph's outputs.
            Defaults to `None`.

    Returns:
        `Plan` of the graph, with a `Decision` for each operation.
    """
    inputs = {id(own): fact for own, fact in zip(graph.inputs, facts, strict=True)}
    return make_plan(
        graph, inputs, graph.outputs if outputs is None else outputs, scope
    )


def _plan_call(view: OperationView) -> Decision:
    """Decide how to build the call of a function, whose graph is planned by itself."""
    graph = programs.function_graph(view.op)
    results = programs.results_of_call(view.op, graph)
    plan = _plan_inside(graph, view.facts, view.scope, results)
    outputs = [plan.fact(tensor) for tensor in results]
    return Decision([AS_IS] * len(view), outputs, plans=[plan])


def _plan_branches(view: OperationView) -> Decision:
    """Decide how to build an `If` or a `Case`: each branch gets a plan of its own.

    Replicas hold each result in a form that all branches can return.
    """
    graphs = programs.branch_graphs(view.op)
    plans = [_plan_inside(graph, view.facts[1:], view.scope) for graph in graphs]
    outputs, needs = [], []
    for tensors in zip(*(graph.outputs for graph in graphs), strict=True):
        facts = [p.fact(t) for p, t in zip(plans, tensors, strict=True)]
        need, fact = _common_form(facts)
        if need is WHOLE and _is_list(tensors[0]):
            view.scope.whole.update(tensor.op for tensor in tensors)
        needs.append(need)
        outputs.append(fact)
    outputs += view.whole_outputs()[len(outputs) :]
    return Decision(
        [WHOLE] + [AS_IS] * (len(view) - 1), outputs, plans=plans, details=needs
    )


def _common_form(facts: Sequence[Fact]) -> tuple[Need, Fact]:
    """Choose how replicas hold a result of branches that hold it in different ways.

    If all branches hold it alike, for example as own rows along one axis, it stays so.
    A partial sum in some and a whole value in others become a partial sum. Otherwise
    every branch returns the whole value.

    Args:
        facts: Sequence of `Fact`, one for each branch: how replicas hold the result
            there.

    Returns:
        Tuple of the `Need`, the form to which each branch converts the result, and the
        `Fact` of the converted result.
    """
    non_empty = [fact for fact in facts if fact.form is not Form.EMPTY]
    if not non_empty:
        return AS_IS, facts[0]
    shape = sizes.common([fact.sizes for fact in non_empty])
    forms = {fact.form for fact in non_empty}
    if (
        len({fact.form_and_axis() for fact in non_empty}) == 1
        and Form.SIZES not in forms
    ):
        multiples = (
            {fact.multiple for fact in non_empty} if non_empty[0].is_rows else {0}
        )
        if len(multiples) == 1:
            first = non_empty[0]
            return AS_IS, Fact(first.form, first.axis, shape)
    if forms == {Form.PART, Form.WHOLE} and Form.PART in forms:
        return PART, Fact(Form.PART, sizes=shape)
    return WHOLE, whole(shape)


def _plan_loop(view: OperationView, *, may_divide: bool = True) -> Decision:
    """Decide how to build a `While`, by plans of its condition and its body.

    The body is planned repeatedly, until it returns each loop variable in the form in
    which it receives it. A loop that would contain a collective is marked to run on the
    whole batch.

    Args:
        view: `OperationView` of the loop.
        may_divide: Bool, whether the loop may run on a replica's rows, and so has to be
            searched for collectives; false if it runs on the whole batch already.
            Defaults to `True`.

    Raises:
        CannotDivideError: If the forms still change after planning the body
            `_MAX_PASSES` times.
    """
    # `replace` copies references to the sets, not the sets. So what the loop adds to
    # them counts for the whole program.
    scope = dataclasses.replace(view.scope, num_loops=view.scope.num_loops + 1)
    cond, body = programs.loop_graphs(view.op)
    is_same = [
        output is given for output, given in zip(body.outputs, body.inputs, strict=True)
    ]
    facts = [
        fact if same or _is_list(given) else _without_value(fact)
        for fact, same, given in zip(view.facts, is_same, body.inputs, strict=True)
    ]
    for _ in range(_MAX_PASSES):
        body_plan = _plan_inside(body, facts, scope)
        after = [
            fact
            if same
            else _loop_variable_fact(
                fact, body_plan.fact(output), is_list=_is_list(output)
            )
            for fact, output, same in zip(facts, body.outputs, is_same, strict=True)
        ]
        if after == facts:
            break
        facts = after
    else:
        raise CannotDivideError(
            view.op,
            "has loop variables whose division among replicas changes in each pass",
            "Use an operation on the whole batch in place of the loop.",
        )
    cond_plan = _plan_inside(cond, facts, scope)
    is_converted = any(
        is_conversion(body_plan.fact(output), need_of(fact))
        for fact, output, same in zip(facts, body.outputs, is_same, strict=True)
        if not same
    )
    if may_divide and (
        is_converted
        or converts(cond_plan, scope.effects)
        or converts(body_plan, scope.effects)
    ):
        # A collective inside of a loop would deadlock, because the replicas of one
        # process would wait for each other. So the loop runs on the whole batch.
        scope.whole.add(view.op)
    needs = [
        AS_IS if same else need_of(fact)
        for fact, same in zip(facts, is_same, strict=True)
    ]
    return Decision(needs, facts, plans=[cond_plan, body_plan], details=is_same)


def _without_value(fact: Fact) -> Fact:
    """Return the `Fact` of a tensor whose elements a loop may change.

    It has the form and the sizes of `fact`, but no known elements; integers that follow
    from sizes become whole.
    """
    if fact.form is Form.SIZES:
        return whole(fact.sizes)
    return Fact(fact.form, fact.axis, fact.sizes)


def converts(plan: Plan, effects: Mapping[Any, Sequence[Any]]) -> bool:
    """Return whether a planned graph gathers or sums over replicas.

    The result is false for a graph with an update, which reduces gradients itself.

    Args:
        plan: `Plan` of the graph.
        effects: Dict from a graph to its effects, such as updates.
    """
    if any(
        effect.tensors and effect.kind != "as is"
        for effect in effects.get(plan.graph, ())
    ):
        # A graph with an update is not counted as one with conversions: the update
        # reduces gradients itself, and raises an error where a loop does not allow it.
        # Effects without tensors, or with tensors as they are, only observe the step.
        return False
    decisions = [plan.decisions[op] for op in plan.live if op in plan.decisions]
    return any(True for _ in plan.conversions()) or any(
        decision.has_collective
        or any(converts(inner, effects) for inner in decision.plans)
        for decision in decisions
    )


def is_conversion(fact: Fact, need: Need) -> bool:
    """Return whether the needed form of a tensor requires other replicas' data.

    If so, a replica gathers or sums it. A whole tensor never does: a replica can slice
    it.

    Args:
        fact: `Fact` with the form in which replicas hold the tensor.
        need: `Need` with the needed form.
    """
    if fact.form is Form.PART:
        return need.kind in (NeededForm.WHOLE, NeededForm.ROWS)
    if fact.is_rows:
        is_other = need.kind is NeededForm.ROWS and need.axis != fact.axis
        return is_other or need.kind in (NeededForm.WHOLE, NeededForm.PART)
    return fact.form is Form.LOCAL and need.kind is NeededForm.WHOLE


def _is_list(tensor: Any) -> bool:
    """Return whether a tensor holds a list of tensors or an optional value."""
    return tensor.dtype == tf.variant


def _loop_variable_fact(before: Fact, after: Fact, *, is_list: bool) -> Fact:
    """Return a `Fact` that holds for a loop variable before and after an iteration.

    A `Fact` says how a replica holds a tensor, such as its own rows, and its sizes.

    Args:
        before: `Fact` of the variable before an iteration.
        after: `Fact` of the variable after it.
        is_list: Bool, whether the variable is a list of tensors.
    """
    if before.form is Form.EMPTY or after.form is Form.EMPTY:
        fact = after if before.form is Form.EMPTY else before
        return fact if is_list else _without_value(fact)
    if is_list and before == after:
        return before
    after = _without_value(after)
    shape = sizes.common([before.sizes, after.sizes])
    if before.form_and_axis() == after.form_and_axis():
        return Fact(before.form, before.axis, shape)
    first = (before.sizes or (sizes.UNKNOWN,) * (after.axis + 1))[after.axis]
    is_whole_first = before.form is Form.WHOLE and not is_list
    if is_whole_first and after.is_rows and first.kind == "rows":
        # The initial value of the loop variable, such as zeros, is whole, but each
        # iteration returns a replica's own rows of the variable. So each replica begins
        # with its own rows of the initial value.
        return Fact(Form.ROWS, after.axis, after.sizes)
    if {before.form, after.form} == {Form.WHOLE, Form.PART}:
        return Fact(Form.PART, sizes=shape)
    return whole(shape)


_WITH_GRAPHS = {
    **dict.fromkeys(_BRANCHES, _plan_branches),
    **dict.fromkeys(LOOPS, _plan_loop),
}
