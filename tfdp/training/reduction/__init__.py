"""Reduction of gradients over replicas: one fused all-reduce for each bucket.

- `reducer`: dense tensors and rows of this worker's replicas, reduced.
- `gradient_reducer`: the same as the running replica, or a single device, sees it.
- `training_group`: the replicas whose steps are one program.
- `fusion`: buckets of gradients, packed, all-reduced and unpacked.
- `sparse`: gradients that are rows of a table.
- `algorithm_choice`: a bucket's algorithm, and what travels by it.
- `compressor_choice`: the choice among those that carry a compressor.
- `algorithm_selector`: the choice for each bucket of a plan.
- `trained_plans`: the plans of the steps that were traced, and options in place of a
  strategy's, for the variables of one model.
- `link_measure`, `link_fit`: the links that this choice depends on.
- `cache_file`: files of the user's cache, that of measured links among them.
- `communication_plan`: all of it as a table for the user.
"""
