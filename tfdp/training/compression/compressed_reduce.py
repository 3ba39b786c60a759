"""A bucket reduced by compressors, in one level or in two."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import Member, ProcessGroup, node_levels, ring
from tfdp.ground.plans.buckets import Entry
from tfdp.training.compression.compressor import Compressor, GradientBucket
from tfdp.training.compression.replica_group import NodeGroup, ReplicaGroup
from tfdp.training.compression.residuals import BucketResiduals, assign_state
from tfdp.training.compression.step_residuals import gradient_unit


@dataclasses.dataclass(frozen=True)
class Wire:
    """In which form elements travel on one level.

    Args:
        compressor: `Compressor`, or `None`. Defaults to `None`.
        dtype_name: String, name of the dtype that they are cast to, or `None`, their
            own. Defaults to `None`.
        ratio: Float, the bytes that the compressor sends over those of an all-reduce,
            NaN where that is not known. Defaults to 1.
    """

    compressor: Compressor | None = None
    dtype_name: str | None = None
    ratio: float = dataclasses.field(default=1.0, compare=False)

    @property
    def dtype(self) -> tf.DType | None:
        """`tf.DType` that elements are cast to, or `None`, their own."""
        return None if self.dtype_name is None else tf.as_dtype(self.dtype_name)

    @property
    def name(self) -> str | None:
        """String, what travels, or `None` for elements as they are."""
        return self.dtype_name if self.compressor is None else str(self.compressor)

    def byte_ratio(self, itemsize: int) -> float:
        """Bytes for each byte of an all-reduce, 1 where that is not known.

        Args:
            itemsize: Int, the bytes of an element of the bucket.
        """
        if self.dtype is not None:
            return self.dtype.size / itemsize
        return 1.0 if math.isnan(self.ratio) else self.ratio


@dataclasses.dataclass(frozen=True)
class CompressedRoute:
    """What travels on each level of a reduction, cast or compressed.

    Args:
        inner: `Wire` inside nodes, and everywhere in one level.
        outer: `Wire` across nodes.
        has_levels: Bool, whether a reduction inside nodes is followed by one across
            them.
        sum_all: Callable such as `tfdp.communication.collectives.ring`, the all-reduce
            for what compressors have summed over all replicas.
    """

    inner: Wire
    outer: Wire
    has_levels: bool
    sum_all: Callable[..., tf.Tensor]

    @property
    def compressors(self) -> list[Compressor]:
        """List of the `Compressor` of each level that has one."""
        given = (self.inner.compressor, self.outer.compressor)
        return [compressor for compressor in given if compressor is not None]

    @property
    def is_compressed(self) -> bool:
        """Bool, whether a level has a compressor."""
        return bool(self.compressors)

    @property
    def is_one_reduction(self) -> bool:
        """Bool, whether one compressor reduces over all replicas at once."""
        outer = self.outer.compressor
        is_whole = outer is not None and not outer.cuts_buckets
        return not self.has_levels or (self.inner == self.outer and is_whole)


@dataclasses.dataclass(frozen=True)
class Caller:
    """Who reduces a bucket: a local replica, on a channel, with its residuals.

    Args:
        replica: Int, index among the local replicas.
        channel: Int, the chain of the launch order.
        residuals: `BucketResiduals`.
    """

    replica: int
    channel: int
    residuals: BucketResiduals

    def member(self, group: ProcessGroup, dtype: tf.DType | None = None) -> Member:
        """The caller as a member of a group, whose elements travel in a dtype."""
        return Member(group, self.replica, self.channel, dtype)


def all_reduce_compressed(
    flat: tf.Tensor,
    group: ProcessGroup,
    replica: int,
    *,
    channel: int = 0,
    is_alone: bool = True,
    route: CompressedRoute,
    entries: tuple[Entry, ...],
    residuals: BucketResiduals,
) -> tf.Tensor:
    """All-reduce a bucket of gradients by the compressors of a route.

    Args:
        flat: Tensor of shape `[bucket_size]`.
        group: `ProcessGroup` of all replicas.
        replica: Int, index of the calling replica among the local ones.
        channel: Int, the chain of the launch order. Defaults to `0`.
        is_alone: Bool, as for `collectives.ring`; it makes no difference.
        route: `CompressedRoute`.
        entries: Tuple of `Entry`, what lies in the bucket.
        residuals: `BucketResiduals`.

    Returns:
        A tensor like `flat`, identical on every replica.
    """
    del is_alone
    caller = Caller(replica, channel, residuals)
    with tf.device(group.devices[replica]):
        own, unit = _in_unit(flat)
        if route.is_one_reduction:
            members = ReplicaGroup(group, replica, channel, route.sum_all)
            total = _call(route.outer, "reduce", "all", own, entries, members, caller)
        elif all(c.cuts_buckets for c in route.compressors):
            total = _in_two_levels(own, group, route, caller)
        else:
            total = _across_nodes(own, group, route, entries, caller)
        return total if unit is None else total * unit


def reduce_scatter_in_levels(
    flat: tf.Tensor,
    inner: ProcessGroup,
    outer: ProcessGroup | None,
    route: CompressedRoute,
    caller: Caller,
    *,
    is_copied: bool,
) -> tf.Tensor:
    """Sum a bucket over all replicas, and keep the own slice.

    Args:
        flat: Tensor of shape `[num_owners * slice_size]`.
        inner: `ProcessGroup` of the owners of slices, those of a node where there
            are two levels.
        outer: `ProcessGroup` across nodes, or `None` in one level.
        route: `CompressedRoute`, whose compressors, if any, cut buckets.
        caller: `Caller`.
        is_copied: Bool, whether each node has the whole state, so that the second
            level is an all-reduce.

    Returns:
        Tensor of shape `[slice_size]`.
    """
    own, unit = _in_unit(flat) if route.is_compressed else (flat, None)
    piece = _scatter(route.inner, "inner", own, inner, caller)
    if outer is not None and is_copied:
        is_alone = not route.is_compressed
        piece = _reduce(route.outer, "outer", piece, outer, caller, is_alone=is_alone)
    elif outer is not None:
        piece = _scatter(route.outer, "outer", piece, outer, caller)
    return piece if unit is None else piece * unit


def _in_unit(flat: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Gradients without the loss scale and the like, and by what they had it."""
    unit = gradient_unit()
    if unit is None:
        return flat, None
    unit = tf.cast(unit, flat.dtype)
    return flat / unit, unit


