"""Variables that are put together from tensors, as tapes and graphs see them."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import tensorflow as tf
from keras.src.backend.common import variables
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import record
from tensorflow.python.framework import ops
from tensorflow.python.ops import (
    control_flow_v2_func_graphs,
    resource_variable_ops,
)

from tfdp.ground._compat.distribute import outside_strategies

_ControlFlowGraph = control_flow_v2_func_graphs.ControlFlowFuncGraph


def record_read(variable: Any, value: tf.Tensor) -> None:
    """Tell all active gradient tapes that `value` was read from a variable.

    A `GradientTape` watches a variable by its `handle` when it is read. The gradient
    of the handle is then that of all that was read from it, in its dtype. What
    TensorFlow's own function for this does besides is to look for other variables
    inside of one of tf.distribute.

    Args:
        variable: Object with a tensor as its `handle`, whose own value does not
            matter, and with `trainable`.
        value: Tensor, a new one for each read.
    """
    source = variable.handle

    def gradient(upstream: Any) -> list[Any]:
        if isinstance(upstream, tf.IndexedSlices):
            values = tf.cast(upstream.values, source.dtype)
            return [tf.IndexedSlices(values, upstream.indices, upstream.dense_shape)]
        return [tf.cast(upstream, source.dtype)]

    pywrap_tfe.TFE_Py_TapeVariableAccessed(variable)
    pywrap_tfe.TFE_Py_VariableWatcherVariableAccessed(variable)
    record.record_operation("ReadParameter", [value], [source], gradient)


def step_graph() -> Any:
    """The graph that a replica's step is traced in, around its loops and branches.

    Returns:
        A graph, or `None` in a function of its own that the step calls: a tensor of
        the step would belong to one call of it only.
    """
    entry = getattr(threading.current_thread(), "graph", None)
    graph = ops.get_default_graph()
    while graph is not entry and isinstance(graph, _ControlFlowGraph):
        graph = graph.outer_graph
    return graph if entry is None or graph is entry else None


def run_of_replicas() -> Any:
    """An object that the threads of one `strategy.run` share."""
    return getattr(threading.current_thread(), "coord", None)


def set_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Give an operation another input, of the same shape and dtype."""
    op._update_input(index, tensor)


def attached(graph: Any, key: Any, make: Any) -> Any:
    """An object that lives as long as a graph, made when it is first asked for.

    A dictionary by graphs would keep them alive, since the object holds their tensors.
    """
    found = getattr(graph, "_tfdp_attached", None)
    if found is None:
        found = graph._tfdp_attached = {}
    if key not in found:
        found[key] = make()
    return found[key]


def all_attached(graph: Any) -> list:
    """The objects that live as long as a graph."""
    return list((getattr(graph, "_tfdp_attached", None) or {}).values())


def autocast_dtype() -> str | None:
    """The dtype in which Keras reads variables where a layer is computing."""
    scope = variables.get_autocast_scope()
    return None if scope is None else scope.dtype


def autocasting(dtype: tf.DType | None) -> contextlib.AbstractContextManager:
    """Read Keras variables in a dtype inside, as layers do, or in their own."""
    return variables.AutocastScope(None if dtype is None else dtype.name)


def is_cast_when_read(variable: Any) -> bool:
    """Whether Keras reads a variable in the dtype of the layer that computes."""
    return bool(variable._autocast)


def value_of(variable: Any) -> Any:
    """The `tf.Variable` of a Keras variable, whatever scope is in force."""
    return getattr(variable, "_value", variable)


def set_value_of(variable: Any, value: Any) -> None:
    """Put another object in the place of the `tf.Variable` of a Keras variable."""
    variable._value = value


def variable_like(variable: tf.Variable, value: Any, device: str) -> tf.Variable:
    """A `tf.Variable` of one device that is not watched by tapes, named like another.

    Keras's optimizers know a variable, and whether it decays, by the identity that it
    shares with the other.
    """
    name = variable.name.partition(":")[0]
    return component_variable(value, device, name, variable._unique_id)


def component_variable(
    value: Any, device: str, name: str, unique_id: str
) -> tf.Variable:
    """A `tf.Variable` of one device that is not watched by tapes."""
    with tf.init_scope(), outside_strategies(), tf.device(device):
        made = resource_variable_ops.ResourceVariable(value, trainable=False, name=name)
    made._unique_id = unique_id
    return made


def unique_name(name: str) -> str:
    """An identity that no other variable of this process has, as TensorFlow's own."""
    return f"{name}_{ops.uid()}"
