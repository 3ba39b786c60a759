"""Units that one replica's step gathers, while the step is traced.

    first read of unit 0: gather 0, 1            (one is prefetched)
    first read of unit 1:       gather 2, when what unit 0 computes has begun
    first read of unit 2:             gather 3, when what unit 1 computes has begun

TensorFlow starts every operation as soon as its inputs are there, so it would gather
all units at once. Here each gather waits for an operation of an earlier unit, and for
the gather before it: a unit under way takes memory twice, as it travels and unpacked.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp.communication.collectives import timing
from tfdp.ground import _compat
from tfdp.ground.plans.shards import ShardBucket, ShardPlan
from tfdp.ground.plans.units import DEFAULT_UNITS, UnitOptions, unit_bucket
from tfdp.training.parameters.packing import unpack_rows
from tfdp.training.parameters.quantized_gathers import (
    decoded,
    own_words,
    sent_bytes,
    travels_quantized,
)
from tfdp.training.parameters.shard_groups import ShardGroups
from tfdp.training.parameters.sharded_parameter import ShardedParameter


@dataclasses.dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together.

    Args:
        number: Int, its place in the order of the forward pass.
        parameters: Tuple of `ShardedParameter`.
        options: `UnitOptions`. Defaults to that of no arguments.
    """

    number: int
    parameters: tuple[ShardedParameter, ...]
    options: UnitOptions = DEFAULT_UNITS

    @property
    def num_bytes(self) -> int:
        """Int, the size of its parameters."""
        return sum(item.num_elements * item.dtype.size for item in self.parameters)

    @property
    def sent_bytes(self) -> int:
        """Int, what all owners send of it, where layers compute in its own dtypes."""
        options = self.options
        members = [p for p in self.parameters if travels_quantized(p, options)]
        saved = sum(item.num_elements * item.dtype.size for item in members)
        return self.num_bytes - saved + (sent_bytes(members) if members else 0)


class Form(NamedTuple):
    """In which form parameters travel.

    Args:
        dtype: `tf.DType`, in which they are read.
        is_quantized: Bool, whether they travel in 8 bits.
    """

    dtype: tf.DType
    is_quantized: bool


@dataclasses.dataclass(eq=False)
class GatheredUnit:
    """A unit as a step has gathered it.

    Args:
        unit: `Unit`.
        dtypes: Tuple of `tf.DType`, in which each parameter is read.
        values: Dict from the `id` of a parameter to its whole value.
        pieces: Dict from a `Form` to what the replica has of the unit when its node
            has all of it, see `ShardGroups.gather_across_nodes`.
        age: Int, age of the last operation before it was first read.
    """

    unit: Unit
    dtypes: tuple[tf.DType, ...]
    values: dict[int, tf.Tensor]
    pieces: dict[Form, tf.Tensor]
    age: int


