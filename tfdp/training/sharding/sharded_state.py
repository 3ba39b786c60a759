"""Sharded state of an optimizer, with access for steps and for files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.communication.coordination.checks import variables_fact
from tfdp.communication.coordination.facts import SharedFact, compare
from tfdp.ground._compat import (
    keras_optimizer,
    optimizer_state,
    tensor_reads,
    tf_distribute,
)
from tfdp.ground.base.context import in_replica_thread, replica_context
from tfdp.ground.base.param_groups import entry_of, innermost, is_elementwise
from tfdp.ground.options import CommunicationOptions
from tfdp.ground.plans.buckets import Bucket, Entry
from tfdp.ground.plans.sharding import ShardingOptions
from tfdp.ground.plans.shards import (
    ShardBucket,
    ShardPlan,
    plan_element_shards,
    plan_variable_shards,
)
from tfdp.ground.plans.units import range_of_owner, unit_bucket
from tfdp.training.parameters.backward_gathers import BackwardGathers
from tfdp.training.parameters.conversion import repartition, shard_variables
from tfdp.training.parameters.gathers import Gathers, gathers_of
from tfdp.training.parameters.quantized_gathers import check_constraints
from tfdp.training.parameters.shard_groups import shard_groups_of
from tfdp.training.parameters.sharded_parameter import (
    ShardedParameter,
    check_reader,
    parameter_of,
    sharded_parameter,
)
from tfdp.training.reduction.fusion import bucket_bytes_of
from tfdp.training.reduction.gradient_reducer import ReplicaReducer
from tfdp.training.replicas.assigned_values import AssignedValues
from tfdp.training.replicas.drift import check_weights
from tfdp.training.replicas.variables import MirroredVariable
from tfdp.training.sharding.element_shards import ElementShards
from tfdp.training.sharding.optimizer_state import (
    accumulator_state,
    param_group_state,
    shard_full_slots,
)
from tfdp.training.sharding.shard_collectives import collectives_class
from tfdp.training.sharding.sharded_layout import ShardedLayout
from tfdp.training.sharding.sharded_param_group import ShardedParamGroup
from tfdp.training.sharding.state_tensors import StateTensor, slot_names
from tfdp.training.sharding.variable_shards import VariableShards


class ShardedState:
    """The state of an optimizer, sharded over the replicas.

    A part is the state of one inner optimizer, a `ShardedParamGroup`.

    Args:
        optimizer: The user's Keras optimizer. It keeps its settings, counter and
            learning rate; the values of existing slots are copied to shards and the
            slots are freed.
        variables: List of Keras variables that it trains.
        strategy: A tfdp strategy with at least two replicas.
        options: `ShardingOptions`.
        parameters: Sequence of further Keras variables of the same model to shard, in
            the order of the forward pass. Defaults to none.

    Attributes:
        groups: `ShardGroups`, the replicas that own shards.
        parts: Dict from the `id` of an inner optimizer to its `ShardedParamGroup`.
    """

    def __init__(
        self,
        optimizer: Any,
        variables: list[Any],
        strategy: Any,
        options: ShardingOptions,
        parameters: Sequence[Any] = (),
    ) -> None:
        extended = strategy.extended
        self._extended = extended
        self.groups = shard_groups_of(
            extended,
            options.shard_scope,
            needs_two_levels=options.units.reshard_after_forward == "node",
        )
        host = extended.host_group.devices[0]
        self._devices = tuple(
            device if options.offload is None else host
            for device in self.groups.group.devices
        )
        every = variables
        if options.shards_parameters:
            every = _joined(parameters, variables)
        was_built = optimizer.built
        if not was_built:
            optimizer_state.build_without_state(optimizer, variables)
        plans = {id(part): self._plan_of(part) for part in _trained_parts(optimizer)}
        # Workers compare their variables before they exchange values: workers with
        # different variables would run different collectives, and wait for each other
        # indefinitely.
        how = self._layout_fact(options, _trained_parts(optimizer), plans)
        facts = [variables_fact(every, "shards"), how]
        compare(extended.worker_group, "sharding the optimizer", facts)
        if extended.worker_group.num_workers > 1:
            state = optimizer.variables if was_built else []
            self._check_values(strategy, variables, state)
        check_constraints(variables, options.units)
        self._gathers: Gathers | None = None
        if options.shards_parameters:
            self._gathers = gathers_of(extended, self.groups)
        check_reader(every, self._gathers)
        if self._gathers is not None:
            shard_variables(
                every,
                strategy,
                self._gathers,
                self._devices,
                bucket_bytes_of(list(map(entry_of, every)), extended.options),
                options.units,
            )
        self.parts = {
            id(part): self._create_shards(part, plans[id(part)])
            for part in _trained_parts(optimizer)
        }
        self._states = {key: self._state_of(p) for key, p in self.parts.items()}
        if was_built:
            self._move_slots_to_shards()

    def _check_values(
        self, strategy: Any, variables: Sequence[Any], state: Sequence[Any]
    ) -> None:
        """Raise on every worker if variables or slots differ between replicas.

        The variables also begin to record assignments outside of steps, so that workers
        can compare them later.

        Args:
            strategy: A tfdp strategy.
            variables: Sequence of Keras variables that the optimizer trains.
            state: Sequence of the optimizer's own variables; empty before it is built.
        """
        if tf.executing_eagerly() and not in_replica_thread():
            # Scalar state is not compared: it consists of counters and rates, which a
            # worker may set on its own.
            slots = [v for v in state if len(v.shape) and hasattr(v, "value")]
            when = "before the optimizer is sharded"
            topic = "sharding the optimizer: values"
            check_weights(strategy, [*variables, *slots], topic, when)
        for variable in variables:
            value = tensor_reads.value_of(variable)
            if isinstance(value, MirroredVariable) and value.assigned is None:
                value.assigned = AssignedValues()

    def _layout_fact(
        self, options: ShardingOptions, parts: list[Any], plans: dict[int, ShardPlan]
    ) -> SharedFact:
        """Return how this worker shards the optimizer, for a comparison of workers.

        If the result differs between workers, `compare` raises an error on all of them.

        Args:
            options: `ShardingOptions`.
            parts: List of the inner optimizers.
            plans: Dict from the `id` of an inner optimizer to its `ShardPlan`.
        """
        how = {
            "options": options.text,
            "optimizers": [type(part).__name__ for part in parts],
            "plans": [plans[id(part)].fingerprint for part in parts],
        }
        return SharedFact(
            "how",
            how,
            "Workers shard their optimizers differently. Give every worker the same "
            "optimizer, communication options, and options of sharding.",
        )

    def state(self, part: ShardedParamGroup) -> list[StateTensor]:
        """Return the state tensors of one inner optimizer, in Keras's order.

        The constructor has created them.

        Args:
            part: `ShardedParamGroup` of the optimizer, one of `parts`.
        """
        return self._states[id(part.optimizer)]

    def _state_of(self, part: ShardedParamGroup) -> list[StateTensor]:
        """Create the state tensors of one inner optimizer's shards.

        Args:
            part: `ShardedParamGroup` of the optimizer.

        Raises:
            ValueError: If two state tensors have the same name.
        """
        optimizer = part.optimizer
        tensors = param_group_state(
            part,
            self.groups.is_first_copy,
            self._extended.first_rank,
        )
        if len({tensor.name for tensor in tensors}) < len(tensors):
            raise ValueError(
                f"The state of {type(optimizer).__name__} cannot be sharded: it keeps "
                "several variables of one name outside of lists with one entry for "
                'each trained variable. Use `sharding="none"`.'
            )
        return tensors

    def tensors(self) -> list[StateTensor]:
        """Return the state tensors of all inner optimizers, in their order."""
        return [t for part in self.parts.values() for t in self.state(part)]

    def accumulated(self, sums: list[Any]) -> dict[int, StateTensor]:
        """Return the state tensors of gradients that are accumulated in slices.

        Args:
            sums: List of Keras variables, one for each bucket of all inner optimizers.

        Returns:
            Dict from the `id` of a trained variable to `StateTensor`.
        """
        by_variable: dict[int, StateTensor] = {}
        first = 0
        for part in self.parts.values():
            last = first + len(part.plan.buckets)
            tensors = accumulator_state(
                sums[first:last], part, self.groups.is_first_copy
            )
            first = last
            by_variable.update(zip(map(id, part.variables), tensors, strict=True))
        return by_variable

    def _move_slots_to_shards(self) -> None:
        """Copy owned elements from full slots to shards, and free the full slots."""
        for part in self.parts.values():
            slots = slot_names(part.optimizer, part.variables)
            shard_full_slots(self.state(part), [slot for _, slot in slots])
            optimizer_state.drop_state(part.optimizer)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Tuple of the buckets of reduce-scatters and all-gathers, in launch order."""
        return tuple(
            _communication_bucket(bucket, part.variables)
            for part in self.parts.values()
            for bucket in part.plan.buckets
        )

    @property
    def peak_gathered_bytes(self) -> int:
        """Int, the most bytes of gathered parameters that a step holds at a time.

        It is 0 if parameters are not sharded.
        """
        return 0 if self._gathers is None else self._gathers.peak_gathered_bytes

    @property
    def compression_ratio(self) -> float:
        """Float, bytes that gathers send, divided by the bytes of the parameters.

        It is 1 if parameters are not sharded.
        """
        variables = [v for part in self.parts.values() for v in part.variables]
        found = [sharded_parameter(variable) for variable in variables]
        units = {id(p.unit): p.unit for p in found if p is not None}.values()
        whole = sum(unit.num_bytes for unit in units)
        return sum(unit.sent_bytes for unit in units) / whole if whole else 1.0

    @property
    def accumulated_slices(self) -> list[Entry]:
        """List of `Entry` (name, shape, dtype): the slices that ZeRO-2 accumulates."""
        return [
            Entry(
                f"bucket_{number}",
                (bucket.slice_size,),
                bucket.dtype,
                tf.as_dtype(bucket.dtype).size,
            )
            for part in self.parts.values()
            for number, bucket in enumerate(part.plan.buckets)
        ]

    def layout_of_replica(self) -> ShardedLayout:
        """Create the `ShardedLayout` for a step of the running replica."""
        context = replica_context()
        step = None if self._gathers is None else self._gathers.step()
        collectives = collectives_class(self._extended)(
            self._extended,
            self.groups,
            tf_distribute.local_replica_id(context),
            ReplicaReducer(self._extended.reducer, context),
            None if step is None else BackwardGathers(step),
        )
        return ShardedLayout(self.parts, collectives)

    def _plan_of(self, optimizer: Any) -> ShardPlan:
        """Plan the shards of an inner optimizer as if no parameter were sharded."""
        variables = keras_optimizer.trained_by(optimizer)
        return shard_plan(
            optimizer, variables, self.groups.num_owners, self._extended.options
        )

    def _create_shards(self, optimizer: Any, plan: ShardPlan) -> ShardedParamGroup:
        """Create the shards of one inner optimizer on each local replica.

        Args:
            optimizer: Keras optimizer without inner optimizers.
            plan: `ShardPlan` of its state. With sharded parameters, a plan with their
                ranges replaces it.
        """
        variables = keras_optimizer.trained_by(optimizer)
        if self._gathers is not None:
            plan = plan_of_parameters(plan, variables, self._gathers)
        kind = VariableShards if plan.shards_variables else ElementShards
        states = [
            kind(
                optimizer, variables, plan, self.groups.owner(replica), replica, device
            )
            for replica, device in enumerate(self._devices)
        ]
        return ShardedParamGroup(optimizer, variables, plan, states)


