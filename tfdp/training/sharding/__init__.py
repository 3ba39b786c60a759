"""Sharded optimizer state (ZeRO-1 to 3): each replica owns and updates a shard.

- `options`: what is sharded, and among whom.
- `sharded_state`: builds the state, shows it to a step and to files.
- `sharded_param_group`, `element_shards`, `variable_shards`: the state of one inner
  optimizer, in flat shards or in whole variables.
- `parameter_plan`: the same where parameters are sharded (ZeRO-3), by their units.
- `sharded_layout`, `sharded_gradients`, `gradient_statistics`: its stages of a step.
- `shard_collectives`: reduce-scatter and all-gather, and which of them a step takes.
- `state_tensors`, `state_names`, `optimizer_state`, `full_state`: the state as files
  hold it, whole tensors by name.
- `memory_report`: what the state takes on each replica.
"""

from tfdp.training.sharding.memory_report import memory_report, param_group_memory
from tfdp.training.sharding.sharded_layout import ShardedLayout
from tfdp.training.sharding.sharded_state import ShardedState, shard_plan
from tfdp.training.sharding.state_names import slot_names, variable_name

__all__ = [
    "ShardedLayout",
    "ShardedState",
    "memory_report",
    "param_group_memory",
    "shard_plan",
    "slot_names",
    "variable_name",
]
