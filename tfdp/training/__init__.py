"""The core: what every training step passes through.

A walk through it is in docs/step.md.

- `optimizer`: `DistributedOptimizer`, its settings and features.
- `strategy`: the two strategies, and what TensorFlow calls of them.
- `program`: a step as the program of one device, divided.
- `keras_hooks`: every replacement in Keras, in one table.
- `losses`: `tfdp.all_gather`, for losses in loops of one's own.
- `sharding`: optimizer state sharded over the replicas.
- `step`: the path of a step, from local gradients to variables.
- `reduction`: gradients reduced in buckets; algorithm selection.
- `parameters`: sharded parameters, gathered by a step.
- `data`: distribution of batches, epochs and data position.
- `replicas`: variables, initial values, drift detection.
- `compression`: gradients in fewer bytes, with error feedback.
"""
