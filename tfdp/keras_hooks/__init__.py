"""Functions of Keras that tfdp replaces, and what takes their place.

- `install`: the table of replacements, and the loops `fit`, `evaluate` and `predict`.
- `optimizer_hooks`, `layer_hooks`, `file_hooks`: functions of optimizers, of layers and
  losses, and of files.
- `scope_checks`: models, metrics and optimizers made outside of the scope.
- `worker_callbacks`, `added_callbacks`, `rebalancing`: callbacks of the loops.
- `logs`: logs of the global batch.
- `file_view`, `saving`: the optimizer that files hold; atomic saves.
"""