def _communication_bucket(bucket: ShardBucket, variables: list[Any]) -> Bucket:
    """Convert a bucket of shards to the `Bucket` of a communication plan.

    Args:
        bucket: `ShardBucket`.
        variables: List of the Keras variables of the bucket's plan.
    """
    sizes: dict[int, int] = {}
    for segment in (segment for row in bucket.rows for segment in row):
        sizes[segment.index] = sizes.get(segment.index, 0) + segment.size
    entries = [
        dataclasses.replace(entry_of(variables[index]), shape=(size,))
        for index, size in sizes.items()
    ]
    return Bucket(tuple(sizes), tuple(entries), bucket.dtype)


def shard_plan(
    optimizer: Any, variables: list[Any], num_owners: int, options: CommunicationOptions
) -> ShardPlan:
    """Plan the shards of an optimizer's state for some variables.

    Args:
        optimizer: Keras optimizer without inner optimizers, built or not.
        variables: List of Keras variables.
        num_owners: Int, the number of replicas that share the state.
        options: `CommunicationOptions`.

    Returns:
        `ShardPlan`: flat slices for optimizers that are known to be elementwise, whole
        variables for all others.

    Raises:
        ValueError: If the optimizer is of a user's class that looks at all gradients,
            or uses state of its own outside of the update of a variable.
    """
    looks_at_all = keras_optimizer.overridden_by_user(
        optimizer, "_backend_update_step", "_clip_gradients"
    )
    if looks_at_all:
        raise ValueError(
            f"The state of `{type(optimizer).__name__}` cannot be sharded: it "
            f"overrides `{looks_at_all[0]}`, which would receive only the gradients "
            "whose state a replica has. Override `update_step`, or train without "
            "sharding."
        )
    builds_state = keras_optimizer.overridden_by_user(optimizer, "build")
    if builds_state and keras_optimizer.overrides_apply(optimizer):
        raise ValueError(
            f"The state of `{type(optimizer).__name__}` cannot be sharded: it "
            "overrides `apply` and `build`, and the variables that it builds are "
            "those of each replica's part. Override `update_step` in place of `apply`, "
            "or train without sharding."
        )
    entries = [entry_of(variable) for variable in variables]
    bucket_bytes = bucket_bytes_of(entries, options)
    if not is_elementwise(optimizer):
        return plan_variable_shards(entries, num_owners, bucket_bytes=bucket_bytes)
    return plan_element_shards(
        entries,
        num_owners,
        bucket_bytes=bucket_bytes,
        first_bucket_bytes=options.first_bucket_bytes,
    )


