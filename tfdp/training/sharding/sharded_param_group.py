"""The state of one inner optimizer on the replicas of this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.ground import _compat
from tfdp.ground.plans.shards import ShardPlan


class OwnedState:
    """What one replica owns of it: `ElementShards` or `VariableShards`.

    A clone of the optimizer is built for it, so that slots are born sharded.

    Args:
        optimizer: Keras optimizer, the user's.
        variables: List of Keras variables, those of the plan.
        plan: `ShardPlan`.
        owner: Int, which slices.
        replica: Int, the local replica that has them.
        device: String, where they are kept and updated.

    Attributes:
        slots: Dict from the name of an attribute to its list of variables.
        singles: Dict from the name of an attribute to a variable that belongs to no
            trained one.
    """

    slots: dict[str, list[Any]]
    singles: dict[str, Any]

    def __init__(
        self,
        optimizer: Any,
        variables: list[Any],
        plan: ShardPlan,
        owner: int,
        replica: int,
        device: str,
    ) -> None:
        self.owner = owner
        self.device = device
        self._plan = plan
        with tf.init_scope(), _compat.outside_strategies(), tf.device(device):
            self._build(optimizer, variables, replica)

    def _build(self, optimizer: Any, variables: list[Any], replica: int) -> None:
        raise NotImplementedError

    def set_averages(self, values: list[tf.Tensor]) -> None:
        """Set the averages to values, as `own_values` returns them."""
        for average, value in zip(self._own_averages, values, strict=True):
            average.assign(value)

    @property
    def _own_averages(self) -> list[Any]:
        return self.slots.get("_model_variables_moving_average", [])


@dataclasses.dataclass(frozen=True)
class ShardedParamGroup:
    """The state of one inner optimizer on the replicas of this process.

    Args:
        optimizer: Keras optimizer that holds the settings, and no slots.
        variables: List of the Keras variables that it trains.
        plan: `ShardPlan` of them.
        replicas: Sequence of the state that each local replica owns.
    """

    optimizer: Any
    variables: list[Any]
    plan: ShardPlan
    replicas: Sequence[OwnedState]
