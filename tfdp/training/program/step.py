"""The step of a replica: its part of the single-device program.

step -> traced once, as on one device -> plan -> built on each replica by the plan
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfdp.ground._compat import graphs, programs, tensor_reads, xla_lowering
from tfdp.ground.base import xla
from tfdp.ground.base.loops import Loop
from tfdp.ground.base.program_trace import ProgramTrace, tracing
from tfdp.training.data.rows import count_of, first_tensor, take_rows
from tfdp.training.program.batch import BatchPlaceholder, batch_placeholders
from tfdp.training.program.builder import Builder
from tfdp.training.program.checks import check_exchange, check_step
from tfdp.training.program.divisions import warn_of_division
from tfdp.training.program.facts import Form
from tfdp.training.program.gathers import (
    Conversion,
    conversions_before_update,
    conversions_of,
    describe_operation,
    ids_gathered_by_update,
    operations_of,
    place_of,
)
from tfdp.training.program.logs import LogTail, find_log_tail
from tfdp.training.program.micro_batches import MicroPlan, plan_micro_batches
from tfdp.training.program.micro_builder import StagedBuilder
from tfdp.training.program.plan import (
    CannotDivideError,
    Plan,
    ProgramProperties,
    make_plan,
)
from tfdp.training.program.replica import Replica, Rows
from tfdp.training.program.rules.state import may_write_state, prints_or_summarizes
from tfdp.training.program.view import AS_IS, WHOLE
from tfdp.training.reduction.training_group import TrainingGroup
from tfdp.training.replicas.variables import MetricVariable
from tfdp.training.step.step import RowDivider


@dataclasses.dataclass
class _Traced:
    """A traced step with its plan, ready to be built on a replica.

    Args:
        trace: `ProgramTrace` of the step.
        parts: List of `BatchPlaceholder`, one for each part of the batch, such as `x`.
        results: Nest of tensors and other values that the step returns.
        plan: `Plan` of the graph: how replicas divide its operations.
        scope: `ProgramProperties` of the plan.
        micro: `MicroPlan`, or `None` unless rows are computed in micro-batches.
        tail: `LogTail` that computes the logs, or `None` if the step returns rows.
        conversions: List of `Conversion`, each a tensor that is gathered or summed over
            replicas, in the order of the program.
        operations: List of pairs of a signature, which workers compare, and its
            operation. Empty with one worker.
    """

    trace: ProgramTrace
    parts: list[BatchPlaceholder]
    results: Any
    plan: Plan
    scope: ProgramProperties
    micro: MicroPlan | None
    tail: LogTail | None
    conversions: list[Conversion]
    operations: list[tuple[str, Any]]


class DividedStep:
    """A step that Keras passes to `strategy.run`, divided among the replicas.

    Args:
        strategy: A tfdp strategy.
        loop: `Loop` of Keras that runs the step.
        function: Callable, the step, written for one device.
        others: Collection of ints, flat positions of the arguments whose number of
            rows may differ from that of the first. Defaults to none.
        divider: `RowDivider` that divides a replica's rows into micro-batches, or
            `None`. Defaults to `None`.
    """

    def __init__(
        self,
        strategy: Any,
        loop: Loop,
        function: Callable,
        others: Collection[int] = (),
        divider: RowDivider | None = None,
    ) -> None:
        self._strategy = strategy
        self._loop = loop
        self._function = function
        self._others = others
        self._divider = divider
        # A step of `predict` returns rows; the steps of other loops return logs.
        self._returns_rows = "predict" in loop.name
        self._traced: _Traced | None = None
        self._graph: Any = None
        self._captures: dict[Any, dict[int, Any]] = {}
        # The `gates` of each local replica's `StagedBuilder`. They are kept until the
        # last local replica has built its step, and are then connected.
        self._gates: list[list[tuple[Any, Any]]] = []

    @property
    def tail(self) -> LogTail | None:
        """`LogTail` that computes logs from the replicas' results.

        It is `None` before the step is traced, and in `predict`, which returns rows.
        """
        return None if self._traced is None else self._traced.tail

    def __call__(self, args: tuple, group: TrainingGroup, rows: Rows) -> Any:
        """Build the step of the running replica.

        Args:
            args: Tuple of nests of tensors, the rows of the replica.
            group: `TrainingGroup` of the replicas that share the program.
            rows: `Rows` of the batch and of the replica.

        Returns:
            Nest of rows that the step returns, or list of tensors from which `tail`
            computes logs.

        Raises:
            ValueError: If the step cannot be divided, or differs between workers.
        """
        # A trace captures tensors of the graph in which it was created, and cannot be
        # used in another one. So the program is traced again there, as in the graph of
        # a function that XLA compiles.
        graph = tf.compat.v1.get_default_graph()
        if self._divider is not None and xla.is_tracing():
            raise xla.CannotCompileError("rows are computed in micro-batches")
        if self._traced is None or self._graph is not graph:
            self._traced, self._graph = (
                self._trace_for_any_row_count(args, group),
                graph,
            )
            self._check(self._traced, rows, group)
        found = self._traced
        flat = tf.nest.flatten(args)
        replica = Replica(self._strategy, group, rows)
        tensors = {
            id(placeholder): tensor
            for part, own in zip(found.parts, flat, strict=True)
            for (placeholder, _), tensor in zip(
                part.facts, part.local_values(own, replica), strict=True
            )
        }
        for outer, inner in found.trace.graph.captures:
            variable = self._variable_of(outer)
            own = (
                outer if variable is None else variable.values[replica.local_id].handle
            )
            tensors.setdefault(id(inner), own)
        builder = self._builder(found, replica, tensors)
        builder.run()
        if isinstance(builder, StagedBuilder):
            self._join_gates(builder)
        if found.tail is not None:
            return found.tail.values(builder)
        return tf.nest.map_structure(
            lambda result: self._rows_of(builder, replica, result), found.results
        )

    def _builder(self, found: _Traced, replica: Replica, tensors: dict) -> Builder:
        """Return the builder of a traced step on a replica.

        It is a `StagedBuilder` if rows are computed in micro-batches.

        Args:
            found: `_Traced`, the step.
            replica: `Replica`.
            tensors: Dict from the `id` of an input of the program to its value.
        """
        known = found.trace, found.plan, found.scope, replica, tensors
        if found.micro is None or self._divider is None:
            return Builder(*known)
        return StagedBuilder(
            *known,
            micro=found.micro,
            num_parts=self._divider.num_parts(),
            begin_changes=self._divider.begin_changes,
            is_local=self._strategy.extended.worker_group.num_workers == 1,
        )

    def _join_gates(self, builder: StagedBuilder) -> None:
        """Let a replica use a loop's results once all local replicas have run the loop.

        The loops are those over micro-batches. Each has a gate: an operation before
        which no result of the loop is used. Once the method has been called for each
        local replica, it makes the gates of all wait until all have run the loop.

        Args:
            builder: `StagedBuilder` of a local replica, which has run.
        """
        self._gates.append(builder.gates)
        if len(self._gates) < self._strategy.extended.num_local:
            return
        for loop in zip(*self._gates, strict=True):
            arrived = [own for own, _ in loop]
            for _, gate in loop:
                graphs.add_control_inputs(gate, arrived)
        self._gates = []

    def _rows_of(self, builder: Builder, replica: Replica, result: Any) -> Any:
        """Return this replica's rows of a step's result; a scalar is returned whole.

        Args:
            builder: `Builder` that has built the step.
            replica: `Replica` that runs it.
            result: Tensor of the program or another value that the step returns.
        """
        if isinstance(result, (tf.RaggedTensor, tf.SparseTensor)):
            return self._rows_of_composite(builder, result)
        if not tf.is_symbolic_tensor(result):
            return result
        fact = builder.fact(result)
        if result.shape.rank == 0:
            return builder.get(result, WHOLE)
        if (fact.is_rows and fact.axis == 0) or fact.form is Form.LOCAL:
            return builder.get(result, AS_IS)
        # The number of rows of this result may differ from that of the batch, since an
        # argument of the step may have other rows. So each replica returns an equal
        # share of the result's rows.
        return replica.take_equal_share(builder.get(result, WHOLE))

    @staticmethod
    def _rows_of_composite(builder: Builder, result: Any) -> Any:
        """Return the rows that the replica has of a ragged or sparse result.

        Args:
            builder: `Builder` that has built the step.
            result: Ragged or sparse tensor of the program.
        """
        parts = tf.nest.flatten(result, expand_composites=True)
        whole = tf.nest.pack_sequence_as(
            result, [builder.get(part, WHOLE) for part in parts], expand_composites=True
        )
        begin, size = builder.first_row, builder.own_rows
        return take_rows(whole, tf.cast(begin, tf.int64), tf.cast(size, tf.int64))

    def _check(self, found: _Traced, rows: Rows, group: TrainingGroup) -> None:
        """Check a step that was just traced; compare the first one between workers.

        Raises:
            ValueError: If steps differ between workers, if a gathered tensor would not
                fit in memory, or if options or a `GradientExchange` forbid gathers.
        """
        trace, plan, conversions = found.trace, found.plan, found.conversions
        in_update = set(ids_gathered_by_update(trace, plan))
        check_step(
            self._strategy,
            self._loop,
            conversions if group.size > 1 else [],
            in_update,
            found.operations,
            rows.total if isinstance(rows.total, int) else self._loop.batch_rows,
        )
        before = conversions_before_update(conversions, trace, plan, in_update)
        check_exchange(self._loop, before)
        warn_of_division(
            trace,
            self._strategy.num_replicas_in_sync,
            self._strategy.extended.replica_count_names,
            self._loop.model,
        )

    def _trace_for_any_row_count(self, args: tuple, group: TrainingGroup) -> _Traced:
        """Trace the step for any number of rows or, where that fails, for a fixed one.

        A layer may need the number of rows in the static shape of its input.

        Args:
            args: Tuple of nests of tensors, the rows of a replica.
            group: `TrainingGroup` of the replicas that share the program.
        """
        try:
            return self._trace(args, 0, is_of_all=group.is_all)
        except (TypeError, ValueError):
            first = first_tensor(args)
            is_known = isinstance(first, tf.Tensor) and first.shape[0]
            if not is_known:
                raise
        return self._trace(args, group.size, is_of_all=group.is_all)

    def _trace(self, args: tuple, num_replicas: int, *, is_of_all: bool) -> _Traced:
        """Trace the step as on one device, and plan how replicas divide it.

        Args:
            args: Tuple of nests of tensors, the rows of a replica.
            num_replicas: Int, number of replicas, each with as many rows as this one:
                the step is traced for their static total. Or 0 to trace it for any
                number of rows.
            is_of_all: Bool, whether all replicas share the program. If true, their logs
                are merged in each step, unless the loop has a `GradientExchange`; see
                `find_log_tail`.

        Returns:
            `_Traced`: the trace, its `Plan`, and what checks and logs need of it.

        Raises:
            ValueError: If the step cannot be divided among replicas.
        """
        graph = programs.ProgramGraph()
        trace = ProgramTrace(graph)
        flat = tf.nest.flatten(args)
        with graph.as_default(), tracing(trace):
            parts = batch_placeholders(flat, num_replicas, self._others)
            values = [part.value for part in parts]
            results = self._function(*tf.nest.pack_sequence_as(args, values))
        needed = [
            tensor
            for tensor in tf.nest.flatten(results, expand_composites=True)
            if tf.is_symbolic_tensor(tensor)
        ]
        facts = {id(tensor): fact for part in parts for tensor, fact in part.facts}
        written = self._written_resources(graph)
        shared = self._shared_states(handle for _, handle in written)
        if self._loop.trains:
            # They replace those of an earlier trace, maybe of an earlier `compile`.
            self._strategy.extended.step_writes[self._loop.model] = {
                id(handle): (handle, place_of(op)) for op, handle in written
            }
        scope = ProgramProperties(
            self._is_metric,
            trace.effects,
            lambda op: any(id(self._outermost(t)) in shared for t in op.inputs),
        )
        name = self._loop.name
        with _naming_operations(f"A step of `{name}` cannot be divided among replicas"):
            plan = make_plan(graph, facts, needed, scope)
        tail = micro = None
        if not self._returns_rows:
            is_merged = is_of_all and self._loop.exchange is None
            tail = find_log_tail(plan, results, scope, is_of_all=is_merged)
            if self._divider is not None:
                ends = [tensor for tensor, _, _ in tail.cuts]
                with _naming_operations(
                    f"A step of `{name}` cannot be divided into micro-batches"
                ):
                    micro = plan_micro_batches(plan, trace.effects, ends)
        cuts = [] if tail is None else [cut[:2] for cut in tail.cuts]
        conversions = conversions_of(trace, plan, cuts)
        has_one_worker = self._strategy.extended.worker_group.num_workers == 1
        operations = [] if has_one_worker else operations_of(trace, plan, needed)
        return _Traced(
            trace, parts, results, plan, scope, micro, tail, conversions, operations
        )

    def _variable_of(self, handle: Any) -> Any:
        """Return the distributed variable of a resource handle, or `None`."""
        return self._strategy.extended.variable_of(handle)

    def _is_metric(self, handle: Any) -> bool:
        """Return whether a handle is that of a metric's state summed over replicas."""
        variable = self._variable_of(self._outermost(handle))
        return isinstance(variable, MetricVariable) and variable.is_merged

    def _written_resources(self, graph: Any) -> list[tuple[Any, Any]]:
        """Return pairs of an operation of a graph and a resource that it may write."""
        return [
            (op, outer)
            for op in xla_lowering.all_operations(graph)
            if may_write_state(op) and not prints_or_summarizes(op)
            for outer in map(self._outermost, op.inputs)
            if outer.dtype == tf.resource
        ]

    def _shared_states(self, written: Iterable[Any]) -> set[int]:
        """Return the `id`s of those written resources that local replicas share.

        Examples are tables, and variables created outside of the scope.

        Args:
            written: Iterable of resource tensors outside of the step's graphs.
        """
        if self._strategy.extended.num_local == 1:
            return set()
        return {id(outer) for outer in written if self._variable_of(outer) is None}

    def _outermost(self, tensor: Any) -> Any:
        """Return the value outside of all graphs that a placeholder stands for.

        A function's graph has a placeholder for each tensor that it captures from the
        graph around it. A tensor that is not such a placeholder is returned itself.
        """
        while tf.is_symbolic_tensor(tensor):
            if tensor.graph not in self._captures:
                self._captures[tensor.graph] = {
                    id(inner): outer for outer, inner in tensor.graph.captures
                }
            outer = self._captures[tensor.graph].get(id(tensor))
            if outer is None:
                break
            tensor = outer
        return tensor


