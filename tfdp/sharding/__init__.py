"""Optimizer state that is spread over the replicas, each part with one owner."""

from tfdp.sharding.memory_report import memory_report, part_memory
from tfdp.sharding.sharded_layout import ShardedLayout
from tfdp.sharding.sharded_state import ShardedState, shard_plan
from tfdp.sharding.state_names import place, slot_names

__all__ = [
    "ShardedLayout",
    "ShardedState",
    "memory_report",
    "part_memory",
    "place",
    "shard_plan",
    "slot_names",
]
