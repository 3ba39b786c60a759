"""Logs that are functions of the states of metrics, computed from merged states.

What a step returns of a metric, `metric.result()`, is computed on each replica from its
own states. The graph of the step shows from which, whatever the log is called and
whatever else is computed of it. The same operations on the merged states give the log
of the global batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp import _compat
from tfdp.replicas.variables import MetricVariable

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_BRANCHES = ("If", "StatelessIf", "While", "StatelessWhile")


class State(NamedTuple):
    """A state of a metric that a log is computed from.

    Args:
        variable: `MetricVariable`.
        value: Tensor of this replica, where the step changes the variable after it has
            read it, or `None` for the state at the end of the step.
    """

    variable: MetricVariable
    value: tf.Tensor | None = None

    @property
    def key(self) -> tuple:
        """What tells it from the other states of a step."""
        return id(self.variable), None if self.value is None else self.value.name


class _Frame(NamedTuple):
    """Call of a traced function, whose operations are in a graph of their own."""

    call: tf.Operation
    graph: Any
    outer: _Frame | None


@dataclasses.dataclass(frozen=True)
class StateFunction:
    """A traced log as a function of nothing but states of metrics.

    Args:
        result: Tuple of the tensor of the log and of the call that it is in.
        reads: Dict from the name of a tensor to the `State` that is read there.
        operations: Dict from names to operations and the calls that they are in.
    """

    result: tuple[tf.Tensor, _Frame | None]
    reads: dict[tuple, State] = dataclasses.field(default_factory=dict)
    operations: dict[tuple, tuple[tf.Operation, _Frame | None]] = dataclasses.field(
        default_factory=dict
    )

    @property
    def states(self) -> list[State]:
        """List of `State`, each once."""
        return list({state.key: state for state in self.reads.values()}.values())

    @property
    def can_compute(self) -> bool:
        """Whether its operations can be copied: not the branches of a condition."""
        return all(op.type not in _BRANCHES for op, _ in self.operations.values())

    def compute(self, values: Mapping[tuple, tf.Tensor]) -> tf.Tensor:
        """Compute it from other values.

        Args:
            values: Mapping of tensors by the `key` of each of `states`.
        """
        new = {name: values[state.key] for name, state in self.reads.items()}
        for op, frame in sorted(self.operations.values(), key=lambda at: _age(*at)):
            inputs = [new[_name(*_source(tensor, frame))] for tensor in op.inputs]
            copies = _compat.copy_of_operation(op, inputs)
            for old, copy in zip(op.outputs, copies, strict=True):
                new[_name(old, frame)] = copy
        return new[_name(*self.result)]


def state_function(tensor: Any) -> StateFunction | None:
    """Find the states of metrics that a log is computed from.

    Args:
        tensor: What the step of a replica returned.

    Returns:
        `StateFunction`, or `None` if the log depends on anything else, such as the
        batch, or if nothing is traced.
    """
    if not tf.is_symbolic_tensor(tensor):
        return None
    function = StateFunction(_source(tensor, None))
    queue = [function.result]
    while queue:
        tensor, frame = queue.pop()
        op = tensor.op
        if _place(op, frame) in function.operations:
            continue
        is_read = op.type == "ReadVariableOp"
        if not (is_read or _is_plain(op)):
            return None
        if not is_read:
            function.operations[_place(op, frame)] = op, frame
        for source in op.inputs:
            if source.dtype != tf.resource:
                queue.append(_source(source, frame))
                continue
            state = _state(op, source, frame)
            if state is None:
                return None
            function.reads[_name(tensor if is_read else source, frame)] = state
    return function if function.reads else None


def _state(op: tf.Operation, handle: tf.Tensor, frame: _Frame | None) -> State | None:
    """The state that an operation reads, if it is one that can be merged."""
    is_last, inside = not _changes_after(op, handle), frame
    while inside is not None:
        (index,) = (i for i, x in enumerate(inside.graph.inputs) if x is handle)
        handle = inside.call.inputs[index]
        is_last = is_last and not _changes_after(inside.call, handle)
        inside = inside.outer
    variable = MetricVariable.of_handle(handle)
    if variable is None or not variable.is_number:
        return None
    if is_last:
        return State(variable)
    is_read = frame is None and op.type == "ReadVariableOp"
    return State(variable, op.outputs[0]) if is_read else None


def _changes_after(op: tf.Operation, handle: tf.Tensor) -> bool:
    """Whether a later operation of the same graph may change a variable."""
    return any(
        _compat.op_age(other) > _compat.op_age(op) and _may_change(other, handle)
        for other in handle.consumers()
    )


def _may_change(op: tf.Operation, handle: tf.Tensor) -> bool:
    """Whether an operation may change a variable that it is given."""
    graphs = _compat.called_graphs(op)
    if not graphs or None in graphs:
        return op.type != "ReadVariableOp"
    for graph in graphs:
        # A condition has its predicate before what its branches are given.
        given = op.inputs[len(op.inputs) - len(graph.inputs) :]
        for outer, inner in zip(given, graph.inputs, strict=True):
            if outer is handle and any(
                _may_change(x, inner) for x in inner.consumers()
            ):
                return True
    return False


def _called_graph(op: tf.Operation) -> Any:
    """The graph of the function that an operation calls, or `None`."""
    return _compat.called_graphs(op)[0] if op.type in _CALLS else None


def _source(tensor: tf.Tensor, frame: _Frame | None) -> tuple:
    """What a tensor is: an argument or a result of a call is another one."""
    while True:
        op = tensor.op
        if frame is not None and op.type == "Placeholder":
            (index,) = (i for i, x in enumerate(frame.graph.inputs) if x is tensor)
            tensor, frame = frame.call.inputs[index], frame.outer
            continue
        graph = _called_graph(op)
        if graph is None:
            return tensor, frame
        frame = _Frame(op, graph, frame)
        tensor = graph.outputs[tensor.value_index]


def _is_plain(op: tf.Operation) -> bool:
    """Whether an operation computes from its inputs alone."""
    return op.type in _BRANCHES or (op.type != "Placeholder" and _compat.is_pure(op))


def _path(frame: _Frame | None) -> tuple:
    """The calls that a frame is in, by name."""
    return () if frame is None else (*_path(frame.outer), frame.call.name)


def _place(op: tf.Operation, frame: _Frame | None) -> tuple:
    return (*_path(frame), op.name)


def _name(tensor: tf.Tensor, frame: _Frame | None) -> tuple:
    return (*_path(frame), tensor.name)


def _age(op: tf.Operation, frame: _Frame | None) -> tuple:
    """Position in the order in which inputs come first, also across calls."""
    before = () if frame is None else _age(frame.call, frame.outer)
    return (*before, _compat.op_age(op))
