"""Gathers of whole parameters outside of a step, between workers, in small messages.

Only the first worker writes a file. It reads the variables in the order of Keras, which
the other workers do not know, so it announces each parameter that they gather with it.
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

# Worker 0 sends this value after its last read, instead of the position of a parameter,
# so that the other workers stop waiting for reads.
_END = -1


def gather_parameter(
    parameter: ShardedParameter, owners: Sequence[int], host_group: ProcessGroup
) -> tf.Tensor:
    """Gather a parameter in the host memory of each worker.

    All workers call it, or `serve_parameter`.

    Args:
        parameter: `ShardedParameter`.
        owners: Sequence of ints: for each replica on all workers, in the order of
            `host_group`, which part of the parameter it owns.
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
    """Take part in the `gather_parameter` of other workers; keep no result.

    Args:
        parameter: `ShardedParameter`.
        owners: Sequence of ints: for each replica on all workers, in the order of
            `host_group`, which part of the parameter it owns.
        host_group: `ProcessGroup` with one member for each worker.
    """
    for _ in _messages(parameter, owners, host_group):
        pass


def _messages(
    parameter: ShardedParameter, owners: Sequence[int], host_group: ProcessGroup
) -> Iterator[tf.Tensor]:
    """Yield the elements of a parameter, gathered from its owners, in messages.

    Args:
        parameter: `ShardedParameter`.
        owners: Sequence of ints: for each replica on all workers, in the order of
            `host_group`, which part of the parameter it owns.
        host_group: `ProcessGroup` with one member for each worker.

    Yields:
        Tensor of shape `[num_owners, columns]`: in each row the next elements of one
        owner's part, with zeros after its end; or of shape `[1, columns]` if one owner
        has all elements. A message has about `MESSAGE_BYTES`, the last one fewer; on a
        single worker the only message has all columns.
    """
    sizes = [stop - start for start, stop in parameter.ranges]
    bucket = unit_bucket([0], [parameter.ranges], parameter.dtype.name)
    holders = [owner for owner, size in enumerate(sizes) if size]
    num_rows = 1 if len(holders) == 1 else len(owners)
    width = max(1, MESSAGE_BYTES // (num_rows * parameter.dtype.size))
    if host_group.size == 1:
        width = max(1, bucket.slice_size)
    for begin in range(0, bucket.slice_size, width):
        end = min(begin + width, bucket.slice_size)
        if len(holders) == 1:
            rank = owners.index(holders[0])
            yield _columns_of_one(parameter, rank, begin, end, host_group)
        else:
            local = [_columns(part, begin, end) for part in parameter.values]
            # The gather extends the rows of local replicas to those of all replicas, in
            # the order of `owners`. So an owner's position in `owners` is that of its
            # row.
            rows = tf.stack(local)
            if host_group.size > 1:
                rows = Member(host_group, 0).all_gather(rows)
            yield tf.gather(rows, [owners.index(owner) for owner in range(len(sizes))])


def _columns_of_one(
    parameter: ShardedParameter,
    rank: int,
    begin: int,
    end: int,
    host_group: ProcessGroup,
) -> tf.Tensor:
    """Broadcast a range of elements of a parameter that one replica holds.

    Args:
        parameter: `ShardedParameter`.
        rank: Int, index of the replica that holds it among those of all workers, in the
            order of `host_group`.
        begin: Int, the first element.
        end: Int, one after the last.
        host_group: `ProcessGroup` with one member for each worker.

    Returns:
        Tensor of shape `[1, end - begin]`.
    """
    source, replica = divmod(rank, len(parameter.values))
    if source == host_group.position(0):
        own = _columns(parameter.values[replica], begin, end)
    else:
        own = tf.zeros([end - begin], parameter.dtype)
    return Member(host_group, 0).broadcast(own, source=source)[tf.newaxis]


def _columns(part: tf.Variable, begin: int, end: int) -> tf.Tensor:
    """Return elements `begin` to `end - 1` of a part as a flat tensor.

    Elements beyond the end of the part are zeros.
    """
    found = tf.reshape(part.read_value(), [-1])[begin:end]
    return tf.pad(found, [[0, end - begin - found.shape[0]]])


def parameters_of(model: Any) -> list[ShardedParameter]:
    """Return the sharded parameters of a model, each once, in its variables' order."""
    found = [sharded_parameter(variable) for variable in model.variables]
    return list({id(item): item for item in found if item is not None}.values())


@contextlib.contextmanager
def reading_alone(
    parameters: Sequence[ShardedParameter], host_group: ProcessGroup
) -> Iterator[None]:
    """Allow this worker to read parameters alone, while the others call `serve_reads`.

    Each read is announced to the other workers, which take part in the gather. At the
    end of the context their `serve_reads` returns.

    Args:
        parameters: Sequence of `ShardedParameter`, the same on all workers.
        host_group: `ProcessGroup` with one member for each worker; this worker is the
            first.
    """
    if host_group.size == 1 or not parameters:
        yield
        return

    def announce(position: int) -> None:
        """Announce to the other workers which parameter is read next.

        `position` is an index into `parameters`, or `_END` after the last read.
        """
        Member(host_group, 0).broadcast(tf.constant([position]))

    for position, parameter in enumerate(parameters):
        announcement = functools.partial(announce, position)
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
    """Take part in the reads of the first worker until it has finished.

    The gathered values are not kept on this worker.

    Args:
        parameters: Sequence of `ShardedParameter`, the same on all workers.
        host_group: `ProcessGroup` with one member for each worker.
    """
    if host_group.size == 1 or not parameters:
        return
    while True:
        position = int(Member(host_group, 0).broadcast(tf.constant([_END]))[0])
        if position == _END:
            return
        parameters[position].reader.serve(parameters[position])
