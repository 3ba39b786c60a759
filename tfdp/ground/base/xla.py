"""XLA: functions of a replica's step that are compiled, as far as XLA can.

What XLA lacks is found while a step is traced, and not by an error of its first run,
which would have read its batch already.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.ground import _compat
from tfdp.ground.base import loops, step_context

# In the check for what XLA lacks these stand for sizes that no one knows before a step,
# until a model can do with one: with many strides it needs large images, and one that
# halves and doubles them, or folds axes, needs multiples.
_TRIED_SIZES = (16, 96, 224, 512)
# An operation and its name in the graph.
_LACKS = re.compile(r": (\w+) \(No registered .*?\{\{node ([^}]*)\}\}", re.DOTALL)


class CannotCompileError(Exception):
    """XLA cannot compile a function, with the reason."""


def is_wanted() -> bool:
    """Return whether XLA is to compile the running step, and does not yet.

    A model that is not built, as in `predict` without `fit`, makes its variables in
    the first trace, which XLA cannot; the next one is compiled.
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
    """Return whether this thread traces what XLA compiles."""
    return step_context.current().is_compiled


def trace(function: Callable, args: tuple) -> Any:
    """Trace a function that XLA compiles when it is called.

    Args:
        function: Callable of nested structures of tensors.
        args: Tuple of its arguments.

    Returns:
        Concrete function.
    """
    plain = tf.autograph.experimental.do_not_convert(function)
    with step_context.using(is_compiled=True):
        return tf.function(plain, jit_compile=True).get_concrete_function(*args)


def check(concrete: Any, device: str) -> None:
    """Raise what XLA cannot compile of a traced function.

    Args:
        concrete: Concrete function.
        device: String, where it is to run.

    Raises:
        CannotCompileError: If XLA lacks an operation, or cannot know a shape.
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
    """Run a function, compiled if XLA can.

    Args:
        function: Callable of nested structures of tensors.
        args: Tuple of its arguments.
        device: String, where it runs.

    Returns:
        What it returns.
    """
    try:
        concrete = trace(function, args)
        check(concrete, device)
    except CannotCompileError:
        return function(*args)
    return concrete(*args)


def _static(tensor: Any, any_size: int) -> tf.TensorSpec:
    sizes = [any_size if size is None else size for size in tensor.shape.as_list()]
    return tf.TensorSpec(sizes, tensor.dtype)


def _problem(concrete: Any, specs: list[tf.TensorSpec], device: str) -> str:
    """The error of lowering a function for arguments of these sizes, or `""`."""
    try:
        _compat.lower(concrete, specs, device)
    except (ValueError, tf.errors.OpError) as error:
        return str(error)
    return ""


def _reason(text: str) -> str:
    """The sentence of an error of XLA's that says what it lacks."""
    lacks = _LACKS.search(text)
    if lacks:
        return f"XLA lacks the operation `{lacks[1]}` ({lacks[2]!r})"
    return "XLA cannot compile it: " + text.partition("\n")[0].strip(" .")
