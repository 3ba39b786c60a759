"""Tensor fusion: gradients are packed into buckets that are all-reduced."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import Member, ProcessGroup, padded_length, timing
from tfdp.ground._compat import graphs
from tfdp.ground.options import CommunicationOptions
from tfdp.ground.plans.buckets import (
    BucketPlan,
    Entry,
    effective_bucket_bytes,
    plan_buckets,
)
from tfdp.training.reduction.carried_scalar import CarriedScalar


def make_plan(
    tensors: Sequence[tf.Tensor],
    names: Sequence[str],
    options: CommunicationOptions,
    *,
    in_list_order: bool = False,
) -> BucketPlan:
    """Plan the buckets for the gradients of one replica.

    In a traced function the backward pass computes gradients in the order of the graph.
    An eager loop has no graph; the gradient of the last variable is assumed to be ready
    first.

    Args:
        tensors: Sequence of dense tensors of known shape.
        names: Sequence of strings, one for each tensor.
        options: `CommunicationOptions`, with the sizes of buckets.
        in_list_order: Bool, whether the tensors are taken in the order of the list, as
            replicas may compute tensors other than gradients in different orders.
            Defaults to `False`.

    Returns:
        A `BucketPlan`, the same on every replica and worker.
    """
    entries = [
        Entry(name, tuple(t.shape.as_list()), t.dtype.name, t.dtype.size)
        for t, name in zip(tensors, names, strict=True)
    ]
    return plan_buckets(
        entries,
        range(len(tensors)) if in_list_order else ready_order(tensors),
        bucket_bytes=bucket_bytes_of(entries, options),
        first_bucket_bytes=options.first_bucket_bytes,
    )


def bucket_bytes_of(entries: Sequence[Entry], options: CommunicationOptions) -> int:
    """Return the limit on the size of a bucket in bytes.

    The limit is that of the options. If they have the default, a small model gets a
    lower limit from the total size of its gradients, see `effective_bucket_bytes`.

    Args:
        entries: Sequence of `Entry`, one for each gradient.
        options: `CommunicationOptions`.
    """
    if not options.adapts_buckets:
        return options.bucket_bytes
    total_bytes = sum(entry.num_bytes for entry in entries)
    return effective_bucket_bytes(total_bytes, options.bucket_bytes)


def ready_order(tensors: Sequence[tf.Tensor]) -> list[int]:
    """Return the positions of gradients in the order in which they are computed.

    In a graph it is the order of their operations. In eager mode, which does not show
    it, the last gradient is assumed to be computed first.
    """
    positions = range(len(tensors))
    if tf.executing_eagerly():
        return list(reversed(positions))
    return sorted(positions, key=lambda i: (graphs.op_position(tensors[i]), -i))


def all_reduce_buckets(
    tensors: Sequence[tf.Tensor],
    plan: BucketPlan,
    group: ProcessGroup,
    replica: int,
    weight: tf.Tensor | None,
    algorithms: Sequence[Callable[..., tf.Tensor]],
    carried: CarriedScalar | None = None,
    carrier: int | None = None,
) -> list[tf.Tensor]:
    """Sum tensors over the group by one all-reduce for each bucket.

    Args:
        tensors: Sequence of the dense tensors that were planned.
        plan: `BucketPlan` of the tensors.
        group: `ProcessGroup` of the replicas.
        replica: Int, index of the calling replica among the local ones.
        weight: Scalar tensor, factor of this replica's tensors, see `weighted`; or
            `None` for 1.
        algorithms: Sequence of callables such as `tfdp.communication.collectives.ring`,
            one for each bucket.
        carried: `CarriedScalar` to sum together with a bucket, which sets its `total`;
            or `None`. Defaults to `None`.
        carrier: Int, position of the bucket that `carried` is appended to, or `None`.
            Defaults to `None`.

    Returns:
        List of flat tensors, one for each bucket, with its members concatenated.
    """
    flats = []
    with tf.device(group.devices[replica]):
        for channel, bucket in enumerate(plan):
            members = [tensors[index] for index in bucket.indices]
            if carried is not None and channel == carrier:
                members.append(tf.cast(carried.value, bucket.dtype))
            flat = pack(members)
            if weight is not None:
                flat = weighted(flat, weight)
            is_alone = 2 * bucket.num_bytes > plan.num_bytes
            label = timing.current_label() or f"{timing.GRADIENTS} {channel}"
            with timing.labelled(label):
                reduced = algorithms[channel](
                    flat, group, replica, channel=channel, is_alone=is_alone
                )
            if carried is not None and channel == carrier:
                carried.total, reduced = reduced[-1], reduced[:-1]
            flats.append(reduced)
    return flats


def weighted(gradient: Any, weight: tf.Tensor) -> Any:
    """Multiply a gradient by the weight of its replica, before the reduction.

    The gradients of a replica without rows are NaN, from 0 / 0. A weight of zero
    replaces them by zeros.

    Args:
        gradient: Tensor or `tf.IndexedSlices`.
        weight: Scalar float64 tensor, see `tfdp.training.data.batch_weights`.

    Returns:
        The same kind of gradient.
    """
    if isinstance(gradient, tf.IndexedSlices):
        return with_values(gradient, weighted(gradient.values, weight))
    gradient = tf.convert_to_tensor(gradient)
    if gradient.dtype.size < tf.float32.size:
        # Half precision would round the weight, and so change all gradients alike: 1/3
        # in bfloat16 is 0.2 % too large. So the product is computed in float32.
        wide = weighted(tf.cast(gradient, tf.float32), weight)
        return tf.cast(wide, gradient.dtype)
    return tf.math.multiply_no_nan(gradient, tf.cast(weight, gradient.dtype))


def with_values(rows: tf.IndexedSlices, values: tf.Tensor) -> tf.IndexedSlices:
    """Return `tf.IndexedSlices` with the same indices and other values."""
    return tf.IndexedSlices(values, rows.indices, rows.dense_shape)


def all_reduce_any_shape(
    tensor: tf.Tensor, group: ProcessGroup, replica: int
) -> tf.Tensor:
    """Sum a tensor whose shape is known only at run time.

    Args:
        tensor: Tensor, of the same shape on every replica.
        group: `ProcessGroup` of the replicas.
        replica: Int, index of the calling replica among the local ones.

    Returns:
        Tensor of the same shape and dtype, the sum.
    """
    if tensor.shape.is_fully_defined():
        return Member(group, replica).all_reduce(tensor)
    with tf.device(group.devices[replica]):
        flat = tf.reshape(tensor, [-1])
        length = tf.size(flat, out_type=tf.int32)
        padded, size = padded_length(length)
        padding = [[0, padded - length]]
        total = Member(group, replica).all_reduce(tf.pad(flat, padding), size=size)
        result = tf.reshape(total[:length], tf.shape(tensor))
        return tf.ensure_shape(result, tensor.shape)


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenate tensors as one flat tensor; a single one is only reshaped."""
    flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
    return flat[0] if len(flat) == 1 else tf.concat(flat, axis=0)


