"""The core: the parts of tfdp that every training step passes through.

docs/step.md describes the path of a step through these packages.

- `optimizer`: `DistributedOptimizer`, its settings and features.
- `strategy`: the two strategies, and their methods that TensorFlow calls.
- `program`: a step, traced as the program of one device, and divided.
- `keras_hooks`: the replaced functions of Keras and TensorFlow, in one table.
- `losses`: `tfdp.all_gather`, for losses in custom training loops.
- `sharding`: optimizer state sharded over the replicas.
- `step`: the path of a step, from local gradients to updated variables.
- `reduction`: gradients reduced in buckets; algorithm selection.
- `parameters`: sharded parameters, which each step gathers.
- `data`: distribution of batches, epochs and data position.
- `replicas`: variables, initial values, drift detection.
- `compression`: gradient compression, with error feedback.
"""
