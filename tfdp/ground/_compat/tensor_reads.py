"""Variables that are assembled from tensors: reads, tapes and graphs."""

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

from tfdp.ground._compat.tf_distribute import outside_strategies

_ControlFlowGraph = control_flow_v2_func_graphs.ControlFlowFuncGraph


def record_read(variable: Any, value: tf.Tensor) -> None:
    """Record on all active gradient tapes that `value` was read from a variable.

    A `GradientTape` watches a variable by its `handle` when it is read. The gradient of
    the handle is the sum over all reads, in the handle's dtype. TensorFlow's own
    function for this also looks for the components of a distributed variable.

    Args:
        variable: Object with `trainable` and with a tensor as its `handle`, whose value
            does not matter.
        value: Tensor, a new one for each read.
    """
    source = variable.handle

    def gradient(upstream: Any) -> list[Any]:
        """Return the gradient of the handle: that of `value`, in the handle's dtype."""
        if isinstance(upstream, tf.IndexedSlices):
            values = tf.cast(upstream.values, source.dtype)
            return [tf.IndexedSlices(values, upstream.indices, upstream.dense_shape)]
        return [tf.cast(upstream, source.dtype)]

    pywrap_tfe.TFE_Py_TapeVariableAccessed(variable)
    pywrap_tfe.TFE_Py_VariableWatcherVariableAccessed(variable)
    record.record_operation("ReadParameter", [value], [source], gradient)


def step_graph() -> Any:
    """Return the graph in which a replica's step is traced.

    In the body of a loop or a branch it is the graph around it.

    Returns:
        A graph, or `None` inside a `tf.function` that the step calls: a tensor that is
        created there belongs to one call of that function only.
    """
    entry = getattr(threading.current_thread(), "graph", None)
    graph = ops.get_default_graph()
    while graph is not entry and isinstance(graph, _ControlFlowGraph):
        graph = graph.outer_graph
    return graph if entry is None or graph is entry else None


def shared_run_object() -> Any:
    """Return the object that the replicas' threads of a `strategy.run` call share.

    It is their coordinator, and shows whether two replicas run in the same call.

    Returns:
        The object, or `None` outside the threads of replicas.
    """
    return getattr(threading.current_thread(), "coord", None)


def set_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Replace an operation's input at `index` by a tensor of its shape and dtype."""
    op._update_input(index, tensor)


def attached(graph: Any, key: Any, make: Any) -> Any:
    """Return the object that an attribute of a graph stores by `key`, created once.

    A global dict by graph would keep the graphs alive, as the objects hold tensors of
    them.

    Args:
        graph: Graph of TensorFlow.
        key: Hashable object, such as a string.
        make: Callable without arguments that creates the object.
    """
    objects = getattr(graph, "_tfdp_attached", None)
    if objects is None:
        objects = graph._tfdp_attached = {}
    if key not in objects:
        objects[key] = make()
    return objects[key]


def all_attached(graph: Any) -> list:
    """Return a list of all objects that `attached` has stored with a graph."""
    return list((getattr(graph, "_tfdp_attached", None) or {}).values())


def autocast_dtype() -> str | None:
    """Return the dtype in which the active layer reads variables; `None` if none is."""
    scope = variables.get_autocast_scope()
    return None if scope is None else scope.dtype


def autocasting(dtype: tf.DType | None) -> contextlib.AbstractContextManager:
    """Return a context in which Keras variables are read in a dtype, as in layers."""
    return variables.AutocastScope(None if dtype is None else dtype.name)


def is_cast_when_read(variable: Any) -> bool:
    """Return whether Keras reads a variable in the dtype of the active layer."""
    return bool(variable._autocast)


def value_of(variable: Any) -> Any:
    """Return the `tf.Variable` of a Keras variable, whatever scope is active."""
    return getattr(variable, "_value", variable)


def set_value_of(variable: Any, value: Any) -> None:
    """Replace the `tf.Variable` of a Keras variable."""
    variable._value = value


def create_value_again(variable: Any, like: tf.Variable) -> None:
    """Replace the value of a Keras variable by new `tf.Variable`s of zeros.

    Each replica gets one. The caller has entered the scope of the strategy.

    Args:
        variable: Keras variable.
        like: `tf.Variable` with the name scope and identity of the new ones. Keras's
            optimizers find the variable by this identity.
    """
    scope, _, _ = like.name.rpartition("/")
    # A variable of a frozen layer may be trained later, and tapes watch only what was
    # created as trainable, so the variable is created as trainable.
    is_trainable, variable._trainable = variable._trainable, True
    with tf.name_scope(f"{scope}/") if scope else contextlib.nullcontext():
        variable._initialize(tf.zeros(variable.shape, variable.dtype))
    variable._trainable = is_trainable
    for component in variable._value.values:
        component._unique_id = like._unique_id


def variable_like(variable: tf.Variable, value: Any, device: str) -> tf.Variable:
    """Create an unwatched `tf.Variable` on a device, with another's name and identity.

    Keras's optimizers find a variable and its weight decay by this identity.

    Args:
        variable: `tf.Variable` with the name and the identity.
        value: Initial value.
        device: String, name of the device.
    """
    name = variable.name.partition(":")[0]
    return component_variable(value, device, name, variable._unique_id)


def component_variable(
    value: Any, device: str, name: str, unique_id: str
) -> tf.Variable:
    """Create a `tf.Variable` on a device that tapes do not watch.

    Args:
        value: Initial value.
        device: String, name of the device.
        name: String, name of the variable.
        unique_id: String, identity by which Keras's optimizers find the variable.
    """
    with tf.init_scope(), outside_strategies(), tf.device(device):
        variable = resource_variable_ops.ResourceVariable(
            value, trainable=False, name=name
        )
    variable._unique_id = unique_id
    return variable


def unique_name(name: str) -> str:
    """Return a variable's name with a unique number, such as `"kernel_12"`."""
    return f"{name}_{ops.uid()}"
