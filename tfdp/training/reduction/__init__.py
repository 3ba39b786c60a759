"""Reduction of gradients over replicas: one fused all-reduce for each bucket.

- `reducer`: all-reduce of dense and sparse tensors of the local replicas.
- `gradient_reducer`: the reducer of the running replica, or of a single device.
- `gradient_exchange`: base class of what replaces the all-reduce of gradients.
- `training_group`: the replicas that share one program.
- `fusion`: packing of gradients into buckets, their all-reduce and unpacking.
- `carried_scalar`: a scalar that one of these buckets carries.
- `sparse`: reduction of gradients that are rows of a table.
- `compressor_choice`: choice of an algorithm that can carry a compressor.
- `algorithm_selector`: choice of an algorithm for each bucket of a plan.
- `trained_plans`: plans of traced steps, and tuned options that replace those of the
  strategy, by the variables of a model.
- `link_measure`, `link_fit`: latency and bandwidth of links, for these choices.
- `cache_file`: files of the user's cache, such as that of measured links.
- `communication_plan`: the plan of a step as a table for the user.
"""
