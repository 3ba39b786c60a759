"""Reads of sharded parameters, in traced steps, in eager steps and outside of steps."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import Member
from tfdp.ground._compat import tensor_reads, tf_distribute
from tfdp.ground.base import program_trace
from tfdp.ground.base.context import replica_context
from tfdp.ground.base.program_trace import ProgramTrace
from tfdp.ground.plans.units import UnitOptions, peak_gathered_bytes
from tfdp.training.parameters.backward_gathers import BackwardGathers
from tfdp.training.parameters.host_gathers import gather_parameter, serve_parameter
from tfdp.training.parameters.quantized_gathers import (
    is_gathered_in_8_bits,
    round_parameter,
)
from tfdp.training.parameters.shard_groups import ShardGroups
from tfdp.training.parameters.sharded_parameter import ShardedParameter
from tfdp.training.parameters.step_gathers import Unit, UnitGatherer, read_dtype


class Gathers:
    """All-gathers of the sharded parameters that have the same owners.

    All workers create it together.

    Args:
        extended: Extended object of a tfdp strategy.
        groups: `ShardGroups`, the replicas that own the parts.
    """

    def __init__(self, extended: Any, groups: ShardGroups) -> None:
        self.groups = groups
        # A unit is a set of parameters that are gathered together. Only its parameters
        # keep it alive, so that it is freed with its model.
        self._units: list[weakref.ref[Unit]] = []
        self._host_group = extended.host_group
        self._worker_group = extended.worker_group
        # While one worker reads parameters alone, in `reading_alone`, the other workers
        # must learn which parameter to gather with it: these functions announce the
        # read of a parameter, found by its `id`.
        self.announcements: dict[int, Callable[[], None]] = {}
        self._owners = self._owners_of_all(extended.num_local)

    def add_unit(
        self, parameters: Sequence[ShardedParameter], options: UnitOptions
    ) -> None:
        """Add a unit of parameters that are gathered together, after earlier units.

        It is set as the `unit` of each parameter, which keeps it alive.

        Args:
            parameters: Sequence of `ShardedParameter`, those of the unit.
            options: `UnitOptions`: how steps gather the unit.
        """
        unit = Unit(len(self._units), tuple(parameters), options)
        self._units.append(weakref.ref(unit))
        for parameter in parameters:
            parameter.unit = unit

    @property
    def units(self) -> list[Unit]:
        """List of the existing `Unit`s, in the order in which they were added."""
        found = [reference() for reference in self._units]
        return [unit for unit in found if unit is not None]

    @property
    def peak_gathered_bytes(self) -> int:
        """Int, the most bytes of gathered parameters that a step holds at a time."""
        sizes = [unit.num_bytes for unit in self.units]
        prefetch = max((unit.options.prefetch for unit in self.units), default=0)
        return peak_gathered_bytes(sizes, prefetch)

    def source(self, parameter: ShardedParameter) -> tf.Tensor:
        """Return the tensor that stands for the parameter on gradient tapes.

        Its gradient is that of the whole parameter.
        """
        if (trace := program_trace.traced()) is not None:
            return trace.source(
                parameter, lambda: tf.zeros(parameter.whole_shape, parameter.dtype)
            )
        step = self.step()
        if step is not None:
            return step.source(parameter)
        if parameter.eager_source is None:
            parameter.eager_source = tf.zeros([], parameter.dtype)
        return parameter.eager_source

    def read(self, parameter: ShardedParameter) -> tf.Tensor:
        """Return the whole parameter; a step gathers its unit at the first read."""
        if (trace := program_trace.traced()) is not None:
            return _read_in_program(trace, parameter)
        step = self.step()
        if step is not None:
            return step.read(parameter, _unit_of(parameter))
        if not tf.executing_eagerly():
            return self.gather_on_hosts(parameter)
        value = tf.identity(self._eager_value(parameter))
        tensor_reads.record_read(parameter, value)
        return value

    def gather_before_assignment(self) -> None:
        """Trace the second gathers for backward passes, before a step assigns a value.

        A gather reads the parts as they are when it is traced. Traced later, it would
        read what is assigned, which may depend on the very gradients that need it.
        """
        step = self.step()
        if step is not None:
            with step.between_backward_passes():
                BackwardGathers(step).gather_rest()

    def forget(self, parameter: ShardedParameter) -> None:
        """Drop the gathered values of a parameter, which an assignment made stale."""
        if program_trace.traced() is not None:
            return
        parameter.eager_value = None
        step = self.step()
        if step is not None:
            step.forget(_unit_of(parameter))

    def step(self) -> UnitGatherer | None:
        """Return the `UnitGatherer` of the replica's step being traced, or `None`.

        The first call of a step creates it. It is `None` in eager mode and outside of
        replicas.

        Raises:
            ValueError: In a `tf.function` that a step calls.
        """
        context = tf.distribute.get_replica_context()
        if (
            context is None
            or tf.executing_eagerly()
            or not tf.distribute.has_strategy()
        ):
            return None
        graph = tensor_reads.step_graph()
        if graph is None:
            raise ValueError(
                "A `tf.function` inside a training step reads sharded parameters, "
                "which would be gathered for one call of it only. Call the function "
                'without the decorator, or train with `sharding="gradients"`.'
            )
        replica = tf_distribute.local_replica_id(context)
        return tensor_reads.attached(
            graph,
            (id(self), replica),
            lambda: UnitGatherer(graph, self.groups, replica),
        )

    def gather_on_hosts(self, parameter: ShardedParameter) -> tf.Tensor:
        """Gather the whole parameter outside of a step. All workers call it.

        Returns:
            Tensor of the parameter's shape.
        """
        return gather_parameter(parameter, self._owners, self._host_group)

    def serve(self, parameter: ShardedParameter) -> None:
        """Send this worker's parts for a gather on another worker; keep no result."""
        serve_parameter(parameter, self._owners, self._host_group)

    def _eager_value(self, parameter: ShardedParameter) -> tf.Tensor:
        """Return the whole parameter in eager mode.

        It is gathered once for each call of `strategy.run`, and for each read outside.
        """
        if replica_context() is None:
            self._announce_read(parameter)
            return self.gather_on_hosts(parameter)
        # Local replicas of an eager step run one after another, so the first replica
        # gathers the parameter for all of them.
        run = tensor_reads.shared_run_object()
        if parameter.eager_value is None or parameter.eager_value[0] is not run:
            whole = self.gather_on_hosts(parameter)
            if is_gathered_in_8_bits(parameter, _unit_of(parameter).options):
                whole = round_parameter(parameter, whole)
            parameter.eager_value = run, whole
        return parameter.eager_value[1]

    def _announce_read(self, parameter: ShardedParameter) -> None:
        """Announce to the other workers that this worker reads a parameter.

        The read is a gather in which all workers must take part. If they do not, the
        timeout error of this worker names the parameter.
        """
        if id(parameter) in self.announcements:
            self.announcements[id(parameter)]()
        elif self._worker_group.num_workers > 1:
            self._worker_group.all_gather(
                f"reading {parameter.name!r}, which is sharded, so that all workers "
                "have to read it"
            )

    def _owners_of_all(self, num_local: int) -> list[int]:
        """Gather the owner index of every replica on all workers. All workers call it.

        Args:
            num_local: Int, number of local replicas.

        Returns:
            List of ints, one for each replica, in the order of the workers' positions
            in the host group.
        """
        own = tf.constant([self.groups.owner(replica) for replica in range(num_local)])
        if self._host_group.size > 1:
            own = Member(self._host_group, 0).all_gather(own)
        return own.numpy().tolist()


