"""Compressed reduction of gradients: fewer bytes on the wire, with error feedback.

- `compressor`: `Compressor`, the base class that reduces a bucket of gradients.
- `block_code`: floats encoded in 8 or 4 bits, with a scale for each block.
- `block_quantized`: gradients in 8 or 4 bits an element, with error feedback.
- `power_sgd`: gradients as products of low-rank matrices.
- `top_k`: the largest elements of each bucket.
- `replica_group`: the collectives between replicas that a compressor can call.
- `residuals`: the state of compressors, with a value for each replica.
- `step_residuals`: new states of a step, assigned unless the step is skipped.
- `algorithm_choice`: algorithm and wire formats of one bucket.
- `compressed_reduce`: reductions of a bucket by compressors, in one or two levels.
"""
