"""Sums over the replicas of a node, which train synchronously between outer steps."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp import _compat
from tfdp.reduction.gradient_reducer import (
    GradientReducer,
    LocalReducer,
    ReplicaReducer,
)
from tfdp.reduction.reducer import Reducer


class NodeReducers:
    """The reducers over the nodes of local replicas, each made once.

    A reducer compares the variables with the other workers when it is first used, and
    not all of these trace a step again when one does.
    """

    def __init__(self) -> None:
        self._reducers: dict[int, Reducer] = {}

    def of_replica(self, strategy: Any, context: Any) -> GradientReducer:
        """The reducer over the node of the replica that is running.

        Args:
            strategy: A tfdp strategy.
            context: The replica context.

        Raises:
            ValueError: In eager mode, with several replicas in this process.
        """
        whole = strategy.extended.reducer
        nodes = [sorted(positions) for positions in whole.group.nodes]
        group = whole.group.split(nodes)[_compat.local_replica_id(context)]
        if group is None or group.size == 1:
            return LocalReducer()
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
            )
        return ReplicaReducer(self._reducers[group.key], context)
