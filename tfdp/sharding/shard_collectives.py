"""Reduce-scatter of gradients to shards, all-gather of shards to variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import tensorflow as tf

from tfdp import _compat
from tfdp.collectives import timing
from tfdp.parameters.packing import pack_row, pack_rows, unpack_rows
from tfdp.parameters.shard_groups import Compression, ReduceDtypes, ShardGroups
from tfdp.plans.shards import Segment, ShardBucket, ShardPlan
from tfdp.reduction.fusion import weighted

Slices = list[tf.Tensor | None]


class ShardCollectives(Protocol):
    """Collectives that a step with sharded optimizer state needs."""

    owner: int
    num_copies: int

    def reduce_scatter(
        self,
        plan: ShardPlan,
        tensors: Mapping[int, tf.Tensor],
        weight: tf.Tensor | None,
    ) -> Slices:
        """Sum tensors over all replicas and keep the own slice of each bucket.

        Args:
            plan: `ShardPlan`.
            tensors: Dict from position to tensor, the same ones on all replicas.
            weight: Scalar tensor by which this replica's tensors count, or `None`
                for one.

        Returns:
            List with a tensor of shape `[slice_size]` for each bucket, or `None`
            where there is nothing to sum.
        """

    def all_gather(self, plan: ShardPlan, slices: Slices) -> dict[int, tf.Tensor]:
        """Gather all variables of the buckets whose slices are given.

        Args:
            plan: `ShardPlan`.
            slices: As `reduce_scatter` returns them.

        Returns:
            Dict from position to flat tensor, alike on all replicas.
        """

    def all_reduce(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sum a small tensor over the owners of different slices."""


class GraphShardCollectives:
    """Shard collectives by reduce-scatter and all-gather, in a graph.

    Args:
        groups: `ShardGroups`.
        replica: Int, index of the calling replica among the local ones.
        reduce_dtypes_of: Callable from what is sent to the dtypes that it travels in,
            see `ShardGroups.reduce_scatter`.
        compression_of: Callable from the number of a bucket, the bucket and what is
            sent to how it is compressed, see `ShardGroups.scatter_bucket`.
        before_bucket: Callable, called before each reduce-scatter with the age of the
            last operation that it waits for, or `None`. Defaults to `None`.
        after_bucket: Callable, called with what each reduce-scatter returns, or
            `None`. Defaults to `None`.
    """

    def __init__(
        self,
        groups: ShardGroups,
        replica: int,
        reduce_dtypes_of: Callable[[tf.Tensor], ReduceDtypes],
        compression_of: Callable[[int, ShardBucket, tf.Tensor], Compression | None],
        before_bucket: Callable[[int], None] | None = None,
        after_bucket: Callable[[tf.Tensor], None] | None = None,
    ) -> None:
        self.owner = groups.owner(replica)
        self.num_copies = groups.num_copies
        self._groups = groups
        self._replica = replica
        self._reduce_dtypes_of = reduce_dtypes_of
        self._compression_of = compression_of
        self._before_bucket = before_bucket
        self._after_bucket = after_bucket

    def reduce_scatter(
        self,
        plan: ShardPlan,
        tensors: Mapping[int, tf.Tensor],
        weight: tf.Tensor | None,
    ) -> Slices:
        """See `ShardCollectives`."""
        slices: Slices = []
        for channel, bucket in enumerate(plan.buckets):
            given = sorted(bucket.indices & tensors.keys())
            if not given:
                slices.append(None)
                continue
            if self._before_bucket is not None:
                self._before_bucket(max(_compat.op_position(tensors[i]) for i in given))
            flat = pack_rows(bucket, tensors, tensors[given[0]].dtype)
            if weight is not None:
                flat = weighted(flat, weight)
            with timing.labelled(f"{timing.GRADIENTS} {channel}"):
                piece = self._groups.scatter_bucket(
                    bucket,
                    flat,
                    self._replica,
                    channel=channel,
                    reduce_dtypes=self._reduce_dtypes_of(flat),
                    compression=self._compression_of(channel, bucket, flat),
                )
            if self._after_bucket is not None:
                self._after_bucket(piece)
            slices.append(piece)
        return slices

    def all_gather(self, plan: ShardPlan, slices: Slices) -> dict[int, tf.Tensor]:
        """See `ShardCollectives`."""
        flats: Slices = []
        for channel, (bucket, piece) in enumerate(
            zip(plan.buckets, slices, strict=True)
        ):
            flat = None
            if piece is not None:
                # A key contains the shape, which clipping or an update may have lost.
                whole = tf.ensure_shape(piece, [bucket.slice_size])
                with timing.labelled(f"{timing.PARAMETERS} {channel}"):
                    flat = self._groups.gather_bucket(
                        bucket, whole, self._replica, channel=channel
                    )
            flats.append(flat)
        return unpack_rows(plan, flats)

    def all_reduce(self, tensor: tf.Tensor) -> tf.Tensor:
        """See `ShardCollectives`."""
        with timing.labelled("norms"):
            return self._groups.all_reduce(tensor, self._replica)


