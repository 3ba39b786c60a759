"""Gathers of units in one replica's step, built while the step is traced.

    first read of unit 0: gather 0, 1            (one is prefetched)
    first read of unit 1:       gather 2, after unit 0 has begun to compute
    first read of unit 2:             gather 3, after unit 1 has begun to compute

TensorFlow starts every operation as soon as its inputs are ready, so it would gather
all units at once. Here each gather waits for an operation of an earlier unit, and for
the previous gather, since a unit needs memory twice while it is gathered: packed and
unpacked.

The age of an operation is its position in the graph: an operation that is traced later
has a larger age. A gate is a list of operations that a gather waits for.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp.communication.collectives import timing
from tfdp.ground._compat import graphs, tensor_reads, tf_distribute
from tfdp.ground.plans.shards import ShardBucket, ShardPlan
from tfdp.ground.plans.units import DEFAULT_UNITS, UnitOptions, unit_bucket
from tfdp.training.parameters.packing import unpack_rows
from tfdp.training.parameters.quantized_gathers import (
    decode_parts,
    encode_parts,
    is_gathered_in_8_bits,
    sent_bytes,
)
from tfdp.training.parameters.shard_groups import ShardGroups
from tfdp.training.parameters.sharded_parameter import ShardedParameter


@dataclasses.dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together.

    Args:
        number: Int, position of the unit in the forward pass.
        parameters: Tuple of `ShardedParameter`.
        options: `UnitOptions`. Defaults to `UnitOptions()`.
    """

    number: int
    parameters: tuple[ShardedParameter, ...]
    options: UnitOptions = DEFAULT_UNITS

    @property
    def num_bytes(self) -> int:
        """Int, size of its parameters in bytes."""
        return sum(item.num_elements * item.dtype.size for item in self.parameters)

    @property
    def sent_bytes(self) -> int:
        """Int, bytes that all owners together send to gather the unit.

        Parameters that are not quantized count in their own dtypes.
        """
        options = self.options
        members = [p for p in self.parameters if is_gathered_in_8_bits(p, options)]
        saved = sum(item.num_elements * item.dtype.size for item in members)
        return self.num_bytes - saved + (sent_bytes(members) if members else 0)


class GatherFormat(NamedTuple):
    """Format of an all-gather of parameters; those with the same format share one.

    Args:
        dtype: `tf.DType` in which layers read the parameters.
        is_quantized: Bool, whether they travel in 8 bits an element.
    """

    dtype: tf.DType
    is_quantized: bool


@dataclasses.dataclass(eq=False)
class GatheredUnit:
    """Result of one gather of a unit in a step.

    Args:
        unit: `Unit`.
        dtypes: Tuple of `tf.DType`, the dtype in which each parameter is read.
        values: Dict from the `id` of a parameter to its whole value, which layers read.
        pieces: Dict from `GatherFormat` to the slices that this replica has gathered
            from all nodes. With them a second gather, for the backward pass, can stay
            inside of the node.
        age: Int, position in the graph of the last operation before the first read.
    """

    unit: Unit
    dtypes: tuple[tf.DType, ...]
    values: dict[int, tf.Tensor]
    pieces: dict[GatherFormat, tf.Tensor]
    age: int


