"""Whole parameters gathered outside of a step, between workers, in small messages.

The first worker alone writes a file, and reads one variable after the other in whatever
order Keras does. The others learn from it which one they gather with it next.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import Member, ProcessGroup
from tfdp.ground.plans.units import unit_bucket
from tfdp.training.parameters.sharded_parameter import (
    ShardedParameter,
    sharded_parameter,
)
from tfdp.training.replicas.synchronized_scope import MESSAGE_BYTES

# What is announced when nothing more is read.
_END = -1


def gather_parameter(
    parameter: ShardedParameter, owners: Sequence[int], host_group: ProcessGroup
) -> tf.Tensor:
    """Gather a parameter on the host of each worker. All workers call it, or serve.

    Args:
        parameter: `ShardedParameter`.
        owners: Sequence of ints, the part that each replica has, of all workers.
        host_group: `ProcessGroup` with one member for each worker.

    Returns:
        Tensor of the parameter's shape.
    """
    pieces = list(_messages(parameter, owners, host_group))
    if not pieces:
        return tf.zeros(parameter.whole_shape, parameter.dtype)
    flat = tf.reshape(tf.concat(pieces, axis=1), [-1])
    return tf.reshape(flat[: parameter.num_elements], parameter.whole_shape)


def serve_parameter(
    parameter: ShardedParameter, owners: Sequence[int], host_group: ProcessGroup
) -> None:
    """Take part in `gather_parameter`, and keep no more than a message of it.

    Arguments are those of `gather_parameter`.
    """
    for _ in _messages(parameter, owners, host_group):
        pass


def _messages(
    parameter: ShardedParameter, owners: Sequence[int], host_group: ProcessGroup
) -> Iterator[tf.Tensor]:
    """Columns of all owners, `[num_owners, columns]`, or of the only one."""
    sizes = [stop - start for start, stop in parameter.ranges]
    bucket = unit_bucket([0], [parameter.ranges], parameter.dtype.name)
    only = [owner for owner, size in enumerate(sizes) if size]
    num_rows = 1 if len(only) == 1 else len(owners)
    width = max(1, MESSAGE_BYTES // (num_rows * parameter.dtype.size))
    if host_group.size == 1:
        width = max(1, bucket.slice_size)
    for begin in range(0, bucket.slice_size, width):
        end = min(begin + width, bucket.slice_size)
        if len(only) == 1:
            place = owners.index(only[0])
            yield _columns_of_one(parameter, place, begin, end, host_group)
        else:
            own = [_columns(part, begin, end) for part in parameter.values]
            rows = tf.stack(own)  # [local replicas, columns]
            if host_group.size > 1:
                rows = Member(host_group, 0).all_gather(rows)  # [replicas, columns]
            yield tf.gather(rows, [owners.index(owner) for owner in range(len(sizes))])


def _columns_of_one(
    parameter: ShardedParameter, place: int, begin: int, end: int, hosts: ProcessGroup
) -> tf.Tensor:
    """Elements of a parameter that one replica has alone: `[1, columns]`."""
    source, replica = divmod(place, len(parameter.values))
    if source == hosts.position(0):
        own = _columns(parameter.values[replica], begin, end)
    else:
        own = tf.zeros([end - begin], parameter.dtype)
    return Member(hosts, 0).broadcast(own, source=source)[tf.newaxis]


def _columns(part: tf.Variable, begin: int, end: int) -> tf.Tensor:
    """Elements of a part, and zeros where it has fewer."""
    found = tf.reshape(part.read_value(), [-1])[begin:end]
    return tf.pad(found, [[0, end - begin - found.shape[0]]])


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
        Member(host_group, 0).broadcast(tf.constant([number]))

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
        number = int(Member(host_group, 0).broadcast(tf.constant([_END]))[0])
        if number == _END:
            return
        parameters[number].reader.serve(parameters[number])