class WholeGradientCollectives(GraphShardCollectives):
    """Shard collectives for Adasum and compressors of whole buckets, in a graph.

    Gradients are all-reduced by the buckets of an optimizer that is not sharded; each
    replica keeps its slices of the sums.

    Args:
        groups: `ShardGroups`.
        replica: Int, index of the calling replica among the local ones.
        sum_gradients: Callable from a dict of gradients by position, and a weight, to
            the dict of their sums over all replicas.
        before_bucket: Callable, see `GraphShardCollectives`. Defaults to `None`.
        after_bucket: Callable, see `GraphShardCollectives`. Defaults to `None`.
    """

    def __init__(
        self,
        groups: ShardGroups,
        replica: int,
        sum_gradients: Callable[[Mapping[int, tf.Tensor], tf.Tensor | None], dict],
        before_bucket: Callable[[int], None] | None = None,
        after_bucket: Callable[[tf.Tensor], None] | None = None,
    ) -> None:
        super().__init__(
            groups,
            replica,
            lambda flat: (None, None),
            lambda number, bucket, flat: None,
            before_bucket,
            after_bucket,
        )
        self._sum_gradients = sum_gradients

    def reduce_scatter(
        self,
        plan: ShardPlan,
        tensors: Mapping[int, tf.Tensor],
        weight: tf.Tensor | None,
    ) -> Slices:
        """See `ShardCollectives`."""
        if self._before_bucket is not None and tensors:
            self._before_bucket(max(map(_compat.op_position, tensors.values())))
        sums = self._sum_gradients(tensors, weight)
        slices = _own_slices(plan, self.owner, sums)
        if self._after_bucket is not None:
            for piece in slices:
                if piece is not None:
                    self._after_bucket(piece)
        return slices


class EagerShardCollectives:
    """Shard collectives by all-reduce: for eager steps, and where rows are uneven.

    Eager replicas run one after the other and cannot wait for each other in a
    collective. And where one variable is larger than a fair share, rows would be
    mostly padding.

    Args:
        groups: `ShardGroups`.
        replica: Int, index of the calling replica among the local ones.
        sum_tensors: Callable that sums a list of tensors over all replicas.
    """

    def __init__(
        self,
        groups: ShardGroups,
        replica: int,
        sum_tensors: Callable[[list[tf.Tensor]], list[tf.Tensor]],
    ) -> None:
        self.owner = groups.owner(replica)
        self.num_copies = groups.num_copies
        self._sum_tensors = sum_tensors
        self._is_first_copy = groups.is_first_copy(replica)

    def reduce_scatter(
        self,
        plan: ShardPlan,
        tensors: Mapping[int, tf.Tensor],
        weight: tf.Tensor | None,
    ) -> Slices:
        """See `ShardCollectives`."""
        indices = list(tensors)
        given = [
            tensors[index] if weight is None else weighted(tensors[index], weight)
            for index in indices
        ]
        sums = dict(zip(indices, self._sum_tensors(given), strict=True))
        return _own_slices(plan, self.owner, sums)

    def all_gather(self, plan: ShardPlan, slices: Slices) -> dict[int, tf.Tensor]:
        """See `ShardCollectives`: others' elements count as zeros in a sum."""
        sizes = _variable_sizes(plan, slices)
        own: dict[int, list[tuple[Segment, tf.Tensor]]] = {index: [] for index in sizes}
        dtypes: dict[int, tf.DType] = {}
        for bucket, piece in zip(plan.buckets, slices, strict=True):
            if piece is None:
                continue
            dtypes.update(dict.fromkeys(bucket.indices, piece.dtype))
            begin = 0
            for segment in bucket.rows[self.owner] if self._is_first_copy else ():
                elements = piece[begin : begin + segment.size]
                own[segment.index].append((segment, elements))
                begin += segment.size
        padded = [
            _pad_with_zeros(own[index], size, dtypes[index])
            for index, size in sizes.items()
        ]
        return dict(zip(sizes, self._sum_tensors(padded), strict=True))

    def all_reduce(self, tensor: tf.Tensor) -> tf.Tensor:
        """See `ShardCollectives`."""
        mine = tensor if self._is_first_copy else tf.zeros_like(tensor)
        return self._sum_tensors([mine])[0]


def _own_slices(plan: ShardPlan, owner: int, sums: Mapping[int, tf.Tensor]) -> Slices:
    """An owner's slice of each bucket, of gradients that are summed already."""
    slices: Slices = []
    for bucket in plan.buckets:
        present = sorted(bucket.indices & sums.keys())
        if not present:
            slices.append(None)
            continue
        row, padding = bucket.rows[owner], bucket.padding(owner)
        slices.append(pack_row(row, padding, sums, sums[present[0]].dtype))
    return slices


def _variable_sizes(plan: ShardPlan, slices: Slices) -> dict[int, int]:
    """Size of each variable of the buckets that are given, in one order."""
    sizes: dict[int, int] = {}
    for bucket, piece in zip(plan.buckets, slices, strict=True):
        if piece is not None:
            for segment in (segment for row in bucket.rows for segment in row):
                sizes[segment.index] = max(sizes.get(segment.index, 0), segment.stop)
    return sizes


def _pad_with_zeros(
    parts: list[tuple[Segment, tf.Tensor]], size: int, dtype: tf.DType
) -> tf.Tensor:
    pieces, end = [], 0
    for segment, elements in sorted(parts, key=lambda part: part[0].start):
        pieces += [tf.zeros([segment.start - end], dtype), elements]
        end = segment.stop
    return tf.concat([*pieces, tf.zeros([size - end], dtype)], axis=0)
