"""The operations of a program as one replica builds them, by a plan.

    decision of an operation -> inputs in the forms that it needs -> the operation

Where a form is another than that which the replica holds, it is converted: rows are
gathered, parts summed, and of what is whole a replica takes its rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.communication.collectives import timing
from tfdp.ground import _compat
from tfdp.ground.base import xla
from tfdp.ground.base.program_trace import ProgramTrace
from tfdp.training.program import control_flow, sizes
from tfdp.training.program.conversions import Replica
from tfdp.training.program.facts import Fact, Form, is_known
from tfdp.training.program.plan import Plan, Scope, with_inputs
from tfdp.training.program.rules.state import ASSIGNMENTS, is_output
from tfdp.training.program.view import AS_HELD, PART, WHOLE, Decision, Kind, Need
from tfdp.training.reduction.sparse import are_unique, marked_unique

_BASES = frozenset(("Shape", "Size", "ShapeN", "TensorListElementShape"))


@dataclasses.dataclass
class Builder:
    """Builds one graph of a program on a replica.

    Args:
        trace: `ProgramTrace`.
        plan: `Plan` of the graph.
        scope: `Scope` of the plan.
        replica: `Replica`, its rows and what it converts by.
        tensors: Dict from the `id` of a tensor of the program to that of the replica.
        parent: Pair of the `Builder` of the graph around this one and a dict from the
            `id` of a placeholder to the tensor there; or `None`.
        is_in_loop: Bool, whether it is inside of a loop. Defaults to `False`.
    """

    trace: ProgramTrace
    plan: Plan
    scope: Scope
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
        # Assignments of statistics that are averaged together.
        self._waiting: list[Any] = []

    def run(self) -> None:
        """Build all that is needed, in the order of the program."""
        effects = list(self.trace.effects.get(self.plan.graph, ()))
        built: set = set()
        for position, last in enumerate(self.plan.graph.get_operations()):
            while effects and effects[0].position <= position:
                self._run_effect(effects.pop(0))
            for op in with_inputs(last, built):
                if op in self.plan.live:
                    self._build(op)
        for effect in effects:
            self._run_effect(effect)
        self._assign_statistics(is_last=self.parent is None)

    def run_inside(
        self,
        plan: Plan,
        outer: Sequence[Any],
        given: Mapping[int, Any] | None = None,
    ) -> Builder:
        """Build a graph inside of an operation, in the graph that is the default.

        Args:
            plan: `Plan` of the graph inside.
            outer: Sequence of the tensors of the program that its inputs stand for.
            given: Dict from the `id` of an input of a loop's graph to a tensor of the
                replica, or `None`, if it is no loop. Defaults to `None`.

        Returns:
            `Builder` of that graph, which has run.
        """
        sources = {
            id(placeholder): tensor
            for placeholder, tensor in zip(plan.graph.inputs, outer, strict=True)
            if id(placeholder) not in (given or {})
        }
        inner = dataclasses.replace(
            self,
            plan=plan,
            tensors=dict(given or {}),
            parent=(self, sources),
            is_in_loop=self.is_in_loop or given is not None,
        )
        inner.run()
        return inner

    # What rules ask.

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
        """Whether this replica may have no rows, where that needs care: on a CPU."""
        is_plain = self.replica.is_on_cpu and not xla.is_tracing()
        return self.replica.rows.may_be_empty and is_plain

    def fact(self, tensor: Any) -> Fact:
        """Return the fact of a tensor of the program, of which nothing may be known.

        It may be of a graph around this one, as an update's may be.
        """
        found = self.plan.facts.get(id(tensor))
        if found is None and self.parent and tensor.graph is not self.plan.graph:
            return self.parent[0].fact(tensor)
        return Fact(Form.WHOLE) if found is None else found

    def facts_of(self, tensors: Sequence[Any]) -> list[Fact]:
        """Return the facts of tensors of the program."""
        return [self.fact(tensor) for tensor in tensors]

    def need(self, op: Any, index: int) -> Need:
        """Return the need of an input of an operation."""
        return self.plan.decisions[op].needs[index]

    def constant(self, value: Any, dtype: tf.DType) -> tf.Tensor:
        """Return a constant."""
        return tf.constant(np.asarray(value).astype(dtype.as_numpy_dtype), dtype)

    def multiple(self, tensor: Any) -> Any:
        """Entries along the axis of rows for each row, an int or an int32 scalar."""
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
        """Entries along the axis of rows of all replicas: int32 scalar."""
        return self.replica.rows.total * self.multiple(tensor)

    def own_entries(self, tensor: Any) -> tf.Tensor:
        """Entries along the axis of rows of this replica: int32 scalar."""
        fact = self.fact(tensor)
        if fact.multiple is not None:
            return self.own_rows * fact.multiple
        return tf.shape(self.get(tensor, AS_HELD))[fact.axis]

    def first_entry(self, multiple: int | None, own_shape: Any) -> tf.Tensor:
        """Entries of the replicas before this one, along the axis of rows."""
        if multiple is not None:
            return self.first_row * multiple
        own = tf.cast(own_shape[0], tf.int32)
        return self.first_row * (own // tf.maximum(self.own_rows, 1))

    def take_rows(self, tensor: Any, whole: tf.Tensor) -> tf.Tensor:
        """Return the rows of this replica of a tensor of the program.

        Args:
            tensor: Tensor of the program, of own rows.
            whole: Tensor, all rows of it.
        """
        fact = self.fact(tensor)
        own = self.replica.take_rows(whole, fact.axis, fact.multiple)
        return self.with_shape(own, tensor, fact)

    def keep_whole(self, tensor: Any, value: tf.Tensor) -> None:
        """Note all rows of a tensor of the program, so that nothing gathers them."""
        self._converted[id(tensor), WHOLE] = value

    def with_shape(self, tensor: Any, source: Any, fact: Fact) -> Any:
        """Set what is known of the shape of a tensor on this replica."""
        if tensor.dtype not in (tf.variant, tf.resource):
            tensor.set_shape(self.own_static_shape(source, fact))
        return tensor

    def own_static_shape(self, source: Any, fact: Fact) -> tf.TensorShape:
        """Return the static shape of a tensor of the program on this replica."""
        if source.shape.rank is None:
            return tf.TensorShape(None)
        found = source.shape.as_list()
        if fact.is_rows and source.dtype != tf.variant:
            rows, multiple = self.own_rows, fact.multiple
            is_known = isinstance(rows, int) and multiple is not None
            found[fact.axis] = rows * multiple if is_known else None
        return tf.TensorShape(found)

    def shape_of(self, fact: Fact) -> Any:
        """Return the shape of what follows from the number of rows alone."""
        assert fact.sizes is not None
        own = fact.axis if fact.is_rows else None
        parts = [
            self._known_size(size, of_all=axis != own)
            for axis, size in enumerate(fact.sizes)
        ]
        return _packed(parts, tf.int32)

    def own_shape(self, fact: Fact, given: Any) -> Any:
        """Return the shape of an item of a list, which may have own rows."""
        known = fact.sizes
        if known is None or not fact.is_rows:
            return given
        parts = []
        for axis, size in enumerate(known):
            if axis == fact.axis and size.number is not None:
                parts.append(self.own_rows * size.number)
            else:
                parts.append(size.number if size.kind == "number" else -1)
        return _packed(parts, tf.int32)

    # Operations.

    def copy(self, op: Any, inputs: Sequence[Any], kind: str | None = None) -> list:
        """Build an operation like one of the program, or of another kind."""
        template = self.trace.template_of(op, _compat.OperationTemplate)
        control = [
            self._operations[other]
            for other in template.control_inputs
            if other in self._operations
        ]
        if template.device and template.device != self.replica.first_device:
            with tf.device(template.device):
                return template.build(inputs, control, kind)
        return template.build(inputs, control, kind)

    def _build(self, op: Any) -> None:
        if op.type in ("Placeholder", "PlaceholderWithDefault"):
            self._build_read(op)
            return
        if not _is_built_when_asked_for(op, self.plan.decisions[op]):
            self._build_now(op)

    def _build_now(self, op: Any) -> None:
        is_assigned = op.type == "AssignVariableOp"
        if is_assigned and self.fact(op.inputs[1]).form is Form.LOCAL:
            self._waiting.append(op)
            return
        handles = {id(waiting.inputs[0]) for waiting in self._waiting}
        if handles and not handles.isdisjoint(map(id, op.inputs)):
            self._assign_statistics()
        self._build_operation(op)

    def _assign_statistics(self, *, is_last: bool = False) -> None:
        """Average what replicas assign of their own rows, by one message.

        Args:
            is_last: Bool, whether nothing in the step reads them any more. Then they
                are averaged after it, as they are for a step that is not divided.
        """
        waiting, self._waiting = self._waiting, []
        values = {
            id(op.inputs[1]): op.inputs[1]
            for op in waiting
            if (id(op.inputs[1]), WHOLE) not in self._converted
        }
        handles = [self.get(op.inputs[0]) for op in waiting]
        if values and is_last and self.replica.averages_after_step(handles):
            self._converted |= {(key, WHOLE): self.get(v) for key, v in values.items()}
        elif values:
            with timing.labelled("statistics"):
                own = [self.replica.weighted(self.get(v)) for v in values.values()]
                totals = self.replica.sum(own)
            for key, total in zip(values, totals, strict=True):
                self._converted[key, WHOLE] = total
        for op in waiting:
            self._build_operation(op)

    def _build_operation(self, op: Any) -> None:
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
                inputs[1] = self._unless_empty(op, inputs)
            outputs = self._build_of(op, decision, inputs)
        for tensor, own in zip(op.outputs, outputs, strict=True):
            if own is not None:
                self._note(tensor, own)
            if tf.is_symbolic_tensor(own):
                self._operations[op] = own.op

    def _note(self, tensor: Any, own: Any) -> None:
        self.tensors[id(tensor)] = own
        fact = self.plan.facts[id(tensor)]
        if fact.form is Form.PART:
            self._parts[id(tensor)] = tensor
        if fact.is_rows and fact.sizes is not None and fact.multiple is None:
            self._inherit_multiple(tensor)

    def _inherit_multiple(self, tensor: Any) -> None:
        if tensor.op.type == "Reshape":
            return
        for source in tensor.op.inputs:
            if id(source) in self._multiples and id(tensor) not in self._multiples:
                self._multiples[id(tensor)] = self._multiples[id(source)]

    def _build_of(self, op: Any, decision: Decision, inputs: list) -> list:
        if decision.plans:
            return control_flow.build(self, op, decision, inputs)
        if self._is_made_by_another(op):
            return []
        if decision.build is not None:
            return decision.build(self, op, inputs)
        return self.copy(op, inputs)

    def _unless_empty(self, op: Any, inputs: list) -> Any:
        """Return what is assigned, or what changes nothing where a group has no rows.

        Means of no rows are not a number.
        """
        handle, value = inputs
        if not self.replica.rows.total_may_be_zero:
            return value
        other = tf.zeros_like(value)
        if op.type == "AssignVariableOp":
            other = tf.raw_ops.ReadVariableOp(resource=handle, dtype=value.dtype)
        return tf.where(self.replica.rows.total > 0, value, other)

    def _is_made_by_another(self, op: Any) -> bool:
        """Whether another replica writes what all share, or what a user reads."""
        if op.outputs:
            return False
        if is_output(op):
            return self.replica.rank > 0
        return not self.replica.is_writer and self.scope.is_shared(op)

    def _build_read(self, op: Any) -> None:
        tensor = op.outputs[0]
        read = self.trace.reads.get(id(tensor))
        if read is not None and id(tensor) not in self.tensors:
            self.tensors[id(tensor)] = read()

    def _run_effect(self, effect: Any) -> None:
        if effect.kind == "parts":
            found = [self._counted(self._as_part(t)) for t in effect.tensors]
        else:
            need = WHOLE if effect.kind == "whole" else AS_HELD
            found = [self.get(tensor, need) for tensor in effect.tensors]
        effect.run(found)

    def _counted(self, gradient: Any) -> Any:
        """Return a gradient, or zeros where all replicas of a group have no rows."""
        if gradient is None or not self.replica.rows.total_may_be_zero:
            return gradient
        is_any = self.replica.rows.total > 0
        if not isinstance(gradient, tf.IndexedSlices):
            return tf.where(is_any, gradient, tf.zeros_like(gradient))
        values = tf.where(is_any, gradient.values, tf.zeros_like(gradient.values))
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)

    def _as_part(self, gradient: Any) -> Any:
        """Return a gradient, dense or sparse, as a part of the sum over replicas."""
        if gradient is None:
            return None
        if not isinstance(gradient, tf.IndexedSlices):
            return self.get(gradient, PART)
        values, indices = self._slices_part(gradient.values, gradient.indices)
        shape = gradient.dense_shape
        shape = None if shape is None else self.get(shape, WHOLE)
        return tf.IndexedSlices(values, indices, shape)

    def _slices_part(self, values: Any, indices: Any) -> tuple[Any, Any]:
        """Return values and indices of which all replicas' are those of one device."""
        of_values, of_indices = self.facts_of((values, indices))
        are_rows = of_values.is_rows and of_indices.is_rows and not of_values.axis
        if are_rows and of_values.multiple == of_indices.multiple:
            return self.get(values), self.get(indices)
        whole = self.get(indices, WHOLE)
        if are_unique(indices):
            # Parts of one index are added up.
            return self.get(values, PART), marked_unique(whole)
        found = self.get(values, WHOLE)
        return (found[:0], whole[:0]) if self.replica.rank else (found, whole)

    # Forms.

    def get(self, tensor: Any, need: Need = AS_HELD) -> Any:
        """Return a tensor of the program in the form that is needed."""
        if self.parent is not None and id(tensor) in self.parent[1]:
            builder, sources = self.parent
            return builder.get(sources[id(tensor)], need)
        if self.parent is not None and tensor.graph is not self.plan.graph:
            return self.parent[0].get(tensor, need)
        fact = self.fact(tensor)
        if fact.form is Form.SIZES:
            return self._get_sizes(tensor, fact, need)
        if self._is_held(fact, need):
            return self._held(tensor)
        key = (id(tensor), need)
        if key not in self._converted:
            with self.graph.as_default():
                self._converted[key] = self._convert(tensor, fact, need)
        return self._converted[key]

    def _get_sizes(self, tensor: Any, fact: Fact, need: Need) -> Any:
        if need.kind is Kind.AS_HELD:
            return self.sizes_of(tensor, of_all=False)
        found = self.sizes_of(tensor, of_all=True)
        if need.kind is Kind.WHOLE:
            return found
        with self.graph.as_default():
            if need.kind is Kind.PART:
                return self.replica.once(found)
            return self.replica.take_rows(found, need.axis, None)

    @staticmethod
    def _is_held(fact: Fact, need: Need) -> bool:
        if need.kind is Kind.AS_HELD:
            return True
        if need.kind is Kind.WHOLE:
            return fact.form in (Form.WHOLE, Form.EMPTY)
        if need.kind is Kind.PART:
            return fact.form in (Form.PART, Form.EMPTY)
        return (fact.is_rows and fact.axis == need.axis) or fact.form is Form.EMPTY

    def _held(self, tensor: Any) -> Any:
        if id(tensor) not in self.tensors:
            with self.graph.as_default():
                self._build_now(tensor.op)
        return self.tensors[id(tensor)]

    def _convert(self, tensor: Any, fact: Fact, need: Need) -> Any:
        # A plan has been checked, see `tfdp.training.program.plan`: zeros of a list, at
        # most.
        is_whole = fact.form is Form.WHOLE and need.kind is Kind.PART
        assert is_whole or tensor.dtype not in (tf.variant, tf.resource), tensor
        own = self._held(tensor)
        if need.kind is Kind.WHOLE:
            return self._whole(tensor, own, fact)
        if need.kind is Kind.PART:
            if fact.form is Form.LOCAL:
                return self.replica.weighted(own)
            return self.replica.once(self.get(tensor, WHOLE))
        if fact.form is Form.LOCAL:
            return own
        found = self.get(tensor, WHOLE)
        # Of what is gathered, TensorFlow may know less than of the program's.
        found.set_shape(tensor.shape)
        if need.may_broadcast and fact.sizes is not None:
            size = fact.sizes[need.axis]
            multiple = size.number if size.kind == "rows" else None
            is_certain = size.kind == "rows" or (
                size.kind == "number" and size.number > 1
            )
            return self.replica.take_rows(
                found, need.axis, multiple, may_broadcast=not is_certain
            )
        return self.replica.take_rows(found, need.axis, None)

    def _whole(self, tensor: Any, own: Any, fact: Fact) -> Any:
        if fact.form is Form.LOCAL:
            return self.replica.sum([self.replica.weighted(own)])[0]
        if fact.is_rows:
            found = self.replica.gather(own, fact.axis)
            found.set_shape(tensor.shape)
            return found
        return self._sum_parts(tensor)

    def _sum_parts(self, tensor: Any) -> Any:
        """Sum a part, with all other parts that will be needed, by one message."""
        waiting = [
            other
            for other in self._parts.values()
            if (id(other), WHOLE) not in self._converted
            and (other is tensor or id(other) in self.plan.sums)
            and other.dtype not in (tf.variant, tf.resource)
        ]
        totals = self.replica.sum([self._held(other) for other in waiting])
        for other, total in zip(waiting, totals, strict=True):
            self._converted[id(other), WHOLE] = total
        return self._converted[id(tensor), WHOLE]

    # Integers that are computed of sizes.

    def sizes_of(self, tensor: Any, *, of_all: bool) -> Any:
        """Return integers for this replica's sizes, or for those of the program."""
        if self.parent is not None and id(tensor) in self.parent[1]:
            builder, sources = self.parent
            return builder.sizes_of(sources[id(tensor)], of_all=of_all)
        fact = self.fact(tensor)
        if fact.form is not Form.SIZES:
            return self.get(tensor, AS_HELD)
        key = (id(tensor), of_all)
        if key not in self._sizes:
            with self.graph.as_default():
                if is_known(fact):
                    self._sizes[key] = self._sizes_of_rows(fact, tensor, of_all=of_all)
                else:
                    self._build_sizes(tensor.op, of_all=of_all)
        return self._sizes[key]

    def _sizes_of_rows(self, fact: Fact, tensor: Any, *, of_all: bool) -> Any:
        """Return integers that follow from the number of rows alone."""
        parts = [self._known_size(size, of_all=of_all) for size in fact.value.ravel()]
        if fact.value.ndim == 1:
            return _packed(parts, tensor.dtype)
        found = [tf.cast(part, tensor.dtype) for part in parts]
        shape = fact.value.shape
        return tf.reshape(found, shape) if shape else found[0]

    def _known_size(self, size: sizes.Size, *, of_all: bool) -> Any:
        """Return a size, of own rows or of those of all replicas."""
        rows = self.replica.rows.total if of_all else self.own_rows
        return rows * size.number if size.kind == "rows" else size.number

    def _build_sizes(self, op: Any, *, of_all: bool) -> None:
        decision = self.plan.decisions[op]
        if op.type in _BASES:
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
        """Build the shape, or the size, of a tensor or of the items of a list."""
        source, result = op.inputs[index], op.outputs[index]
        fact = self.fact(source)

        @functools.cache
        def shape() -> Any:
            own = self.get(source, AS_HELD)
            if op.type == "TensorListElementShape":
                return Builder.copy(self, op, [own])[0]
            return tf.shape(own, out_type=result.dtype)

        parts = []
        assert fact.sizes is not None
        for axis, size in enumerate(fact.sizes):
            if size.kind == "number":
                parts.append(size.number)
            elif size.kind == "rows":
                parts.append(self._count(source, fact, axis, shape, of_all=of_all))
            else:
                parts.append(shape()[axis])
        stacked = _packed(parts, result.dtype)
        return tf.reduce_prod(stacked) if op.type == "Size" else stacked

    def _count(
        self, source: Any, fact: Fact, axis: int, shape: Any, *, of_all: bool
    ) -> Any:
        """Return a size that is a multiple of the rows."""
        assert fact.sizes is not None
        if fact.sizes[axis].number is not None:
            return self._known_size(fact.sizes[axis], of_all=of_all)
        if fact.is_rows and axis == fact.axis:
            return self.entries(source) if of_all else shape()[axis]
        if of_all:
            return shape()[axis]
        total = tf.cast(shape()[axis], tf.int32)
        return total // tf.maximum(self.replica.rows.total, 1) * self.own_rows


def _is_built_when_asked_for(op: Any, decision: Decision) -> bool:
    """Whether an operation gives constants and sizes, which nothing may need."""
    if op.type == "Const" or _known_values(op, decision) is not None:
        return True
    forms = {fact.form for fact in decision.outputs}
    return forms == {Form.SIZES}


def _known_values(op: Any, decision: Decision) -> list | None:
    """Return the numbers that an operation gives, if all are known."""
    if op.type == "Const" or decision.build is not None or not decision.outputs:
        return None
    values = [sizes.numbers(fact.value) for fact in decision.outputs]
    return None if any(value is None for value in values) else values


def _packed(parts: Sequence[Any], dtype: tf.DType) -> tf.Tensor:
    """Return a vector of ints and scalar tensors."""
    if not any(tf.is_tensor(part) for part in parts):
        return tf.constant(list(parts), dtype, [len(parts)])
    return tf.stack([tf.cast(part, dtype) for part in parts])