def _trained_parts(optimizer: Any) -> list[Any]:
    """Return the optimizers inside a `MultiOptimizer`, or any other optimizer itself.

    Optimizers that are not built, or that train no variables, are left out.
    """
    parts = [part for part in innermost(optimizer) if part.built]
    return list(filter(keras_optimizer.trained_by, parts))


def _joined(ordered: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Return the variables of `ordered`, then those of `others` that it lacks."""
    known = {id(variable) for variable in ordered}
    return [*ordered, *(v for v in others if id(v) not in known)]


def plan_of_parameters(
    plan: ShardPlan, variables: list[Any], gathers: Gathers
) -> ShardPlan:
    """Plan shards of optimizer state with the same ranges as the sharded parameters.

    If the optimizer needs whole variables, all elements of each parameter are moved to
    one owner first. All workers call the function then.

    Args:
        plan: `ShardPlan` of the optimizer's state if parameters were not sharded.
        variables: List of Keras variables, all sharded.
        gathers: `Gathers` of the parameters.

    Returns:
        `ShardPlan` with a bucket for each unit and dtype, the last unit first.
    """
    parameters = [parameter_of(variable) for variable in variables]
    if plan.owners is not None:
        for parameter, owner in zip(parameters, plan.owners, strict=True):
            size = parameter.num_elements
            repartition(parameter, range_of_owner(size, plan.num_owners, owner))
    return ShardPlan(
        tuple(
            bucket
            for unit in reversed(gathers.units)
            for bucket in _buckets(unit.parameters, parameters)
        ),
        plan.num_owners,
        plan.owners,
    )


def _buckets(
    unit: tuple[ShardedParameter, ...], parameters: list[ShardedParameter]
) -> list[ShardBucket]:
    """Return the buckets of a unit: one for each dtype of its trained parameters.

    A unit is a set of parameters that a step gathers together.

    Args:
        unit: Tuple of the `ShardedParameter`s of the unit.
        parameters: List of the `ShardedParameter`s of the optimizer; their positions
            are those of the plan.
    """
    members = {id(parameter) for parameter in unit}
    indices = [i for i, parameter in enumerate(parameters) if id(parameter) in members]
    buckets = []
    for dtype in dict.fromkeys(parameters[i].dtype.name for i in indices):
        of_dtype = [i for i in indices if parameters[i].dtype.name == dtype]
        bucket = unit_bucket(of_dtype, [parameters[i].ranges for i in of_dtype], dtype)
        if bucket.slice_size:
            buckets.append(bucket)
    return buckets
