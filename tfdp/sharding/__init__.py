"""Optimizer state that is spread over the replicas, each part with one owner."""

from tfdp.sharding.layout import ShardedState
from tfdp.sharding.memory import memory_report, part_memory
from tfdp.sharding.state import Sharding, shard_plan
from tfdp.sharding.whole import place, slot_names

__all__ = [
    "ShardedState",
    "Sharding",
    "memory_report",
    "part_memory",
    "place",
    "shard_plan",
    "slot_names",
]