@contextlib.contextmanager
def backward_pass() -> Iterator[None]:
    """Record the operations traced inside as a backward pass of the replica's step.

    Sharded parameters that these operations use, and that were freed after the forward
    pass, are gathered a second time.
    """
    steps = _steps_of_replica()
    for step in steps:
        step.begin_backward_pass()
    yield
    for step in steps:
        step.end_backward_pass()


def regather_used_units() -> None:
    """Trace the second gathers of the parameters that backward passes have used so far.

    Call it before another collective is traced: the collective may need gradients that
    depend on these gathers, and collectives of one channel run in trace order.
    """
    for step in _steps_of_replica():
        with step.between_backward_passes():
            BackwardGathers(step).gather_rest()


def _steps_of_replica() -> list[UnitGatherer]:
    """Return the `UnitGatherer` objects of the running replica's step.

    Returns:
        List with one for each `Gathers` whose parameters the step has read; empty in
        eager mode, outside of a replica, or without sharded parameters.
    """
    context = replica_context()
    graph = None if tf.executing_eagerly() else tensor_reads.step_graph()
    if context is None or graph is None:
        return []
    replica = tf_distribute.local_replica_id(context)
    return [s for s in tensor_reads.all_attached(graph) if s.replica == replica]


@contextlib.contextmanager
def marked_backward_pass(trace: ProgramTrace) -> Iterator[None]:
    """Mark the operations traced in the block as a backward pass of each replica.

    The operations belong to a program, the step of one device that each replica later
    rebuilds as its own. A replica enters `backward_pass` before its copies of these
    operations, and exits it after them.

    Args:
        trace: `ProgramTrace` of the step that is being traced.
    """
    passes: list[contextlib.ExitStack] = []

    def begin(_: list) -> None:
        """Record a backward pass of the calling replica until `end` is called.

        `ProgramTrace.add` requires the argument, a list of tensors; it is empty here.
        """
        passes.append(contextlib.ExitStack())
        passes[-1].enter_context(backward_pass())

    def end(_: list) -> None:
        """End the backward pass that began last."""
        passes.pop().close()

    trace.add([], begin)
    yield
    trace.add([], end)