class UnitGatherer:
    """Gathers units, the groups of parameters that are gathered at once, in a step.

    It keeps the gathered values for later operations of the replica's step.

    Args:
        graph: The graph of the step, outside of its loops and branches.
        groups: `ShardGroups`.
        replica: Int, index of the replica among the local ones.
    """

    def __init__(self, graph: Any, groups: ShardGroups, replica: int) -> None:
        self.graph = graph
        self.groups = groups
        self.replica = replica
        self.order = ComputeOrder(graph)
        # All gathers are kept in order, since a gather waits for earlier ones. A read
        # finds the latest gather of a parameter by the parameter's `id` and the name of
        # the dtype in which it is read.
        self.gathered: list[GatheredUnit] = []
        self._current: dict[tuple[int, str], GatheredUnit] = {}
        self._sources: dict[int, tf.Tensor] = {}
        self._backward_passes: list[tuple[int, int]] = []
        # A stack, since backward passes are nested where layers are computed again: for
        # each open pass, the age (position in the graph) of the operation before it.
        self._open_passes: list[int] = []

    def source(self, parameter: ShardedParameter) -> tf.Tensor:
        """Return the tensor that stands for the parameter on gradient tapes.

        Its gradient is that of the whole parameter; its value is never computed.
        """
        key = id(parameter)
        if key not in self._sources:
            with self.graph.as_default(), tf.control_dependencies(None):
                self._sources[key] = tf.zeros(parameter.whole_shape, parameter.dtype)
        return self._sources[key]

    def read(self, parameter: ShardedParameter, unit: Unit) -> tf.Tensor:
        """Return the value of a parameter; gather its unit at the first read.

        Returns:
            Tensor of the parameter's shape, in the dtype that the model computes in.
        """
        key = (id(parameter), read_dtype(parameter).name)
        with self.graph.as_default():
            if key not in self._current:
                self._gather(unit)
            value = tf.identity(self._current[key].values[id(parameter)])
        tensor_reads.record_read(parameter, value)
        return value

    def forget(self, unit: Unit) -> None:
        """Drop the gathered values of a unit of parameters; a read gathers it again."""
        members = {id(parameter) for parameter in unit.parameters}
        for key in [key for key in self._current if key[0] in members]:
            del self._current[key]

    def begin_backward_pass(self) -> None:
        """Record that a backward pass begins; operations traced from now on are in it.

        `BackwardGathers` gathers a second time the parameters that these passes use.
        """
        self._open_passes.append(self.order.newest())

    def end_backward_pass(self) -> None:
        """End the backward pass that began last.

        Passes inside of it, of layers that are computed again, become a part of it.
        """
        begin, end = self._open_passes.pop(), self.order.newest()
        others = [known for known in self._backward_passes if known[0] < begin]
        self._backward_passes = [*others, (begin, end)]

    @contextlib.contextmanager
    def between_backward_passes(self) -> Iterator[None]:
        """End the backward passes that are being traced, and begin them again on exit.

        What has been traced so far is recorded as whole passes, for
        `take_backward_passes` inside the context.
        """
        depth = len(self._open_passes)
        for _ in range(depth):
            self.end_backward_pass()
        yield
        for _ in range(depth):
            self.begin_backward_pass()

    def take_backward_passes(self) -> list[tuple[int, int]]:
        """Return the backward passes recorded so far, and forget them.

        Returns:
            List of pairs of ages, the positions in the graph of the operations before a
            backward pass and at its end.
        """
        taken, self._backward_passes = self._backward_passes, []
        return taken

    def _gather(self, unit: Unit) -> None:
        """Trace a gather of a unit, whose values later reads of its parameters return.

        The gather waits for the one before it, and until an earlier unit is about to
        compute: the option `prefetch` of `unit` says how many units earlier.
        """
        dtypes = tuple(map(read_dtype, unit.parameters))
        age = self.order.newest()
        # The gather waits until an earlier unit is about to compute, so that only a few
        # units are in memory at a time.
        before = len(self.gathered) - 1 - unit.options.prefetch
        gate = [] if before < 0 else self.order.last_until(self.gathered[before].age)
        if self.gathered:
            gate += [value.op for value in self.gathered[-1].values.values()]
        with timing.needed_after(self.order.last_until(age)):
            gathered = gather_unit(self, unit, dtypes, gate)
        found = GatheredUnit(unit, dtypes, *gathered, age)
        self.gathered.append(found)
        for parameter, dtype in zip(unit.parameters, dtypes, strict=True):
            self._current[id(parameter), dtype.name] = found


