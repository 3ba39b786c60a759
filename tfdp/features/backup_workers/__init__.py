"""Steps that do not wait for late workers: `CommunicationOptions(backup_workers=...)`.

A step of `fit` takes the first gradients, scaled to the rows of the global batch, and
drops late ones. Every worker applies the same sums in the same order, so that all
replicas stay equal. A worker that is behind takes no rows until it has caught up.

- `checks`: what cannot be combined with it.
- `exchange`: the sums, in place of the all-reduce of gradients.
- `training`: the feature of `fit`, which counts dropped gradients.

Source: Chen et al. 2016, "Revisiting Distributed Synchronous SGD",
https://arxiv.org/abs/1604.00981.
"""
