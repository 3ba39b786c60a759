"""The state of one inner optimizer on the replicas of this process."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdp.ground.plans.shards import ShardPlan
from tfdp.training.sharding.element_shards import ElementShards
from tfdp.training.sharding.variable_shards import VariableShards

Owned = ElementShards | VariableShards


@dataclasses.dataclass(frozen=True)
class ShardedParamGroup:
    """The state of one inner optimizer on the replicas of this process.

    Args:
        optimizer: Keras optimizer that holds the settings, and no slots.
        variables: List of the Keras variables that it trains.
        plan: `ShardPlan` of them.
        replicas: List with the state that each local replica owns.
    """

    optimizer: Any
    variables: list[Any]
    plan: ShardPlan
    replicas: list[Owned]
