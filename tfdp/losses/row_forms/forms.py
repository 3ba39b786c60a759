"""Interpreter: forms of the tensors of a step, computed on request."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfdp import _compat
from tfdp.collectives import is_collective
from tfdp.losses.row_forms.fallback import fallback
from tfdp.losses.row_forms.form import (
    CONSTANT,
    ROWS,
    ROWS_SOMEWHERE,
    UNKNOWN,
    Form,
    Kind,
    are_constant,
)
from tfdp.losses.row_forms.rules import CALLS, RULES


class Forms:
    """Forms of the tensors of a replica's step while it is traced.

    Args:
        batch: Iterable of tensors with rows along their first axis, ragged and sparse
            ones too; scalars have none.
        num_replicas: Int.
        warned: Set of strings, subjects of which the user has been warned, or `None`.
            Defaults to `None`.
            Defaults to `False`.
    """

    def __init__(
        self,
        batch: Iterable[Any],
        num_replicas: int,
        warned: set[str] | None = None,
    ) -> None:
        self.num_replicas = num_replicas
        # Whether the step itself reads the number of replicas: then a factor of that
        # size is it.
        self.counts_replicas = False
        self._warned = set() if warned is None else warned
        self._found: dict[tuple[int, str], Form] = {}
        self._captured: dict[int, dict[str, Any]] = {}
        # The numbers of rows, where the shapes of the batch are static.
        self._num_rows: frozenset[int] = frozenset()
        for tensor in batch:
            self._set_rows(tensor)

    def _set_rows(self, tensor: Any) -> None:
        if isinstance(tensor, tf.SparseTensor):
            self.set(tensor.values, ROWS)
            self.set(tensor.indices, ROWS_SOMEWHERE)
            self.set(tensor.dense_shape, Form(Kind.SHAPE, 1, 0))
        elif isinstance(tensor, tf.RaggedTensor):
            for part in (tensor.flat_values, *tensor.nested_row_splits):
                self.set(part, ROWS)
        elif tensor.shape.rank != 0:
            rows = tensor.shape[0] if tensor.shape.rank else None
            counts = frozenset() if rows is None else frozenset([rows])
            self._num_rows |= counts
            self.set(tensor, dataclasses.replace(ROWS, counts=counts))

    def set(self, tensor: Any, form: Form) -> None:
        """Set the form of a tensor, whatever its operation is."""
        self._found[_key(tensor)] = form

    def set_constant(self, tensor: Any) -> None:
        """Set the form of a tensor that does not depend on the batch."""
        self.set(tensor, CONSTANT)

    def of(self, tensor: Any) -> Form:
        """Return the form of a symbolic tensor; of anything else a constant's.

        Args:
            tensor: Tensor of the graph that is traced.
        """
        if not tf.is_symbolic_tensor(tensor):
            return CONSTANT
        if _key(tensor) not in self._found:
            for op in self._ancestors(tensor):
                self._apply_rule(op)
        return self._found[_key(tensor)]

    def origin(self, tensor: Any) -> Any:
        """Return the first operation from which a tensor has its kind of form."""
        kind = self.of(tensor).kind
        while True:
            sources = [x for x in tensor.op.inputs if self.of(x).kind is kind]
            if not sources:
                return tensor.op
            tensor = sources[0]

    def replica_power_of(self, constant: Any) -> int:
        """Return the power of the number of replicas that a user's factor is.

        Args:
            constant: Tensor.

        Returns:
            1, -1, or 0 where it is none.
        """
        return self.power_of_count(constant) if self.counts_replicas else 0

    def power_of_count(self, constant: Any) -> int:
        """Return the power of the number of replicas that a factor equals: 1, -1, 0."""
        value = _compat.constant_value(constant)
        if value is None or value.shape != ():
            return 0
        if abs(float(value) - self.num_replicas) < 1e-6:
            return 1
        return -1 if abs(float(value) * self.num_replicas - 1.0) < 1e-6 else 0

    def should_warn(self, subject: str) -> bool:
        """Return whether to warn the user of a subject, the first time."""
        is_new = subject not in self._warned
        self._warned.add(subject)
        return is_new

    def _ancestors(self, tensor: Any) -> list:
        """Return the operations without a form that a tensor depends on, in order."""
        seen: dict[int, Any] = {}
        queue = [tensor.op]
        while queue:
            op = queue.pop()
            if id(op) in seen:
                continue
            seen[id(op)] = op
            queue += [x.op for x in op.inputs if _key(x) not in self._found]
        return sorted(seen.values(), key=_compat.op_age)

    def _apply_rule(self, op: Any) -> None:
        inputs = [self._found[_key(tensor)] for tensor in op.inputs]
        if op.type == "Placeholder":
            forms: Any = self._of_captured(op)
        elif is_collective(op):
            forms = CONSTANT  # the result is the same on each replica
        elif op.type in CALLS and not are_constant(inputs):
            forms = self._of_call(op, inputs)
        elif not are_constant(inputs):
            forms = RULES.get(op.type, fallback)(op, inputs, self.replica_power_of)
        elif "Random" in op.type and self._num_rows:
            forms = [self._of_noise(output) for output in op.outputs]
        else:
            forms = CONSTANT
        if isinstance(forms, Form):
            forms = [forms] * len(op.outputs)
        for output, form in zip(op.outputs, forms, strict=True):
            self._found.setdefault(_key(output), form)

    def _of_call(self, op: Any, inputs: list[Form]) -> Any:
        """Return the forms of the outputs of a function, or of a conditional."""
        graphs = _compat.called_graphs(op)
        if not all(_fits(graph, op) for graph in graphs):
            return RULES[op.type](op, inputs, self.replica_power_of)
        given = inputs[1:] if "If" in op.type else inputs
        num_outputs = len(op.outputs)
        found = [self._of_outputs(graph, given)[:num_outputs] for graph in graphs]
        return [_in_common(forms) for forms in zip(*found, strict=True)]

    def _of_outputs(self, graph: Any, inputs: list[Form]) -> list[Form]:
        """Return the forms of the outputs of a function, by those of its inputs."""
        nested = Forms((), self.num_replicas)
        nested.counts_replicas = self.counts_replicas
        nested._num_rows = self._num_rows
        for tensor, form in zip(graph.inputs, inputs, strict=True):
            nested.set(tensor, form)
        return [nested.of(output) for output in graph.outputs]

    def _of_noise(self, output: Any) -> Form:
        """Return the form of random numbers: rows where there are as many."""
        is_batch = bool(output.shape.rank) and output.shape[0] in self._num_rows
        return (
            dataclasses.replace(ROWS, counts=self._num_rows) if is_batch else CONSTANT
        )

    def _of_captured(self, op: Any) -> Form:
        """Return the form of a tensor that a branch or inner function captures."""
        graph = op.graph
        if id(graph) not in self._captured:
            pairs = getattr(graph, "captures", ())
            self._captured[id(graph)] = {own.name: outer for outer, own in pairs}
        outer = self._captured[id(graph)].get(op.outputs[0].name)
        return CONSTANT if outer is None else self.of(outer)


def _fits(graph: Any, op: Any) -> bool:
    """Return whether inputs and outputs of an operation are those of its function."""
    # A function of which a gradient is taken gets more outputs later on.
    num_inputs = len(op.inputs) - ("If" in op.type)
    is_known = graph is not None and len(graph.inputs) == num_inputs
    return is_known and len(graph.outputs) >= len(op.outputs)


def _in_common(forms: tuple[Form, ...]) -> Form:
    """Return the common form of tensors of which one is the result."""
    varying = [form for form in forms if not form.is_constant] or [forms[0]]
    alike = {(form.kind, form.degree, form.replica_power) for form in varying}
    if len(alike) > 1:
        return UNKNOWN
    axes = {form.axis for form in varying}
    return varying[0] if len(axes) == 1 else varying[0].with_axis(None)


def _key(tensor: Any) -> tuple[int, str]:
    return id(tensor.graph), tensor.name
