"""Sharded optimizer state (ZeRO-1 to 3): each replica owns and updates a shard.

- `options`: what is sharded, and among whom.
- `sharded_state`: builds the state, shows it to a step and to files.
- `sharded_param_group`, `element_shards`, `variable_shards`: the state of one inner
  optimizer, in flat shards or in whole variables.
- `sharded_layout`, `sharded_gradients`: its stages of a step.
- `shard_collectives`: reduce-scatter and all-gather, and which of them a step takes.
- `state_tensors`, `optimizer_state`, `full_state`: the state as files
  hold it, whole tensors by name.
- `memory_report`: what the state takes on each replica.
"""
