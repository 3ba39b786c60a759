"""Collectives: flat tensor and group in, flat tensor out.

Each is called once per local replica, on that replica's device, inside or
outside `tf.function`, in conditionals, and in loops around all replicas. In eager
mode the local replicas have to call from threads of their own, since a collective
returns only when all have called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import timing
from tfdp.communication.collectives.groups import Call, ProcessGroup
from tfdp.communication.collectives.instance_keys import SIZES


def all_reduce(
    tensor: tf.Tensor,
    group: ProcessGroup,
    replica: int,
    *,
    channel: int = 0,
    size: tf.Tensor | None = None,
    is_alone: bool = True,
) -> tf.Tensor:
    """All-reduce: sum a tensor over the group.

    Args:
        tensor: Tensor, the same shape and dtype on every replica.
        group: A `ProcessGroup`.
        replica: Int, index of the calling replica among the local ones.
        channel: Int, the chain of the launch order. Defaults to `0`.
        size: Scalar int32 tensor from `padded_length`, where the length of
            `tensor` is known only at run time. Defaults to `None`.
        is_alone: Bool, whether hardly anything else is under way at the same
            time. Defaults to `True`.

    Returns:
        A tensor like `tensor`, identical on every replica.
    """
    if group.size == 1 or _is_empty(tensor):
        return tf.identity(tensor)
    call = Call(group, replica, channel, size, is_alone)
    return _run("all_reduce", tensor, call)


def all_gather(
    tensor: tf.Tensor,
    group: ProcessGroup,
    replica: int,
    *,
    channel: int = 0,
    size: tf.Tensor | None = None,
    reduce_dtype: tf.DType | None = None,
) -> tf.Tensor:
    """All-gather: concatenate the replicas' tensors along the first axis.

    Args:
        tensor: Tensor of rank one or more, the same shape on every replica.
        group: A `ProcessGroup`.
        replica: Int, index of the calling replica among the local ones.
        channel: Int, the chain of the launch order. Defaults to `0`.
        size: Scalar int32 tensor from `padded_length`, where the length of
            `tensor` is known only at run time. Defaults to `None`.
        reduce_dtype: `tf.DType` that the elements are rounded to, or `None`, their
            own. Defaults to `None`.

    Returns:
        A tensor whose first axis is `group.size` times as long, in the order
        of positions, identical on every replica.
    """
    if group.size == 1:
        return tf.identity(tensor)
    if _is_empty(tensor):
        return tf.concat([tensor] * group.size, axis=0)
    sent, back = _to_sent_dtype(tensor, reduce_dtype)
    call = Call(group, replica, channel, size)
    with tf.device(group.devices[replica]):
        gathered = back(_run("all_gather", sent, call))
        return tf.ensure_shape(gathered, _joined_shape(tensor, group.size))


def all_to_all(
    tensor: tf.Tensor, group: ProcessGroup, replica: int, *, channel: int = 0
) -> tf.Tensor:
    """All-to-all: send the i-th slice of the first axis to replica i.

    Args:
        tensor: Tensor of shape `[group.size, ...]`.
        group: A `ProcessGroup`.
        replica: Int, index of the calling replica among the local ones.
        channel: Int, the chain of the launch order. Defaults to `0`.

    Returns:
        A tensor of the same shape; slice i is what replica i sent here.
    """
    if group.size == 1 or _is_empty(tensor):
        return tf.identity(tensor)
    return _run("all_to_all", tensor, Call(group, replica, channel))


def reduce_scatter(
    tensor: tf.Tensor,
    group: ProcessGroup,
    replica: int,
    *,
    channel: int = 0,
    reduce_dtype: tf.DType | None = None,
) -> tf.Tensor:
    """Reduce-scatter: sum over the group and keep the calling replica's slice.

    Args:
        tensor: Tensor of shape `[group.size * n, ...]`.
        group: A `ProcessGroup`.
        replica: Int, index of the calling replica among the local ones.
        channel: Int, the chain of the launch order. Defaults to `0`.
        reduce_dtype: `tf.DType` that the elements travel in; they are added up in their
            own. Defaults to `None`, their own.

    Returns:
        A tensor of shape `[n, ...]`, the slice of the replica's position.
    """
    if group.size == 1:
        return tf.identity(tensor)
    if _is_empty(tensor):
        return tf.split(tensor, group.size)[0]
    if group.transport.has_reduce_scatter and reduce_dtype is None:
        return _run("reduce_scatter", tensor, Call(group, replica, channel))
    # An all-to-all and a local sum move the same bytes, and add up what was rounded
    # for the wire in its own dtype.
    sent = tf.reshape(tensor, _split_shape(tensor, group.size))  # [group.size, n, ...]
    if reduce_dtype is not None:
        sent = tf.cast(sent, reduce_dtype)
    received = all_to_all(sent, group, replica, channel=channel)
    return _sum_of_rows(received, tensor.dtype)  # [n, ...]


def broadcast(
    tensor: tf.Tensor,
    group: ProcessGroup,
    replica: int,
    *,
    source: int = 0,
    channel: int = 0,
    reduce_dtype: tf.DType | None = None,
) -> tf.Tensor:
    """Broadcast: copy the source's tensor to every replica.

    Args:
        tensor: Tensor; on the others only its shape and dtype count.
        group: A `ProcessGroup`.
        replica: Int, index of the calling replica among the local ones.
        source: Int, the position of the source in the group. Defaults to `0`.
        channel: Int, the chain of the launch order. Defaults to `0`.
        reduce_dtype: `tf.DType` that the elements are rounded to, or `None`, their
            own. Defaults to `None`.

    Returns:
        The source's tensor, identical on every replica.
    """
    if group.size == 1 or _is_empty(tensor):
        return tf.identity(tensor)
    sent, back = _to_sent_dtype(tensor, reduce_dtype)
    with tf.device(group.devices[replica]):
        return back(_run("broadcast", sent, Call(group, replica, channel), source))


@dataclasses.dataclass(frozen=True)
class Member:
    """A replica as a member of a group, which calls its collectives.

    Args:
        group: `ProcessGroup`.
        replica: Int, index of the calling replica among the local ones.
        channel: Int, the chain of the launch order. Defaults to `0`.
        reduce_dtype: `tf.DType` in which elements travel, or `None`, their own.
            Defaults to `None`.
    """

    group: ProcessGroup
    replica: int
    channel: int = 0
    reduce_dtype: tf.DType | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Dict, the arguments of a collective beside its tensor."""
        return vars(self)

    @property
    def position(self) -> int:
        """Int, the calling replica's position in the group."""
        return self.group.position(self.replica)

    def inside(self, groups: Sequence[ProcessGroup | None]) -> Member:
        """The same replica as a member of its part of a split group."""
        group = groups[self.replica]
        assert group is not None
        return dataclasses.replace(self, group=group)

    def reduce_scatter(self, tensor: tf.Tensor) -> tf.Tensor:
        """See `reduce_scatter`."""
        return reduce_scatter(tensor, **self.arguments)

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """See `all_gather`."""
        return all_gather(tensor, **self.arguments)

    def broadcast(self, tensor: tf.Tensor, source: int) -> tf.Tensor:
        """See `broadcast`."""
        return broadcast(tensor, source=source, **self.arguments)


