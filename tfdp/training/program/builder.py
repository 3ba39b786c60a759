"""Construction of the operations of a program on one replica, by a plan.

    decision of an operation -> inputs in the forms that it needs -> the operation

An input that the replica holds in another form is converted: rows are gathered, parts
are summed, and own rows are sliced from whole tensors. An effect is an action between
two operations, such as an update of variables, which is not an operation of the graph.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.communication.collectives import timing
from tfdp.ground._compat import programs
from tfdp.ground.base import xla
from tfdp.ground.base.program_trace import ProgramTrace
from tfdp.training.program import control_flow, sizes
from tfdp.training.program.facts import Fact, Form, is_known
from tfdp.training.program.plan import Plan, ProgramProperties, with_inputs
from tfdp.training.program.replica import Replica
from tfdp.training.program.rules.state import ASSIGNMENTS, prints_or_summarizes
from tfdp.training.program.view import AS_IS, PART, WHOLE, Decision, Need, NeededForm
from tfdp.training.reduction.sparse import are_unique, marked_unique

# These operations read only the shape of their input, so `Builder.shape` builds their
# results from the sizes that the plan knows, where it can.
_SHAPE_QUERIES = frozenset(("Shape", "Size", "ShapeN", "TensorListElementShape"))


@dataclasses.dataclass
class Builder:
    """Builds a replica's copy of one graph of the program, the step as on one device.

    Args:
        trace: `ProgramTrace` of the step, with its effects (actions such as updates).
        plan: `Plan` of the graph: how replicas divide its operations.
        scope: `ProgramProperties`, properties of the whole program.
        replica: `Replica`, with its rows and its collectives.
        tensors: Dict from the `id` of a tensor of the program to the tensor that the
            replica holds.
        parent: Pair of the `Builder` of the outer graph, and a dict from the `id` of a
            placeholder of this graph to the tensor of the outer graph for which it
            stands; or `None` for the outermost graph. Defaults to `None`.
        is_in_loop: Bool, whether the graph is inside of a loop. Defaults to `False`.
    """

    trace: ProgramTrace
    plan: Plan
    scope: ProgramProperties
    replica: Replica
    tensors: dict[int, Any]
    parent: tuple[Builder, dict[int, Any]] | None = None
    is_in_loop: bool = False

    def __post_init__(self) -> None:
        self.graph = tf.compat.v1.get_default_graph()
        self._converted: dict[tuple, Any] = {}
        self._sizes: dict[tuple[int, bool], Any] = {}
        self._multiples: dict[int, Any] = {}
        self._parts: dict[int, Any] = {}
        self._operations: dict[Any, tf.Operation] = {}
        # Assignments of `Form.LOCAL` values, such as statistics of batch normalization.
        # They are delayed so that one all-reduce averages all of them.
        self._delayed: list[Any] = []

    def run(self) -> None:
        """Build all operations on which the graph's results and effects depend.

        Effects are actions such as updates. They run between the operations, and both
        follow the order of the program.
        """
        self._build_with_effects(self.plan.live)
        self._assign_statistics(is_last=self.parent is None)

    def build_inner_graph(
        self,
        plan: Plan,
        outer: Sequence[Any],
        loop_values: Mapping[int, Any] | None = None,
    ) -> Builder:
        """Build the graph of a branch, a loop or a call in TensorFlow's default graph.

        Args:
            plan: `Plan` of the inner graph.
            outer: Sequence of tensors of the program, one for each input of the graph.
            loop_values: Dict from the `id` of an input of a loop's graph to the
                replica's value of that loop variable; or `None` if the operation is not
                a loop. Defaults to `None`.

        Returns:
            `Builder` of the inner graph, which has run.
        """
        sources = {
            id(placeholder): tensor
            for placeholder, tensor in zip(plan.graph.inputs, outer, strict=True)
            if id(placeholder) not in (loop_values or {})
        }
        inner = dataclasses.replace(
            self,
            plan=plan,
            tensors=dict(loop_values or {}),
            parent=(self, sources),
            is_in_loop=self.is_in_loop or loop_values is not None,
        )
        inner.run()
        return inner

    def _build_with_effects(self, needed: Container[Any]) -> None:
        """Build the operations in `needed` and run the effects (updates), in order."""
        effects = list(self.trace.effects.get(self.plan.graph, ()))
        built: set = set()
        for position, last in enumerate(self.plan.graph.get_operations()):
            while effects and effects[0].position <= position:
                self._run_effect(effects.pop(0))
            for op in with_inputs(last, built):
                if op in needed:
                    self.build(op)
        for effect in effects:
            self._run_effect(effect)

    @property
    def own_rows(self) -> tf.Tensor:
        """Number of rows of this replica: scalar, int32."""
        return self.replica.rows.own

    @property
    def first_row(self) -> tf.Tensor:
        """Number of rows of the replicas before this one: scalar, int32."""
        return self.replica.rows.first

    @property
    def may_be_empty(self) -> bool:
        """Bool, whether this replica may have no rows and runs on a CPU without XLA."""
        is_plain = self.replica.is_on_cpu and not xla.is_tracing()
        return self.replica.rows.may_be_empty and is_plain

    def fact(self, tensor: Any) -> Fact:
        """Return the `Fact` of a tensor of the program: how it is held, and its sizes.

        The tensor may be of a graph around this one, such as a tensor of an update. A
        tensor without a recorded `Fact` counts as whole.
        """
        found = self.plan.facts.get(id(tensor))
        if found is None and self.parent and tensor.graph is not self.plan.graph:
            return self.parent[0].fact(tensor)
        return Fact(Form.WHOLE) if found is None else found

    def facts_of(self, tensors: Sequence[Any]) -> list[Fact]:
        """Return the `Fact` of each tensor: how replicas hold it, and its sizes."""
        return [self.fact(tensor) for tensor in tensors]

    def need(self, op: Any, index: int) -> Need:
        """Return the form in which an operation needs its input number `index`.

        A form is, for example, a replica's own rows, a partial sum or the whole tensor.
        """
        return self.plan.decisions[op].needs[index]

    def constant(self, value: Any, dtype: tf.DType) -> tf.Tensor:
        """Create a constant of a dtype from a number or an array of numbers."""
        return tf.constant(np.asarray(value).astype(dtype.as_numpy_dtype), dtype)

    def multiple(self, tensor: Any) -> Any:
        """Return how many entries a tensor has along its axis of rows for each row.

        It is 2, for example, after a reshape of `[rows, 4]` to `[2 * rows, 2]`.

        Returns:
            Int if it is known before the step runs, or else a scalar int32 tensor,
            which may need an all-reduce.
        """
        fact = self.fact(tensor)
        if fact.multiple is not None:
            return fact.multiple
        if id(tensor) not in self._multiples:
            own = self.own_entries(tensor)
            total = self.replica.sum([own])[0]
            self._multiples[id(tensor)] = total // tf.maximum(
                self.replica.rows.total, 1
            )
        return self._multiples[id(tensor)]

    def entries(self, tensor: Any) -> tf.Tensor:
        """Return the size of a tensor's axis of rows, summed over all replicas.

        It is a scalar int32 tensor.
        """
        return self.replica.rows.total * self.multiple(tensor)

    def own_entries(self, tensor: Any) -> tf.Tensor:
        """Return the size of a tensor's axis of rows on this replica.

        It is a scalar int32 tensor.
        """
        fact = self.fact(tensor)
        if fact.multiple is not None:
            return self.own_rows * fact.multiple
        return tf.shape(self.get(tensor, AS_IS))[fact.axis]

    def first_entry(self, multiple: int | None, own_shape: Any) -> tf.Tensor:
        """Return where this replica's block begins along the axis of rows.

        Args:
            multiple: Int, number of entries per row, or `None` if not known.
            own_shape: Integer tensor, the shape of the tensor on this replica, whose
                first axis is that of rows.

        Returns:
            Scalar int32 tensor, an index into the tensor of all replicas.
        """
        if multiple is not None:
            return self.first_row * multiple
        own = tf.cast(own_shape[0], tf.int32)
        return self.first_row * (own // tf.maximum(self.own_rows, 1))

    def take_rows(self, tensor: Any, whole: tf.Tensor) -> tf.Tensor:
        """Slice the rows of this replica from a whole tensor.

        Args:
            tensor: Tensor of the program, which is sharded by rows.
            whole: Tensor, the rows of all replicas.
        """
        fact = self.fact(tensor)
        own = self.replica.take_rows(whole, fact.axis, fact.multiple)
        return self.with_shape(own, tensor, fact)

    def cache_whole(self, tensor: Any, value: tf.Tensor) -> None:
        """Cache the value of a tensor for the whole batch, to avoid a gather of it.

        `get` then returns `value` where the program's `tensor` is needed whole.
        """
        self._converted[id(tensor), WHOLE] = value

    def with_shape(self, tensor: Any, source: Any, fact: Fact) -> Any:
        """Set the static shape of a replica's tensor, and return the tensor.

        The shape is that of `source`, with this replica's number of rows. A list (a
        variant) or a resource stays as it is.

        Args:
            tensor: Tensor of this replica.
            source: Tensor of the program whose value on this replica is `tensor`.
            fact: `Fact` of `source`, which says whether and along which axis it has
                rows.
        """
        if tensor.dtype not in (tf.variant, tf.resource):
            tensor.set_shape(self.own_static_shape(source, fact))
        return tensor

    def own_static_shape(self, source: Any, fact: Fact) -> tf.TensorShape:
        """Return the static shape that a tensor of the program has on this replica.

        The size of the axis of rows is this replica's, or `None` if it is not static.

        Args:
            source: Tensor of the program.
            fact: `Fact` of `source`, which says whether and along which axis it has
                rows.
        """
        if source.shape.rank is None:
            return tf.TensorShape(None)
        shape = source.shape.as_list()
        if fact.is_rows and source.dtype != tf.variant:
            rows, multiple = self.own_rows, fact.multiple
            is_known = isinstance(rows, int) and multiple is not None
            shape[fact.axis] = rows * multiple if is_known else None
        return tf.TensorShape(shape)

    def shape_of(self, fact: Fact) -> Any:
        """Return the shape of a tensor on this replica: int32, `[rank]`.

        `fact` is the `Fact` of the tensor, with sizes that are all known.
        """
        assert fact.sizes is not None
        own = fact.axis if fact.is_rows else None
        parts = [
            self._size_from_rows(size, of_all=axis != own)
            for axis, size in enumerate(fact.sizes)
        ]
        return _pack(parts, tf.int32)

    def item_shape(self, fact: Fact, shape_input: Any) -> Any:
        """Return the shape of an item of a `TensorList` on this replica.

        Args:
            fact: `Fact` of the item, a tensor of the program.
            shape_input: Tensor, the input of the operation with the shape of the item.

        Returns:
            For an item sharded by rows, an int32 tensor with this replica's number of
            rows, and -1 for unknown sizes. Otherwise `shape_input`.
        """
        known = fact.sizes
        if known is None or not fact.is_rows:
            return shape_input
        parts = []
        for axis, size in enumerate(known):
            if axis == fact.axis and size.number is not None:
                parts.append(self.own_rows * size.number)
            else:
                parts.append(size.number if size.kind == "number" else -1)
        return _pack(parts, tf.int32)

    def copy(self, op: Any, inputs: Sequence[Any], kind: str | None = None) -> list:
        """Build a copy of an operation of the program, optionally of another type.

        Args:
            op: `tf.Operation` of the program.
            inputs: Sequence of this replica's tensors, the inputs of the copy.
            kind: String, another type of operation, or `None`. Defaults to `None`.

        Returns:
            List of the outputs of the copy.
        """
        template = self.trace.template_of(op, programs.OperationTemplate)
        control = [
            self._operations[other]
            for other in template.control_inputs
            if other in self._operations
        ]
        if template.device and template.device != self.replica.first_device:
            with tf.device(template.device):
                return template.build(inputs, control, kind)
        return template.build(inputs, control, kind)

    def build(self, op: Any) -> None:
        """Build an operation, unless it is a constant or computes sizes.

        `get` and `sizes_of` build constants and sizes once they are needed.
        """
        if op.type in ("Placeholder", "PlaceholderWithDefault"):
            self._build_read(op)
            return
        if not _is_built_on_demand(op, self.plan.decisions[op]):
            self._build_now(op)

    def _build_now(self, op: Any) -> None:
        """Build an operation, or delay it if it assigns statistics of own rows.

        Such statistics, as the moving mean of BatchNormalization, differ between
        replicas. The assignment waits for the next operation that uses the variable, or
        for the end of the step. Then all delayed ones are averaged over replicas
        together, see `_assign_statistics`.
        """
        is_assigned = op.type == "AssignVariableOp"
        if is_assigned and self.fact(op.inputs[1]).form is Form.LOCAL:
            self._delayed.append(op)
            return
        handles = {id(waiting.inputs[0]) for waiting in self._delayed}
        if handles and not handles.isdisjoint(map(id, op.inputs)):
            self._assign_statistics()
        self._build_operation(op)

    def _assign_statistics(self, *, is_last: bool = False) -> None:
        """Build the delayed assignments of statistics, averaged by one all-reduce.

        Args:
            is_last: Bool, whether no later operation of the step reads the variables.
                Then the variables are averaged after the step instead, if the strategy
                knows them. Defaults to `False`.
        """
        waiting, self._delayed = self._delayed, []
        values = {
            id(op.inputs[1]): op.inputs[1]
            for op in waiting
            if (id(op.inputs[1]), WHOLE) not in self._converted
        }
        handles = [self.get(op.inputs[0]) for op in waiting]
        if values and is_last and self.replica.average_after_step(handles):
            self._converted |= {(key, WHOLE): self.get(v) for key, v in values.items()}
        elif values:
            self.replica.check_average_in_step()
            with timing.labelled("statistics"):
                own = [
                    self.replica.weight_by_rows(self.get(v)) for v in values.values()
                ]
                totals = self.replica.sum(own)
            for key, total in zip(values, totals, strict=True):
                self._converted[key, WHOLE] = total
        for op in waiting:
            self._build_operation(op)

    def _build_operation(self, op: Any) -> None:
        """Build an operation on this replica, and store its outputs in `tensors`.

        Its inputs are converted to the forms that the plan's `Decision` demands, such
        as own rows or the whole tensor.
        """
        decision = self.plan.decisions[op]
        values = _known_values(op, decision)
        if values is not None:
            pairs = zip(values, op.outputs, strict=True)
            outputs = [self.constant(value, tensor.dtype) for value, tensor in pairs]
        else:
            inputs = [
                self.get(tensor, need) if self.plan.is_needed(op, index) else None
                for index, (tensor, need) in enumerate(
                    zip(op.inputs, decision.needs, strict=True)
                )
            ]
            if op.type in ASSIGNMENTS:
                inputs[1] = self._assigned_value(op, inputs)
            outputs = self._build_outputs(op, decision, inputs)
        for tensor, own in zip(op.outputs, outputs, strict=True):
            if own is not None:
                self._store(tensor, own)
            if tf.is_symbolic_tensor(own):
                self._operations[op] = own.op

    def _store(self, tensor: Any, value: Any) -> None:
        """Store this replica's value of the program's tensor for later operations."""
        self.tensors[id(tensor)] = value
        fact = self.plan.facts[id(tensor)]
        if fact.form is Form.PART:
            self._parts[id(tensor)] = tensor
        if fact.is_rows and fact.sizes is not None and fact.multiple is None:
            self._inherit_multiple(tensor)

    def _inherit_multiple(self, tensor: Any) -> None:
        """Copy the number of entries per row from an input of a tensor to the tensor.

        It is the number of entries along the axis of rows for each row of the batch,
        see `multiple`, which then needs no all-reduce to find it. Nothing is copied if
        it was computed for no input, or if a reshape creates the tensor, which may
        change it.
        """
        if tensor.op.type == "Reshape":
            return
        for source in tensor.op.inputs:
            if id(source) in self._multiples and id(tensor) not in self._multiples:
                self._multiples[id(tensor)] = self._multiples[id(source)]

    def _build_outputs(self, op: Any, decision: Decision, inputs: list) -> list:
        """Return this replica's outputs of an operation, built as its `Decision` says.

        The list is empty for an operation that another replica runs alone. `inputs` are
        this replica's tensors, already converted to the forms that the operation needs.
        """
        if decision.plans:
            return control_flow.build(self, op, decision, inputs)
        if self._is_left_to_another_replica(op):
            return []
        if decision.build is not None:
            return decision.build(self, op, inputs)
        return self.copy(op, inputs)

    def _assigned_value(self, op: Any, inputs: list) -> Any:
        """Return the value that an operation assigns to a variable, or adds to it.

        It is the second of `inputs`, the variable's handle and the value. But if no
        replica of the group has rows, means are NaN, and the result keeps the variable
        unchanged: it is the old value, or zeros to add.
        """
        handle, value = inputs
        if not self.replica.rows.total_may_be_zero:
            return value
        other = tf.zeros_like(value)
        if op.type == "AssignVariableOp":
            other = tf.raw_ops.ReadVariableOp(resource=handle, dtype=value.dtype)
        return tf.where(self.replica.rows.total > 0, value, other)

    def _is_left_to_another_replica(self, op: Any) -> bool:
        """Return whether this replica leaves an operation to another replica.

        This holds for prints and summaries, and for writes to a state that local
        replicas share.
        """
        if op.outputs:
            return False
        if prints_or_summarizes(op):
            return self.replica.rank > 0
        return not self.replica.is_writer and self.scope.is_shared(op)

    def _build_read(self, op: Any) -> None:
        """Set the value of a placeholder that `ProgramTrace.read` has created.

        The function that `ProgramTrace.read` received reads the value on this replica.
        `op` is the placeholder. Others, such as those of the batch, keep their values.
        """
        tensor = op.outputs[0]
        read = self.trace.reads.get(id(tensor))
        if read is not None and id(tensor) not in self.tensors:
            self.tensors[id(tensor)] = read()

    def _run_effect(self, effect: Any) -> None:
        """Run an `Effect` of the step, such as an update, with this replica's tensors.

        The kind of the effect says whether they are partial sums, whole or unconverted.
        """
        if effect.kind == "parts":
            tensors = [
                self._zero_without_rows(self._as_partial_sum(t)) for t in effect.tensors
            ]
        else:
            need = WHOLE if effect.kind == "whole" else AS_IS
            tensors = [self.get(tensor, need) for tensor in effect.tensors]
        effect.run(tensors)

    def _zero_without_rows(self, gradient: Any) -> Any:
        """Return a gradient, or zeros if no replica of the group has rows."""
        if gradient is None or not self.replica.rows.total_may_be_zero:
            return gradient
        is_any = self.replica.rows.total > 0
        if not isinstance(gradient, tf.IndexedSlices):
            return tf.where(is_any, gradient, tf.zeros_like(gradient))
        values = tf.where(is_any, gradient.values, tf.zeros_like(gradient.values))
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)

    def _as_partial_sum(self, gradient: Any) -> Any:
        """Return this replica's addend of a gradient, which is summed over replicas.

        Args:
            gradient: Gradient of the program: a tensor, `tf.IndexedSlices`, or `None`.

        Returns:
            For a tensor, this replica's partial sum, converted from the form in which
            the replica holds it; for sparse rows, this replica's `tf.IndexedSlices`;
            for `None`, `None`.
        """
        if gradient is None:
            return None
        if not isinstance(gradient, tf.IndexedSlices):
            return self.get(gradient, PART)
        values, indices = self._rows_of_sparse(gradient.values, gradient.indices)
        shape = gradient.dense_shape
        shape = None if shape is None else self.get(shape, WHOLE)
        return tf.IndexedSlices(values, indices, shape)

    def _rows_of_sparse(self, values: Any, indices: Any) -> tuple[Any, Any]:
        """Return this replica's part of a sparse gradient, as values and indices.

        Each replica has the gradient of its own rows of the batch, or its addends for
        all indices if none occurs twice, or else only the first replica has all of it.
        The parts of all replicas together are the gradient of one device.

        Args:
            values: Tensor of the program, the values of an `IndexedSlices`.
            indices: Tensor of the program, its indices.
        """
        of_values, of_indices = self.facts_of((values, indices))
        are_rows = of_values.is_rows and of_indices.is_rows and not of_values.axis
        if are_rows and of_values.multiple == of_indices.multiple:
            return self.get(values), self.get(indices)
        whole = self.get(indices, WHOLE)
        if are_unique(indices):
            # Adam treats two rows with one index differently from one row with their
            # sum. No index occurs twice in this gradient, so each replica may pass all
            # indices with its own addends, and the reduction sums rows by index.
            return self.get(values, PART), marked_unique(whole)
        whole_values = self.get(values, WHOLE)
        return (
            (whole_values[:0], whole[:0])
            if self.replica.rank
            else (whole_values, whole)
        )

    def get(self, tensor: Any, need: Need = AS_IS) -> Any:
        """Return this replica's value of a tensor of the program, in a needed form.

        It is gathered, summed or sliced if the replica holds another form.

        Args:
            tensor: Tensor of the program.
            need: `Need`: own rows, a partial sum or the whole tensor. Defaults to the
                form that the replica holds.

        Returns:
            Tensor, which may be a variant or a resource.
        """
        if self.parent is not None and id(tensor) in self.parent[1]:
            builder, sources = self.parent
            return builder.get(sources[id(tensor)], need)
        if self.parent is not None and tensor.graph is not self.plan.graph:
            return self.parent[0].get(tensor, need)
        fact = self.fact(tensor)
        if fact.form is Form.SIZES:
            return self._get_sizes(tensor, fact, need)
        if self._has_form(fact, need):
            return self._own_value(tensor)
        key = (id(tensor), need)
        if key not in self._converted:
            with self.graph.as_default():
                self._converted[key] = self._convert(tensor, fact, need)
        return self._converted[key]

    def _get_sizes(self, tensor: Any, fact: Fact, need: Need) -> Any:
        """Return integers computed from sizes (`Form.SIZES`), in the needed form.

        Args:
            tensor: Integer tensor of the program.
            fact: `Fact` of the tensor.
            need: `Need`. With `AS_IS` the integers are those for this replica's rows,
                otherwise those for the whole batch, in the needed form.

        Returns:
            Integer tensor.
        """
        if need.kind is NeededForm.AS_IS:
            return self.sizes_of(tensor, of_all=False)
        program_sizes = self.sizes_of(tensor, of_all=True)
        if need.kind is NeededForm.WHOLE:
            return program_sizes
        with self.graph.as_default():
            if need.kind is NeededForm.PART:
                return self.replica.as_partial_sum(program_sizes)
            return self.replica.take_rows(program_sizes, need.axis, None)

    @staticmethod
    def _has_form(fact: Fact, need: Need) -> bool:
        """Return whether a replica already holds a tensor in the needed form.

        `fact` says in which form the replica holds the tensor, and `need` which is
        needed.
        """
        if need.kind is NeededForm.AS_IS:
            return True
        if need.kind is NeededForm.WHOLE:
            return fact.form in (Form.WHOLE, Form.EMPTY)
        if need.kind is NeededForm.PART:
            return fact.form in (Form.PART, Form.EMPTY)
        return (fact.is_rows and fact.axis == need.axis) or fact.form is Form.EMPTY

    def _own_value(self, tensor: Any) -> Any:
        """Return this replica's value of a tensor, unconverted; build it if missing."""
        if id(tensor) not in self.tensors:
            with self.graph.as_default():
                self._build_now(tensor.op)
        return self.tensors[id(tensor)]

    def _convert(self, tensor: Any, fact: Fact, need: Need) -> Any:
        """Convert this replica's value of a tensor to a form that it does not hold.

        Args:
            tensor: Tensor of the program.
            fact: `Fact` of the tensor: the form in which replicas hold it.
            need: `Need`, the needed form, which differs from that of `fact`.

        Returns:
            Tensor in the needed form.
        """
        # No collective can carry a list or another variant, nor a resource. The only
        # conversion that needs no collective makes a partial sum of a value that all
        # replicas have: the first replica keeps it, and all others have zeros.
        is_whole = fact.form is Form.WHOLE and need.kind is NeededForm.PART
        assert is_whole or tensor.dtype not in (tf.variant, tf.resource), tensor
        own = self._own_value(tensor)
        if need.kind is NeededForm.WHOLE:
            return self._gather_or_sum(tensor, own, fact)
        if need.kind is NeededForm.PART:
            if fact.form is Form.LOCAL:
                return self.replica.weight_by_rows(own)
            return self.replica.as_partial_sum(self.get(tensor, WHOLE))
        if fact.form is Form.LOCAL:
            return own
        whole = self.get(tensor, WHOLE)
        # A gather may lose static sizes, which are restored from the program's tensor.
        whole.set_shape(tensor.shape)
        if need.may_broadcast and fact.sizes is not None:
            size = fact.sizes[need.axis]
            multiple = size.number if size.kind == "rows" else None
            is_certain = size.kind == "rows" or (
                size.kind == "number" and size.number > 1
            )
            return self.replica.take_rows(
                whole, need.axis, multiple, may_broadcast=not is_certain
            )
        return self.replica.take_rows(whole, need.axis, None)

    def _gather_or_sum(self, tensor: Any, own: Any, fact: Fact) -> Any:
        """Return a tensor's value for the whole batch, gathered or summed.

        Args:
            tensor: Tensor of the program.
            own: Value that this replica has of it.
            fact: `Fact` of the tensor: own rows are gathered, partial sums added up,
                and values of single replicas averaged with the numbers of rows as
                weights.

        Returns:
            Tensor, equal on all replicas.
        """
        if fact.form is Form.LOCAL:
            return self.replica.sum([self.replica.weight_by_rows(own)])[0]
        if fact.is_rows:
            gathered = self.replica.gather(own, fact.axis)
            gathered.set_shape(tensor.shape)
            return gathered
        return self._sum_parts(tensor)

    def _sum_parts(self, tensor: Any) -> Any:
        """Return the total of a partial sum over replicas.

        The same all-reduce sums all other partial sums that are built already and whose
        totals an operation needs. Their totals are kept for later calls of `get`.
        """
        waiting = [
            other
            for other in self._parts.values()
            if (id(other), WHOLE) not in self._converted
            and (other is tensor or id(other) in self.plan.sums)
            and other.dtype not in (tf.variant, tf.resource)
        ]
        totals = self.replica.sum([self._own_value(other) for other in waiting])
        for other, total in zip(waiting, totals, strict=True):
            self._converted[id(other), WHOLE] = total
        return self._converted[id(tensor), WHOLE]

    def sizes_of(self, tensor: Any, *, of_all: bool) -> Any:
        """Return a tensor of integers that follow from sizes, such as a shape.

        Args:
            tensor: Integer tensor of the program.
            of_all: Bool, true for sizes of the whole batch, false for those of this
                replica's rows.

        Returns:
            Integer tensor.
        """
        if self.parent is not None and id(tensor) in self.parent[1]:
            builder, sources = self.parent
            return builder.sizes_of(sources[id(tensor)], of_all=of_all)
        fact = self.fact(tensor)
        if fact.form is not Form.SIZES:
            return self.get(tensor, AS_IS)
        key = (id(tensor), of_all)
        if key not in self._sizes:
            with self.graph.as_default():
                if is_known(fact):
                    self._sizes[key] = self._values_from_rows(
                        fact, tensor, of_all=of_all
                    )
                else:
                    self._build_sizes(tensor.op, of_all=of_all)
        return self._sizes[key]

    def _values_from_rows(self, fact: Fact, tensor: Any, *, of_all: bool) -> Any:
        """Build a tensor whose elements follow from the number of rows.

        Args:
            fact: `Fact` of the tensor, with known elements.
            tensor: Integer tensor of the program.
            of_all: Bool, true for the whole batch, false for this replica's rows.

        Returns:
            Integer tensor with the dtype of `tensor`.
        """
        parts = [
            self._size_from_rows(size, of_all=of_all) for size in fact.value.ravel()
        ]
        if fact.value.ndim == 1:
            return _pack(parts, tensor.dtype)
        elements = [tf.cast(part, tensor.dtype) for part in parts]
        shape = fact.value.shape
        return tf.reshape(elements, shape) if shape else elements[0]

    def _size_from_rows(self, size: sizes.Size, *, of_all: bool) -> Any:
        """Return a size as a number, for the rows of this replica or those of all.

        Args:
            size: `Size`, a number or a multiple of the rows.
            of_all: Bool, true for the whole batch, false for this replica's rows.

        Returns:
            Number, or a scalar int32 tensor if it depends on the rows.
        """
        rows = self.replica.rows.total if of_all else self.own_rows
        return rows * size.number if size.kind == "rows" else size.number

    def _build_sizes(self, op: Any, *, of_all: bool) -> None:
        """Build an operation that computes integers from sizes, such as `Shape`.

        Its outputs are kept for `sizes_of`, separately for each value of `of_all`.

        Args:
            op: `tf.Operation` of the program whose outputs are integers.
            of_all: Bool, true for the whole batch, false for this replica's rows.
        """
        decision = self.plan.decisions[op]
        if op.type in _SHAPE_QUERIES:
            outputs = [
                self.shape(op, index, of_all=of_all) for index in range(len(op.outputs))
            ]
        else:
            inputs = [self.sizes_of(tensor, of_all=of_all) for tensor in op.inputs]
            build: Callable = decision.build or Builder.copy
            outputs = build(self, op, inputs)
        for tensor, own in zip(op.outputs, outputs, strict=True):
            self._sizes[id(tensor), of_all] = own

    def shape(self, op: Any, index: int, *, of_all: bool) -> Any:
        """Build the result of an operation that asks for the shape of an input.

        Args:
            op: `tf.Operation` of the program. Its type selects the result: `Size` the
                number of elements, `TensorListElementShape` the shape of the items of a
                list, and `Shape` or `ShapeN` the shape.
            index: Int, index of the input.
            of_all: Bool, true for the whole batch, false for this replica's rows.

        Returns:
            Integer tensor: a scalar for `Size`, or else a vector.
        """
        source, result = op.inputs[index], op.outputs[index]
        fact = self.fact(source)

        @functools.cache
        def shape() -> Any:
            """Return the shape, on this replica, of the input or of a list's items."""
            own = self.get(source, AS_IS)
            if op.type == "TensorListElementShape":
                return Builder.copy(self, op, [own])[0]
            return tf.shape(own, out_type=result.dtype)

        parts = []
        assert fact.sizes is not None
        for axis, size in enumerate(fact.sizes):
            if size.kind == "number":
                parts.append(size.number)
            elif size.kind == "rows":
                parts.append(
                    self._size_in_rows(source, fact, axis, shape, of_all=of_all)
                )
            else:
                parts.append(shape()[axis])
        stacked = _pack(parts, result.dtype)
        return tf.reduce_prod(stacked) if op.type == "Size" else stacked

    def _size_in_rows(
        self, source: Any, fact: Fact, axis: int, shape: Any, *, of_all: bool
    ) -> Any:
        """Return the size of a tensor's axis that is a multiple of the rows.

        Args:
            source: Tensor of the program.
            fact: `Fact` of `source`.
            axis: Int, the axis.
            shape: Function that returns the shape of `source` on this replica.
            of_all: Bool, true for the whole batch, false for this replica's rows.

        Returns:
            Number or scalar int32 tensor.
        """
        assert fact.sizes is not None
        if fact.sizes[axis].number is not None:
            return self._size_from_rows(fact.sizes[axis], of_all=of_all)
        if fact.is_rows and axis == fact.axis:
            return self.entries(source) if of_all else shape()[axis]
        if of_all:
            return shape()[axis]
        total = tf.cast(shape()[axis], tf.int32)
        return total // tf.maximum(self.replica.rows.total, 1) * self.own_rows


def _is_built_on_demand(op: Any, decision: Decision) -> bool:
    """Return whether an operation is a constant or computes sizes.

    Such an operation is built only when another one needs its output.
    """
    if op.type == "Const" or _known_values(op, decision) is not None:
        return True
    forms = {fact.form for fact in decision.outputs}
    return forms == {Form.SIZES}


def _known_values(op: Any, decision: Decision) -> list | None:
    """Return an operation's outputs as a list of arrays, if the plan knows all.

    Otherwise, and for a `Const` or a decision with a `build`, the result is `None`.
    """
    if op.type == "Const" or decision.build is not None or not decision.outputs:
        return None
    values = [sizes.numbers(fact.value) for fact in decision.outputs]
    return None if any(value is None for value in values) else values


def _pack(parts: Sequence[Any], dtype: tf.DType) -> tf.Tensor:
    """Pack ints or scalar tensors into a vector of a dtype."""
    if not any(tf.is_tensor(part) for part in parts):
        return tf.constant(list(parts), dtype, [len(parts)])
    return tf.stack([tf.cast(part, dtype) for part in parts])
