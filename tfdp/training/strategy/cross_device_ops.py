"""Adapter of the reducer to the cross-device operations of tf.distribute."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp.communication.collectives.gather import gather_rows
from tfdp.ground._compat import tf_distribute
from tfdp.training.reduction.reducer import Reducer


class CrossDeviceOps(tf_distribute.CollectiveAllReduce):
    """TensorFlow's cross-device operations, with its collectives replaced by tfdp's.

    Args:
        reducer: `Reducer`.
        collective_keys: TensorFlow's collective keys, which only stock code reads.
    """

    def __init__(self, reducer: Reducer, collective_keys: Any) -> None:
        group = reducer.group
        super().__init__(
            devices=group.devices,
            group_size=group.size,
            options=tf_distribute.StockOptions(),
            collective_keys=collective_keys,
        )
        self._reducer = reducer
        self._launchers = [
            _Launcher(reducer, replica) for replica in range(len(group.devices))
        ]

    def _all_reduce(
        self, reduce_op: Any, value: Any, replica_id: int, options: Any
    ) -> Any:
        """All-reduce a value of the local replica `replica_id` by tfdp's reducer."""
        del options
        return self._reducer.reduce(reduce_op, value, replica_id)

    def __deepcopy__(self, memo: dict) -> CrossDeviceOps:
        """Return this object itself."""
        # Collectives of a device need one launch order, and a copy of a strategy has
        # the devices of the original. So both share this object.
        return self


class _Launcher:
    """Stand-in for TensorFlow's `CollectiveReplicaLauncher`, with tfdp's all-gather.

    TensorFlow's gather operations call it on a replica.

    Args:
        reducer: `Reducer`.
        replica: Int, local index of the replica.
    """

    def __init__(self, reducer: Reducer, replica: int) -> None:
        self._reducer = reducer
        self._replica = replica

    def can_order_nccl(self) -> bool:
        """Return true: tfdp orders the launches of all collectives."""
        return True

    def all_gather(self, tensor: tf.Tensor, axis: Any, options: Any) -> tf.Tensor:
        """Concatenate the tensors of all replicas along an axis."""
        del options
        rank = self._reducer.first_rank + self._replica
        return gather_rows(tensor, axis, self._reducer.group, self._replica, rank)
