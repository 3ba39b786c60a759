"""XLA: compilation of functions of a replica's step, with checks beforehand.

Operations that XLA lacks are detected while a step is traced. An error of the first run
would come too late, after it has read its batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.ground._compat import xla_lowering
from tfdp.ground.base import loops, step_context

# Sizes that replace unknown dimensions to check a function, tried in this order until
# the model accepts one. A model with many strides needs large images. One that halves
# and doubles images, or folds axes, needs sizes divisible by a power of two.
_TRIED_SIZES = (16, 96, 224, 512)
# TensorFlow names an operation that XLA lacks only in the text of an error. The groups
# are the operation's type and name.
_LACKS = re.compile(r": (\w+) \(No registered .*?\{\{node ([^}]*)\}\}", re.DOTALL)


class CannotCompileError(Exception):
    """Error: XLA cannot compile a function, for the reason in the message."""


def should_compile() -> bool:
    """Return whether XLA should compile parts of the step that is being traced.

    Inside such a part it is false. A model that is not built, as in `predict` without
    `fit`, creates its variables in the first trace, which XLA cannot compile; the next
    trace is compiled.
    """
    loop = loops.current()
    return (
        loop is not None
        and bool(loop.model.jit_compile)
        and bool(loop.model.built)
        and not tf.executing_eagerly()
        and not is_tracing()
    )


def is_tracing() -> bool:
    """Return whether this thread traces a function that XLA compiles."""
    return step_context.current().is_compiled


def trace(function: Callable, args: tuple) -> Any:
    """Trace a function for compilation by XLA on its first call.

    Args:
        function: Callable of nested structures of tensors.
        args: Tuple of the function's arguments.

    Returns:
        Concrete function.
    """
    plain = tf.autograph.experimental.do_not_convert(function)
    with step_context.using(is_compiled=True):
        return tf.function(plain, jit_compile=True).get_concrete_function(*args)


def check(concrete: Any, device: str) -> None:
    """Raise if XLA cannot compile a traced function.

    Args:
        concrete: Concrete function.
        device: String, the device of the function.

    Raises:
        CannotCompileError: If XLA lacks an operation, or a shape is not static.
    """
    num_arguments = len(concrete.inputs) - len(concrete.captured_inputs)
    arguments = concrete.inputs[:num_arguments]
    if any(tensor.shape.rank is None for tensor in arguments):
        raise CannotCompileError("a batch has a tensor of unknown rank")
    is_static = all(tensor.shape.is_fully_defined() for tensor in arguments)
    problem = ""
    for size in _TRIED_SIZES[:1] if is_static else _TRIED_SIZES:
        specs = [_static(tensor, size) for tensor in arguments]
        problem = _problem(concrete, specs, device)
        if not problem or _LACKS.search(problem):
            break
    if problem:
        raise CannotCompileError(_reason(problem))


def run(function: Callable, args: tuple, device: str) -> Any:
    """Run a function, compiled if XLA can compile it.

    Args:
        function: Callable of nested structures of tensors.
        args: Tuple of the function's arguments.
        device: String, the device of the function.

    Returns:
        The result of the function.
    """
    try:
        concrete = trace(function, args)
        check(concrete, device)
    except CannotCompileError:
        return function(*args)
    return concrete(*args)


def _static(tensor: Any, any_size: int) -> tf.TensorSpec:
    """Return a static spec of a tensor, with `any_size` for unknown dimensions."""
    sizes = [any_size if size is None else size for size in tensor.shape.as_list()]
    return tf.TensorSpec(sizes, tensor.dtype)


def _problem(concrete: Any, specs: list[tf.TensorSpec], device: str) -> str:
    """Return XLA's error for a function with arguments of `specs`; `""` without one."""
    try:
        xla_lowering.lower(concrete, specs, device)
    except (ValueError, tf.errors.OpError) as error:
        return str(error)
    return ""


def _reason(text: str) -> str:
    """Return why XLA cannot compile, as a clause, from the `text` of its error."""
    lacks = _LACKS.search(text)
    if lacks:
        return f"XLA lacks the operation `{lacks[1]}` ({lacks[2]!r})"
    return "XLA cannot compile it: " + text.partition("\n")[0].strip(" .")
