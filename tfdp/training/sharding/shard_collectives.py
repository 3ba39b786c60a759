"""Reduce-scatter of gradients to shards, all-gather of shards to variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import timing
from tfdp.ground import _compat
from tfdp.ground.plans.shards import Segment, ShardBucket, ShardPlan
from tfdp.training.compression.compressed_reduce import Caller
from tfdp.training.parameters.backward_gathers import BackwardGathers
from tfdp.training.parameters.packing import pack_row, pack_rows, unpack_rows
from tfdp.training.parameters.shard_groups import ShardGroups
from tfdp.training.reduction.fusion import weighted
from tfdp.training.reduction.gradient_reducer import ReplicaReducer
from tfdp.training.sharding.sharded_param_group import ShardedParamGroup

Slices = list[tf.Tensor | None]


@dataclasses.dataclass(frozen=True)
class StepCollectives:
    """Callable from a parameter group to its collectives, on one replica.

    Args:
        extended: Extended class of a tfdp strategy.
        groups: `ShardGroups`.
        replica: Int, index of the calling replica among the local ones.
        reducer: `ReplicaReducer`.
        backward: `BackwardGathers` of sharded parameters, or `None`.
        may_sum_everything: Bool, whether all-reduces may take the place of all
            collectives of an optimizer.
    """

    extended: Any
    groups: ShardGroups
    replica: int
    reducer: ReplicaReducer
    backward: BackwardGathers | None
    may_sum_everything: bool

    def __call__(self, part: ShardedParamGroup) -> ShardCollectives:
        """Return the `ShardCollectives` of a parameter group.

        Raises:
            ValueError: In eager mode, where gradients are combined by Adasum.
        """
        selector = self.extended.algorithm_selector
        if selector.combines_means and tf.executing_eagerly():
            raise ValueError(
                "Adasum with sharded state needs a graph. Leave out "
                "`run_eagerly=True`, and call `strategy.run` in a `tf.function`."
            )
        is_lopsided = part.plan.shards_variables and part.plan.is_lopsided
        sums_everything = self.may_sum_everything and not selector.combines_means
        if tf.executing_eagerly() or (sums_everything and is_lopsided):
            return EagerShardCollectives(self, part.variables)
        if selector.needs_whole_buckets:
            return WholeGradientCollectives(self, part.variables)
        return ShardCollectives(self, part.variables)


class ShardCollectives:
    """Shard collectives by reduce-scatter and all-gather, in a graph.

    Args:
        step: `StepCollectives`.
        variables: List of Keras variables, those of a parameter group.
    """

    def __init__(self, step: StepCollectives, variables: list[Any]) -> None:
        self.owner = step.groups.owner(step.replica)
        self.num_copies = step.groups.num_copies
        self._step = step
        self._variables = variables

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
        slices: Slices = []
        for channel, bucket in enumerate(plan.buckets):
            given = sorted(bucket.indices & tensors.keys())
            if not given:
                slices.append(None)
                continue
            self._gather_before([tensors[index] for index in given])
            flat = pack_rows(bucket, tensors, tensors[given[0]].dtype)
            if weight is not None:
                flat = weighted(flat, weight)
            with timing.labelled(f"{timing.GRADIENTS} {channel}"):
                piece = self._scatter(channel, bucket, flat)
            self._note_reduced([piece])
            slices.append(piece)
        return slices

    def all_gather(self, plan: ShardPlan, slices: Slices) -> dict[int, tf.Tensor]:
        """Gather all variables of the buckets whose slices are given.

        Args:
            plan: `ShardPlan`.
            slices: As `reduce_scatter` returns them.

        Returns:
            Dict from position to flat tensor, alike on all replicas.
        """
        flats: Slices = []
        for channel, (bucket, piece) in enumerate(
            zip(plan.buckets, slices, strict=True)
        ):
            flat = None
            if piece is not None:
                # A key contains the shape, which clipping or an update may have lost.
                whole = tf.ensure_shape(piece, [bucket.slice_size])
                with timing.labelled(f"{timing.PARAMETERS} {channel}"):
                    flat = self._step.groups.gather_bucket(
                        bucket, whole, self._step.replica, channel=channel
                    )
            flats.append(flat)
        return unpack_rows(plan, flats)

    def all_reduce(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sum a small tensor over the owners of different slices."""
        with timing.labelled("norms"):
            return self._step.groups.all_reduce(tensor, self._step.replica)

    def _scatter(self, number: int, bucket: ShardBucket, flat: tf.Tensor) -> tf.Tensor:
        """Reduce-scatter a bucket by the algorithm that an all-reduce would take."""
        extended, replica = self._step.extended, self._step.replica
        num_bytes = flat.shape.num_elements() * flat.dtype.size
        route = extended.algorithm_selector.select(num_bytes, flat.dtype.name)
        members = [self._variables[index] for index in sorted(bucket.indices)]
        residuals = extended.reducer.residuals.of_bucket(
            "reduce-scatter", number, members, replica
        )
        caller = Caller(replica, number, residuals)
        return self._step.groups.scatter_bucket(bucket, flat, route.levels, caller)

    def _gather_before(self, tensors: Iterable[tf.Tensor]) -> None:
        """Gather parameters that operations before some gradients need again."""
        if self._step.backward is not None:
            self._step.backward.up_to(max(map(_compat.op_position, tensors)))

    def _note_reduced(self, slices: Slices) -> None:
        for piece in slices:
            if self._step.backward is not None and piece is not None:
                self._step.backward.note_reduced(piece)


