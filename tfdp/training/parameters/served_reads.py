"""Reads of sharded parameters by one worker alone, which the others take part in.

The first worker writes a file, and reads one variable after the other in whatever order
Keras does. The others learn from it which one they gather with it next.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import ProcessGroup, broadcast
from tfdp.training.parameters.sharded_parameter import (
    ShardedParameter,
    sharded_parameter,
)

_END = -1


def parameters_of(model: Any) -> list[ShardedParameter]:
    """The sharded parameters of a Keras model, in one order, each once."""
    found = [sharded_parameter(variable) for variable in model.variables]
    return list({id(item): item for item in found if item is not None}.values())


@contextlib.contextmanager
def reading_alone(
    parameters: Sequence[ShardedParameter], host_group: ProcessGroup
) -> Iterator[None]:
    """Let this worker read parameters while all others call `serve_reads`.

    Args:
        parameters: Sequence of `ShardedParameter`, the same on all workers.
        host_group: `ProcessGroup` with one member for each worker, this one the first.
    """
    if host_group.size == 1 or not parameters:
        yield
        return

    def announce(number: int) -> None:
        broadcast(tf.constant([number]), host_group, 0)

    for number, parameter in enumerate(parameters):
        announcement = functools.partial(announce, number)
        parameter.reader.announcements[id(parameter)] = announcement
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.reader.announcements.pop(id(parameter), None)
        announce(_END)


def serve_reads(
    parameters: Sequence[ShardedParameter], host_group: ProcessGroup
) -> None:
    """Gather with the first worker what it reads, until it has read all it needs.

    What is gathered is not kept here.

    Args:
        parameters: Sequence of `ShardedParameter`, the same on all workers.
        host_group: `ProcessGroup` with one member for each worker.
    """
    if host_group.size == 1 or not parameters:
        return
    while True:
        number = int(broadcast(tf.constant([_END]), host_group, 0)[0])
        if number == _END:
            return
        parameters[number].reader.serve(parameters[number])
