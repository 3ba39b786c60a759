"""Reductions of a bucket by compressors, in one level or in two levels."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import Member, ProcessGroup, node_levels, ring
from tfdp.ground.plans.buckets import Entry
from tfdp.training.compression.algorithm_choice import AlgorithmChoice, WireFormat
from tfdp.training.compression.compressor import GradientBucket
from tfdp.training.compression.replica_group import NodeGroup, ReplicaGroup
from tfdp.training.compression.residuals import BucketResiduals, assign_state
from tfdp.training.compression.step_residuals import gradient_scale


@dataclasses.dataclass(frozen=True)
class CallingReplica:
    """Local replica that reduces a bucket, with its channel and compressor states.

    Args:
        replica: Int, index among the local replicas.
        channel: Int, the channel of its collectives; those of a channel run in order.
        residuals: `BucketResiduals`, the compressors' states of the bucket on it.
    """

    replica: int
    channel: int
    residuals: BucketResiduals

    def member(self, group: ProcessGroup, dtype: tf.DType | None = None) -> Member:
        """Return this replica as a `Member` of a group, to call its collectives.

        Args:
            group: `ProcessGroup`.
            dtype: `tf.DType` in which elements are sent, or `None` for their own.
                Defaults to `None`.
        """
        return Member(group, self.replica, self.channel, dtype)


def all_reduce_compressed(
    flat: tf.Tensor,
    group: ProcessGroup,
    replica: int,
    *,
    channel: int = 0,
    is_alone: bool = True,
    route: AlgorithmChoice,
    entries: tuple[Entry, ...],
    residuals: BucketResiduals,
) -> tf.Tensor:
    """All-reduce a bucket of gradients by the compressors that were chosen for it.

    Args:
        flat: Tensor of shape `[bucket_size]`.
        group: `ProcessGroup` of all replicas.
        replica: Int, index of the calling replica among the local ones.
        channel: Int, the channel of its collectives. Defaults to `0`.
        is_alone: Bool, ignored; an argument that all algorithms have.
        route: `AlgorithmChoice`, the algorithm and compressors of the bucket.
        entries: Tuple of `Entry`, the gradients in the bucket.
        residuals: `BucketResiduals`, states of the bucket on the calling replica.

    Returns:
        A tensor like `flat`, identical on every replica.
    """
    del is_alone
    caller = CallingReplica(replica, channel, residuals)
    with tf.device(group.devices[replica]):
        scaled, scale = _divide_by_scale(flat)
        if route.is_single_level:
            members = ReplicaGroup(group, replica, channel, route.all_reduce)
            total = _call_compressor(
                route.outer, "reduce", "all", scaled, entries, members, caller
            )
        elif not route.needs_whole_bucket:
            total = _in_two_levels(scaled, group, route, caller)
        else:
            total = _across_nodes(scaled, group, route, entries, caller)
        return total if scale is None else total * scale


def reduce_scatter_in_levels(
    flat: tf.Tensor,
    inner: ProcessGroup,
    outer: ProcessGroup | None,
    route: AlgorithmChoice,
    caller: CallingReplica,
    *,
    is_copied: bool,
) -> tf.Tensor:
    """Sum a bucket in one or two levels, and keep the calling replica's slice.

    Args:
        flat: Tensor of shape `[num_owners * slice_size]`.
        inner: `ProcessGroup` of the owners of slices; with two levels, of the owners
            in the node.
        outer: `ProcessGroup` across nodes, or `None` with one level.
        route: `AlgorithmChoice`. The compressor of a level, if it has one, compresses
            there; it must be able to cut a bucket into slices (`cuts_buckets`).
        caller: `CallingReplica`, the local replica that reduces, with its channel and
            the states of its compressors for the bucket.
        is_copied: Bool, whether each node holds a copy of the sharded state, so that
            the second level is an all-reduce.

    Returns:
        Tensor of shape `[slice_size]`.
    """
    scaled, scale = _divide_by_scale(flat) if route.is_compressed else (flat, None)
    piece = _reduce_scatter_level(route.inner, "inner", scaled, inner, caller)
    if outer is not None and is_copied:
        is_alone = not route.is_compressed
        piece = _all_reduce_outer(route.outer, piece, outer, caller, is_alone=is_alone)
    elif outer is not None:
        piece = _reduce_scatter_level(route.outer, "outer", piece, outer, caller)
    return piece if scale is None else piece * scale


def _divide_by_scale(flat: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Divide a bucket's gradients by the factor of this step, such as the loss scale.

    Args:
        flat: Tensor, the gradients of the bucket.

    Returns:
        Tuple of the quotient and the factor, a scalar tensor. If the step has no
        factor, `flat` and `None`.
    """
    scale = gradient_scale()
    if scale is None:
        return flat, None
    scale = tf.cast(scale, flat.dtype)
    return flat / scale, scale


