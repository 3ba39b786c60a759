"""Groups of replicas that compressors reduce over, with their collectives."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfdp.communication.collectives import Member, ProcessGroup, ring


class ReplicaGroup:
    """Replicas that a compressor reduces over, and collectives between them.

    Every replica has to call the same collectives in the same order. Integers and
    floats travel in their own dtypes. TensorFlow's own transport moves no integers of
    less than 32 bits; send them as int32, converted by `tf.bitcast`.

    Args:
        group: `ProcessGroup`.
        replica: Int, index of the calling replica among the local ones.
        channel: Int, the channel of its collectives; those of a channel run in order.
        sum_all: Callable such as `tfdp.communication.collectives.ring`, the algorithm
            of `all_reduce`. Defaults to that of the group's transport.

    Example:

    The `reduce` of a `tfdp.compression.Compressor` that does not compress:

    >>> def reduce(self, bucket, state, group):
    ...     return group.all_reduce(bucket.flat), state

    Source: the hooks of PyTorch's DDP, which get a process group,
    https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html.
    """

    def __init__(
        self,
        group: ProcessGroup,
        replica: int,
        channel: int,
        sum_all: Callable[..., tf.Tensor] = ring,
    ) -> None:
        self._member = Member(group, replica, channel)
        self._sum_all = sum_all

    @property
    def size(self) -> int:
        """Int, the number of replicas."""
        return self._member.group.size

    @property
    def position(self) -> int:
        """Int, position of the calling replica, from 0 to `size - 1`."""
        return self._member.position

    def all_reduce(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sum a tensor over the replicas; the sum is equal on all of them."""
        group, replica = self._member.group, self._member.replica
        channel = self._member.channel
        return self._sum_all(tensor, group, replica, channel=channel, is_alone=False)

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Concatenate the tensors of all replicas along the first axis, by position."""
        return self._member.all_gather(tensor)

    def all_to_all(self, tensor: tf.Tensor) -> tf.Tensor:
        """Send row i of a tensor of shape `[size, ...]` to position i.

        Returns:
            Tensor like `tensor`: row i is from position i.
        """
        return self._member.all_to_all(tensor)

    def reduce_scatter(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sum a tensor of shape `[size * n, ...]`, and keep this replica's `n` rows."""
        return self._member.reduce_scatter(tensor)


class NodeGroup(ReplicaGroup):
    """Nodes that a compressor reduces over; all replicas of a node hold its sum.

    Args:
        across: `ProcessGroup` of the replicas with the same index in their nodes.
        node: `ProcessGroup` of the calling replica's node.
        replica: Int, index of the calling replica among the local ones.
        channel: Int, the channel of its collectives; those of a channel run in order.
    """

    def __init__(
        self, across: ProcessGroup, node: ProcessGroup, replica: int, channel: int
    ) -> None:
        super().__init__(across, replica, channel)
        self._node = Member(node, replica, channel)

    def all_reduce(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sum a tensor over the nodes.

        Each replica of a node sends a slice; all of them get the whole sum.

        Args:
            tensor: Tensor that is equal on all replicas of a node.
        """
        flat = tf.reshape(tensor, [-1])
        length, size = flat.shape.num_elements(), self._node.group.size
        slice_size = -(-length // size)
        padded = tf.pad(flat, [[0, size * slice_size - length]])
        begin = self._node.position * slice_size
        piece = padded[begin : begin + slice_size]
        total = self._member.all_reduce(piece, is_alone=False)
        whole = self._node.all_gather(total)
        return tf.reshape(whole[:length], tensor.shape)