def unsaved_writes(strategy: Any, model: Any, saved: Iterable[Any]) -> list[str]:
    """Describe the lines of a model's training steps that write other states.

    Args:
        strategy: A tfdp strategy.
        model: Keras model.
        saved: Iterable of Keras variables and `tf.Variable`s, which are saved.

    Returns:
        List of strings, such as "train.py:12: `queue.assign(x)`", one for each state
        that the step traced last may write and that is not among `saved`.
    """
    values = map(tensor_reads.value_of, saved)
    components = [c for value in values for c in getattr(value, "values", (value,))]
    known = {id(component.handle) for component in components}
    found = strategy.extended.step_writes.get(model, {})
    return [line for key, (_, line) in found.items() if key not in known]


def rows_of_replica(
    group: TrainingGroup,
    args: tuple,
    total: tf.Tensor | None,
    counts: Mapping[int, tf.Tensor],
    *,
    are_alike: bool,
) -> Rows:
    """Count the rows of the running replica, and those of the replicas before it.

    Args:
        group: `TrainingGroup` of the replicas that share the program.
        args: Tuple of nests of tensors, the rows of the running replica.
        total: Scalar tensor, rows of all replicas, where a batch is divided equally; or
            `None` to gather the numbers of rows from the replicas.
        counts: Dict from the rank of each local replica to its number of rows, an int32
            scalar.
        are_alike: Bool, whether all replicas have the same static number of rows. The
            result then has ints, and nothing is gathered.

    Returns:
        `Rows` of the batch and of the running replica.
    """
    first = first_tensor(args)
    if first is None:
        return Rows(0, 0, 0, may_be_empty=False)
    own = tf.cast(count_of(first), tf.int32)
    static = first.shape[0]
    rank, size = group.rank, group.size
    if are_alike:
        return Rows(static, static * rank, static * size, may_be_empty=False)
    may_lack_all = not group.is_all and not static
    if size == 1:
        return Rows(own, 0, own, not static, may_lack_all)
    if total is not None and group.is_all:
        count = tf.cast(total, tf.int32)
        least, extra = count // size, count % size
        before = rank * least + tf.minimum(rank, extra)
        return Rows(own, before, count, not static)
    if counts.keys() >= set(group.ranks):
        all_rows = tf.stack([counts[other] for other in group.ranks])
    else:
        all_rows = group.gather(own[tf.newaxis])
    return Rows(
        own,
        tf.reduce_sum(all_rows[:rank]),
        tf.reduce_sum(all_rows),
        not static,
        may_lack_all,
    )


@contextlib.contextmanager
def _naming_operations(problem: str) -> Iterator[None]:
    """Turn a `CannotDivideError` in the context into a `ValueError` for the user.

    `problem` begins its message, which then names the operation and the user's line.
    """
    try:
        yield
    except CannotDivideError as error:
        raise ValueError(
            f"{problem}: {describe_operation(error.op)} {error.reason}. {error.advice}"
        ) from None