def gathers_of(extended: Any, groups: ShardGroups) -> Gathers:
    """Return the `Gathers` of a strategy for some owners, created at the first call.

    All workers make the first call together.

    Args:
        extended: Extended object of a tfdp strategy.
        groups: `ShardGroups`, the owners.
    """
    # `Gathers` are stored in the process group. A change of the cluster creates a new
    # group, so `Gathers` of the former cluster are no longer used.
    found = vars(groups.group).setdefault("_parameter_gathers", {})
    key = groups.num_copies, groups.has_two_levels, groups.group.nodes
    if key not in found:
        found[key] = Gathers(extended, groups)
    return found[key]


def _read_in_program(trace: ProgramTrace, parameter: ShardedParameter) -> tf.Tensor:
    """Record a read of a parameter in the program of a step that is being traced.

    A program is the step of one device that each replica later rebuilds as its own.

    Returns:
        Tensor of the parameter's shape, which stands for the value on each replica.
    """
    dtype = read_dtype(parameter)

    def read() -> tf.Tensor:
        """Read `parameter` in the step that the calling replica traces.

        Returns:
            Tensor, the whole parameter in `dtype`.
        """
        with tensor_reads.autocasting(dtype if parameter.casts else None):
            return parameter.reader.read(parameter)

    # A read in the body of a loop is traced outside the loop, and its value is
    # captured. The gradient of the loop then reaches the read through the capture.
    with trace.graph.as_default():
        value = tf.identity(trace.read(parameter.whole_shape, dtype, read))
    tensor_reads.record_read(parameter, value)
    return value


def _unit_of(parameter: ShardedParameter) -> Unit:
    """Return the `Unit` of a parameter: the parameters that are gathered together.

    Until an optimizer plans units, the parameter is a unit by itself.
    """
    return Unit(0, (parameter,)) if parameter.unit is None else parameter.unit
