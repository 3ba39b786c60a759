"""Deferred updates: updates that run after the part of a step that XLA compiles.

A step of Keras passes its gradients to the optimizer before the step ends. XLA cannot
compile the collectives of the update. So `apply` only records its arguments while the
compiled part is traced, and is called again after that part.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdp.ground.base import program_trace, step_context


class CannotDeferError(Exception):
    """Error: an update in a branch, loop or function of a step cannot be deferred."""


@dataclasses.dataclass(frozen=True)
class Update:
    """Call of an optimizer's `apply` that waits for the end of a step's compiled part.

    Args:
        optimizer: Keras optimizer.
        apply: Callable that makes the update, such as the optimizer's `apply`.
        gradients: List of tensors, `tf.IndexedSlices` and `None`.
        variables: List of Keras variables, or `None` for those of the optimizer.
        num_operations: Int, the number of operations of the graph before the update.
    """

    optimizer: Any
    apply: Callable
    gradients: list
    variables: list | None
    num_operations: int


@contextlib.contextmanager
def deferring() -> Iterator[list[Update]]:
    """Defer the updates of this thread in the block, and yield the list of them."""
    updates: list[Update] = []
    with step_context.using(deferred=(updates, tf.compat.v1.get_default_graph())):
        yield updates


def defer(
    optimizer: Any,
    gradients: Sequence[Any],
    variables: Any,
    apply: Callable,
) -> bool:
    """Defer an update within `deferring`, or while a one-device program is traced.

    While a program is traced, the update becomes an effect of the program: each replica
    makes it at this position.

    Args:
        optimizer: Keras optimizer.
        gradients: Sequence of tensors, `tf.IndexedSlices` and `None`.
        variables: Sequence of Keras variables, or `None`.
        apply: Callable that makes the update with the gradients of a replica and the
            variables.

    Returns:
        Bool, whether the update is deferred.

    Raises:
        CannotDeferError: If the update is made in a branch, a loop or a function.
    """
    variables = None if variables is None else list(variables)
    trace, deferred = program_trace.current(), step_context.current().deferred
    if trace is not None:
        trace.add(list(gradients), lambda own: apply(own, variables), "parts")
        return True
    if deferred is None:
        return False
    updates, graph = deferred
    if tf.compat.v1.get_default_graph() is not graph:
        raise CannotDeferError("an update is made in a branch, a loop or a function")
    num_operations = len(graph.get_operations())
    updates.append(Update(optimizer, apply, list(gradients), variables, num_operations))
    return True
