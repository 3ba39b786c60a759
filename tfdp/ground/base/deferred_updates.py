"""Updates that wait until the part of a step that XLA compiles is done.

A step of Keras's gives its gradients to the optimizer in the middle. Collectives cannot
be compiled with the rest, so `apply` only notes what it was given while that part is
traced, and is called again after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdp.ground.base import program_trace, step_context


class CannotDeferError(Exception):
    """An update cannot wait for the end of the step."""


@dataclasses.dataclass(frozen=True)
class Update:
    """An update that waits.

    Args:
        optimizer: Keras optimizer.
        gradients: List of tensors, `tf.IndexedSlices` and `None`.
        variables: List of Keras variables, or `None` for those of the optimizer.
        num_operations: Int, operations of the graph before it.
    """

    optimizer: Any
    gradients: list
    variables: list | None
    num_operations: int


@contextlib.contextmanager
def deferring() -> Iterator[list[Update]]:
    """Defer the updates of this thread; yields the list of them."""
    updates: list[Update] = []
    with step_context.using(deferred=(updates, tf.compat.v1.get_default_graph())):
        yield updates


def defer(optimizer: Any, gradients: Sequence[Any], variables: Any) -> bool:
    """Defer an update if they are deferred in this thread, or a program is traced.

    In a program each replica makes it, at this place of the step.

    Args:
        optimizer: Keras optimizer.
        gradients: Sequence of tensors, `tf.IndexedSlices` and `None`.
        variables: Sequence of Keras variables, or `None`.

    Returns:
        Bool, whether it is deferred.

    Raises:
        CannotDeferError: If it is made in a branch or a loop.
    """
    variables = None if variables is None else list(variables)
    trace, found = program_trace.current(), step_context.current().deferred
    if trace is not None:
        trace.add(list(gradients), lambda own: optimizer.apply(own, variables), "parts")
        return True
    if found is None:
        return False
    updates, graph = found
    if tf.compat.v1.get_default_graph() is not graph:
        raise CannotDeferError("an update is made in a branch, a loop or a function")
    num_operations = len(graph.get_operations())
    updates.append(Update(optimizer, list(gradients), variables, num_operations))
    return True