class StepGathers:
    """What the step of one replica has gathered, in one graph.

    Args:
        graph: The graph of the step, around its loops and branches.
        groups: `ShardGroups`.
        replica: Int, index of the replica among the local ones.
    """

    def __init__(self, graph: Any, groups: ShardGroups, replica: int) -> None:
        self.graph = graph
        self.groups = groups
        self.replica = replica
        self.order = ComputeOrder(graph)
        # All that was gathered, in order, and what is up to date.
        self.gathered: list[GatheredUnit] = []
        self._current: dict[tuple[int, str], GatheredUnit] = {}
        self._sources: dict[int, tf.Tensor] = {}
        self._backward_passes: list[tuple[int, int]] = []
        # Ages of the last operations before those that are being traced.
        self._open_passes: list[int] = []

    def source(self, parameter: ShardedParameter) -> tf.Tensor:
        """The tensor whose gradient is that of the parameter.

        It is never computed.
        """
        key = id(parameter)
        if key not in self._sources:
            with self.graph.as_default(), tf.control_dependencies(None):
                self._sources[key] = tf.zeros(parameter.whole_shape, parameter.dtype)
        return self._sources[key]

    def read(self, parameter: ShardedParameter, unit: Unit) -> tf.Tensor:
        """Read a parameter, and gather its unit at the first read.

        Returns:
            Tensor of the parameter's shape, in the dtype that the model computes in.
        """
        key = (id(parameter), read_dtype(parameter).name)
        with self.graph.as_default():
            if key not in self._current:
                self._gather(unit)
            value = tf.identity(self._current[key].values[id(parameter)])
        _compat.record_read(parameter, value)
        return value

    def forget(self, unit: Unit) -> None:
        """Gather a unit again when it is read next."""
        members = {id(parameter) for parameter in unit.parameters}
        for key in [key for key in self._current if key[0] in members]:
            del self._current[key]

    def begin_backward_pass(self) -> None:
        """Take the operations from now on for those of a backward pass."""
        self._open_passes.append(self.order.newest())

    def end_backward_pass(self) -> None:
        """End the backward pass that began last.

        It contains those that began in it, of layers that are computed again.
        """
        begin, end = self._open_passes.pop(), self.order.newest()
        others = [known for known in self._backward_passes if known[0] < begin]
        self._backward_passes = [*others, (begin, end)]

    @contextlib.contextmanager
    def between_backward_passes(self) -> Iterator[bool]:
        """Interrupt the backward pass that is being traced, if there is one."""
        depth = len(self._open_passes)
        for _ in range(depth):
            self.end_backward_pass()
        yield depth > 0
        for _ in range(depth):
            self.begin_backward_pass()

    def take_backward_passes(self) -> list[tuple[int, int]]:
        """The backward passes since they were taken last."""
        taken, self._backward_passes = self._backward_passes, []
        return taken

    def _gather(self, unit: Unit) -> None:
        dtypes = tuple(map(read_dtype, unit.parameters))
        age = self.order.newest()
        gate = self._gate(len(self.gathered) - 1 - unit.options.prefetch)
        if self.gathered:
            gate += [value.op for value in self.gathered[-1].values.values()]
        with timing.needed_after(self.order.last_until(age)):
            gathered = gather_unit(self, unit, dtypes, gate)
        found = GatheredUnit(unit, dtypes, *gathered, age)
        self.gathered.append(found)
        for parameter, dtype in zip(unit.parameters, dtypes, strict=True):
            self._current[id(parameter), dtype.name] = found

    def _gate(self, before: int) -> list[tf.Operation]:
        """What comes before the first read of a unit, see the top of this file."""
        if before < 0:
            return []
        return self.order.last_until(self.gathered[before].age)


def gather_unit(
    step: StepGathers,
    unit: Unit,
    dtypes: Sequence[tf.DType],
    gate: Sequence[tf.Operation],
    pieces: Mapping[Form, tf.Tensor] | None = None,
    *,
    label: str = timing.UNIT,
) -> tuple[dict[int, tf.Tensor], dict[Form, tf.Tensor]]:
    """Gather a unit on the calling replica, by one all-gather for each form.

    Args:
        step: `StepGathers`.
        unit: `Unit`.
        dtypes: Sequence of `tf.DType`, in which each parameter is read.
        gate: Sequence of operations that come before.
        pieces: Dict from a `Form` to what the replica has of the unit where its node
            has all of it; or `None`: its own part only. Defaults to `None`.
        label: String, what monitors call it. Defaults to that of the forward pass.

    Returns:
        Tuple of a dict from the `id` of a parameter to its whole value, and one from
        a `Form` to a piece, like `pieces`.
    """
    values: dict[int, tf.Tensor] = {}
    kept: dict[Form, tf.Tensor] = {}
    members_of: dict[Form, list[ShardedParameter]] = {}
    for parameter, dtype in zip(unit.parameters, dtypes, strict=True):
        form = Form(dtype, travels_quantized(parameter, unit.options))
        members_of.setdefault(form, []).append(parameter)
    device = step.groups.group.devices[step.replica]
    with tf.control_dependencies(list(gate)), tf.device(device):
        for form, members in members_of.items():
            with timing.labelled(f"{label} {unit.number}"):
                given = (pieces or {}).get(form)
                wholes, piece = _gather(step, unit, members, form, given)
            if piece is not None:
                kept[form] = piece
            step.order.begin_with(wholes)
            values.update(zip(map(id, members), wholes, strict=True))
    return values, kept