def _in_two_levels(
    flat: tf.Tensor, group: ProcessGroup, route: CompressedRoute, caller: Caller
) -> tf.Tensor:
    """Reduce slices inside each node, then across nodes, and gather them inside."""
    node, across = node_levels(group, caller.replica)
    size = flat.shape[0]
    padded = tf.pad(flat, [[0, -size % node.size]])
    piece = _scatter(route.inner, "inner", padded, node, caller)
    piece = _reduce(route.outer, "outer", piece, across, caller)
    if route.inner.compressor is not None and route.inner == route.outer:
        inside = ReplicaGroup(node, caller.replica, caller.channel)
        whole = route.inner.compressor.all_gather(piece, inside)
    else:
        whole = caller.member(node, route.inner.dtype).all_gather(piece)
    return whole[:size]


def _across_nodes(
    flat: tf.Tensor,
    group: ProcessGroup,
    route: CompressedRoute,
    entries: tuple[Entry, ...],
    caller: Caller,
) -> tf.Tensor:
    """Sum the bucket inside each node; all its replicas then compress the sum."""
    node, across = node_levels(group, caller.replica)
    inside = caller.member(node, route.inner.dtype)
    total = ring(flat, is_alone=False, **inside.arguments)
    members = NodeGroup(across, node, caller.replica, caller.channel)
    return _call(route.outer, "reduce", "outer", total, entries, members, caller)


def _scatter(
    wire: Wire, level: str, flat: tf.Tensor, group: ProcessGroup, caller: Caller
) -> tf.Tensor:
    """Reduce-scatter on one level."""
    if wire.compressor is None:
        return caller.member(group, wire.dtype).reduce_scatter(flat)
    members = ReplicaGroup(group, caller.replica, caller.channel)
    return _call(wire, "reduce_scatter", level, flat, (), members, caller)


def _reduce(
    wire: Wire,
    level: str,
    flat: tf.Tensor,
    group: ProcessGroup,
    caller: Caller,
    *,
    is_alone: bool = False,
) -> tf.Tensor:
    """All-reduce on one level."""
    if wire.compressor is None:
        own = caller.member(group, wire.dtype)
        return ring(flat, is_alone=is_alone, **own.arguments)
    members = ReplicaGroup(group, caller.replica, caller.channel)
    return _call(wire, "reduce", level, flat, (), members, caller)


def _call(
    wire: Wire,
    method: str,
    level: str,
    flat: tf.Tensor,
    entries: tuple[Entry, ...],
    members: ReplicaGroup,
    caller: Caller,
) -> tf.Tensor:
    """Call a method of a compressor with its state, and check what it returns."""
    compressor = wire.compressor
    assert compressor is not None
    bucket = GradientBucket(flat.shape[0], flat.dtype.name, members.size, entries)
    variables = caller.residuals.variables_of(level, compressor, bucket)
    state = {name: variable.read_value() for name, variable in variables.items()}
    given = dataclasses.replace(bucket, flat=flat)
    result: Any = getattr(compressor, method)(given, dict(state), members)
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
        result: What it returned.
        size: Int, the elements that the sum must have.
        dtype: `tf.DType` that it must have.
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