def _in_two_levels(
    flat: tf.Tensor, group: ProcessGroup, route: AlgorithmChoice, caller: CallingReplica
) -> tf.Tensor:
    """Reduce-scatter in each node, reduce across nodes, and all-gather in each node.

    Args:
        flat: Tensor of shape `[bucket_size]`.
        group: `ProcessGroup` of all replicas.
        route: `AlgorithmChoice` with two levels.
        caller: `CallingReplica`, with its channel and compressor states.

    Returns:
        Tensor like `flat`, the sum over all replicas.
    """
    node, across = node_levels(group, caller.replica)
    size = flat.shape[0]
    padded = tf.pad(flat, [[0, -size % node.size]])
    piece = _reduce_scatter_level(route.inner, "inner", padded, node, caller)
    piece = _all_reduce_outer(route.outer, piece, across, caller)
    if route.inner.compressor is not None and route.inner == route.outer:
        inside = ReplicaGroup(node, caller.replica, caller.channel)
        whole = route.inner.compressor.all_gather(piece, inside)
    else:
        whole = caller.member(node, route.inner.dtype).all_gather(piece)
    return whole[:size]


def _across_nodes(
    flat: tf.Tensor,
    group: ProcessGroup,
    route: AlgorithmChoice,
    entries: tuple[Entry, ...],
    caller: CallingReplica,
) -> tf.Tensor:
    """Sum the bucket in each node, and reduce the sum across nodes by the compressor.

    All replicas of a node compress the same sum.

    Args:
        flat: Tensor of shape `[bucket_size]`.
        group: `ProcessGroup` of all replicas.
        route: `AlgorithmChoice` whose outer level has a compressor.
        entries: Tuple of `Entry`, the gradients in the bucket.
        caller: `CallingReplica`, the local replica that reduces, with its channel and
            the states of its compressors for the bucket.

    Returns:
        Tensor like `flat`, the sum over all replicas.
    """
    node, across = node_levels(group, caller.replica)
    inside = caller.member(node, route.inner.dtype)
    total = ring(flat, is_alone=False, **inside.arguments)
    members = NodeGroup(across, node, caller.replica, caller.channel)
    return _call_compressor(
        route.outer, "reduce", "outer", total, entries, members, caller
    )


def _reduce_scatter_level(
    wire: WireFormat,
    level: str,
    flat: tf.Tensor,
    group: ProcessGroup,
    caller: CallingReplica,
) -> tf.Tensor:
    """Reduce-scatter a bucket in a node or across nodes, compressed if so chosen.

    Args:
        wire: `WireFormat` of the level. Without a compressor, its dtype is the one in
            which elements are sent.
        level: String, `"inner"` or `"outer"`, the level that the compressor's state
            belongs to.
        flat: Tensor of shape `[bucket_size]`.
        group: `ProcessGroup` of the replicas on this level.
        caller: `CallingReplica`, the local replica that reduces, with its channel and
            the states of its compressors for the bucket.

    Returns:
        Tensor of shape `[bucket_size // group.size]`, the calling replica's slice.
    """
    if wire.compressor is None:
        return caller.member(group, wire.dtype).reduce_scatter(flat)
    members = ReplicaGroup(group, caller.replica, caller.channel)
    return _call_compressor(wire, "reduce_scatter", level, flat, (), members, caller)


