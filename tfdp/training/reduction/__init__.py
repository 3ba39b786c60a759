"""Reduction of gradients over replicas: one fused all-reduce for each bucket.

- `reducer`: dense tensors and rows of this worker's replicas, reduced.
- `gradient_reducer`: the same as the running replica, or a single device, sees it.
- `training_group`: the replicas whose steps are one program.
- `fusion`: buckets of gradients, packed, all-reduced and unpacked.
- `sparse`: gradients that are rows of a table.
- `reduced_gradients`: the result, as the later stages of a step take it.
- `algorithm_choice`: a bucket's algorithm, and what travels by it.
- `compressor_choice`: the choice among those that carry a compressor.
- `algorithm_selector`: the choice for each bucket of a plan.
- `tuned_options`: options in place of a strategy's, for the variables of one model.
- `trained_plans`: the plans of the steps that were traced.
- `link_measure`, `link_fit`, `link_cache`: the links that this choice depends on.
- `cache_file`: files of the user's cache.
- `communication_plan`: all of it as a table for the user.
"""