def gather_unit(
    step: UnitGatherer,
    unit: Unit,
    dtypes: Sequence[tf.DType],
    gate: Sequence[tf.Operation],
    pieces: Mapping[GatherFormat, tf.Tensor] | None = None,
    *,
    label: str = timing.UNIT,
) -> tuple[dict[int, tf.Tensor], dict[GatherFormat, tf.Tensor]]:
    """Trace a gather of a unit's parameters, by one all-gather for each format.

    A format is the dtype of the parameters, and whether they are sent in 8 bits.

    Args:
        step: `UnitGatherer` of the calling replica.
        unit: `Unit`.
        dtypes: Sequence of `tf.DType`, the dtype in which each parameter is read.
        gate: Sequence of operations that the gather waits for.
        pieces: Dict from `GatherFormat` to the result of an earlier gather across
            nodes, so that only a gather in the node is needed; or `None`. Defaults to
            `None`.
        label: String, name of the gather in monitors. Defaults to that of the forward
            pass.

    Returns:
        Tuple of a dict from the `id` of a parameter to its whole value, and a dict from
        `GatherFormat` to the result of the gather across nodes.
    """
    values: dict[int, tf.Tensor] = {}
    kept: dict[GatherFormat, tf.Tensor] = {}
    members_of: dict[GatherFormat, list[ShardedParameter]] = {}
    for parameter, dtype in zip(unit.parameters, dtypes, strict=True):
        gather_format = GatherFormat(
            dtype, is_gathered_in_8_bits(parameter, unit.options)
        )
        members_of.setdefault(gather_format, []).append(parameter)
    device = step.groups.group.devices[step.replica]
    with tf.control_dependencies(list(gate)), tf.device(device):
        for gather_format, members in members_of.items():
            with timing.labelled(f"{label} {unit.number}"):
                known = (pieces or {}).get(gather_format)
                wholes, piece = _gather_members(
                    step, unit, members, gather_format, known
                )
            if piece is not None:
                kept[gather_format] = piece
            step.order.begin_with(wholes)
            values.update(zip(map(id, members), wholes, strict=True))
    return values, kept


def _gather_members(
    step: UnitGatherer,
    unit: Unit,
    members: list[ShardedParameter],
    gather_format: GatherFormat,
    piece: tf.Tensor | None,
) -> tuple[list[tf.Tensor], tf.Tensor | None]:
    """Gather parameters of one format: across nodes, then inside of nodes.

    Args:
        step: `UnitGatherer`.
        unit: `Unit`.
        members: List of `ShardedParameter` of the unit.
        gather_format: `GatherFormat` of the members.
        piece: Tensor, the result of an earlier gather across nodes, so that only the
            gather in the node runs; or `None` to run both.

    Returns:
        Tuple of the list of whole parameters, and the result of the gather across
        nodes. The latter is `None` if slices would be mostly padding (a lopsided
        bucket, not quantized): one all-reduce then gathers over all replicas.
    """
    caller: dict[str, int] = {"replica": step.replica, "channel": unit.number}
    ranges = [parameter.ranges for parameter in members]
    bucket = unit_bucket(range(len(members)), ranges, gather_format.dtype.name)
    if bucket.is_lopsided and not gather_format.is_quantized:
        piece = _local_slice(step, members, bucket)
        flat = step.groups.gather_bucket(bucket, piece, **caller)
        return _unpack_members(members, bucket, flat), None
    if piece is None:
        if gather_format.is_quantized:
            part = encode_parts(members, step.replica)
        else:
            part = _local_slice(step, members, bucket)
        piece = step.groups.gather_across_nodes(part, **caller)
    flat = step.groups.gather_in_node(piece, **caller)
    if not gather_format.is_quantized:
        return _unpack_members(members, bucket, flat), piece
    return [
        tf.cast(whole, gather_format.dtype) for whole in decode_parts(members, flat)
    ], piece