class WholeGradientCollectives(ShardCollectives):
    """Shard collectives for Adasum and compressors of whole buckets, in a graph.

    Gradients are all-reduced by the buckets of an optimizer that is not sharded; each
    replica keeps its slices of the sums.
    """

    def reduce_scatter(
        self,
        plan: ShardPlan,
        tensors: Mapping[int, tf.Tensor],
        weight: tf.Tensor | None,
    ) -> Slices:
        """See `ShardCollectives`."""
        if tensors:
            self._gather_before(tensors.values())
        reduced = self._step.reducer.reduce_gradients(
            list(tensors.values()),
            [self._variables[index] for index in tensors],
            may_sum=False,
            weight=weight,
        )
        sums = dict(zip(tensors, reduced.gradients(), strict=True))
        slices = _own_slices(plan, self.owner, sums)
        self._note_reduced(slices)
        return slices


class EagerShardCollectives(ShardCollectives):
    """Shard collectives by all-reduce: for eager steps, and where rows are uneven.

    Eager replicas run one after the other and cannot wait for each other in a
    collective. And where one variable is larger than a fair share, rows would be
    mostly padding.
    """

    @property
    def _is_first_copy(self) -> bool:
        return self._step.groups.is_first_copy(self._step.replica)

    def reduce_scatter(
        self,
        plan: ShardPlan,
        tensors: Mapping[int, tf.Tensor],
        weight: tf.Tensor | None,
    ) -> Slices:
        """See `ShardCollectives`."""
        given = [
            tensor if weight is None else weighted(tensor, weight)
            for tensor in tensors.values()
        ]
        sums = dict(zip(tensors, self._step.reducer.sum(given), strict=True))
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
            for segment, begin, end in bucket.places(self.owner):
                if self._is_first_copy:
                    own[segment.index].append((segment, piece[begin:end]))
        padded = [
            _pad_with_zeros(own[index], size, dtypes[index])
            for index, size in sizes.items()
        ]
        return dict(zip(sizes, self._step.reducer.sum(padded), strict=True))

    def all_reduce(self, tensor: tf.Tensor) -> tf.Tensor:
        """See `ShardCollectives`."""
        mine = tensor if self._is_first_copy else tf.zeros_like(tensor)
        return self._step.reducer.sum([mine])[0]


def _own_slices(plan: ShardPlan, owner: int, sums: Mapping[int, tf.Tensor]) -> Slices:
    """An owner's slice of each bucket, of gradients that are summed already."""
    slices: Slices = [None] * len(plan.buckets)
    for number, bucket in enumerate(plan.buckets):
        present = sorted(bucket.indices & sums.keys())
        if present:
            dtype = sums[present[0]].dtype
            slices[number] = pack_row(bucket, owner, sums, dtype)
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
