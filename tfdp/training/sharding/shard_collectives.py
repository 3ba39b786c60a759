"""Reduce-scatter of gradients to shards, and all-gather of shards to variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import timing
from tfdp.ground._compat import graphs
from tfdp.ground.plans.shards import ShardPlan
from tfdp.training.compression.compressed_reduce import CallingReplica
from tfdp.training.parameters.backward_gathers import BackwardGathers
from tfdp.training.parameters.packing import pack_row, pack_rows, place_row, unpack_rows
from tfdp.training.parameters.shard_groups import ShardGroups
from tfdp.training.reduction.fusion import weighted
from tfdp.training.reduction.gradient_reducer import ReplicaReducer
from tfdp.training.sharding.sharded_param_group import ShardedParamGroup

# One replica's slice of each bucket, a tensor of shape `[slice_size]`, or `None` for a
# bucket in which no variable has a gradient.
Slices = list[tf.Tensor | None]


@dataclasses.dataclass(frozen=True)
class ShardCollectives:
    """Reduce-scatter and all-gather of shards on one replica, in a graph.

    Args:
        extended: Extended object of a tfdp strategy.
        groups: `ShardGroups`, the replicas that own shards.
        replica: Int, index of the calling replica among the local ones.
        reducer: `ReplicaReducer` of this replica.
        backward: `BackwardGathers` of sharded parameters, or `None` without them.
    """

    extended: Any
    groups: ShardGroups
    replica: int
    reducer: ReplicaReducer
    backward: BackwardGathers | None

    @property
    def owner(self) -> int:
        """Int, index of the replica's own slice among the slices of each bucket."""
        return self.groups.owner(self.replica)

    def reduce_scatter(
        self,
        group: ShardedParamGroup,
        tensors: Mapping[int, tf.Tensor],
        weight: tf.Tensor | None,
    ) -> Slices:
        """Sum gradients over all replicas and keep this replica's slice of each bucket.

        Args:
            group: `ShardedParamGroup`.
            tensors: Dict from the position of a variable in the group to its
                gradient, with the same positions on all replicas.
            weight: Scalar tensor, the factor of this replica's tensors, or `None`
                for 1.

        Returns:
            List with a tensor of shape `[slice_size]` for each bucket, or `None`
            for a bucket without tensors.
        """
        slices: Slices = []
        for channel, bucket in enumerate(group.plan.buckets):
            present = sorted(bucket.indices & tensors.keys())
            if not present:
                slices.append(None)
                continue
            self._gather_before([tensors[index] for index in present])
            flat = pack_rows(bucket, tensors, tensors[present[0]].dtype)
            if weight is not None:
                flat = weighted(flat, weight)
            with timing.labelled(f"{timing.GRADIENTS} {channel}"):
                piece = self._scatter(group, channel, flat)
            self._record_reduced([piece])
            slices.append(piece)
        return slices

    def all_gather(self, plan: ShardPlan, slices: Slices) -> dict[int, tf.Tensor]:
        """Gather all variables of the buckets that have slices.

        Args:
            plan: `ShardPlan`.
            slices: List with a slice of each bucket or `None`, as `reduce_scatter`
                returns.

        Returns:
            Dict from a variable's position to its flat value, equal on all replicas.
        """
        flats: Slices = []
        for channel, (bucket, piece) in enumerate(
            zip(plan.buckets, slices, strict=True)
        ):
            flat = None
            if piece is not None:
                # Two replicas run the same collective only if their tensors have the
                # same static shape, which clipping or an update may have lost.
                whole = tf.ensure_shape(piece, [bucket.slice_size])
                with timing.labelled(f"{timing.PARAMETERS} {channel}"):
                    flat = self.groups.gather_bucket(
                        bucket, whole, self.replica, channel=channel
                    )
            flats.append(flat)
        return unpack_rows(plan, flats)

    def all_reduce(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sum a small tensor over the owners of slices; return the sum to all replicas.

        If several replicas hold copies of the same slices, only the tensor of the first
        of them is added.
        """
        with timing.labelled("norms"):
            return self.groups.all_reduce(tensor, self.replica)

    def _scatter(
        self, group: ShardedParamGroup, number: int, flat: tf.Tensor
    ) -> tf.Tensor:
        """Reduce-scatter a bucket, with the wire formats that an all-reduce would use.

        Args:
            group: `ShardedParamGroup`.
            number: Int, index of the bucket, also the channel of its collective.
            flat: Flat tensor, the packed gradients of the bucket.

        Returns:
            Tensor of shape `[slice_size]`.
        """
        bucket = group.plan.buckets[number]
        num_bytes = flat.shape.num_elements() * flat.dtype.size
        route = self.extended.algorithm_selector.select(num_bytes, flat.dtype.name)
        members = [group.variables[index] for index in sorted(bucket.indices)]
        residuals = self.extended.reducer.residuals.of_bucket(
            "reduce-scatter", number, members, self.replica
        )
        caller = CallingReplica(self.replica, number, residuals)
        return self.groups.scatter_bucket(bucket, flat, route, caller)

    def _gather_before(self, tensors: Iterable[tf.Tensor]) -> None:
        """Trace second gathers of the sharded parameters that gradients depend on.

        A parameter that was freed after the forward pass is gathered a second time for
        the backward pass. The gather must be traced before the gradients are reduced.
        Without sharded parameters nothing is traced.

        Args:
            tensors: Iterable of tensors, the gradients that are reduced next.
        """
        if self.backward is not None:
            self.backward.gather_until(max(map(graphs.op_position, tensors)))

    def _record_reduced(self, slices: Slices) -> None:
        """Make later gathers of the backward pass wait until slices are reduced.

        Args:
            slices: `Slices`, results of reduce-scatters.
        """
        for piece in slices:
            if self.backward is not None and piece is not None:
                self.backward.record_reduced(piece)


class WholeGradientCollectives(ShardCollectives):
    """Shard collectives for Adasum and compressors of whole buckets, in a graph.

    Gradients are all-reduced in the buckets of an optimizer without sharding. Each
    replica keeps its slices of the sums.
    """

    def reduce_scatter(
        self,
        group: ShardedParamGroup,
        tensors: Mapping[int, tf.Tensor],
        weight: tf.Tensor | None,
    ) -> Slices:
        """Sum gradients by all-reduce, and keep this replica's slice of each bucket.

        Arguments and result are those of `ShardCollectives.reduce_scatter`.
        """
        if tensors:
            self._gather_before(tensors.values())
        reduced = self.reducer.reduce_gradients(
            list(tensors.values()),
            [group.variables[index] for index in tensors],
            may_sum=False,
            weight=weight,
        )
        sums = dict(zip(tensors, reduced.gradients(), strict=True))
        slices = _own_slices(group.plan, self.owner, sums)
        self._record_reduced(slices)
        return slices


class EagerShardCollectives(WholeGradientCollectives):
    """Shard collectives by all-reduce, for eager steps.

    Eager replicas run one after another and cannot wait for each other in a
    collective.
    """

    def all_gather(self, plan: ShardPlan, slices: Slices) -> dict[int, tf.Tensor]:
        """All-gather by a sum, in which a slice is zero on all replicas but one owner.

        Arguments and result are those of `ShardCollectives.all_gather`.
        """
        joined = tuple(bucket.joined for bucket in plan.buckets)
        placed = [
            self.groups.counted_once(place_row(bucket, self.owner, piece), self.replica)
            for bucket, piece in zip(plan.buckets, slices, strict=True)
            if piece is not None
        ]
        sums = iter(self.reducer.sum(placed))
        flats = [None if piece is None else next(sums) for piece in slices]
        return unpack_rows(dataclasses.replace(plan, buckets=joined), flats)

    def all_reduce(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sum a small tensor over the owners of slices.

        Where several replicas have copies of the same slices, only the first adds its
        tensor; the others add zeros.
        """
        counted = self.groups.counted_once(tensor, self.replica)
        return self.reducer.sum([counted])[0]


def collectives_class(extended: Any) -> type[ShardCollectives]:
    """Return the class of `ShardCollectives` for the current step of a strategy.

    Args:
        extended: Extended object of a tfdp strategy.

    Returns:
        `EagerShardCollectives` in an eager step; in a graph `WholeGradientCollectives`
        if Adasum or a compressor needs whole buckets, otherwise `ShardCollectives`.
    """
    if tf.executing_eagerly():
        return EagerShardCollectives
    is_whole = extended.algorithm_selector.needs_whole_buckets
    return WholeGradientCollectives if is_whole else ShardCollectives


def _own_slices(plan: ShardPlan, owner: int, sums: Mapping[int, tf.Tensor]) -> Slices:
    """Cut an owner's slice of each bucket out of summed gradients.

    Args:
        plan: `ShardPlan`.
        owner: Int, index of the owner of the slices.
        sums: Dict from a variable's position to its whole gradient.

    Returns:
        List with a slice of each bucket, or `None` for a bucket without gradients.
    """
    slices: Slices = [None] * len(plan.buckets)
    for number, bucket in enumerate(plan.buckets):
        present = sorted(bucket.indices & sums.keys())
        if present:
            dtype = sums[present[0]].dtype
            slices[number] = pack_row(bucket, owner, sums, dtype)
    return slices