def padded_length(length: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Round a length up to one of the lengths that collectives may have.

    Args:
        length: Scalar int32 tensor, the same on every replica.

    Returns:
        Tuple of two scalar int32 tensors: the length to pad to, and the number
        that `all_reduce` and `all_gather` take as `size`.

    Example:

    >>> padded, size = padded_length(tf.constant(17))
    >>> int(padded)
    18
    """
    sizes = tf.constant(SIZES, tf.int32)
    number = tf.searchsorted(sizes, length[tf.newaxis])[0]
    return tf.gather(sizes, number), number


def _to_sent_dtype(
    tensor: tf.Tensor, reduce_dtype: tf.DType | None
) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Cast a tensor to the dtype that is sent; return it and the inverse function."""
    if reduce_dtype is not None and reduce_dtype != tensor.dtype:
        sent, back = _to_sent_dtype(tf.cast(tensor, reduce_dtype), None)
        return sent, lambda received: tf.cast(back(received), tensor.dtype)
    if tensor.dtype == tf.bfloat16:
        # TensorFlow moves no bfloat16 that it does not add up: the same bits.
        return (
            tf.bitcast(tensor, tf.float16),
            lambda received: tf.bitcast(received, tf.bfloat16),
        )
    return tensor, lambda received: received


def _split_shape(tensor: tf.Tensor, count: int) -> tf.Tensor | list[int]:
    """Return a static shape where possible, since instance keys contain the shape."""
    if tensor.shape.is_fully_defined():
        return [count, tensor.shape[0] // count, *tensor.shape[1:]]
    shape = tf.shape(tensor)
    return tf.concat([[count, shape[0] // count], shape[1:]], axis=0)


def _joined_shape(tensor: tf.Tensor, count: int) -> tf.TensorShape:
    rows = tensor.shape[0]
    return tf.TensorShape([None if rows is None else count * rows, *tensor.shape[1:]])


def _sum_of_rows(rows: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Sum over the first axis; half precision in float32, to be rounded once."""
    wide = tf.float32 if dtype.is_floating and dtype.size < 4 else dtype
    return tf.cast(tf.reduce_sum(tf.cast(rows, wide), axis=0), dtype)


def _is_empty(tensor: tf.Tensor) -> bool:
    """Return whether there is nothing to send, which TensorFlow takes for an error."""
    return tensor.shape.num_elements() == 0


def _run(kind: str, tensor: tf.Tensor, call: Call, source: int = 0) -> tf.Tensor:
    """Run on the replica's device, with timestamps around it if they are recorded."""
    group, replica = call.group, call.replica
    chain = hash((id(group.launch_order), replica, call.channel))
    with (
        timing.measured(kind, tensor, replica, group.size, chain) as done,
        tf.device(group.devices[replica]),
    ):
        return done(group.transport.run(kind, tensor, call, source))
