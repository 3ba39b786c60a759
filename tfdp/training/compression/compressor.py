"""`Compressor`: base class of reductions that send fewer bytes."""

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
    """Gradients that are reduced together, concatenated in one flat tensor.

    Args:
        size: Int, the number of elements.
        dtype: String, `"float32"` or `"float64"`.
        num_replicas: Int, number of replicas that the gradients are summed over.
        entries: Tuple with `name`, `shape` and `dtype` of each gradient in the bucket;
            empty for a part of a bucket. Defaults to `()`.
        flat: Tensor of shape `[size]`, the gradients; or `None` where only their size
            is known. Defaults to `None`.

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
        """Int, size of the bucket in bytes."""
        return self.size * tf.as_dtype(self.dtype).size


class Compressor:
    """Reduction of a bucket of gradients; derive from it to write your own.

    Its methods build a part of the graph of a step, once on each replica. They keep
    no tensors between steps: values for later steps are in `state`, with separate
    variables on each replica. A step that is skipped because of an overflow does not
    change the state. Backups and checkpoints contain it.

    With a scaled loss or accumulated gradients, a compressor receives the gradients
    divided by the factor, so that its state stays valid when the loss scale or the
    number of micro-batches changes.

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

    # Whether a bucket may be cut anywhere, because elements are compressed one by one
    # or in blocks. Then each level of a hierarchical reduction compresses its own
    # slices; otherwise a compressor always gets a whole bucket.
    cuts_buckets = False
    # Whether `all_gather` sends compressed elements. If it does, a hierarchical
    # reduction can use the same compressor on both levels; otherwise all replicas
    # reduce in one level.
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
            state: Dict of tensors, with the names that `state` returned.
            group: `ReplicaGroup`.

        Returns:
            Tuple of the sum and a dict, the new state. The sum is a tensor like
            `bucket.flat`, bit for bit equal on all replicas, and not finite if the
            gradients of any replica are not finite.
        """
        raise NotImplementedError

    def reduce_scatter(
        self, bucket: GradientBucket, state: State, group: ReplicaGroup
    ) -> tuple[tf.Tensor, State]:
        """Sum a bucket over the replicas, and keep one slice of it.

        Args:
            bucket: `GradientBucket` with a multiple of `group.size` elements.
            state: Dict of tensors, with the names that `state` returned.
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
        """Concatenate the replicas' slices of a bucket that was reduced before.

        Args:
            piece: Tensor of shape `[n]`, the slice of the calling replica.
            group: `ReplicaGroup`.

        Returns:
            Tensor of shape `[group.size * n]`, equal on all replicas.
        """
        return group.all_gather(piece)

    @property
    def replaces_momentum(self) -> bool:
        """Bool, whether the compressor applies momentum in place of the optimizer.

        Then all buckets are compressed, whatever their `wire_ratio`.
        """
        return False

    def wire_ratio(self, bucket: GradientBucket) -> float | None:
        """Return the bytes that are sent for a bucket, relative to an all-reduce.

        Args:
            bucket: `GradientBucket` without `flat`.

        Returns:
            Float, which decides whether a bucket is compressed; or `None` if unknown:
            then all buckets are compressed.
        """
        del bucket
        return None

    def __repr__(self) -> str:
        # Workers compare their options by this string, so it has all settings.
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"

    def __str__(self) -> str:
        return type(self).__name__
