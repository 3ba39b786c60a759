"""XLA: lowering of a traced function, and its captured values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from keras.src.trainers import trainer
from tensorflow.python.eager import context


def supports_jit(model: Any) -> bool:
    """Return whether Keras's `jit_compile="auto"` would compile a model by XLA."""
    return trainer.model_supports_jit(model)


def outermost(tensor: Any) -> Any:
    """Return the tensor of an outer graph that functions have captured as `tensor`.

    Captures are followed outwards, function by function. A tensor that is not captured
    is returned unchanged.
    """
    while tf.is_symbolic_tensor(tensor):
        captures = getattr(tensor.graph, "captures", ())
        outer = next((out for out, inside in captures if inside is tensor), None)
        if outer is None:
            break
        tensor = outer
    return tensor


def all_operations(graph: Any) -> Iterator[tf.Operation]:
    """Yield the operations of a graph and of the functions in it."""
    yield from graph.get_operations()
    for function in graph._functions.values():
        inner = getattr(function, "graph", None)
        if inner is not None:
            yield from inner.get_operations()


def lower(concrete: Any, arguments: Sequence[tf.TensorSpec], device: str) -> None:
    """Check that XLA supports a traced function, by lowering it without compilation.

    The lowered operations are discarded. TensorFlow's public method for this,
    `experimental_get_compiler_ir`, needs values for all captured tensors.

    Args:
        concrete: Concrete function.
        arguments: Sequence of static `tf.TensorSpec`s for the flat arguments.
        device: String, name of the target device.

    Raises:
        ValueError: If XLA lacks an operation, or a shape depends on values.
    """
    # `get_compiler_ir` requires captured inputs as eager tensors. Inside `init_scope`,
    # tensors are eager even while a step is traced.
    with tf.init_scope():
        captured = [_value_of(tensor) for tensor in concrete.captured_inputs]
        context.context().get_compiler_ir(
            device_name=device,
            platform_name=None,
            function_name=concrete.name,
            flat_args=list(arguments),
            captured_inputs=captured,
            stage="hlo",
        )


def _value_of(tensor: Any) -> Any:
    """Return the eager tensor that a function captured; zeros if it is symbolic.

    Unknown sizes of a symbolic tensor are 1.
    """
    value = outermost(tensor)
    if not tf.is_symbolic_tensor(value):
        return value
    sizes = [1 if size is None else size for size in value.shape.as_list()]
    return tf.zeros(sizes, value.dtype)
