"""Sums over the replicas of a node, which train synchronously between outer steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.communication.coordination.checks import check_same_variables
from tfdp.ground import _compat
from tfdp.training.reduction.gradient_reducer import GradientReducer, ReplicaReducer
from tfdp.training.reduction.reducer import Reducer


class NodeReducers:
    """The reducers over the nodes of local replicas, each made once.

    The variables are compared with those of all workers when the first one is asked
    for: not all nodes have a reducer, and not all workers trace a step again when one
    does.

    Args:
        variables: Sequence of the trained Keras variables.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self._variables = list(variables)
        self._is_compared = False
        self._reducers: dict[int, Reducer] = {}

    def of_replica(self, strategy: Any, context: Any) -> GradientReducer:
        """The reducer over the node of the replica that is running.

        Args:
            strategy: A tfdp strategy.
            context: The replica context.

        Raises:
            ValueError: In eager mode, with several replicas in this process; or if a
                worker trains other variables.
        """
        whole = strategy.extended.reducer
        nodes = [sorted(positions) for positions in whole.group.nodes]
        replica = _compat.local_replica_id(context)
        if replica == 0:
            self._compare(strategy.extended.worker_group)
        group = whole.group.split(nodes)[replica]
        if group is None or group.size == 1:
            return GradientReducer()
        if tf.executing_eagerly() and len(group.devices) > 1:
            raise ValueError(
                "Replicas of one process cannot reduce within their node while they "
                "run eagerly, one after the other. Leave out `run_eagerly=True`."
            )
        if group.key not in self._reducers:
            self._reducers[group.key] = Reducer(
                group,
                whole.first_rank,
                whole.options,
                strategy.extended.worker_group,
                compares=False,
            )
        return ReplicaReducer(self._reducers[group.key], context)

    def _compare(self, worker_group: Any) -> None:
        if not self._is_compared:
            self._is_compared = True
            check_same_variables(
                worker_group, "first training step", self._variables, "trains"
            )
