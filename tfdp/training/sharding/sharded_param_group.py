"""The state of one inner optimizer on the replicas of this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.ground._compat import optimizer_state, tf_distribute
from tfdp.ground.plans.shards import ShardPlan


class OptimizerShard:
    """One replica's shard of an optimizer's state; base of the two kinds of shards.

    A clone of the optimizer is built on the shard, so that slots are created sharded.
    `ElementShards` and `VariableShards` implement it.

    Args:
        optimizer: Keras optimizer, the user's.
        variables: List of the Keras variables that the `ShardPlan` was made for.
        plan: `ShardPlan`.
        owner: Int, index of the owner of the slices.
        replica: Int, the local replica that holds the slices.
        device: String, the device that stores and updates the slices.

    Attributes:
        slots: Dict from the name of an optimizer's attribute to its list of slots.
        singles: Dict from the name of an optimizer's attribute to a variable that
            belongs to no trained variable.
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
        with tf.init_scope(), tf_distribute.outside_strategies(), tf.device(device):
            self._build(optimizer, variables, replica)

    def _build(self, optimizer: Any, variables: list[Any], replica: int) -> None:
        """Create the state on `device`. The constructor calls it once.

        A subclass sets the attributes `slots` and `singles`, see the class.

        Args:
            optimizer: Keras optimizer, the user's.
            variables: List of the Keras variables that the `ShardPlan` was made for.
            replica: Int, the local replica that holds the slices.
        """
        raise NotImplementedError

    def set_averages(self, values: list[tf.Tensor]) -> None:
        """Set the moving averages that this replica owns.

        Args:
            values: List of tensors, one for each slot of moving averages, in the order
                and with the shapes of the result of the subclass's `own_values`.
        """
        for average, value in zip(self._own_averages, values, strict=True):
            average.assign(value)

    @property
    def _own_averages(self) -> list[Any]:
        """List of the slots of moving averages; empty without averages."""
        return optimizer_state.averages_in(self.slots)


@dataclasses.dataclass(frozen=True)
class ShardedParamGroup:
    """The state of one inner optimizer on the replicas of this process.

    Args:
        optimizer: Keras optimizer that holds the settings but no slots.
        variables: List of the Keras variables that it trains.
        plan: `ShardPlan` of the variables.
        replicas: Sequence of the `OptimizerShard` of each local replica.
    """

    optimizer: Any
    variables: list[Any]
    plan: ShardPlan
    replicas: Sequence[OptimizerShard]
