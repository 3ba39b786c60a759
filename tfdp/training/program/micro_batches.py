"""Plan of a step whose rows a replica computes in several parts, one after another.

A micro-batch is to a replica what a replica is to the global batch: a block of its
rows. So a loop over the micro-batches builds what depends on rows, with the rules for
replicas, and adds up the partial sums. All other operations run once, on the sums:

    stage 0: reads of variables -> loop 0: parts of sums -> stage 1: their totals
      -> [loop 1, for what depends on rows and on these totals -> ...]
      -> last stage: all that changes a state, such as updates and metrics
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdp.ground._compat import graphs, programs
from tfdp.training.program.facts import Fact, Form, is_known
from tfdp.training.program.liveness import PRUNED
from tfdp.training.program.plan import Plan, converts, in_order, is_conversion
from tfdp.training.program.rules.state import (
    READS,
    may_write_state,
    prints_or_summarizes,
)
from tfdp.training.program.view import CannotDivideError, Decision, Need

# Each loop over micro-batches repeats what it needs of earlier loops, so their number
# is limited. Masks and weights of rows need two loops; a model with a synchronized
# BatchNormalization in every layer would need as many loops as layers.
_MAX_LOOPS = 3
_DIVIDED = (Form.ROWS, Form.LOCAL, Form.PART)
_ADVICE = "Give the number of batches of an update: `GradientAccumulation(steps=4)`."


@dataclasses.dataclass
class MicroPlan:
    """Where each operation of a program runs: in a loop over micro-batches, or once.

    Operations that run once form stages: stage `i` runs just before loop `i`, and the
    last stage after all loops.

    Args:
        plan: `Plan` of the program.
        inside: Set of operations that run in loops.
        stages: Dict from an operation that runs once to the index of its stage.
        forwarded: Dict from a read of a variable to a pair: the tensor that the step
            assigns to the variable before the read, and the form in which replicas
            assign it.
        results: List of lists of the tensors that each loop returns.
        loops: List of lists of the operations of each loop, in order.
    """

    plan: Plan
    inside: set[Any] = dataclasses.field(default_factory=set)
    stages: dict[Any, int] = dataclasses.field(default_factory=dict)
    forwarded: dict[Any, tuple[Any, Need]] = dataclasses.field(default_factory=dict)
    results: list[list[Any]] = dataclasses.field(default_factory=list)
    loops: list[list[Any]] = dataclasses.field(default_factory=list)

    @property
    def last_stage(self) -> int:
        """Int, index of the stage after all loops, in which states change."""
        return len(self.loops)

    def is_built_per_stage(self, op: Any) -> bool:
        """Return whether every loop and stage that needs an operation builds it itself.

        It is `True` if the outputs are known numbers, follow from sizes, or are lists
        without elements.
        """
        facts = self.plan.decisions[op].outputs if op in self.plan.decisions else ()
        return bool(facts) and all(
            fact.form in (Form.SIZES, Form.EMPTY)
            or (fact.form is Form.WHOLE and is_known(fact))
            for fact in facts
        )


def plan_micro_batches(
    plan: Plan, effects: Mapping[Any, Sequence[Any]], results: Sequence[Any]
) -> MicroPlan:
    """Decide for each operation whether it runs in a loop over micro-batches or once.

    Operations that run once form stages: one before each loop, and one after the last
    loop, in which the states change.

    Args:
        plan: `Plan` of the program: how replicas divide its operations.
        effects: Dict from a graph to its effects, actions such as updates, see
            `tfdp.ground.base.program_trace`.
        results: Sequence of the tensors that are needed after the step.

    Raises:
        CannotDivideError: If the step cannot be divided into micro-batches.
    """
    return _Planner(plan, effects, results).make()


class _Planner:
    """Planner that assigns each operation to a loop over micro-batches, or to a stage.

    A stage runs once: one before each loop, and one after the last loop, in which the
    states change.

    Args:
        plan: `Plan` of the program.
        effects: Dict from a graph to its effects, actions such as updates.
        results: Sequence of the tensors that are needed after the step.
    """

    def __init__(
        self,
        plan: Plan,
        effects: Mapping[Any, Sequence[Any]],
        results: Sequence[Any],
    ) -> None:
        self._plan = plan
        self._effects = effects
        self._micro = MicroPlan(plan)
        self._order = [op for op in in_order(plan.graph) if op in plan.live]
        self._needed_after = list(results)
        for effect in effects.get(plan.graph, ()):
            self._needed_after += effect.symbolic_tensors()
        # Operations that change a state, or use a state that the step may have changed.
        # They run in the last stage, after all micro-batches, and so only once.
        self._late: set[Any] = set()
        # For each operation, the index of the first loop or stage that can run it: it
        # must come after all loops whose combined results the operation needs.
        self._levels: dict[Any, int] = {}
        # Tensors that a loop must return, by their `id`, because an operation after the
        # loop needs their values combined over all micro-batches.
        self._frontier: dict[int, Any] = {}

    def make(self) -> MicroPlan:
        """Divide the operations among loops and stages; return the `MicroPlan`."""
        for op in self._order:
            if programs.marker_of(op) == "rows of a replica":
                raise CannotDivideError(
                    op,
                    "normalizes the rows of each micro-batch separately",
                    f"Use another normalization. {_ADVICE}",
                )
            if not self._micro.is_built_per_stage(op) and self._is_inside(op):
                self._micro.inside.add(op)
        self._find_states()
        for op in self._order:
            self._levels[op] = self._level(op)
        for tensor in self._needed_after:
            if tensor.op in self._micro.inside:
                self._frontier[id(tensor)] = tensor
        self._set_loops()
        return self._micro

    def _is_inside(self, op: Any) -> bool:
        """Return whether an operation runs in a loop over micro-batches."""
        decision = self._plan.decisions.get(op)
        if decision is None or self._communicates(decision) or prints_or_summarizes(op):
            return False
        if op.type in ("Placeholder", "PlaceholderWithDefault"):
            return False
        if self._changes_state(op, self._plan):
            return False
        for tensor, need in self._plan.needs(op):
            fact = self._fact(tensor)
            is_own = fact.form is Form.PART and not is_conversion(fact, need)
            if is_own and tensor.op not in self._micro.inside:
                # A partial sum from outside of the loop, such as the state of a metric,
                # must count once. In the loop it would count in each micro-batch.
                return False
        return self._has_rows(op, decision)

    def _has_rows(self, op: Any, decision: Decision) -> bool:
        """Return whether an operation reads or returns rows, or reads partial sums.

        Values of a single replica count as rows, and so does a variable's handle that
        is the output of a loop over rows.
        """
        if any(fact.form in (Form.ROWS, Form.LOCAL) for fact in decision.outputs):
            return True
        for tensor, need in self._plan.needs(op):
            fact = self._fact(tensor)
            if fact.form in _DIVIDED and not is_conversion(fact, need):
                return True
            if tensor.dtype == tf.resource and tensor.op in self._micro.inside:
                # This handle of a variable is an output of a loop in the program. That
                # loop runs on the rows of a micro-batch, so operations that read the
                # handle run on them as well.
                return True
        return False

    def _fact(self, tensor: Any) -> Fact:
        """Return the `Fact` of a tensor, or that of a whole tensor if it has none.

        A whole tensor has the same value on all replicas.
        """
        return self._plan.facts.get(id(tensor)) or Fact(Form.WHOLE)

    def _communicates(self, decision: Decision) -> bool:
        """Return whether an operation has collectives, itself or in inner graphs."""
        inner = (converts(plan, self._effects) for plan in decision.plans)
        return decision.has_collective or any(inner)

    def _changes_state(self, op: Any, plan: Plan) -> bool:
        """Return whether an operation, itself or in inner graphs, writes a state."""
        if may_write_state(op):
            return op.type not in PRUNED
        return op in plan.decisions and any(
            self._effects.get(inner.graph)
            or any(self._changes_state(each, inner) for each in inner.live)
            for inner in plan.decisions[op].plans
        )

    def _find_states(self) -> None:
        """Mark operations that write a state, or use a written one, for the last stage.

        The last stage runs once, after all loops over micro-batches.

        A read of a variable after its assignment may come earlier: it is replaced by
        the assigned tensor, see `MicroPlan.forwarded`.
        """
        # For each changed state, the assigned tensor and its form, since a later read
        # can take the tensor instead. `None` if the change was not an assignment: a
        # read then waits for the last stage.
        changed: dict[Any, Any] = {}
        positions = {op: i for i, op in enumerate(self._plan.graph.get_operations())}
        updated_at = self._position_of_update(positions)
        for op in self._order:
            states = [id(t) for t in op.inputs if t.dtype == tf.resource]
            reads = bool(states) or op.type == "Placeholder"
            if self._changes_state(op, self._plan):
                self._late.add(op)
                is_set = op.type == "AssignVariableOp"
                need = self._plan.decisions[op].needs[-1] if is_set else None
                value = (op.inputs[1], need) if is_set else None
                changed |= dict.fromkeys(states, value)
            elif reads and positions[op] >= updated_at and op.type != "VariableShape":
                self._late.add(op)
            elif not changed.keys().isdisjoint(states):
                assigned = changed.get(states[0])
                if op.type in READS and assigned is not None:
                    self._micro.forwarded[op] = assigned
                else:
                    self._late.add(op)

    def _position_of_update(self, positions: Mapping[Any, int]) -> float:
        """Return the position in the graph of a step's first update, or infinity.

        `positions` is a dict from each operation of the graph to its position in it.
        """
        effects = self._effects.get(self._plan.graph, ())
        # Effects of the kind "as is" only observe a tensor, so they are not updates.
        found = [effect.position for effect in effects if effect.kind != "as is"]
        for op in self._order:
            plans = self._plan.decisions[op].plans if op in self._plan.decisions else ()
            if any(self._effects.get(plan.graph) for plan in plans):
                found.append(positions[op])
        return min(found, default=float("inf"))

    def _level(self, op: Any) -> int:
        """Return the index of the first loop or stage in which an operation can run.

        It is a loop's index for an operation on rows of micro-batches, and a stage's
        for another one. Stage `i` runs just before loop `i`.

        The tensors that a loop has to return for the operation are added to
        `_frontier`. A `CannotDivideError` is raised if it has rows, but fits no loop.
        """
        level = _MAX_LOOPS if op in self._late else 0
        is_inside = op in self._micro.inside
        pairs = self._plan.needs(op)
        if op in self._micro.forwarded:
            pairs = [self._micro.forwarded[op]]
        for tensor, need in pairs:
            before = self._levels.get(tensor.op, 0)
            if tensor.op not in self._micro.inside or self._micro.is_built_per_stage(
                op
            ):
                level = max(level, before)
                continue
            crosses = not is_inside or is_conversion(self._fact(tensor), need)
            if crosses:
                self._frontier[id(tensor)] = tensor
            level = max(level, before + crosses)
        if is_inside and level >= _MAX_LOOPS:
            raise CannotDivideError(
                op,
                "depends on rows and on what the whole batch has changed or summed",
                _ADVICE,
            )
        return min(level, _MAX_LOOPS)

    def _set_loops(self) -> None:
        """Set `results`, `loops` and `stages` of the `MicroPlan`.

        `results` are the tensors that each loop returns, `loops` the operations of each
        loop, and `stages` the stage of each operation outside of loops. They follow
        from an operation's level: the index of the first loop or stage that can run it.
        """
        levels, micro = self._levels, self._micro
        num_loops = 1 + max((levels[t.op] for t in self._frontier.values()), default=-1)
        for level in range(num_loops):
            returned = [t for t in self._frontier.values() if levels[t.op] == level]
            # Gradients have to be returned in the order of the program, because they
            # fill their buckets in the order in which they are returned.
            returned.sort(key=graphs.op_position)
            for tensor in returned:
                self._check_returned(tensor)
            micro.results.append(returned)
            needed = self._needed_in_loop(returned)
            micro.loops.append([op for op in self._order if op in needed])
        for op in self._order:
            if op not in micro.inside:
                micro.stages[op] = min(levels[op], num_loops)

    def _needed_in_loop(self, returned: Sequence[Any]) -> set:
        """Return the set of operations that a loop runs to compute what it returns.

        `returned` are the tensors of the program that the loop returns.
        """
        pending, needed = [tensor.op for tensor in returned], set()
        while pending:
            op = pending.pop()
            if op not in needed and op in self._micro.inside:
                needed.add(op)
                pending += [
                    tensor.op
                    for tensor, need in self._plan.needs(op)
                    if not is_conversion(self._fact(tensor), need)
                ]
        return needed

    def _check_returned(self, tensor: Any) -> None:
        """Raise a `CannotDivideError` if a loop cannot combine a tensor's values.

        A loop combines the values of all micro-batches, except of lists, resources,
        rows along another axis than the first, and values of one replica alone.
        """
        fact = self._fact(tensor)
        is_list = tensor.dtype in (tf.variant, tf.resource)
        is_other_axis = fact.is_rows and fact.axis != 0
        if is_list or is_other_axis or fact.form is Form.LOCAL:
            raise CannotDivideError(
                tensor.op,
                "has a result that cannot be put together from micro-batches",
                _ADVICE,
            )
