"""Transports: what carries the bytes of a collective between replicas.

The primitives call the transport of a group; nothing above them knows which one it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfdp.communication.collectives.instance_keys import InstanceKeys


class Group(Protocol):
    """A `ProcessGroup`, as a transport sees it."""

    size: int
    key: int
    launch_order: Any
    instance_keys: InstanceKeys
    # The rank of the worker of each position, where it is known.
    workers: Sequence[int] | None

    @property
    def devices(self) -> tuple[str, ...]:
        """Device of each local replica."""

    def position(self, replica: int) -> int:
        """Position of a local replica in the group."""

    @property
    def local_positions(self) -> Sequence[int | None]:
        """Position of each local replica, `None` for one in another group."""


# Scope of an operation that is one collective, where it is not TensorFlow's own.
SCOPE = "Collective"


def is_collective(op: Any) -> bool:
    """Return whether an operation of a graph is a collective.

    Args:
        op: `tf.Operation`.

    Returns:
        Bool; that of the call, not of the operations inside it.
    """
    if op.type.startswith("Collective"):
        return True
    return op.type.endswith("PartitionedCall") and f"/{SCOPE}_" in f"/{op.name}"


@dataclasses.dataclass(frozen=True)
class Call:
    """Who calls a collective, and where it stands in the launch order.

    Args:
        group: `Group` of at least two replicas.
        replica: Int, index of the calling replica among the local ones.
        channel: Int, the chain of the launch order.
        size: Scalar int32 tensor, index into `SIZES` of a length that is known only at
            run time, or `None`. Defaults to `None`.
        is_alone: Bool, whether hardly anything else is under way at the same time.
            Defaults to `True`.
    """

    group: Group
    replica: int
    channel: int
    size: tf.Tensor | None = None
    is_alone: bool = True

    @property
    def position(self) -> int:
        """Int, the calling replica's position in the group."""
        return self.group.position(self.replica)

    def key(self, kind: str, tensor: tf.Tensor) -> int | tf.Tensor:
        """Return the instance key of this call, see `InstanceKeys`."""
        keys = self.group.instance_keys
        return keys.next_key(kind, tensor, self.replica, self.size)


class Transport(Protocol):
    """Collectives over tensors that are not empty, in groups of two replicas and more.

    Each runs on the replica's device, for all replicas of the group at the same point
    of their programs.
    """

    name: str
    # Chains of a device; collectives of different chains overlap.
    num_channels: int
    # Without it, an all-to-all and a local sum move the same bytes.
    has_reduce_scatter: bool
    # Whether a sum of float16 or bfloat16 over workers is added in float32.
    rounds_sums_once: bool

    def run(
        self, kind: str, tensor: tf.Tensor, call: Call, source: int = 0
    ) -> tf.Tensor:
        """Run a collective.

        Args:
            kind: String: `"all_reduce"` sums tensors of equal shape; `"all_gather"`
                concatenates them along the first axis, by position; `"all_to_all"`
                sends slice i of the first axis, which has `group.size`, to position i;
                `"reduce_scatter"` sums, and keeps the slice of the first axis of the
                replica's position; `"broadcast"` copies the tensor of one replica.
            tensor: Tensor that is not empty.
            call: `Call`.
            source: Int, the position of that replica. Defaults to `0`.
        """