def _local_slice(
    step: UnitGatherer, members: list[ShardedParameter], bucket: ShardBucket
) -> tf.Tensor:
    """Return the replica's slice of a bucket.

    Args:
        step: `UnitGatherer` of the replica.
        members: List of the `ShardedParameter`s in the bucket.
        bucket: `ShardBucket`.

    Returns:
        Tensor of shape `[slice_size]`.
    """
    dtype = tf.as_dtype(bucket.dtype)
    parts = [tf_distribute.local_value(each, step.replica) for each in members]
    piece = [tf.cast(tf.reshape(part.read_value(), [-1]), dtype) for part in parts]
    padding = bucket.padding(step.groups.owner(step.replica))
    return tf.concat([*piece, tf.zeros([padding], dtype)], axis=0)


def _unpack_members(
    members: list[ShardedParameter], bucket: ShardBucket, flat: tf.Tensor
) -> list[tf.Tensor]:
    """Unpack the parameters of a gathered bucket, in their own shapes.

    Args:
        members: List of the `ShardedParameter`s in the bucket.
        bucket: `ShardBucket`.
        flat: Tensor, the gathered rows of all owners.
    """
    found = unpack_rows(ShardPlan((bucket,), len(bucket.rows)), [flat])
    return [
        tf.reshape(found[index], parameter.whole_shape)
        if index in found
        else tf.zeros(parameter.whole_shape, flat.dtype)
        for index, parameter in enumerate(members)
    ]


def read_dtype(parameter: ShardedParameter) -> tf.DType:
    """Return the dtype of a parameter's reads in the current autocast scope."""
    casts = parameter.casts and parameter.dtype.is_floating
    scope = tensor_reads.autocast_dtype() if casts else None
    return parameter.dtype if scope is None else tf.as_dtype(scope)


# Types of operations that take no time to compute, so no gather waits for them.
_INSTANT_OPS = frozenset(
    ("Const", "Identity", "IdentityN", "NoOp", "Rank", "Reshape", "Shape", "ShapeN")
)


class ComputeOrder:
    """Operations of a traced step that depend on gathered parameters, by their age.

    The age of an operation is its position in the graph. Later gathers wait for the
    last of these operations before some age, which `last_until` returns.

    Args:
        graph: The graph of the step.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._num_scanned = len(graph.get_operations())
        self._dependent: set[tf.Operation] = set()
        # Operations that depend on gathered parameters and take time to compute, with
        # their ages (positions in the graph) in ascending order for a binary search.
        self._ages: list[int] = []
        self._computing: list[tf.Operation] = []

    def newest(self) -> int:
        """Return the age of the operation traced last: its position in the graph."""
        traced = self._graph.get_operations()
        return graphs.op_age(traced[-1]) if traced else 0

    def begin_with(self, tensors: Iterable[tf.Tensor]) -> None:
        """Register newly gathered parameters, on which later operations may depend.

        Args:
            tensors: Iterable of tensors, the gathered parameters.
        """
        self._scan()
        self._dependent.update(tensor.op for tensor in tensors)

    def last_until(self, age: int) -> list[tf.Operation]:
        """Return the last operation up to an age that takes time to compute.

        Only operations that depend on gathered parameters count.

        Args:
            age: Int, a position in the graph.

        Returns:
            List of one operation or none.
        """
        self._scan()
        index = bisect.bisect_right(self._ages, age)
        return self._computing[index - 1 : index] if index else []

    def _scan(self) -> None:
        """Register new operations that depend on gathered parameters.

        New are those that were traced since the last scan.
        """
        new = self._graph.get_operations()[self._num_scanned :]
        for op in new:
            if not any(tensor.op in self._dependent for tensor in op.inputs):
                continue
            self._dependent.add(op)
            if op.outputs and op.type not in _INSTANT_OPS:
                self._ages.append(graphs.op_age(op))
                self._computing.append(op)
        self._num_scanned += len(new)
