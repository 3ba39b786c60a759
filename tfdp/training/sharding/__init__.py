"""Sharded optimizer state (ZeRO-1 to 3): each replica owns and updates a shard.

- `sharded_state`: builds the state and gives steps and files access to it.
- `sharded_param_group`, `element_shards`, `variable_shards`: the state of one inner
  optimizer, in flat shards or in whole variables.
- `sharded_layout`, `sharded_gradients`: the stages of a step with sharded state.
- `shard_collectives`: reduce-scatter and all-gather, and the choice between variants.
- `state_tensors`, `optimizer_state`, `full_state`: the state as whole tensors by name,
  which files hold.
- `memory_report`: the memory of the state on each replica.
"""