def unpack(flat: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Split a flat tensor into tensors with the shapes of `like`, to undo `pack`."""
    if len(like) == 1:
        return [tf.reshape(flat, _shape(like[0]))]
    sizes = [_size(tensor) for tensor in like]
    parts = tf.split(flat, sizes)
    return [
        tf.reshape(part, _shape(tensor))
        for part, tensor in zip(parts, like, strict=True)
    ]


def _shape(tensor: tf.Tensor) -> object:
    """Return a tensor's static shape, or a tensor of the shape if it is not known."""
    known = tensor.shape.is_fully_defined()
    return tensor.shape if known else tf.shape(tensor)


def _size(tensor: tf.Tensor) -> object:
    """Return a tensor's number of elements: an int, or a tensor if not static."""
    count = tensor.shape.num_elements()
    return tf.size(tensor) if count is None else count


@dataclasses.dataclass(frozen=True)
class ReducedGradients:
    """Gradients summed over all replicas, dense ones still in buckets.

    Args:
        flats: List of flat tensors, one for each bucket.
        buckets: List of tuples of ints, positions in `like` of the gradients of each
            bucket, in the order in which they are concatenated.
        like: List of the gradients before the reduction, for their shapes.
        sparse: Dict from a position in `like` to the reduced `tf.IndexedSlices`.
    """

    flats: list[tf.Tensor]
    buckets: list[tuple[int, ...]]
    like: list
    sparse: dict[int, tf.IndexedSlices]

    def divided_by(self, divisor: tf.Tensor) -> ReducedGradients:
        """Return the gradients divided by a scalar; half precision becomes float32."""
        sparse = {
            index: with_values(item, divided(item.values, divisor))
            for index, item in self.sparse.items()
        }
        flats = [divided(flat, divisor) for flat in self.flats]
        return dataclasses.replace(self, flats=flats, sparse=sparse)

    def all_finite(self) -> tf.Tensor:
        """Return a scalar bool tensor, whether no element is infinite or NaN."""
        values = [*self.flats, *(item.values for item in self.sparse.values())]
        flags = [tf.reduce_all(tf.math.is_finite(value)) for value in values]
        return tf.reduce_all(flags)

    def gradients(self) -> list:
        """Unpack the buckets; return a list of gradients, one for each variable."""
        results: list = [None] * len(self.like)
        for flat, members in zip(self.flats, self.buckets, strict=True):
            parts = unpack(flat, [self.like[index] for index in members])
            for index, part in zip(members, parts, strict=True):
                results[index] = part
        for index, slices in self.sparse.items():
            results[index] = slices
        return results


def divided(values: tf.Tensor, divisor: tf.Tensor) -> tf.Tensor:
    """Divide a tensor by a scalar tensor.

    The result of half precision is float32, since half precision may overflow at the
    divisor or underflow at the result.
    """
    if values.dtype.size < tf.float32.size:
        values = tf.cast(values, tf.float32)
    return values / tf.cast(divisor, values.dtype)


def wide_dtype(dtype: Any) -> str:
    """Return the name of the dtype for sums: float32, or `dtype` itself if wider."""
    kind = tf.as_dtype(dtype)
    return "float32" if kind.size < tf.float32.size else kind.name


def unbucketed(gradients: list) -> ReducedGradients:
    """Wrap gradients as `ReducedGradients` without reducing or concatenating them."""
    dense: dict[int, tf.Tensor] = {}
    sparse: dict[int, tf.IndexedSlices] = {}
    for index, gradient in enumerate(gradients):
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        (sparse if is_sparse else dense)[index] = gradient
    return ReducedGradients(
        list(dense.values()), [(i,) for i in dense], gradients, sparse
    )