def _all_reduce_outer(
    wire: WireFormat,
    flat: tf.Tensor,
    group: ProcessGroup,
    caller: CallingReplica,
    *,
    is_alone: bool = False,
) -> tf.Tensor:
    """All-reduce a bucket or slice across nodes, by its compressor or in its dtype.

    Args:
        wire: `WireFormat` of the level.
        flat: Tensor of shape `[bucket_size]`.
        group: `ProcessGroup` of the replicas on this level.
        caller: `CallingReplica`, with its channel and compressor states.
        is_alone: Bool, whether hardly any other collective runs at the same time: a
            ring of TensorFlow then sends smaller pieces, so the network is not idle.
            Without effect on a compressor. Defaults to `False`.
    """
    if wire.compressor is None:
        member = caller.member(group, wire.dtype)
        return ring(flat, is_alone=is_alone, **member.arguments)
    members = ReplicaGroup(group, caller.replica, caller.channel)
    return _call_compressor(wire, "reduce", "outer", flat, (), members, caller)


def _call_compressor(
    wire: WireFormat,
    method: str,
    level: str,
    flat: tf.Tensor,
    entries: tuple[Entry, ...],
    members: ReplicaGroup,
    caller: CallingReplica,
) -> tf.Tensor:
    """Call a compressor with its state of a bucket, and check its result.

    The new state is assigned at the end of the step, unless the step is skipped.

    Args:
        wire: `WireFormat` with a compressor.
        method: String, `"reduce"` or `"reduce_scatter"`.
        level: String, `"inner"`, `"outer"` or `"all"`, the level that the state belongs
            to.
        flat: Tensor of shape `[bucket_size]`.
        entries: Tuple of `Entry`, the gradients in the bucket; empty for a part of one.
        members: `ReplicaGroup` that the compressor reduces over.
        caller: `CallingReplica`, the local replica that reduces, with its channel and
            the states of its compressors for the bucket.

    Returns:
        Tensor of shape `[bucket_size]`, the sum. For `"reduce_scatter"`, the calling
        replica's slice of it, of shape `[bucket_size // members.size]`.
    """
    compressor = wire.compressor
    assert compressor is not None
    bucket = GradientBucket(flat.shape[0], flat.dtype.name, members.size, entries)
    variables = caller.residuals.variables_of(level, compressor, bucket)
    state = {name: variable.read_value() for name, variable in variables.items()}
    filled = dataclasses.replace(bucket, flat=flat)
    result: Any = getattr(compressor, method)(filled, dict(state), members)
    size = bucket.size // (members.size if method == "reduce_scatter" else 1)
    _check_result(compressor, method, result, size, flat.dtype)
    total, new = result
    assign_state(compressor, variables, state, new)
    return tf.ensure_shape(total, [size])


def _check_result(
    compressor: Any, method: str, result: Any, size: int, dtype: Any
) -> None:
    """Raise unless a compressor returned a tensor of the right shape, and a state.

    Args:
        compressor: `Compressor`.
        method: String, the method that was called.
        result: The value that it returned.
        size: Int, number of elements that the tensor must have.
        dtype: `tf.DType` that the tensor must have.

    Raises:
        ValueError: The message has the compressor's class and what it returned.
    """
    what = f"`{type(compressor).__name__}.{method}`"
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not is_pair or not isinstance(result[1], Mapping):
        raise ValueError(
            f"{what} must return a tensor and a dict, the new state. "
            f"Received: {type(result).__name__}"
        )
    total = result[0]
    shape, kind = getattr(total, "shape", None), getattr(total, "dtype", None)
    if not tf.is_tensor(total) or shape != tf.TensorShape([size]) or kind != dtype:
        raise ValueError(
            f"{what} must return a sum of shape ({size},) and {dtype.name}, like the "
            f"bucket. Received: shape {shape} and {getattr(kind, 'name', kind)}"
        )
