"""Graphs under construction: their operations, order and outer graphs."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import (
    auto_control_deps,
    ops,
)


def root_graph() -> Any:
    """Return the `tf.Graph` of the outermost function that is being traced.

    Branches and loop bodies have separate graphs. Keys of collectives must be unique in
    one call, so they are counted in the outermost graph.
    """
    graph = ops.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None and getattr(
        graph.outer_graph, "building_function", False
    ):
        graph = graph.outer_graph
    return graph


def graphs_around(graph: Any) -> Iterator[Any]:
    """Yield a graph and its outer graphs, the innermost one first."""
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def in_loop_of_replica() -> bool:
    """Return whether a loop inside a replica's function is being traced."""
    entry = getattr(threading.current_thread(), "graph", None)
    around = graphs_around(ops.get_default_graph())
    inside = itertools.takewhile(lambda graph: graph is not entry, around)
    is_loop = any(type(graph).__name__ == "WhileBodyFuncGraph" for graph in inside)
    return is_loop and entry is not None


def in_branch() -> bool:
    """Return whether a branch of a condition or the body of a loop is being traced."""
    names = ("CondBranchFuncGraph", "WhileBodyFuncGraph")
    around = graphs_around(ops.get_default_graph())
    return any(type(graph).__name__ in names for graph in around)


def op_age(op: tf.Operation) -> int:
    """Return an operation's number in its graph, larger than those of its inputs."""
    return op._id


def op_position(tensor: tf.Tensor) -> int:
    """Return the number, in its graph, of the operation that creates `tensor`."""
    return op_age(tensor.op)


@contextlib.contextmanager
def independent_side_effects() -> Iterator[None]:
    """Open a context for one replica, whose side effects wait for no other replica.

    TensorFlow runs operations with side effects but no resource, such as `Assert`, in
    the order in which they are traced. Replicas are traced one after another, so such
    an operation of replica 1 would wait for one of replica 0. That one may wait for a
    collective that replica 1 has not joined yet: a deadlock.
    """
    graph = ops.get_default_graph()
    manager = graph.experimental_acd_manager
    first = len(graph.get_operations())
    yield
    if manager is None:
        return
    previous = None
    for op in graph.get_operations()[first:]:
        if not _is_ordered_by_tracing(op):
            continue
        manager.run_independently(op)
        if previous is not None:
            op._add_control_input(previous)
        previous = op


def as_one_operation(function: Callable) -> Any:
    """Call a function as one operation of the graph, and return its result.

    The call is not inlined; in eager mode it is an ordinary call.

    In a branch that is not taken, the runtime skips each operation separately, which
    takes time; a call that is not inlined is a single operation. No public argument of
    `tf.function` sets this. Checked on TensorFlow 2.21.
    """
    if tf.executing_eagerly():
        return function()
    attributes = {"_noinline": True}
    return tf.function(function, autograph=False, experimental_attributes=attributes)()


def add_control_inputs(op: tf.Operation, others: Sequence[tf.Operation]) -> None:
    """Let an operation of a graph wait for others, which may be created later."""
    op._add_control_inputs(list(others))


def _is_ordered_by_tracing(op: Any) -> bool:
    """Return whether an operation has side effects but no resource to order it by."""
    uses_a_resource = any(tensor.dtype == tf.resource for tensor in op.inputs)
    is_in_a_branch = op._control_flow_context is not None
    is_plain = not uses_a_resource and not is_in_a_branch
    return is_plain and auto_control_deps.op_is_stateful(op)
