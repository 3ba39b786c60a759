"""Compressed reduction of gradients: fewer bytes on the wire, errors fed back.

- `compressor`: `Compressor`, what a bucket of gradients is reduced by.
- `block_code`: floats as 8 or 4 bits each, with a scale for each block.
- `block_quantized`: 8 or 4 bits an element, and errors fed back.
- `power_sgd`: matrices of low rank.
- `top_k`: the largest elements.
- `replica_group`: the replicas of a reduction, as a compressor sees them.
- `residuals`: what compressors keep from step to step, a value for each replica.
- `step_residuals`: what a step would assign to them, if it is kept.
- `compressed_reduce`: a bucket reduced in one level or two, with its residuals.
"""
