"""Memory of an optimizer's training state, computed by `plans.memory`."""

from __future__ import annotations

from typing import Any

from tfdp.ground._compat import keras_optimizer, optimizer_state
from tfdp.ground.base.param_groups import entry_of, innermost
from tfdp.ground.plans.memory import MemoryReport, ReplicaMemory, replica_memory
from tfdp.ground.plans.sharding import NOT_SHARDED, ShardingOptions
from tfdp.ground.plans.shards import ShardPlan
from tfdp.training.parameters.sharded_parameter import sharded_parameter
from tfdp.training.sharding.state_tensors import slot_names


def memory_report(distributed: Any) -> MemoryReport:
    """Compute the memory of a `DistributedOptimizer`'s training state on a replica.

    Returns:
        `MemoryReport`, the bytes as sharded, and the bytes without sharding.
    """
    accumulates = distributed.features.accumulation is not None
    frozen = distributed.frozen_parameters
    whole = ReplicaMemory(sum(entry_of(v).num_bytes for v in frozen), 0, 0, 0)
    shards = distributed.shards
    gathered = 0 if shards is None else shards.peak_gathered_bytes
    sharded = ReplicaMemory(sum(map(_bytes_held, frozen)), 0, 0, 0, gathered)
    for part in innermost(distributed.inner_optimizer):
        variables = keras_optimizer.trained_by(part) if part.built else []
        if not variables:
            continue
        whole += param_group_memory(part, variables, accumulates=accumulates)
        sharded += param_group_memory(
            part,
            variables,
            None if shards is None else shards.parts[id(part)].plan,
            accumulates=accumulates,
            sharding=distributed.sharding_options,
        )
    return MemoryReport(sharded, whole)


def _bytes_held(variable: Any) -> int:
    """Return a parameter's bytes on the replica that holds the most of its elements."""
    parameter = sharded_parameter(variable)
    if parameter is None:
        return entry_of(variable).num_bytes
    most = max(stop - start for start, stop in parameter.ranges)
    return most * parameter.dtype.size


def param_group_memory(
    optimizer: Any,
    variables: list[Any],
    plan: ShardPlan | None = None,
    *,
    accumulates: bool = False,
    sharding: ShardingOptions = NOT_SHARDED,
) -> ReplicaMemory:
    """Compute a replica's memory for the variables of one inner optimizer.

    Args:
        optimizer: Keras optimizer without inner optimizers, built or not.
        variables: List of Keras variables.
        plan: `ShardPlan` of the variables, or `None` without sharding. Defaults to
            `None`.
        accumulates: Bool, whether gradients are accumulated. Defaults to `False`.
        sharding: `ShardingOptions`, by which the plan also shards accumulated
            gradients and parameters. Defaults to neither.

    Returns:
        `ReplicaMemory`.
    """
    return replica_memory(
        [entry_of(variable) for variable in variables],
        _slot_bytes(optimizer, variables),
        plan,
        accumulates=accumulates,
        sharding=sharding,
    )


def _slot_bytes(optimizer: Any, variables: list[Any]) -> list[int]:
    """Return the bytes of each variable's slots, without allocating them.

    State that belongs to no trained variable counts for the first variable.
    """
    template = optimizer_state.built_without_memory(optimizer, variables)
    totals = [0] * len(variables)
    lists = list(optimizer_state.slots_of(template).values())
    for slots in lists:
        for index, slot in enumerate(slots):
            if slot is not None:
                totals[index] += entry_of(slot).num_bytes
    # State that belongs to no trained variable, such as a scalar, is on every replica.
    # The result has only an item for each variable, so the first item includes it.
    known = {id(slot) for slots in lists for slot in slots}
    for _, slot in slot_names(template, variables):
        if id(slot) not in known:
            totals[0] += entry_of(slot).num_bytes
    return totals
