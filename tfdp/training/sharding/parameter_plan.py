"""Plan of the optimizer's shards where parameters are sharded: by their units."""

from __future__ import annotations

from typing import Any

from tfdp.ground.plans.shards import ShardBucket, ShardPlan
from tfdp.ground.plans.units import range_of_owner, unit_bucket
from tfdp.training.parameters.conversion import divide_again
from tfdp.training.parameters.gathers import Gathers
from tfdp.training.parameters.sharded_parameter import ShardedParameter, parameter_of


def plan_of_parameters(
    plan: ShardPlan, variables: list[Any], gathers: Gathers
) -> ShardPlan:
    """Plan shards of optimizer state that lie as the parameters do.

    Where the optimizer needs whole variables, each parameter is given to its owner.

    Args:
        plan: `ShardPlan` of the variables, as without sharded parameters.
        variables: List of Keras variables, all of them sharded.
        gathers: `Gathers` of the parameters.

    Returns:
        `ShardPlan` with a bucket for each unit, the last unit first, and each dtype.
    """
    parameters = [parameter_of(variable) for variable in variables]
    if plan.owners is not None:
        for parameter, owner in zip(parameters, plan.owners, strict=True):
            size = parameter.num_elements
            ranges = range_of_owner(size, plan.num_owners, owner)
            divide_again(parameter, ranges, keeps_shape=True)
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
    """The buckets of a unit, one for each dtype of what the optimizer trains."""
    members = {id(parameter) for parameter in unit}
    indices = [i for i, parameter in enumerate(parameters) if id(parameter) in members]
    found = []
    for dtype in dict.fromkeys(parameters[i].dtype.name for i in indices):
        own = [i for i in indices if parameters[i].dtype.name == dtype]
        bucket = unit_bucket(own, [parameters[i].ranges for i in own], dtype)
        if bucket.slice_size:
            found.append(bucket)
    return found
