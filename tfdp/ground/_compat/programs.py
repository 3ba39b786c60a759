"""Trace of a step as the program of one device, and rebuilding of its operations.

A marker is the text of an attribute of an identity operation: the plan of a program
recognizes tensors by it.

TensorFlow has no public way to copy an operation to another graph, nor to access the
graphs of branches and loops. Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.autograph.core import ag_ctx as autograph_ctx
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.eager.polymorphic_function import autograph_util
from tensorflow.python.framework import (
    auto_control_deps,
    func_graph,
    op_def_registry,
    ops,
)
from tensorflow.python.ops import cond_v2, control_flow_util_v2, while_v2
from tensorflow.python.util import tf_stack

from tfdp.ground._compat.graphs import graphs_around

_MARKER = "_tfdp_marker"
_CALLS = frozenset(("PartitionedCall", "StatefulPartitionedCall"))


class ProgramGraph(func_graph.FuncGraph):
    """Graph of a step as one device's program, nested in the graph being traced.

    It keeps the stack of each operation, which TensorFlow does not return in full. A
    `tf.function` would add control dependencies between operations.
    """

    def __init__(self) -> None:
        super().__init__("program")
        self.stacks: dict[tf.Operation, Any] = {}

    def _create_op_internal(self, *args: Any, **kwargs: Any) -> tf.Operation:
        """Create an operation, and keep the Python stack that created it."""
        op = super()._create_op_internal(*args, **kwargs)
        self.stacks[op] = tf_stack.extract_stack(stacklevel=3)
        return op


def stack_of(op: tf.Operation) -> list[Any]:
    """Return the stack of an operation of a program, the innermost frame last.

    Each frame has a `filename` and a `lineno`.
    """
    stack = getattr(op.graph, "stacks", {}).get(op)
    return list(op.traceback if stack is None else stack)


def marked(tensor: tf.Tensor, marker: str) -> tf.Tensor:
    """Return an identity of a tensor, whose operation stores a marker.

    Code that examines the traced graph recognizes the operation by `marker_of`.

    Args:
        tensor: Tensor; an eager one is not marked.
        marker: String, such as `"rows of a replica"`.
    """
    result = tf.identity(tensor)
    if not tf.is_symbolic_tensor(result):
        return result
    result.op._set_attr(_MARKER, attr_value_pb2.AttrValue(s=marker.encode()))
    return result


def marker_of(op: tf.Operation) -> str:
    """Return the marker that `marked` has given to an operation, or else `""`."""
    try:
        marker = op.get_attr(_MARKER)
    except ValueError:
        return ""
    return marker.decode() if isinstance(marker, bytes) else str(marker)


def seed_operation(op: tf.Operation) -> None:
    """Set random seeds in an operation that draws random numbers, if it has none.

    All copies of the operation have these seeds, and so draw the same numbers.
    """
    names = {"seed", "seed2"} & set(op.node_def.attr)
    if any(op.get_attr(name) for name in names):
        return
    for name in names:
        seed = random.SystemRandom().getrandbits(62) + 1
        op._set_attr(name, attr_value_pb2.AttrValue(i=seed))


def has_effect(op: tf.Operation) -> bool:
    """Return whether automatic control dependencies count an operation as stateful."""
    return auto_control_deps.op_is_stateful(op)


def draws(op: tf.Operation) -> bool:
    """Return whether an operation draws random numbers from a state that it advances.

    The state is one of its own, or that of a `tf.random.Generator`.
    """
    is_own = op.op_def.is_stateful and any(x.name == "seed2" for x in op.op_def.attr)
    return is_own or op.type.startswith("Rng")


def signature_of(op: tf.Operation) -> str:
    """Return an operation's type and dtypes, with a digest of a constant's value.

    Workers compare these texts to find out whether they have traced different steps.
    """
    text = " ".join([op.type, *(output.dtype.name for output in op.outputs)])
    if op.type != "Const":
        return text
    value = op.node_def.attr["value"].SerializeToString(deterministic=True)
    return f"{text} {hashlib.sha256(value).hexdigest()}"


def has_function(op: tf.Operation) -> bool:
    """Return whether an operation has a function as an attribute, as `While` has."""
    return any(
        value.HasField("func") or value.list.func for value in op.node_def.attr.values()
    )


def branch_graphs(op: tf.Operation) -> list[Any]:
    """Return the graphs of the branches of an `If` or a `Case`."""
    return list(cond_v2.get_func_graphs(op))


def loop_graphs(op: tf.Operation) -> tuple[Any, Any]:
    """Return the graphs of the condition and the body of a `While`."""
    cond = while_v2._get_graph(op, "cond", "_cond_graph")
    return cond, while_v2._get_graph(op, "body", "_body_graph")


def while_loop_counter() -> tf.Tensor:
    """Return the loop counter of the `tf.while_loop` whose condition or body is traced.

    It is the first placeholder of the graph.
    """
    return tf.compat.v1.get_default_graph().get_operations()[0].outputs[0]


def is_call(op: tf.Operation) -> bool:
    """Return whether an operation is a plain call of a function, no branch or loop.

    Functions of TensorFlow 1, as in CTC losses, are called by an operation's type.
    """
    return op.type in _CALLS or op_def_registry.get(op.type) is None


def function_graph(op: tf.Operation) -> Any:
    """Return the `FuncGraph` of the function that an operation calls."""
    name = op.get_attr("f").name if op.type in _CALLS else op.type
    for graph in graphs_around(op.graph):
        function = graph._get_function(name)
        if function is not None and getattr(function, "graph", None) is not None:
            return function.graph
    shapes = [tensor.shape for tensor in op.inputs]
    return control_flow_util_v2.get_func_graph(op, shapes, name)


def results_of_call(op: tf.Operation, graph: Any) -> list[tf.Tensor]:
    """Return the outputs of a function's graph that one of its calls returns.

    After the call was traced, TensorFlow may append outputs for a gradient, such as for
    a forward-mode derivative.
    """
    return graph.outputs[: len(op.outputs)]


class OperationTemplate:
    """Template of an operation, to build copies with other inputs.

    Errors of a copy name the user's line that created the original.

    Args:
        op: `tf.Operation`.
    """

    def __init__(self, op: tf.Operation) -> None:
        definition = op.node_def
        self.device = op.device
        self.control_inputs = list(op.control_inputs)
        self._attributes = {
            name: value
            for name, value in definition.attr.items()
            if not name.startswith("_")
        }
        self._kind, self._name = op.type, definition.name
        self._dtypes = [output.dtype for output in op.outputs]
        self._definition = op.op_def
        self._stack = getattr(op.graph, "stacks", {}).get(op)

    def build(
        self,
        inputs: Sequence[tf.Tensor],
        control: Sequence[Any] = (),
        kind: str | None = None,
    ) -> list[tf.Tensor]:
        """Build an operation in the default graph; return its outputs.

        Args:
            inputs: Sequence of tensors.
            control: Sequence of operations that run before. Defaults to none.
            kind: String, another type of operation with the same attributes, or `None`
                for the original type. Defaults to `None`.
        """
        graph = ops.get_default_graph()
        definition = self._definition if kind is None else None
        after = tf.control_dependencies(list(control)) if control else None
        with after or contextlib.nullcontext():
            op = graph._create_op_internal(
                kind or self._kind,
                list(inputs),
                self._dtypes,
                name=self._name,
                attrs=self._attributes,
                op_def=definition,
            )
        if self._stack is not None:
            pywrap_tf_session.TF_SetOpStackTrace(op._c_op, self._stack)
        return list(op.outputs)


def call_inline(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a `tf.function`'s Python function, in the graph that is being traced.

    Returns:
        Result of the Python function.
    """
    called = function._python_function
    if function._autograph:
        called = autograph_util.py_func_from_autograph(
            called, function._experimental_autograph_options
        )
    args, kwargs = tf.nest.map_structure(_as_tensor, (args, kwargs))
    # Keras disables AutoGraph for its layers, but not inside a `tf.function` that they
    # call. The call is inlined here, so AutoGraph is enabled for it.
    with autograph_ctx.ControlStatusCtx(autograph_ctx.Status.UNSPECIFIED):
        return called(*args, **kwargs)


def _as_tensor(value: Any) -> Any:
    """Return an array as a tensor, and any other value unchanged."""
    return tf.convert_to_tensor(value) if isinstance(value, np.ndarray) else value
