"""Collectives of a replica in a group.

Each is called once per local replica, on that replica's device, inside or outside
`tf.function`, in conditionals, and in loops around all replicas. In eager mode each
local replica must call on its own thread, since a collective returns only when all have
called it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import timing
from tfdp.communication.collectives.groups import CollectiveCall, ProcessGroup
from tfdp.communication.collectives.instance_keys import SIZES


@dataclasses.dataclass(frozen=True)
class Member:
    """A replica as a member of a group, which calls its collectives.

    Args:
        group: `ProcessGroup`.
        replica: Int, index of the calling replica among the local ones.
        channel: Int; collectives of one channel run one after another. Defaults to `0`.
        wire_dtype: `tf.DType` in which elements travel in `reduce_scatter`,
            `all_gather` and `broadcast`, or `None` for their own. Defaults to `None`.
    """

    group: ProcessGroup
    replica: int
    channel: int = 0
    wire_dtype: tf.DType | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Dict from name to value: `group`, `replica`, `channel` and `wire_dtype`.

        They are arguments of `ring` and of the other functions in `FLAT`, which are
        called with them on behalf of this member.
        """
        return vars(self)

    @property
    def position(self) -> int:
        """Int, the calling replica's position in the group."""
        return self.group.position(self.replica)

    def inside(self, groups: Sequence[ProcessGroup | None]) -> Member:
        """Return the replica as a `Member` of its subgroup.

        Args:
            groups: Sequence with the subgroup of each local replica, as `group.split`
                returns it; that of this replica is not `None`.
        """
        group = groups[self.replica]
        assert group is not None
        return dataclasses.replace(self, group=group)

    def all_reduce(
        self, tensor: tf.Tensor, *, size: tf.Tensor | None = None, is_alone: bool = True
    ) -> tf.Tensor:
        """All-reduce: sum a tensor over the group.

        Args:
            tensor: Tensor, the same shape and dtype on every replica.
            size: Scalar int32 tensor from `padded_length`, where the length of
                `tensor` is known only at run time. Defaults to `None`.
            is_alone: Bool, whether hardly any other collective runs at the same time: a
                ring of TensorFlow then sends smaller pieces, so the network is not
                idle. Defaults to `True`.

        Returns:
            A tensor like `tensor`, identical on every replica.
        """
        if self.group.size == 1 or _is_empty(tensor):
            return tf.identity(tensor)
        return self._run("all_reduce", tensor, size, is_alone=is_alone)

    def all_gather(
        self, tensor: tf.Tensor, *, size: tf.Tensor | None = None
    ) -> tf.Tensor:
        """All-gather: concatenate the replicas' tensors along the first axis.

        Args:
            tensor: Tensor of rank one or more, the same shape on every replica.
            size: Scalar int32 tensor, where the length of `tensor` is known only at run
                time: the index that `padded_length` returns with that length. Defaults
                to `None`.

        Returns:
            A tensor whose first axis is `group.size` times as long, in the order
            of positions, identical on every replica.
        """
        group = self.group
        if group.size == 1:
            return tf.identity(tensor)
        if _is_empty(tensor):
            return tf.concat([tensor] * group.size, axis=0)
        sent, back = _to_sent_dtype(tensor, self.wire_dtype)
        with tf.device(group.devices[self.replica]):
            gathered = back(self._run("all_gather", sent, size))
            return tf.ensure_shape(gathered, _joined_shape(tensor, group.size))

    def all_to_all(self, tensor: tf.Tensor) -> tf.Tensor:
        """All-to-all: send the i-th slice of the first axis to replica i.

        Args:
            tensor: Tensor of shape `[group.size, ...]`.

        Returns:
            A tensor of the same shape; slice i is from replica i.
        """
        if self.group.size == 1 or _is_empty(tensor):
            return tf.identity(tensor)
        return self._run("all_to_all", tensor)

    def reduce_scatter(self, tensor: tf.Tensor) -> tf.Tensor:
        """Reduce-scatter: sum over the group and keep the calling replica's slice.

        Elements are summed in their own dtype, even if they travel in another, unless
        the transport adds them as they are sent.

        Args:
            tensor: Tensor of shape `[group.size * n, ...]`.

        Returns:
            A tensor of shape `[n, ...]`, the slice of the replica's position.
        """
        group = self.group
        if group.size == 1:
            return tf.identity(tensor)
        if _is_empty(tensor):
            return tf.split(tensor, group.size)[0]
        transport, wire_dtype = group.transport, self.wire_dtype or tensor.dtype
        if transport.has_reduce_scatter and (
            wire_dtype == tensor.dtype or transport.sums_as_sent(group)
        ):
            total = self._run("reduce_scatter", tf.cast(tensor, wire_dtype))
            return tf.cast(total, tensor.dtype)
        # An all-to-all and a local sum send as many bytes as a reduce-scatter, and can
        # sum in the tensor's dtype although elements are sent in `wire_dtype`.
        sent = tf.cast(tf.reshape(tensor, _split_shape(tensor, group.size)), wire_dtype)
        received = self.all_to_all(sent)
        return _sum_of_rows(received, tensor.dtype)

    def broadcast(self, tensor: tf.Tensor, source: int = 0) -> tf.Tensor:
        """Broadcast: copy the source's tensor to every replica.

        Args:
            tensor: Tensor; only its shape and dtype are used on the other replicas.
            source: Int, the position of the source in the group. Defaults to `0`.

        Returns:
            The source's tensor, identical on every replica.
        """
        if self.group.size == 1 or _is_empty(tensor):
            return tf.identity(tensor)
        sent, back = _to_sent_dtype(tensor, self.wire_dtype)
        with tf.device(self.group.devices[self.replica]):
            return back(self._run("broadcast", sent, source=source))

    def _run(
        self,
        kind: str,
        tensor: tf.Tensor,
        size: tf.Tensor | None = None,
        *,
        is_alone: bool = True,
        source: int = 0,
    ) -> tf.Tensor:
        """Run a collective on the replica's device; record times in active recorders.

        Args:
            kind: String, the kind of the collective, as in `Transport.run`.
            tensor: Tensor that is sent.
            size: Scalar int32 tensor from `padded_length`, or `None`.
            is_alone: Bool, whether hardly any other collective runs at the same time,
                see `all_reduce`.
            source: Int, the position of a broadcast's source.

        Returns:
            Tensor, the result of the transport.
        """
        group, replica, channel = self.group, self.replica, self.channel
        call = CollectiveCall(group, replica, channel, size, is_alone)
        chain = hash((id(group.launch_order), replica, channel))
        with (
            timing.measured(kind, tensor, replica, group.size, chain) as done,
            tf.device(group.devices[replica]),
        ):
            return done(group.transport.run(kind, tensor, call, source))


