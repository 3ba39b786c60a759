"""`Compressor`: the class that reduces a bucket of gradients in fewer bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdp.ground.arguments import checked_integer
from tfdp.ground.plans.buckets import Entry
from tfdp.training.compression.replica_group import ReplicaGroup

State = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class GradientBucket:
    """Gradients that travel together, end to end in one flat tensor.

    Args:
        size: Int, the number of elements.
        dtype: String, `"float32"` or `"float64"`.
        num_replicas: Int, over how many they are summed.
        entries: Tuple of what lies in the bucket: `name`, `shape`, `dtype` of each
            gradient; empty for a part of a bucket. Defaults to `()`.
        flat: Tensor of shape `[size]`, or `None` before there is one. Defaults to
            `None`.

    Example:

    >>> GradientBucket(size=8, dtype="float32", num_replicas=2).num_bytes
    32
    """

    size: int
    dtype: str
    num_replicas: int
    entries: tuple[Entry, ...] = ()
    flat: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", checked_integer("size", self.size, 0))
        num_replicas = checked_integer("num_replicas", self.num_replicas, 1)
        object.__setattr__(self, "num_replicas", num_replicas)

    @property
    def num_bytes(self) -> int:
        """Int, its size in bytes."""
        return self.size * tf.as_dtype(self.dtype).size


class Compressor:
    """Reduction of a bucket of gradients; derive from it to write your own.

    Its methods make a part of the graph of a step, once on each replica. They hold
    no tensors: what is to be kept from step to step is `state`, variables of which
    each replica has its own. A step that is skipped, for an overflow, leaves the
    state as it is; backups and checkpoints hold it.

    Where the loss is scaled or gradients are accumulated, a compressor gets the
    gradients as they were without, so that its state keeps its meaning when the
    scale or the number of micro-batches changes.

    Example: gradients that travel by their signs, with error feedback.

    >>> import tfdp
    >>> class SignSGD(Compressor):
    ...     def state(self, bucket):
    ...         return {"residual": tf.zeros([bucket.size], bucket.dtype)}
    ...
    ...     def reduce(self, bucket, state, group):
    ...         wanted = bucket.flat + state["residual"]
    ...         size = tf.reduce_mean(tf.abs(wanted))
    ...         signs = tf.cast(tf.sign(wanted), tf.float16)
    ...         sent = tf.cast(signs, bucket.dtype) * size
    ...         sizes = group.all_gather(size[tf.newaxis])
    ...         rows = group.all_gather(signs[tf.newaxis])
    ...         total = tf.linalg.matvec(
    ...             tf.cast(rows, bucket.dtype), sizes, transpose_a=True
    ...         )
    ...         return total, {"residual": wanted - sent}
    >>> options = tfdp.CommunicationOptions(compression=SignSGD())

    Source: the hooks of PyTorch's DDP,
    https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html.
    """

    # Whether a bucket may be cut anywhere: every element is by itself, or one of some
    # block. Then each level of a hierarchical reduction compresses its own slices.
    cuts_buckets = False
    # Whether it compresses what `all_gather` puts together, too. Then a hierarchical
    # reduction compresses on both of its levels; else all replicas reduce at once.
    compresses_gathers = False

    def state(self, bucket: GradientBucket) -> State:
        """Return the initial state for a bucket.

        Args:
            bucket: `GradientBucket` without `flat`.

        Returns:
            Dict from names to arrays or eager tensors; `{}` without a state.
        """
        del bucket
        return {}

    def reduce(
        self, bucket: GradientBucket, state: State, group: ReplicaGroup
    ) -> tuple[tf.Tensor, State]:
        """Sum a bucket over the replicas.

        Args:
            bucket: `GradientBucket`.
            state: Dict of tensors, with the names that `state` gave.
            group: `ReplicaGroup`.

        Returns:
            Tuple of a tensor like `bucket.flat`, bit for bit alike on all replicas
            and not finite where any replica's gradients are not; and a dict, the
            new state.
        """
        raise NotImplementedError

    def reduce_scatter(
        self, bucket: GradientBucket, state: State, group: ReplicaGroup
    ) -> tuple[tf.Tensor, State]:
        """Sum a bucket over the replicas, and keep one slice of it.

        Args:
            bucket: `GradientBucket` with a multiple of `group.size` elements.
            state: Dict of tensors, with the names that `state` gave.
            group: `ReplicaGroup`.

        Returns:
            Tuple of the slice of the calling replica, of shape
            `[bucket.size // group.size]`, and a dict, the new state.
        """
        total, state = self.reduce(bucket, state, group)
        slice_size = bucket.size // group.size
        begin = group.position * slice_size
        return total[begin : begin + slice_size], state

    def all_gather(self, piece: tf.Tensor, group: ReplicaGroup) -> tf.Tensor:
        """Put together slices that this compressor has reduced already.

        Args:
            piece: Tensor of shape `[n]`.
            group: `ReplicaGroup`.

        Returns:
            Tensor of shape `[group.size * n]`, alike on all replicas.
        """
        return group.all_gather(piece)

    @property
    def replaces_momentum(self) -> bool:
        """Bool, whether it acts as the optimizer's momentum: all has to pass by it."""
        return False

    def wire_ratio(self, bucket: GradientBucket) -> float | None:
        """Return the bytes that a bucket travels in, over those of an all-reduce.

        Args:
            bucket: `GradientBucket` without `flat`.

        Returns:
            Float, by which it is decided whether a bucket gains from it; or `None`
            where that is not known, and all buckets are compressed.
        """
        del bucket
        return None

    def __repr__(self) -> str:
        # Workers compare their options by it.
        given = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({given})"

    def __str__(self) -> str:
        return type(self).__name__