def _gather(
    step: StepGathers,
    unit: Unit,
    members: list[ShardedParameter],
    form: Form,
    piece: tf.Tensor | None,
) -> tuple[list[tf.Tensor], tf.Tensor | None]:
    """Gather parameters in one form, and return the piece that they are made of, too.

    It is gathered across nodes, unless that has been done, and then inside of them. In
    8 bits, rows of unequal length are padded: that is still less.
    """
    place: dict[str, int] = {"replica": step.replica, "channel": unit.number}
    ranges = [parameter.ranges for parameter in members]
    bucket = unit_bucket(range(len(members)), ranges, form.dtype.name)
    if bucket.is_lopsided and not form.is_quantized:
        own = _own_slice(step, members, bucket)
        flat = step.groups.gather_bucket(bucket, own, **place)
        return _wholes(members, bucket, flat), None
    if piece is None:
        if form.is_quantized:
            own = own_words(members, step.replica)
        else:
            own = _own_slice(step, members, bucket)
        piece = step.groups.gather_across_nodes(own, **place)
    flat = step.groups.gather_in_node(piece, **place)
    if not form.is_quantized:
        return _wholes(members, bucket, flat), piece
    return [tf.cast(whole, form.dtype) for whole in decoded(members, flat)], piece


def _own_slice(
    step: StepGathers, members: list[ShardedParameter], bucket: ShardBucket
) -> tf.Tensor:
    """What the replica has of a bucket: a tensor of shape `[slice_size]`."""
    dtype = tf.as_dtype(bucket.dtype)
    parts = [_compat.local_value(parameter, step.replica) for parameter in members]
    piece = [tf.cast(tf.reshape(part.read_value(), [-1]), dtype) for part in parts]
    padding = bucket.padding(step.groups.owner(step.replica))
    return tf.concat([*piece, tf.zeros([padding], dtype)], axis=0)


def _wholes(
    members: list[ShardedParameter], bucket: ShardBucket, flat: tf.Tensor
) -> list[tf.Tensor]:
    """The parameters of a bucket, in their own shapes."""
    found = unpack_rows(ShardPlan((bucket,), len(bucket.rows)), [flat])
    return [
        tf.reshape(found[index], parameter.whole_shape)
        if index in found
        else tf.zeros(parameter.whole_shape, flat.dtype)
        for index, parameter in enumerate(members)
    ]


def read_dtype(parameter: ShardedParameter) -> tf.DType:
    """The dtype in which Keras reads a parameter where the model is computing."""
    casts = parameter.casts and parameter.dtype.is_floating
    scope = _compat.autocast_dtype() if casts else None
    return parameter.dtype if scope is None else tf.as_dtype(scope)


# Operations that are done as soon as their input is there, whatever it holds.
_IMMEDIATE = frozenset(
    ("Const", "Identity", "IdentityN", "NoOp", "Rank", "Reshape", "Shape", "ShapeN")
)


class ComputeOrder:
    """Operations that depend on gathered parameters, found while a step is traced.

    Args:
        graph: The graph of the step.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._num_scanned = len(graph.get_operations())
        self._dependent: set[tf.Operation] = set()
        # Those that compute, and their ages.
        self._ages: list[int] = []
        self._computing: list[tf.Operation] = []

    def newest(self) -> int:
        """Int, the age of the operation that was traced last."""
        traced = self._graph.get_operations()
        return _compat.op_age(traced[-1]) if traced else 0

    def begin_with(self, tensors: Iterable[tf.Tensor]) -> None:
        """Take what is computed of these tensors for computing, too."""
        self._scan()
        self._dependent.update(tensor.op for tensor in tensors)

    def last_until(self, age: int) -> list[tf.Operation]:
        """The last operation of at most an age that computes: none, or one."""
        self._scan()
        index = bisect.bisect_right(self._ages, age)
        return self._computing[index - 1 : index] if index else []

    def _scan(self) -> None:
        new = self._graph.get_operations()[self._num_scanned :]
        for op in new:
            if not any(tensor.op in self._dependent for tensor in op.inputs):
                continue
            self._dependent.add(op)
            if op.outputs and op.type not in _IMMEDIATE:
                self._ages.append(_compat.op_age(op))
                self._computing.append(op)
        self._num_scanned += len(new)