def padded_length(length: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Round a length up to one of the lengths that collectives may have.

    These are 1 to 16, and then 8 up to each power of two: 18, 20, ..., 32, 36, ..., 64.

    Args:
        length: Scalar int32 tensor, the same on every replica.

    Returns:
        Tuple of two scalar int32 tensors: the length to pad to, and its index, the
        argument `size` of `all_reduce` and `all_gather`.

    Example:

    >>> padded, size = padded_length(tf.constant(17))
    >>> int(padded)
    18
    """
    sizes = tf.constant(SIZES, tf.int32)
    index = tf.searchsorted(sizes, length[tf.newaxis])[0]
    return tf.gather(sizes, index), index


def _to_sent_dtype(
    tensor: tf.Tensor, wire_dtype: tf.DType | None
) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Cast a tensor to the dtype that is sent: `wire_dtype`, or its own for `None`.

    Returns:
        Tuple of the cast tensor, and a function from a received tensor to the dtype of
        `tensor`.
    """
    sent = tf.cast(tensor, wire_dtype or tensor.dtype)
    return sent, lambda received: tf.cast(received, tensor.dtype)


def _split_shape(tensor: tf.Tensor, count: int) -> tf.Tensor | list[int]:
    """Return the shape of a tensor after its first axis is split into `count` slices.

    Args:
        tensor: Tensor, whose first axis is split.
        count: Int, number of slices.

    Returns:
        List of ints `[count, rows // count, ...]`, which instance keys need; or a
        tensor if the shape is dynamic.
    """
    if tensor.shape.is_fully_defined():
        return [count, tensor.shape[0] // count, *tensor.shape[1:]]
    shape = tf.shape(tensor)
    return tf.concat([[count, shape[0] // count], shape[1:]], axis=0)


def _joined_shape(tensor: tf.Tensor, count: int) -> tf.TensorShape:
    """Return the static shape of `count` tensors of one shape, joined on axis 0."""
    rows = tensor.shape[0]
    return tf.TensorShape([None if rows is None else count * rows, *tensor.shape[1:]])


def _sum_of_rows(rows: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Sum `rows` over axis 0, half precision in float32, and cast to `dtype`."""
    wide = tf.float32 if dtype.is_floating and dtype.size < 4 else dtype
    return tf.cast(tf.reduce_sum(tf.cast(rows, wide), axis=0), dtype)


def _is_empty(tensor: tf.Tensor) -> bool:
    """Return whether a tensor has no elements by its static shape."""
    return tensor.shape.num_elements() == 0
