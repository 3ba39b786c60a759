"""Process groups of the owners of sharded state, in one or two levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import Member, ProcessGroup, node_levels, ring
from tfdp.ground import user_code
from tfdp.ground.plans.shards import ShardBucket
from tfdp.training.compression.algorithm_choice import AlgorithmChoice
from tfdp.training.compression.compressed_reduce import (
    CallingReplica,
    reduce_scatter_in_levels,
)
from tfdp.training.parameters.packing import place_row, take_row


class ShardGroups:
    """Owners of shards: all replicas, or those of a node, in one or two levels.

    In two levels, a reduce-scatter inside nodes is followed by one across nodes, so
    that the link of a node carries each element once.

    Args:
        group: `ProcessGroup` of all replicas.
        scope: String, `"all"`; or `"node"`: each node holds the whole state, divided
            among its replicas. Defaults to `"all"`.
        is_hierarchical: Bool, whether slices travel in two levels, which needs nodes of
            equal size. Defaults to `False`.
    """

    def __init__(
        self, group: ProcessGroup, scope: str = "all", *, is_hierarchical: bool = False
    ) -> None:
        self.group = group
        has_nodes = len(group.nodes) > 1
        self._is_copied = scope == "node" and has_nodes
        self.has_two_levels = has_nodes and is_hierarchical and not self._is_copied
        # For each local replica, its inner and outer process group. If nodes have their
        # own level or their own copy of the state, the inner group is the node, and the
        # outer group reaches across nodes; else the inner group has all replicas.
        self._inner: Sequence[ProcessGroup] = (group,) * len(group.devices)
        self._outer: Sequence[ProcessGroup | None] = (None,) * len(group.devices)
        if has_nodes and (is_hierarchical or self._is_copied):
            levels = [node_levels(group, r) for r in range(len(group.devices))]
            self._inner, self._outer = zip(*levels, strict=True)

    @property
    def num_copies(self) -> int:
        """Int, number of replicas that hold the same slices: 1 without copies."""
        outer = self._outer[0]
        return outer.size if outer is not None and self._is_copied else 1

    @property
    def num_owners(self) -> int:
        """Int, number of slices that a bucket is cut into."""
        return self.group.size // self.num_copies

    def owner(self, replica: int) -> int:
        """Return the index of the slice that a local replica owns.

        Args:
            replica: Int, index among the local replicas.

        Returns:
            Int from 0 to `num_owners - 1`.
        """
        outer = self._outer[replica]
        position = self._inner[replica].position(replica)
        if outer is None or self._is_copied:
            return position
        return position * outer.size + outer.position(replica)

    def is_first_copy(self, replica: int) -> bool:
        """Return whether a local replica is the first of those with the same slices."""
        outer = self._outer[replica]
        is_only = outer is None or not self._is_copied
        return is_only or (outer is not None and outer.position(replica) == 0)

    def reduce_scatter(
        self, flat: tf.Tensor, route: AlgorithmChoice, caller: CallingReplica
    ) -> tf.Tensor:
        """Sum a tensor over all replicas, and keep the calling replica's slice.

        Args:
            flat: Tensor of shape `[num_owners * slice_size]`.
            route: `AlgorithmChoice`, the wire formats inside and across nodes.
            caller: `CallingReplica`, with its channel and compressor states.

        Returns:
            Tensor of shape `[slice_size]`.
        """
        inner, outer = self._inner[caller.replica], self._outer[caller.replica]
        return reduce_scatter_in_levels(
            flat, inner, outer, route, caller, is_copied=self._is_copied
        )

    def gather_across_nodes(
        self, piece: tf.Tensor, replica: int, *, channel: int = 0
    ) -> tf.Tensor:
        """Gather slices from the other nodes, so that each node holds all slices.

        Args:
            piece: Tensor of shape `[slice_size]`.
            replica: Int, index of the calling replica among the local ones.
            channel: Int, the channel of its collectives. Defaults to `0`.

        Returns:
            Tensor of shape `[num_nodes * slice_size]`; of shape `[slice_size]` with one
            level, or if each node has a copy of all shards.
        """
        outer = self._outer[replica]
        if outer is None or self._is_copied:
            return piece
        return Member(outer, replica, channel).all_gather(piece)

    def gather_in_node(
        self, piece: tf.Tensor, replica: int, *, channel: int = 0
    ) -> tf.Tensor:
        """Gather slices between the replicas of a node; with one level, between all.

        Args:
            piece: Tensor, the result of `gather_across_nodes`.
            replica: Int, index of the calling replica among the local ones.
            channel: Int, the channel of its collectives. Defaults to `0`.

        Returns:
            Tensor of shape `[num_owners * slice_size]`, equal on all replicas.
        """
        return Member(self._inner[replica], replica, channel).all_gather(piece)

    def scatter_bucket(
        self,
        bucket: ShardBucket,
        flat: tf.Tensor,
        route: AlgorithmChoice,
        caller: CallingReplica,
    ) -> tf.Tensor:
        """Sum a bucket over all replicas, and keep the calling replica's slice.

        Args:
            bucket: `ShardBucket`. If it is lopsided, which means that slices would be
                mostly padding, it is all-reduced, which moves fewer bytes.
            flat: Tensor, the elements in the layout of `bucket.moved`: by owner, padded
                to `slice_size`; or without padding if the bucket is lopsided.
            route: `AlgorithmChoice`; not used by an all-reduce.
            caller: `CallingReplica`, with its channel and compressor states.

        Returns:
            Tensor of shape `[slice_size]`.
        """
        if not bucket.is_lopsided:
            return self.reduce_scatter(flat, route, caller)
        total = ring(flat, is_alone=False, **caller.member(self.group).arguments)
        return take_row(bucket, self.owner(caller.replica), total)

    def gather_bucket(
        self, bucket: ShardBucket, piece: tf.Tensor, replica: int, *, channel: int = 0
    ) -> tf.Tensor:
        """Gather the slices of a bucket, the inverse of `scatter_bucket`.

        Args:
            bucket: `ShardBucket`. A lopsided one is gathered by an all-reduce of rows
                padded with zeros.
            piece: Tensor of shape `[slice_size]`.
            replica: Int, index of the calling replica among the local ones.
            channel: Int, the channel of its collectives. Defaults to `0`.

        Returns:
            Tensor, equal on all replicas, in the layout of `bucket.moved`.
        """
        if not bucket.is_lopsided:
            piece = self.gather_across_nodes(piece, replica, channel=channel)
            return self.gather_in_node(piece, replica, channel=channel)
        # If each node holds the whole state, its replicas gather among themselves, so
        # that no parameter crosses a node's link.
        group = self._inner[replica] if self._is_copied else self.group
        placed = place_row(bucket, self.owner(replica), piece)
        return ring(placed, group, replica, channel=channel, is_alone=False)

    def all_reduce(self, tensor: tf.Tensor, replica: int) -> tf.Tensor:
        """Sum a tensor over the owners of slices; return the sum to all replicas.

        If several replicas hold copies of the same slice, only the tensor of the first
        of them is added.

        Args:
            tensor: Tensor of known shape.
            replica: Int, index of the calling replica among the local ones.

        Returns:
            Tensor like `tensor`, equal on all replicas.
        """
        counted = self.counted_once(tensor, replica)
        return Member(self.group, replica).all_reduce(counted)

    def counted_once(self, tensor: tf.Tensor, replica: int) -> tf.Tensor:
        """Return a replica's tensor, or zeros if an earlier replica has its slices.

        A sum over all replicas then counts each slice once. If each node summed its
        own copy instead, the sums could be rounded differently, and the copies would
        drift apart.

        Args:
            tensor: Tensor that depends on the slices of the replica.
            replica: Int, index of the calling replica among the local ones.
        """
        return tensor if self.is_first_copy(replica) else tf.zeros_like(tensor)


def shard_groups_of(
    extended: Any, scope: str, *, needs_two_levels: bool = False
) -> ShardGroups:
    """Return the owners of shards among the replicas of a strategy.

    Args:
        extended: Extended object of a tfdp strategy.
        scope: String, which replicas share the state: `"all"`, or `"node"` for those of
            each node. It falls back to `"all"`, with a warning, if nodes differ in
            size.
        needs_two_levels: Bool, whether slices travel in two levels even if one level is
            as fast. Defaults to `False`.

    Returns:
        `ShardGroups`.
    """
    selector = extended.algorithm_selector
    is_even = selector.topology.is_even
    has_nodes = selector.topology.num_nodes > 1
    if has_nodes and not is_even and scope == "node":
        user_code.warn(
            '`shard_scope="node"` falls back to "all": it needs the same number of '
            "replicas on every node."
        )
        scope = "all"
    if has_nodes and not is_even and needs_two_levels:
        user_code.warn(
            '`reshard_after_forward="node"` falls back to `True`: it needs the same '
            "number of replicas on every node."
        )
    levels = selector.is_hierarchical or (needs_two_levels and is_even)
    return ShardGroups(extended.group, scope, is_hierarchical=levels)
