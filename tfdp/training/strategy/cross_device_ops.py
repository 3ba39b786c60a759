"""The reducer behind the interface by which tf.distribute reduces and gathers."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp.communication.collectives.gather import gather_rows
from tfdp.ground import _compat
from tfdp.training.reduction.reducer import Reducer


class CrossDeviceOps(_compat.CollectiveAllReduce):
    """Stock bookkeeping (regrouping, eager threads) around our collectives.

    Args:
        reducer: `Reducer`.
        collective_keys: TensorFlow's keys, which only the stock code looks at.
    """

    def __init__(self, reducer: Reducer, collective_keys: Any) -> None:
        group = reducer.group
        super().__init__(
            devices=group.devices,
            group_size=group.size,
            options=_compat.StockOptions(),
            collective_keys=collective_keys,
        )
        self._reducer = reducer
        self._launchers = [
            _Launcher(reducer, replica) for replica in range(len(group.devices))
        ]

    def _all_reduce(
        self, reduce_op: Any, value: Any, replica_id: int, options: Any
    ) -> Any:
        del options
        return self._reducer.reduce(reduce_op, value, replica_id)

    def __deepcopy__(self, memo: dict) -> CrossDeviceOps:
        # Copies of a strategy share its devices and so its launch order.
        return self


class _Launcher:
    """Launcher of collectives for the stock gather, on one replica."""

    def __init__(self, reducer: Reducer, replica: int) -> None:
        self._reducer = reducer
        self._replica = replica

    def can_order_nccl(self) -> bool:
        return True

    def all_gather(self, tensor: tf.Tensor, axis: Any, options: Any) -> tf.Tensor:
        del options
        rank = self._reducer.first_rank + self._replica
        return gather_rows(tensor, axis, self._reducer.group, self._replica, rank)
